"""The Hopper W4A16 kernel without a GPU: packed layout against the PTX manual's, operands against float64, machine code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sass import SPILL, assemble, loop_of_products, overwritten_in_flight

from nybble.formats.numerics import random_qtensor
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import INT4, SCHEMES, UINT4, Spec
from nybble.kernels import linear_hopper_w4a16 as w4a16
from nybble.kernels.linear_hopper_w4a16 import Packed, Tile
from nybble.kernels.registry import LinearShape

DTYPES = (torch.bfloat16, torch.float16)
SPECS = [Spec(INT4, (1, g)) for g in (None, 32, 64, 128, 256)] + [Spec(UINT4, (1, g), zero=True) for g in (None, 32, 128)]


def pack(weight: QTensor, dtype: torch.dtype) -> Packed:
    scheme = replace(SCHEMES["w4a16"], weight=weight.spec)
    return w4a16.KERNELS[0].pack(weight, LinearShape(scheme, *weight.shape, torch.device("cpu"), dtype))


def test_a_thread_finds_its_operands_of_four_products_in_16_bytes() -> None:
    """PTX ISA, wgmma m64nNk16, register operand of 16-bit types: thread t holds, for rows 16 (t / 32) + (t % 32) / 4 and 8
    below, channels 2 (t % 4), the next one, and both 8 further. A thread's four rows of 128 are neighbours."""
    codes = torch.randint(0, 16, (256, 384), dtype=torch.uint8)
    packed = w4a16.pack_fragments(codes).view(2, 3, 2, 2, 128, 4, 4)
    for block, step, half, tile, thread in ((0, 0, 0, 0, 0), (1, 2, 1, 1, 127), (0, 1, 1, 0, 77), (1, 0, 0, 1, 34)):
        row = 128 * block + 32 * (thread // 32) + 4 * (thread % 32 // 4) + 2 * tile
        for word in range(4):
            channel = 128 * step + 64 * half + 16 * word + 2 * (thread % 4)
            low, high = packed[block, step, half, tile, thread, word] & 15, packed[block, step, half, tile, thread, word] >> 4
            for c in (0, 1):
                assert low[2 * c : 2 * c + 2].tolist() == codes[row : row + 2, channel + c].tolist()
                assert high[2 * c : 2 * c + 2].tolist() == codes[row : row + 2, channel + c + 8].tolist()


def operands(packed: Packed) -> torch.Tensor:
    """What the kernel multiplies, times each row's scale, by the .cu's arithmetic: float64 [N, K]. An fma has one rounding."""
    blocks, steps, _ = packed.weight.shape
    bits = torch.stack((packed.weight[..., :8192] & 15, packed.weight[..., :8192] & 0xF0), 8 - 6).to(torch.int16)
    code = bits.view(packed.dtype).double()  # subnormals
    code = code.view(blocks, steps, 2, 2, 2, 4, 8, 4, 4, 2, 2)  # c + 8; half, row tile, warp, four rows, c, 16, c + 1, r
    code = code.permute(0, 5, 6, 4, 10, 1, 3, 8, 2, 7, 9).reshape(blocks, 128, steps, 2, 4, 2, 8)  # block, row, step, half, 16
    rounded = lambda v: v.to(packed.dtype).double()  # noqa: E731
    inverse = torch.tensor([2.0 ** (w4a16.STEP[packed.dtype] - w4a16.CODE[packed.dtype])], dtype=torch.float64)
    sixteenth = torch.tensor([1.0, 1 / 16], dtype=torch.float64).view(2, 1)
    if not packed.group:
        value = code * inverse * sixteenth - 8 * 2.0 ** -w4a16.CODE[packed.dtype]
    else:
        held = packed.weight[..., 8192:].contiguous().view(packed.dtype).double()
        held = held.view(blocks, steps, -1, 128 // packed.group, 128).permute(2, 0, 4, 1, 3)
        held = held.repeat_interleave(8 // (128 // packed.group), -1).view(*held.shape[:4], 2, 4, 1, 1)
        if packed.zero:
            rest = held[2] if packed.zero == 2 else 0.0
            value = rounded(rounded(code * inverse * sixteenth + held[1]) * held[0] + rest)
        else:
            value = rounded(code * held[0] * sixteenth - held[0] * 8 * 2.0 ** -w4a16.STEP[packed.dtype])
    return value.reshape(blocks * 128, steps * 128) * packed.scale.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_operands_are_the_weights_rounded_once(spec: Spec, dtype: torch.dtype) -> None:
    n, k = 200, 768
    weight = random_qtensor(spec, (n, k), torch.Generator().manual_seed(1), torch.float32)
    weight = replace(weight, scale=weight.scale * torch.logspace(-6, 6, n, base=10)[:, None])  # rows of very different size
    weight.scale[3] = 0
    if weight.scale.shape[1] > 1 or weight.zero is not None:
        weight = replace(weight, scale=weight.scale.bfloat16().float() if dtype == torch.bfloat16 else weight.scale)
    if weight.zero is not None:
        weight = replace(weight, zero=torch.randint(0, 16, weight.zero.shape).float())
    got, want = operands(pack(weight, dtype)), dequantize(weight, torch.float64)
    assert got.isfinite().all()
    assert not got[n:].any()
    exact = weight.zero is None and weight.scale.shape[1] == 1
    step = 2.0 ** (-24 if exact else -8 if dtype == torch.bfloat16 else -10)  # fp16 scales are rounded here too
    worst = want.abs().amax(1, keepdim=True)
    assert ((got[:n, :k] - want).abs() <= step * worst).all()


def test_fractions_of_zeros_count() -> None:
    weight = random_qtensor(SPECS[-1], (64, 256), torch.Generator().manual_seed(2), torch.float32)
    weight = replace(weight, zero=torch.rand_like(weight.scale) * 15)
    packed = pack(weight, torch.float16)
    assert packed.zero == 2
    want = dequantize(weight, torch.float64)
    assert ((operands(packed)[:64] - want).norm() / want.norm()).item() < 4e-4


def test_refuses_with_a_reason() -> None:
    for name, reason in (("w4a16_g128", "GPU"), ("w4a8", "16-bit activations"), ("w8a16", "4-bit")):
        refusal = w4a16.KERNELS[0].accepts(LinearShape(SCHEMES[name], 64, 256, torch.device("cpu"), torch.bfloat16))
        assert refusal is not None
        assert reason in refusal


TOKENS = (1, 16, 17, 33, 65, 97, 129, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 20000)
SHAPES = ((5120, 5120, 2), (15360, 5120, 1), (27648, 5120, 1), (4096, 14336, 2))
IN_USE = sorted({part.tile for m in TOKENS for n, k, shares in SHAPES for part in w4a16.plan(m, n, k, shares, 132)})
KINDS = sorted({(tile.row_tiles, tile.chunk, tile.registers, tile.split): tile for tile in IN_USE}.values())


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_plan_covers_every_row_once(tokens: int) -> None:
    for n, k, shares in (*SHAPES, (1003, 512, 1), (57344, 8192, 1)):
        assert shares == w4a16.shares_for(n, k)
        at = 0
        for launch in w4a16.plan(tokens, n, k, shares, 132):
            assert launch.first == at
            assert at % 256 == 0
            assert launch.rows > 0
            at += launch.rows
        assert at == n


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tile", IN_USE)
def test_shared_memory_holds_the_stages(tile: Tile, split: bool) -> None:
    tile = tile._replace(split=split)
    for tile_bytes in (8192, 8192 + 256, 8192 + 3 * 4 * 256):
        stages, size = w4a16.shared_memory(tile, w4a16.cluster_of(tile, 2), tile_bytes)
        assert stages >= 2
        assert tile.resident * (size + 1024) <= 228 * 1024  # what a processor has, 1 KiB a program reserved


@pytest.mark.parametrize(("shares", "zero"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("tile", KINDS, ids=lambda v: "x".join(str(int(p)) for p in v))
def test_machine_code(tile: Tile, shares: int, zero: int, tmp_path: Path) -> None:
    source, defines = w4a16.source_and_defines(tile, shares, 128, zero, torch.bfloat16)
    body = loop_of_products(assemble(source, defines, tmp_path))
    assert not [line for line in body if SPILL.match(line)]
    products = [line for line in body if "MMA." in line]
    assert len(products) == 8 * tile.row_tiles
    assert all(f"HGMMA.64x{tile.tokens}x16.F32.BF16 R" in line for line in products)
    assert len([line for line in body if "WARPGROUP.DEPBAR" in line]) == 8 // tile.chunk
    assert overwritten_in_flight(body) == []
    words = 8 * tile.row_tiles  # of eight weights; five logical operations and four fmas each, eight with zeros
    floats = sum("HFMA2" in line or "HMUL2" in line for line in body)
    assert floats == words * 4 * (1 + zero) + (0 if zero else 4 * tile.row_tiles)  # and two a scale
