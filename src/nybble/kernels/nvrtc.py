"""CUDA C++ at run time: NVRTC (it comes with torch's CUDA wheels) compiles, the driver loads and launches, ctypes is the glue.

No build step, no nvcc, no headers. Machine code is kept in the user's cache under a hash of everything that made it.
`missing` says why this cannot work on a machine; nothing here is loaded before it is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nybble.config import cache_dir
from nybble.kernels import compile_cuda

ARCHITECTURE = "sm_90a"
OUT = {torch.bfloat16: 0, torch.float16: 1}  # of sm90.cuh
BLOCK = 128  # input channels of a step of every GEMM here
LONGEST_COMPILE_S = 120.0  # of another process; after that `machine_code` tries itself
PROCESSOR_BYTES, RESERVED_BYTES, MOST_BYTES = 228 * 1024, 1024, 227 * 1024  # shared memory: of a processor, per program, of one
SHARED_BYTES_ATTRIBUTE, CLUSTER_ATTRIBUTE, OVERLAP_ATTRIBUTE = 8, 4, 6  # of CUfunction_attribute, CUlaunchAttributeID


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a 64-byte union, of which the first words are used here."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("attribute_count", ctypes.c_uint),
    ]  # fmt: skip


class TensorMap(ctypes.Structure):
    """CUtensorMap, 128 opaque bytes that the kernel wants on a 64-byte boundary of its parameters."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def structure(pointers: str, floats: str = "", ints: str = "") -> type[ctypes.Structure]:
    """The `Arguments` of a .cu, from the names of its fields."""
    kinds = (ctypes.c_void_p, pointers), (ctypes.c_float, floats), (ctypes.c_int, ints)
    fields = [(name, kind) for kind, names in kinds for name in names.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


# ---- finding and compiling ----------------------------------------------------------------------------------------


@functools.cache
def compiler() -> ctypes.CDLL:
    """libnvrtc of the CUDA version torch was built for. Raises OSError when there is none."""
    major = (torch.version.cuda or "13").split(".")[0]
    folders = [Path(path) / "nvidia" for path in sys.path]
    names = [str(f) for folder in folders for f in sorted(folder.glob(f"*/lib/libnvrtc.so.{major}"))]
    for name in [*names, f"libnvrtc.so.{major}", "libnvrtc.so"]:
        try:
            return compile_cuda.open_library(name)
        except OSError:
            continue
    raise OSError(f"no libnvrtc.so.{major}: install nvidia-cuda-nvrtc of the CUDA version that torch uses")


@functools.cache
def driver() -> ctypes.CDLL:
    """libcuda. Raises OSError when there is none, or one too old for what is called here (CUDA 12.3)."""
    library = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    if version.value < 12030:
        raise OSError(f"the driver is for CUDA {version.value // 1000}.{version.value % 1000 // 10}, 12.3 or later is wanted")
    return library


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be compiled or launched here, or None."""
    try:
        compiler()
        driver()
    except (OSError, AttributeError) as problem:
        return str(problem)
    return None


@functools.cache
def refusal(device: torch.device) -> str | None:
    """Why nothing here runs on `device`, or None."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return "wants a Hopper GPU"
    return missing()


def room(resident: int) -> int:
    """Bytes of shared memory of a program when so many are to fit a processor."""
    return min(MOST_BYTES, PROCESSOR_BYTES // resident - RESERVED_BYTES)


@functools.cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def product(tokens: int, channels: int, types: str, immediates: str = "") -> str:
    """CUDA for one wgmma of `types` (of sums, weights, activations): 64 rows x `channels` in registers times `tokens` x
    `channels` in shared memory."""
    n, (kind, letter) = tokens // 2, ("float", "f") if types.startswith("f32") else ("int", "r")
    sums, places = ", ".join(f"%{i}" for i in range(n)), ", ".join(f'"+{letter}"(sum[{i}])' for i in range(n))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{tokens}k{channels}.{types}"
    return (
        f"__device__ __forceinline__ void product({kind} (&sum)[{n}], const unsigned (&a)[4], unsigned long long x) {{\n"
        f'  asm volatile("{instruction} {{{sums}}}, {{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, %{n + 4}, 1{immediates};"\n'
        f'      : {places} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));\n}}\n'
    )


def source(name: str) -> str:
    """The text of `name` in this folder behind the helpers that all of them share."""
    folder = Path(__file__).parent
    return folder.joinpath("sm90.cuh").read_text() + folder.joinpath(name).read_text()


def _place(source: str, defines: Mapping[str, int]) -> tuple[list[str], Path]:
    """The compiler's options, and where the code is kept: under a hash of everything that makes it."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *(f"-D{k}={int(v)}" for k, v in sorted(defines.items()))]
    key = hashlib.sha256("\0".join([source, *options, f"{major.value}.{minor.value}"]).encode()).hexdigest()[:24]
    return options, cache_dir() / f"{ARCHITECTURE}-{key}.cubin"


@functools.cache
def _ahead() -> tuple[dict[Path, threading.Event], threading.Semaphore]:
    """What is being compiled by other processes, and how many more of them may start."""
    return {}, threading.Semaphore(max(1, (os.cpu_count() or 2) - 1))


def usual_batches(n: int, k: int) -> tuple[int, ...]:
    """Tokens whose kernels a weight [n, k] will want; of a small one, those of its start-up test."""
    return (*range(1, 65), *range(80, 513, 16), *range(640, 2049, 128), 4096, 8192) if n * k >= 1 << 24 else (1, 40, 100, 300)


def compile_ahead(wanted: Iterable[tuple[str, Mapping[str, int]]]) -> None:
    """Start compiling each (source, defines) that is not kept yet, in processes of their own, and return. `machine_code` waits
    for one that it is asked for meanwhile, and compiles it itself where that came to nothing."""
    running, places = _ahead()

    def compile_apart(source: str, options: list[str], path: Path, done: threading.Event) -> None:
        job = {"library": compiler()._name, "source": source, "options": options, "path": str(path)}
        try:
            with places, suppress(OSError, subprocess.SubprocessError):
                # isolated, or the folder's `types` would hide Python's
                command = [sys.executable, "-IS", compile_cuda.__file__]
                subprocess.run(command, input=json.dumps(job).encode(), capture_output=True, timeout=LONGEST_COMPILE_S)
        finally:  # somebody may wait for it
            done.set()

    for source, defines in wanted:
        options, path = _place(source, defines)
        if path not in running and not path.exists():
            running[path] = threading.Event()
            threading.Thread(target=compile_apart, args=(source, options, path, running[path]), daemon=True).start()


def machine_code(source: str, defines: Mapping[str, int]) -> bytes:
    """The cubin of `source` with the macros `defines`, cached or compiled. RuntimeError has the compiler's log."""
    options, path = _place(source, defines)
    if (done := _ahead()[0].get(path)) is not None:
        done.wait()
    if path.exists():
        return path.read_bytes()
    code = compile_cuda.compile_cuda(compiler(), source, options)
    compile_cuda.keep(code, path)
    return code


# ---- loading and launching ----------------------------------------------------------------------------------------


def check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def load(code: bytes, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
    """A kernel of a cubin, allowed `shared_bytes` of dynamic shared memory a block on `device`."""
    torch.cuda.current_stream(device)  # the context exists
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    cuda = driver()
    check(cuda.cuLibraryLoadData(ctypes.byref(library), code, None, None, 0, None, None, 0), f"loading {name}")
    check(cuda.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode()), f"finding {name}")
    check(cuda.cuKernelSetAttribute(SHARED_BYTES_ATTRIBUTE, shared_bytes, kernel, device), f"{shared_bytes} shared bytes")
    return kernel


@functools.cache
def kernel(name: str, device: int, shared_bytes: int, source_and_defines: Callable[..., tuple[str, Mapping[str, int]]],
           *given: Any) -> ctypes.c_void_p:
    """The kernel `name` of `source_and_defines(*given)`, compiled and loaded once."""
    return load(machine_code(*source_and_defines(*given)), name, shared_bytes, device)


def launch(kernel: ctypes.c_void_p, blocks: int, threads: int, shared_bytes: int, cluster: int,
           arguments: Sequence[ctypes.Structure], device: torch.device) -> None:
    """Launch on the current stream of `device`, which is the current one. The kernel may start before the one ahead of it ends,
    and waits where it needs to."""
    attributes, stream = (Attribute * 2)(), torch.cuda.current_stream(device).cuda_stream
    attributes[0].id, attributes[0].value[:3] = CLUSTER_ATTRIBUTE, [cluster, 1, 1]
    attributes[1].id, attributes[1].value[0] = OVERLAP_ATTRIBUTE, 1
    config = LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared_bytes, stream, attributes, 2)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    check(driver().cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None), "launching")


@functools.lru_cache(4096)
def bytes_map(address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    """Rows of bytes in global memory as boxes of 128 columns with the 128-byte swizzle; what lies outside reads as zero."""
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    out = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)  # the driver wants the boundary too
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns)
    box, ones = (ctypes.c_uint32 * 2)(128, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    status = driver().cuTensorMapEncodeTiled(
        ctypes.byref(out), 0, 2, ctypes.c_void_p(address), sizes, strides, box, ones, 0, 3, 2, 0
    )  # uint8, rank 2, ..., not interleaved, 128-byte swizzle, 128-byte L2 fetches, zeros outside
    check(status, f"describing {rows} x {columns} bytes")
    return out
