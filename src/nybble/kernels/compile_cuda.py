"""CUDA C++ to machine code by NVRTC, without torch: called by `nvrtc`, or run as a program of its own beside it.

The program reads {"library", "source", "options", "path"} as JSON from its input and leaves the code at the path.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def open_library(name: str) -> ctypes.CDLL:
    """libnvrtc by path or name. Raises OSError when there is none."""
    for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # it looks for them by name, not beside itself
    return ctypes.CDLL(name)


def compile_cuda(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    """The cubin. RuntimeError has the compiler's log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if failed:
        raise RuntimeError(f"NVRTC could not compile a kernel ({' '.join(options)}): {log.value.decode(errors='replace')}")
    if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)):
        raise RuntimeError(f"NVRTC compiled a kernel, but to no machine code ({' '.join(options)})")
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def keep(code: bytes, path: Path) -> None:
    """Whole or not at all, whoever else compiles it now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(code)
        os.replace(part.name, path)
    except OSError:
        pass  # a cache that cannot be written costs time only


if __name__ == "__main__":
    job = json.load(sys.stdin)
    os.nice(5)
    keep(compile_cuda(open_library(job["library"]), job["source"], job["options"]), Path(job["path"]))
