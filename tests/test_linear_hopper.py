"""The Hopper kernel without a GPU: its packed layout against the PTX manual's, and the machine code that it becomes.

Numbers are checked on the GPU (tests/gpu). Here: every operand stays in registers, two groups of products are in flight,
nothing in the main loop spills, and no instruction writes a register that a product in flight still reads (PTX calls that
undefined, the compiler does not look).
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from sass import assemble, have_nvrtc, loop_of_products, overwritten_in_flight

from nybble.bench.kernels import MODELS
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import SCHEMES
from nybble.kernels import compile_cuda, linear_hopper, nvrtc
from nybble.kernels.linear_hopper import GROUPED, PER_CHANNEL, ROUNDED, Tile
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


def test_the_form_goes_by_what_the_group_scales_are() -> None:
    """Whole ones multiply bytes; float16 ones are rounded as QQQ rounds, unless a byte saturates or float16 is too narrow."""
    spec = SCHEMES["w4a8_qqq_g128"].weight
    assert spec is not None
    codes, over = torch.full((2, 200), -8, dtype=torch.int8), torch.ones(2, 1)
    for scale, mode in ((16.0, GROUPED), (0.0, GROUPED), (2.5, ROUNDED), (16.0625, ROUNDED), (17.0, None), (2.5002, None)):
        assert linear_hopper.mode_of(QTensor(spec, codes, torch.full((2, 2), scale), None, over)) == mode, scale
    assert linear_hopper.mode_of(QTensor(SCHEMES["w4a8"].weight, codes, over)) == PER_CHANNEL
    for groups, mode in ((63, GROUPED), (64, ROUNDED)):  # 16 * 8 * 16 * 128 * 8192 is 2^31, what int32 does not hold
        lowest = torch.full((1, 128 * groups), -8, dtype=torch.int8)
        assert linear_hopper.mode_of(QTensor(spec, lowest, torch.full((1, groups), 16.0), None, over[:1])) == mode


def test_refuses_with_a_reason() -> None:
    cpu = torch.device("cpu")
    for name, reason in (("w4a8", "Hopper GPU"), ("w8a8", "int4"), ("w4a8_g128", "int8 grid"), ("w4a16", "int8 activations")):
        refusal = linear_hopper.KERNELS[0].accepts(LinearShape(SCHEMES[name], 64, 256, cpu, torch.bfloat16))
        assert refusal is not None
        assert reason in refusal


SHAPES = [shape for model in MODELS.values() for _, *shape in model]
BATCHES = (*range(1, 400), 512, 1024, 4096)
MODES = (PER_CHANNEL, GROUPED, ROUNDED)
IN_USE = sorted({(linear_hopper.tile_for(mode, m, *shape), mode) for mode in MODES for m in BATCHES for shape in SHAPES})
CASES = list({(tile.warp, tile.row_tiles, tile.stream, mode): (tile, mode) for tile, mode in IN_USE}.values())  # the largest


@pytest.mark.parametrize(("tile", "mode"), IN_USE)
def test_shared_memory_holds_the_stages(tile: Tile, mode: int) -> None:
    stages, size = linear_hopper.shared_memory(tile, mode)
    assert stages >= 3
    assert 0 < linear_hopper.source_and_defines(tile, mode, 0)[1]["AHEAD"] <= stages
    assert size <= 227 * 1024  # the most a program may ask for on sm_90
    assert tile.resident * (size + 1024) <= 228 * 1024  # what a processor has, 1 KiB a program reserved


@pytest.mark.parametrize(("tile", "mode"), CASES, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v))
def test_machine_code(tile: Tile, mode: int, tmp_path: Path) -> None:
    lines = assemble(*linear_hopper.source_and_defines(tile, mode, 0), tmp_path)
    body = loop_of_products(lines)
    unwanted = ("STL", "LDL", "STS", *(("PRMT",) if mode != ROUNDED else ()))
    assert not [line for line in body if re.match(rf"(@\S+ )?({'|'.join(unwanted)})\b", line)]
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
    each = 2 if mode == PER_CHANNEL or (mode == GROUPED and tile.warp) else 4
    assert logic <= each * words + 12  # the rest are addresses and phases
    assert sum("HFMA2" in line for line in body) == (8 * words if mode == ROUNDED else 0)


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


def test_another_process_compiles_ahead_and_failing_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not have_nvrtc():
        pytest.skip("no libnvrtc here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" __global__ void kernel(int* p) { *p = VALUE; }'
    here = nvrtc.machine_code(source, {"VALUE": 5})
    (kept,) = tmp_path.rglob("*.cubin")
    kept.unlink()
    nvrtc.compile_ahead([(source, {"VALUE": 5}), ("nonsense", {})])
    monkeypatch.setattr(compile_cuda, "compile_cuda", lambda *_: b"compiled here")
    assert nvrtc.machine_code(source, {"VALUE": 5}) == here
    assert nvrtc.machine_code("nonsense", {}) == b"compiled here"


def test_structures_are_the_drivers() -> None:
    """Sizes and offsets of cuda.h: CUlaunchAttribute, CUlaunchConfig, CUtensorMap."""
    assert ctypes.sizeof(nvrtc.Attribute) == 72
    assert nvrtc.Attribute.value.offset == 8
    assert ctypes.sizeof(nvrtc.LaunchConfig) == 56
    assert (nvrtc.LaunchConfig.stream.offset, nvrtc.LaunchConfig.attributes.offset) == (32, 40)
    assert ctypes.sizeof(nvrtc.TensorMap) == 128
