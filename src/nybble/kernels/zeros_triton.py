"""What zero points add to a product of int8 activations, taken off in two small launches. Portable Triton.

Group sums of codes are whole numbers; over groups is summed one after another in fp32, so a row's result does not depend on how
many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.kernels.types import Rows

_LANES, _ROWS, _COLUMNS = 16, 8, 128


@triton.jit
def _sum(codes_ptr, scale_ptr, sums_ptr, groups, GROUP: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    channel = tl.arange(0, WIDTH)[None, :]
    kept = (group < groups)[:, None] & (channel < GROUP)
    codes = tl.load(codes_ptr + row * groups * GROUP + group[:, None] * GROUP + channel, mask=kept, other=0)
    total = tl.sum(codes.to(tl.int32), 1).to(tl.float32)
    tl.store(sums_ptr + row * groups + group, total * tl.load(scale_ptr + row), mask=group < groups)


@triton.jit
def _subtract(y_ptr, sums_ptr, correction_ptr, out_ptr, rows, outputs, groups, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              AHEAD: tl.constexpr):
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, groups, AHEAD):
        for step in tl.static_range(AHEAD):
            group = first + step
            part = tl.load(sums_ptr + row * groups + group, mask=(row < rows) & (group < groups), other=0.0)
            held = tl.load(correction_ptr + group * outputs + column, mask=(column < outputs) & (group < groups), other=0.0)
            total += part[:, None] * held[None, :].to(tl.float32)
    at = row[:, None] * outputs + column[None, :]
    kept = (row < rows)[:, None] & (column < outputs)[None, :]
    y = tl.load(y_ptr + at, mask=kept, other=0.0)
    tl.store(out_ptr + at, (y - total).to(out_ptr.dtype.element_ty), mask=kept)


def subtract(y: Tensor, x: Rows, correction: Tensor, dtype: torch.dtype) -> Tensor:
    """y float32 [M, N] minus (group sums of x) @ correction [groups, N], in `dtype`."""
    rows, outputs = y.shape
    groups, out = correction.shape[0], torch.empty_like(y, dtype=dtype)
    if rows == 0:
        return out
    group = x.codes.shape[1] // groups
    sums = torch.empty(rows, groups, device=y.device)
    width = triton.next_power_of_2(group)
    lanes = max(1, min(_LANES, 8192 // width))
    _sum[(rows, triton.cdiv(groups, lanes))](x.codes.contiguous(), x.scale, sums, groups, group, width, lanes)
    height = min(_ROWS, triton.next_power_of_2(rows))
    _subtract[(triton.cdiv(outputs, _COLUMNS), triton.cdiv(rows, height))](
        y, sums, correction, out, rows, outputs, groups, height, _COLUMNS, 8)
    return out
