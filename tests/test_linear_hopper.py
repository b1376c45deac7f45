"""The Hopper kernel without a GPU: its packed layout against the PTX manual's, and the machine code that it becomes.

Numbers are checked on the GPU (tests/gpu). Here: every operand stays in registers, two groups of products are in flight,
nothing in the main loop spills, and no instruction writes a register that a product in flight still reads (PTX calls that
undefined, the compiler does not look).
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from nybble.bench.kernels import MODELS
from nybble.formats.spec import SCHEMES
from nybble.kernels import linear_hopper, nvrtc
from nybble.kernels.linear_hopper import GROUPED, PER_CHANNEL, Tile
from nybble.kernels.linear_triton import pack_nibbles
from nybble.kernels.registry import LinearShape

PLACES = ((0, 0, 0, 0, 0), (1, 1, 1, 1, 127), (0, 1, 0, 1, 77), (3, 0, 1, 0, 34))  # row block, step, half, row tile, thread


def rows_and_channels(block: int, step: int, half: int, row_tile: int, thread: int, word: int) -> tuple[int, int]:
    """PTX ISA, wgmma m64nNk32 (and mma.sync m16n8k32), register operand of 8-bit types: thread t holds, for rows
    16 (t / 32) + (t % 32) / 4 and 8 below, channels 4 (t % 4).. and 16 further. Rows of a 128-row tile are dealt so that a
    thread's four, two in each product of 64, are neighbours."""
    group = thread % 32 // 4
    row = 128 * block + 32 * (thread // 32) + 4 * group + 2 * row_tile + word % 2
    return row, 128 * step + 32 * half + 4 * (thread % 4) + 16 * (word // 2)


def test_a_thread_finds_its_operands_of_two_products_in_16_bytes() -> None:
    codes = torch.randint(-8, 8, (512, 256), dtype=torch.int8)
    packed = linear_hopper.pack_fragments(pack_nibbles(codes)).view(4, 2, 2, 2, 128, 4, 4)
    for place in PLACES:
        for word, four in enumerate(packed[place]):
            row, channel = rows_and_channels(*place, word)
            assert torch.equal((four << 4) >> 4, codes[row, channel : channel + 4])
            assert torch.equal(four >> 4, codes[row, channel + 64 : channel + 68])


def test_refuses_with_a_reason() -> None:
    cpu = torch.device("cpu")
    for name, reason in (("w4a8", "Hopper GPU"), ("w8a8", "int4"), ("w4a8_g128", "int8 grid"), ("w4a16", "int8 activations")):
        refusal = linear_hopper.KERNELS[0].accepts(LinearShape(SCHEMES[name], 64, 256, cpu, torch.bfloat16))
        assert refusal is not None
        assert reason in refusal


SHAPES = [shape for model in MODELS.values() for _, *shape in model]
IN_USE = sorted({linear_hopper.tile_for(tokens, *shape) for tokens in (*range(1, 400), 1024, 4096) for shape in SHAPES})
KINDS = list({(tile.warp, tile.row_tiles, tile.stream): tile for tile in IN_USE}.values())  # the largest of each kind
CASES = [*((tile, PER_CHANNEL) for tile in KINDS), (KINDS[0], GROUPED), (KINDS[-1], GROUPED)]


@pytest.mark.parametrize(("tile", "mode"), [(tile, mode) for tile in IN_USE for mode in (PER_CHANNEL, GROUPED)])
def test_shared_memory_holds_the_stages(tile: Tile, mode: int) -> None:
    stages, size = linear_hopper.shared_memory(tile, mode)
    assert stages >= 3
    assert size <= 227 * 1024  # the most a program may ask for on sm_90
    assert tile.resident * (size + 1024) <= 228 * 1024  # what a processor has, 1 KiB a program reserved


@functools.cache
def have_nvrtc() -> bool:
    try:
        return bool(nvrtc.compiler())
    except OSError:
        return False


def machine_code(tile: Tile, mode: int, folder: Path) -> list[str]:
    """SASS, one instruction a line, labels kept. By NVRTC where torch brought it, else by nvcc without any header."""
    triton = pytest.importorskip("triton", reason="nvdisasm comes with Triton")
    source, defines = linear_hopper.source_and_defines(tile, mode, 0, False)
    cubin = folder / "kernel.cubin"
    if have_nvrtc():
        cubin.write_bytes(nvrtc.machine_code(source, defines))
    elif shutil.which("nvcc"):
        (folder / "kernel.cu").write_text(source)
        options = ["-arch=sm_90a", "-std=c++17", "-cubin", "-Werror=all-warnings", *(f"-D{k}={v}" for k, v in defines.items())]
        subprocess.run(["nvcc", *options, "-o", cubin, folder / "kernel.cu"], check=True)
    else:
        pytest.skip("neither libnvrtc nor nvcc here")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return [re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines()]


def written_registers(line: str) -> range:
    """The general registers that an instruction writes, by its first operand and width."""
    line = re.sub(r"^@!?U?P\d+ ", "", line)
    found = re.match(r"([A-Z0-9_.]+) (?:P\d+, )?R(\d+)", line)
    if not found or found[1].startswith(("ST", "RED", "BAR", "SYNCS", "IGMMA", "WARPGROUP", "UTMA", "BRA", "ISETP", "R2UR")):
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
        if "IGMMA" in line:
            operand = int(re.search(r"IGMMA\S* R\d+, R(\d+), gdesc", line)[1])  # type: ignore[index]
            flights[-1] |= set(range(operand, operand + 4))
            if "gsb0" in line:
                flights.append(set())
        elif "DEPBAR" in line:
            left = int(re.search(r"gsb0, 0x(\d+)", line)[1])  # type: ignore[index]
            flights = flights[max(0, len(flights) - 1 - left) :]
        else:
            bad += [line for register in written_registers(line) if any(register in flight for flight in flights)]
    return bad


@pytest.mark.parametrize(("tile", "mode"), CASES, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v))
def test_machine_code(tile: Tile, mode: int, tmp_path: Path) -> None:
    lines = machine_code(tile, mode, tmp_path)
    body = loop_of_products(lines)
    assert not [line for line in body if re.match(r"(@\S+ )?(STL|LDL|STS|PRMT)\b", line)]
    products = [line for line in body if "MMA." in line]
    if tile.warp:
        assert len(products) == 4 * tile.row_tiles * tile.tokens // 8  # 128 channels, 32 at a time: none is issued twice
        assert all("IMMA.16832.S8.S8" in line for line in products)
    else:
        assert len(products) == 4 * tile.row_tiles
        assert all(re.search(r"IGMMA\.64x\d+x32\.S8\.S8 R\d+, R\d+, gdesc", line) for line in products)
        waits = [line for line in body if "WARPGROUP.DEPBAR" in line]
        assert [re.search(r"0x\d+ *;", line)[0][:3] for line in waits] == ["0x1", "0x1"]  # type: ignore[index]
        assert overwritten_in_flight(body) == []
    words = 16 * tile.row_tiles // 2  # packed words a thread unpacks per step
    logic = sum(len(re.findall(r"\bLOP3", line)) for line in body)
    assert logic <= {PER_CHANNEL: 2, GROUPED: 4}[mode] * words + 24  # the rest are addresses and phases


def test_the_check_for_overwritten_operands_can_fail() -> None:
    body = ["IGMMA.64x16x32.S8.S8 R24, R8, gdesc[UR4], R24, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"]
    assert overwritten_in_flight([*body, "LOP3.LUT R9, R2, 0xf0f0f0f0, RZ, 0xc0, !PT ;"])
    assert not overwritten_in_flight([*body, "LOP3.LUT R12, R2, 0xf0f0f0f0, RZ, 0xc0, !PT ;"])


def test_a_compiler_error_is_shown_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not have_nvrtc():
        pytest.skip("no libnvrtc here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match='identifier "missing" is undefined'):
        nvrtc.machine_code('extern "C" __global__ void kernel() { missing; }', {})
    assert not list(tmp_path.rglob("*.cubin"))
    source = 'extern "C" __global__ void kernel(int* p) { *p = VALUE; }'
    first = nvrtc.machine_code(source, {"VALUE": 3})
    (kept,) = tmp_path.rglob("*.cubin")
    assert kept.read_bytes() == first == nvrtc.machine_code(source, {"VALUE": 3})
    assert nvrtc.machine_code(source, {"VALUE": 4}) != first


def test_structures_are_the_drivers() -> None:
    """Sizes and offsets of cuda.h: CUlaunchAttribute, CUlaunchConfig, CUtensorMap."""
    assert ctypes.sizeof(nvrtc.Attribute) == 72
    assert nvrtc.Attribute.value.offset == 8
    assert ctypes.sizeof(nvrtc.LaunchConfig) == 56
    assert (nvrtc.LaunchConfig.stream.offset, nvrtc.LaunchConfig.attributes.offset) == (32, 40)
    assert ctypes.sizeof(nvrtc.TensorMap) == 128
