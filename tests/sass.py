"""Compiling kernels without a GPU, and reading their machine code: the loop of products, spills, operands overwritten while in
flight."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nybble.kernels import nvrtc

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SPILL = re.compile(r"(@\S+ )?(STL|LDL)\b")


@functools.cache
def have_nvrtc() -> bool:
    try:
        return bool(nvrtc.compiler())
    except OSError:
        return False


def assemble(source: str, defines: dict[str, int], folder: Path) -> list[str]:
    """SASS of CUDA text, by NVRTC where torch brought it, else by nvcc without any header."""
    cubin = folder / "kernel.cubin"
    if have_nvrtc():
        cubin.write_bytes(nvrtc.machine_code(source, defines))
    elif shutil.which("nvcc"):
        (folder / "kernel.cu").write_text(source)
        options = ["-arch=sm_90a", "-std=c++17", "-cubin", "-Werror=all-warnings", *(f"-D{k}={v}" for k, v in defines.items())]
        subprocess.run(["nvcc", *options, "-o", cubin, folder / "kernel.cu"], check=True)
    else:
        pytest.skip("neither libnvrtc nor nvcc here")
    return disassemble(cubin)


def compile_for(target: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...] = (),
                **options: int) -> Any:
    """A Triton kernel for a GPU that need not be here. types: of parameters that are not int32; pointers are aligned to 16
    bytes, `aligned` are multiples of 16."""
    triton = pytest.importorskip("triton")
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    known = [at for at, name in enumerate(names) if signature[name].startswith("*") or name in aligned]
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in known})
    gpu = triton.backends.compiler.GPUTarget
    gpu = gpu("cuda", int(target[3:]), 32) if target.startswith("sm_") else gpu("hip", target, 64)
    return triton.compile(source, target=gpu, options=options)


def run_tool(name: str, *arguments: Any) -> str:
    """What nvdisasm or cuobjdump say."""
    triton = pytest.importorskip("triton", reason="they come with Triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def local_bytes(cubin: Path) -> int:
    """Of a thread: what does not fit its registers."""
    return sum(int(v) for v in re.findall(r"(?:STACK|LOCAL):(\d+)", run_tool("cuobjdump", "-res-usage", cubin)))


def disassemble(cubin: Path) -> list[str]:
    """One instruction a line, labels kept."""
    return [re.sub(r"/\*.*?\*/", "", line).strip() for line in run_tool("nvdisasm", "-c", cubin).splitlines()]


def written_registers(line: str) -> range:
    """The general registers that an instruction writes, by its first operand and width."""
    line = re.sub(r"^@!?U?P\d+ ", "", line)
    found = re.match(r"([A-Z0-9_.]+) (?:P\d+, )?R(\d+)", line)
    others = ("ST", "RED", "BAR", "SYNCS", "IGMMA", "HGMMA", "QGMMA", "WARPGROUP", "UTMA", "BRA", "ISETP", "R2UR")
    if not found or found[1].startswith(others):
        return range(0)
    width = 4 if ".128" in found[1] else 2 if ".64" in found[1] or ".WIDE" in found[1] else 1
    return range(int(found[2]), int(found[2]) + width)


def loop_of_products(lines: list[str]) -> list[str]:
    """The innermost loop with products in it, from the label its last branch goes back to."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    best: list[str] = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], at) < at:
            body = lines[labels[target[1]] : at]
            if any("MMA." in inside for inside in body) and (not best or len(body) < len(best)):
                best = body
    return best


def overwritten_in_flight(body: list[str]) -> list[str]:
    """Instructions that write an operand of a product that may still run, over two rounds of the loop."""
    flights: list[set[int]] = [set()]  # operand registers per group; the last is not yet committed
    bad = []
    for line in body * 2:
        if found := re.search(r"[IHQ]GMMA\S* R\d+, R(\d+), gdesc", line):
            flights[-1] |= set(range(int(found[1]), int(found[1]) + 4))
            if "gsb0" in line:
                flights.append(set())
        elif found := re.search(r"DEPBAR.*gsb0, 0x(\d+)", line):
            flights = flights[max(0, len(flights) - 1 - int(found[1])) :]
        else:
            bad += [line for register in written_registers(line) if any(register in flight for flight in flights)]
    return bad
