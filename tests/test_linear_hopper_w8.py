"""The W8A8 Hopper kernels without a GPU: packed tiles against the PTX manual's layouts, tiles that fit, reasons, machine code.

Numbers are checked on the GPU (tests/gpu/test_linear_w8_gpu.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from sass import SPILL, assemble, disassemble, loop_of_products

from nybble.formats.qtensor import QTensor
from nybble.formats.spec import FP8, INT8, PER_TOKEN_FP8, PER_TOKEN_INT8, SCHEMES, Spec, scheme_of
from nybble.kernels import linear_hopper_w8, nvrtc
from nybble.kernels.linear_hopper_w8 import BLOCKS, EVEN_BLOCKS, FLOAT, INTEGER, NARROW, WIDE, Tile, plan
from nybble.kernels.registry import LinearShape

CPU = torch.device("cpu")
KINDS = (INTEGER, FLOAT, BLOCKS, EVEN_BLOCKS)
IN_USE = sorted({(row[-1], kind) for kind in KINDS for row in (*NARROW[kind], *zip(WIDE[kind]))})
# the largest of each form
CASES = list({(tile.warpgroups, tile.staged, tile.tokens > 64, tile.turned, kind): (tile, kind)
              for tile, kind in IN_USE}.values())  # fmt: skip


def test_the_tensor_core_finds_rows_that_are_neighbours_for_a_thread() -> None:
    """PTX ISA: the 128-byte swizzle puts 16-byte piece c of row p at piece c xor (p mod 8); thread t of a warpgroup gets sums
    of rows 16 (t / 32) + (t % 32) / 4 and 8 below."""
    codes = torch.randint(0, 256, (128, 256), dtype=torch.uint8)
    packed = linear_hopper_w8.pack_tiles(codes).view(2, 2, 64, 8, 16)
    for thread in (0, 1, 37, 64, 127):
        for block in (0, 1):
            row = 64 * block + thread // 32 * 16 + thread % 32 // 4 * 2
            for neighbour in (0, 1):
                p = 16 * (thread // 32) + thread % 32 // 4 + 8 * neighbour
                for step, piece in ((0, 0), (1, 3), (1, 7)):
                    channel = 128 * step + 16 * piece
                    found = packed[block, step, p, piece ^ (p % 8)]
                    assert torch.equal(found, codes[row + neighbour, channel : channel + 16])


def test_packing_pads_with_zeros_and_keeps_each_rows_scale() -> None:
    codes = torch.randint(-127, 128, (70, 144), dtype=torch.int8)
    scale = torch.rand(70, 1)
    packed = linear_hopper_w8._pack(QTensor(SCHEMES["w8a8"].weight, codes, scale), ask("w8a8", 70, 144))
    assert packed.codes.shape == (2, 2, 8192)
    assert packed.codes.view(torch.int8).to(torch.int64).sum() == codes.to(torch.int64).sum()
    assert torch.equal(packed.scale, torch.cat((scale.t(), torch.zeros(1, 58)), 1))
    block = QTensor(Spec(FP8, (128, 128)), torch.zeros(300, 200).to(torch.float8_e4m3fn), torch.arange(6.0).view(3, 2))
    act = Spec(FP8, (1, 128), dynamic=True)
    packed = linear_hopper_w8._pack(block, LinearShape(scheme_of(block.spec, act), 300, 200, CPU, torch.bfloat16))
    assert packed.kind == EVEN_BLOCKS
    assert packed.scale[:, [0, 127, 128, 255, 256, 299]].tolist() == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3, 5, 5]]


def ask(name: str, n: int, k: int) -> LinearShape:
    return LinearShape(SCHEMES[name], n, k, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "act", "k", "reason"),
    [
        (Spec(INT8, (1, None)), PER_TOKEN_INT8, 256, "Hopper GPU"),
        (Spec(INT8, (1, None)), PER_TOKEN_INT8, 250, "multiples of 16"),
        (Spec(INT8, (1, 128)), PER_TOKEN_INT8, 256, "one scale per channel"),
        (Spec(INT8, (1, None), zero=True), PER_TOKEN_INT8, 256, "symmetric"),
        (SCHEMES["w4a8"].weight, PER_TOKEN_INT8, 256, "int8 weights"),
        (Spec(FP8, (128, 128)), Spec(FP8, (1, 128), dynamic=True), 256, "Hopper GPU"),
        (Spec(FP8, (128, 128)), PER_TOKEN_FP8, 256, "per 128 channels"),
        (Spec(FP8, (1, None)), Spec(FP8, (None, None), dynamic=True), 256, "requests change each other"),
        (Spec(FP8, (1, None)), Spec(FP8, (None, None)), 256, "input_scale"),
        (Spec(INT8, (1, None)), PER_TOKEN_FP8, 256, "weights and activations in fp8_e4m3"),
    ],
)
def test_refuses_with_a_reason(weight: Spec, act: Spec, k: int, reason: str) -> None:
    shape = LinearShape(scheme_of(weight, act), 64, k, CPU, torch.bfloat16)
    kernel = linear_hopper_w8.KERNELS[0 if act == PER_TOKEN_INT8 else 1]
    assert reason in (kernel.accepts(shape) or "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5120, 15360, 27648, 6144, 57344, 1003])
def test_a_plan_covers_every_row_once(kind: int, rows: int) -> None:
    for tokens in (1, 16, 17, 65, 128, 129, 160, 256, 384, 512, 768, 1024, 2048, 4096, 20000):
        launches = plan(kind, tokens, rows, 132)
        ends = [launch.first + launch.rows for launch in launches]
        assert [launch.first for launch in launches] == [0, *ends[:-1]]
        assert ends[-1] == rows
        for launch in launches:
            assert launch.rows > 0
            assert launch.first % launch.tile.rows == 0


@pytest.mark.parametrize(
    ("kind", "tokens", "rows", "best"),
    [(INTEGER, 512, 15360, [256]), (INTEGER, 1024, 5120, [176]), (INTEGER, 1024, 15360, [256, 176]),
     (INTEGER, 384, 27648, [128]), (FLOAT, 384, 27648, [128]), (FLOAT, 2048, 5120, [160]), (FLOAT, 2048, 15360, [192]),
     (FLOAT, 160, 5120, [80]), (INTEGER, 160, 27648, [160]), (FLOAT, 4096, 5120, [160]), (FLOAT, 192, 5120, [96]),
     (FLOAT, 256, 5120, [128]), (FLOAT, 512, 27648, [176]), (FLOAT, 1024, 5120, [176]), (FLOAT, 1024, 15360, [128]),
     (EVEN_BLOCKS, 256, 5120, [128]), (EVEN_BLOCKS, 512, 5120, [192]), (EVEN_BLOCKS, 512, 15360, [256]),
     (EVEN_BLOCKS, 1024, 5120, [192]), (EVEN_BLOCKS, 4096, 27648, [192])],
)  # fmt: skip
def test_wide_tiles_are_the_sweeps_best(kind: int, tokens: int, rows: int, best: list[int]) -> None:
    """Measured on an H200, which has 132 processors."""
    assert [launch.tile.tokens for launch in plan(kind, tokens, rows, 132)] == best


@pytest.mark.parametrize(("tile", "kind"), IN_USE)
def test_shared_memory_and_registers_hold_a_tile(tile: Tile, kind: int) -> None:
    stages, size = linear_hopper_w8.shared_memory(tile, kind)
    assert stages >= 3
    assert size <= 227 * 1024  # the most a program may ask for on sm_90
    assert tile.resident * (size + 1024) <= 228 * 1024  # what a processor has, 1 KiB a program reserved
    assert tile.tokens % (8 * tile.cluster) == 0  # whole swizzle atoms for each block of a cluster
    if tile.registers:
        threads = tile.threads(kind)
        copying = 40 if tile.warpgroups == 2 else 32
        assert tile.registers * (threads - 128) + copying * 128 <= 65536 // threads // 8 * 8 * threads


def compiled(tile: Tile, kind: int, folder: Path) -> list[str]:
    """SASS, one instruction a line, and no serialized product in the compiler's words, where those can be had."""
    source, defines = linear_hopper_w8.source_and_defines(tile, kind, 0)
    cubin = folder / "kernel.cubin"
    if shutil.which("nvcc"):
        (folder / "kernel.cu").write_text(source)
        options = ["-arch=sm_90a", "-std=c++17", "-cubin", *(f"-D{k}={v}" for k, v in defines.items())]
        run = subprocess.run(["nvcc", *options, "-o", cubin, folder / "kernel.cu"], check=True, capture_output=True, text=True)
        assert "serialized" not in run.stderr
        return disassemble(cubin)
    return assemble(source, defines, folder)


@pytest.mark.parametrize(("tile", "kind"), CASES, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v))
def test_machine_code(tile: Tile, kind: int, tmp_path: Path) -> None:
    lines = compiled(tile, kind, tmp_path)
    products = [line for line in lines if "GMMA.64x" in line]
    name = "IGMMA" if kind == INTEGER else "QGMMA"
    width = tile.turned or tile.tokens
    assert products
    assert all(re.search(rf"{name}\.64x{width}x32\S* R\d+, gdesc", line) for line in products)
    assert not [line for line in loop_of_products(lines) if SPILL.match(line)]
    copies = [line for line in lines if "UTMALDG" in line]
    assert copies
    assert all((".MULTICAST" in line) == (tile.cluster > 1) for line in copies)
    loop = lines[lines.index(products[0]) : lines.index(products[-1])]
    assert not [line for line in loop if "MEMBAR" in line]  # 0.7 us each: no release beyond the block between products


@pytest.mark.parametrize("how", [1, 2, 3])
def test_the_quantizer_compiles(how: int, tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here")
    (tmp_path / "q.cu").write_text(nvrtc.source("w8a8_sm90.cu"))
    for out in (0, 1, 2):
        options = ["-arch=sm_90a", "-std=c++17", "-cubin", f"-DQUANTIZE={how}", f"-DOUT={out}"]
        subprocess.run(["nvcc", *options, "-o", tmp_path / "q.cubin", tmp_path / "q.cu"], check=True)
