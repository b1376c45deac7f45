"""The 16-bit Hopper kernel without a GPU: plans, tiles that fit, reasons, machine code.

Numbers are checked on the GPU (tests/gpu/test_linear_16_gpu.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from sass import SPILL, assemble, loop_of_products

from nybble.formats.spec import SCHEMES, scheme_of
from nybble.kernels import linear_hopper_16
from nybble.kernels.linear_hopper_16 import CHANNELS, fitted, plan, shares_for
from nybble.kernels.linear_hopper_w8 import BFLOAT16, FLOAT16, Tile, shared_memory, source_and_defines
from nybble.kernels.registry import LinearShape

CPU = torch.device("cpu")
WEIGHTS = [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (6144, 4096), (28672, 4096), (4096, 14336), (32001, 5120),
           (128256, 4096), (576, 1536), (1003, 64)]  # fmt: skip
BATCHES = (1, 8, 9, 16, 33, 64, 65, 100, 128, 129, 200, 256, 300, 1000, 5000)
OUTPUTS = (torch.bfloat16, torch.float32)
IN_USE = sorted({plan(m, n, k, out, 132) for n, k in WEIGHTS for m in BATCHES for out in OUTPUTS})
LARGEST = list({(tile.warpgroups, tile.cluster, tile.shares, tile.tokens): tile for tile in IN_USE}.values())


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_the_order_of_a_sum_does_not_follow_the_batch(n: int, k: int) -> None:
    assert {plan(tokens, n, k, out, 132).shares for tokens in BATCHES for out in OUTPUTS} == {shares_for(n, k)}
    assert shares_for(n, k) <= -(-k // CHANNELS)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "best"),
    [(1, 15360, 5120, (8, 1, 1, 120)), (16, 27648, 5120, (16, 1, 1, 216)), (64, 27648, 5120, (64, 4, 1, 128)),
     (128, 15360, 5120, (128, 4, 1, 128)), (128, 5120, 13824, (128, 1, 4, 176)), (1, 32000, 5120, (8, 1, 1, 128)),
     (128, 32000, 5120, (128, 1, 1, 128))],
)  # fmt: skip
def test_tiles_are_the_sweeps_best(tokens: int, n: int, k: int, best: tuple[int, ...]) -> None:
    """Measured on an H200, which has 132 processors: (tokens, programs that share them, shares, rows)."""
    out = torch.float32 if n == 32000 else torch.bfloat16  # logits
    tile = plan(tokens, n, k, out, 132)
    assert (tile.tokens, tile.cluster, tile.shares, tile.rows) == best


@pytest.mark.parametrize("tile", IN_USE)
def test_shared_memory_holds_a_tile_and_the_sums_of_others(tile: Tile) -> None:
    stages, size = shared_memory(tile, BFLOAT16)
    assert stages >= 3
    assert tile.resident * (size + 1024) <= 228 * 1024  # what a processor has, 1 KiB a program reserved
    assert tile.tokens % (8 * tile.cluster) == 0
    assert tile.cluster * tile.shares <= 8  # the most programs of a cluster that every GPU takes
    groups = -(-(tile.tokens // 8) // tile.shares)
    assert (tile.shares - 1) * groups * 8 * 64 * tile.warpgroups * 4 <= stages * (tile.rows + tile.tokens) * 128
    assert (64 * tile.warpgroups - tile.rows) * 128 <= stages * tile.tokens * 128  # what its last warpgroup reads too much


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("tile", LARGEST, ids=lambda tile: "x".join(map(str, tile)))
def test_machine_code(tile: Tile, kind: int, tmp_path: Path) -> None:
    for out in (kind - BFLOAT16, 2):
        dtype = {0: torch.bfloat16, 1: torch.float16, 2: torch.float32}[out]
        lines = assemble(*source_and_defines(fitted(tile, 5120, 5120, dtype), kind, out), tmp_path)
        products = [line for line in lines if "GMMA.64x" in line]
        form = r"F32\.BF16" if kind == BFLOAT16 else "F32"
        assert products
        assert all(re.search(rf"HGMMA\.64x{tile.tokens}x16\.{form} R\d+, gdesc", line) for line in products)
        assert not [line for line in lines if SPILL.match(line)]
        assert not [line for line in loop_of_products(lines) if "MEMBAR" in line]
        sent = [line for line in lines if re.search(r"\bST\.?ASYNC|STAS", line)]
        assert bool(sent) == (tile.shares > 1)


@pytest.mark.parametrize(
    ("scheme", "k", "dtype", "reason"),
    [
        (scheme_of(None, None), 256, torch.bfloat16, "Hopper GPU"),
        (scheme_of(None, None), 252, torch.bfloat16, "multiples of 8"),
        (scheme_of(None, None), 256, torch.float32, "bfloat16 or float16"),
        (SCHEMES["w4a16_g128"], 256, torch.bfloat16, "16 bits"),
    ],
)
def test_refuses_with_a_reason(scheme: object, k: int, dtype: torch.dtype, reason: str) -> None:
    assert reason in (linear_hopper_16.KERNELS[0].accepts(LinearShape(scheme, 64, k, CPU, dtype)) or "")
