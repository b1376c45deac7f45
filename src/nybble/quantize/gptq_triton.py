"""GPTQ's inner loop on a GPU: one launch rounds a block of input channels, where torch would take seven a channel.

Not an algorithm of its own: `gptq.one_block` says what is computed. The one idea: weight rows never meet, so a program
keeps a few of them in registers and walks the block's channels alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.formats.spec import Num

ROWS, BLOCK = 8, 128
TO_INTEGER = 12582912.0  # 1.5 * 2**23: adding and taking it away rounds half to even


@triton.jit
def _round(x, QMIN: tl.constexpr, QMAX: tl.constexpr, INTEGER: tl.constexpr, MAGIC: tl.constexpr):
    """To the nearest integer, or e4m3 number: a multiple of 2^(exponent - 3), of 2^-9 below 2^-6."""
    x = tl.minimum(tl.maximum(x, QMIN), QMAX)
    if INTEGER:
        return (x + MAGIC) - MAGIC
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    step = exponent - (3 << 23)
    inverse = ((254 << 23) - step).to(tl.float32, bitcast=True)
    return ((x * inverse + MAGIC) - MAGIC) * step.to(tl.float32, bitcast=True)


@triton.jit
def _one_block(STATE, CODES, SCALE, MATRIX, MOVED, start, width, k, n, QMIN: tl.constexpr, QMAX: tl.constexpr,
               SWEEP: tl.constexpr, INTEGER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MAGIC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    alive, inside = row < n, column < width
    state = tl.load(STATE + (start + column)[None, :] * n + row[:, None], mask=alive[:, None] & inside[None, :], other=0.0)
    for j in range(0, width):
        at = (start + j) * n + row
        value = tl.sum(tl.where((column == j)[None, :], state, 0.0), 1)
        scale = tl.load(SCALE + at, mask=alive, other=0.0)
        inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
        line = tl.load(MATRIX + (start + j) * k + start + column, mask=inside & (column > j), other=0.0)
        diagonal = tl.load(MATRIX + (start + j) * k + start + j)
        if SWEEP:
            old = tl.load(CODES + at, mask=alive, other=0.0)
            code = _round(old + value * inverse / diagonal, QMIN, QMAX, INTEGER, MAGIC)
            moved = (code - old) * scale
        else:
            code = _round(value * inverse, QMIN, QMAX, INTEGER, MAGIC)
            moved = (value - code * scale) / diagonal
        state -= line[None, :] * moved[:, None]
        tl.store(CODES + at, code, mask=alive)
        tl.store(MOVED + j * n + row, moved, mask=alive)


def one_block(state: Tensor, codes: Tensor, scale: Tensor, matrix: Tensor, start: int, stop: int, num: Num,
              sweep: bool) -> Tensor:
    """As `gptq.one_block`; at most 128 channels, all tensors contiguous fp32."""
    k, n = state.shape
    moved = torch.empty(stop - start, n, dtype=state.dtype, device=state.device)
    _one_block[(triton.cdiv(n, ROWS),)](state, codes, scale, matrix, moved, start, stop - start, k, n, num.qmin, num.qmax,
                                        sweep, num.kind == "int", ROWS, BLOCK, TO_INTEGER, num_warps=1)
    return moved
