"""Linears and logits of 16-bit weights on Hopper (sm_90a), in CUDA (`w8a8_sm90.cu`): weights as they are, float32 sums.

For batches whose time is reading the weights; larger ones are cuBLAS's, which is ahead there. The sum over K has shares where
row tiles alone would leave processors idle. They depend on the weight's shape alone, so no batch this file multiplies changes a
bit; cuBLAS's sums are in another order. Logits are always this file's: a row's do not depend on the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.formats.qtensor import QTensor
from nybble.kernels import linear_hopper_w8, linear_triton, nvrtc
from nybble.kernels.linear_hopper_w8 import BFLOAT16, FLOAT16, Launch, Tile, source_and_defines, start
from nybble.kernels.nvrtc import processors
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import Rows

KIND = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
CHANNELS = 64  # of a step


# ---- tiles --------------------------------------------------------------------------------------------------------

# One processor reads from memory at about a hundredth of its speed, so that all of them have to have as much to read: a tile is
# as many rows as that takes, not a power of two. From sweeps on an H200 over the linears and the logits of Llama-2-13B.
MOST_ROWS = 232
WIDTHS = (8, 16, 32, 64, 96, 128)


def most_tokens(n: int, k: int) -> int:
    """Of a batch that is not cuBLAS's. Sums of few channels in shares cost more to exchange than they save."""
    return 64 if shares_for(n, k) > 1 and k <= 8192 else 128


def shares_for(n: int, k: int) -> int:
    """How many parts the sum over K has, whatever the batch: more where a tile for every processor would be so few rows that
    it reads more of the tokens than of the weight."""
    if k < 1024 or n > 8448:
        return 1
    return 4 if n <= 5760 else 2


def clusters(size: int, processors: int) -> int:
    """How many clusters run at once: an H200 has no room for more than 30 of four programs."""
    return processors * 10 // 44 if size == 4 else processors // size


def even_rows(n: int, places: int) -> int:
    """Rows of a tile, in eights, for the fewest rounds over so many places."""
    rounds, of_128 = -(-n // (places * MOST_ROWS)), -(-n // (places * 128))
    if rounds > 1 and n > 0.93 * places * of_128 * 128:  # as even
        return 128
    return -(-n // (places * rounds * 8)) * 8


def fitted(tile: Tile, n: int, k: int, dtype: torch.dtype) -> Tile:
    staged = tile.staged and tile.shares == 1 and tile.rows % 64 == 0 and n % 8 == 0 and k > CHANNELS and dtype != torch.float32
    return tile._replace(staged=staged)


@functools.lru_cache(4096)
def plan(tokens: int, n: int, k: int, out: torch.dtype, processors: int) -> Tile:
    """The tile for a batch."""
    shares, fours = shares_for(n, k), clusters(4, processors)
    width = next((t for t in WIDTHS if tokens <= t), 256 if shares == 1 else WIDTHS[-1])
    quads, tile = -(-n // (4 * 128)), Tile(width, 2, 4, staged=True)
    if shares == 1 and width > 32 and fitted(tile, n, k, out).staged and quads >= 0.85 * fours * -(-quads // fours):
        return tile  # tokens come once for four programs, outputs leave while the next tile is read
    if width > WIDTHS[-1]:
        return Tile(width, 2)
    rows = even_rows(n, clusters(shares, processors))
    return Tile(width, -(-rows // 64), shares=shares, rows_held=rows)


# ---- launching ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """weight: [N, K] of 16 bits. dtype: of outputs."""

    weight: Tensor
    dtype: torch.dtype
    tile: Tile | None = None  # set: this tile whatever the batch (benchmarks, tests)


def fits(weight: Tensor) -> bool:
    aligned = weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0 and weight.is_contiguous()
    return weight.dtype in KIND and aligned and weight.numel() > 0


def multiply(packed: Packed, x: Tensor) -> Tensor:
    """x [M, K] of the weight's dtype times the weight -> [M, N]."""
    (n, k), tokens = packed.weight.shape, x.shape[0]
    x = x.contiguous()
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    y = torch.empty((tokens, n), dtype=packed.dtype, device=x.device)
    if tokens:
        tile = packed.tile or plan(tokens, n, k, packed.dtype, processors(x.device.index))
        start(Launch(fitted(tile, n, k, packed.dtype), 0, n), KIND[x.dtype], x.data_ptr(), 2 * k, y, (packed.weight,))
    return y


@functools.cache
def compile_ahead(kind: int, n: int, k: int, dtype: torch.dtype, count: int) -> None:
    batches = [m for m in nvrtc.usual_batches(n, k) if m <= most_tokens(n, k)]
    tiles = {fitted(plan(m, n, k, dtype, count), n, k, dtype) for m in batches}
    nvrtc.compile_ahead(source_and_defines(tile, kind, linear_hopper_w8.OUT[dtype]) for tile in tiles)


def _pack(weight: QTensor | Tensor, shape: LinearShape) -> Packed:
    assert isinstance(weight, Tensor)
    weight = weight.to(shape.device, shape.dtype).contiguous()
    if shape.device.type == "cuda":
        compile_ahead(KIND[shape.dtype], *weight.shape, shape.dtype, processors(shape.device.index or 0))
    return Packed(weight, shape.dtype)


def _run(packed: Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Tensor)
    if packed.tile is None and len(x) > most_tokens(*packed.weight.shape) or not fits(packed.weight):
        return F.linear(x, packed.weight)
    return multiply(packed, x)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`reference.logits`; a row's bits do not depend on the others."""
    if not fits(weight):
        return linear_triton.logits(hidden, weight)
    return multiply(Packed(weight, torch.float32), hidden.to(weight.dtype))


def _accepts(shape: LinearShape) -> str | None:
    if shape.scheme.weight is not None or shape.scheme.act is not None:
        return "wants weights and activations of 16 bits"
    if shape.dtype not in KIND:
        return f"wants bfloat16 or float16, not {shape.dtype}"
    if shape.in_features % 8:
        return "wants input channels in multiples of 8"
    return nvrtc.refusal(shape.device)


KERNELS: tuple[LinearKernel, ...] = (LinearKernel("hopper 16 bits", _accepts, _pack, _run, None),)
