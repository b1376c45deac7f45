"""Quantized weights in canonical form: signed codes, one row per output channel, scales in fp32. No kernel's layout.

Foreign checkpoints are read into this form, kernels pack from it, and tensor-parallel cuts and Q/K/V joins happen here and
nowhere else. The laws (tested): `dequantize(cut(q)) == cut(dequantize(q))`, `dequantize(join(qs)) == cat(dequantize)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from nybble.formats.spec import Spec, Tile


@dataclass(frozen=True)
class QTensor:
    """A quantized [N, K] weight.

    codes: int8 [N, K] for integers (int4 codes one per byte, -8..7; uint4 0..15), or a float8 dtype.
    scale: float32 [N, K // group] ([N, 1] per channel, [N / 128, K / 128] rounded up for blocks, [1, 1] per tensor).
    zero: float32, shape of `scale`; value = (code - zero) * scale. None when symmetric.
    over: float32 [N, 1] when `spec.over` is set: the int8 grid's per-channel scale. Then the integer that enters the dot
        product is clamp(rint(code * scale), -128, 127) (QQQ), and the value is that integer times `over`.
    order: int64 [K] or None: the group of each input channel where groups are not contiguous (GPTQ g_idx).
    """

    spec: Spec
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    over: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.codes.shape)

    def to(self, device: torch.device | str) -> QTensor:
        move = lambda t: None if t is None else t.to(device)  # noqa: E731
        return replace(self, codes=move(self.codes), scale=move(self.scale), zero=move(self.zero), over=move(self.over),
                       order=move(self.order))

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales (16 bits), zeros (code width) and the coarser grid (32 bits) included."""
        n, k = self.shape
        bits = self.spec.num.bits * n * k + 16 * self.scale.numel()
        bits += self.spec.num.bits * self.zero.numel() if self.zero is not None else 0
        bits += 32 * self.over.numel() if self.over is not None else 0
        return bits / (n * k)


def expand(scale: Tensor, shape: tuple[int, int], order: Tensor | None = None, tile: Tile = (None, None)) -> Tensor:
    """Repeat per-tile values to one per weight. [S_n, S_k] -> [N, K]. `tile` is needed where the last tile is a part."""
    n, k = shape
    rows = scale.repeat_interleave(tile[0] or -(-n // scale.shape[0]), 0)[:n] if scale.shape[0] != n else scale
    if order is not None:
        return rows[:, order]
    return rows.repeat_interleave(tile[1] or -(-k // scale.shape[1]), 1)[:, :k] if scale.shape[1] != k else rows


def inner_codes(q: QTensor) -> Tensor:
    """The int8 operand of the dot product where scales live on a coarser grid. int8 [N, K]."""
    grid = torch.round(q.codes.float() * expand(q.scale, q.shape, q.order, q.spec.tile))
    return grid.clamp_(-128, 127).to(torch.int8)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] values in `dtype` (fp64 gives the exact product of code and fp32 scale)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if q.over is not None:
        return (inner_codes(q).to(wide) * q.over.to(wide)).to(dtype)
    values = q.codes.to(wide)
    if q.zero is not None:
        values = values - expand(q.zero, q.shape, q.order, q.spec.tile).to(wide)
    return (values * expand(q.scale, q.shape, q.order, q.spec.tile).to(wide)).to(dtype)


def dense(value: Tensor | QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a weight, quantized or not."""
    return dequantize(value, dtype) if isinstance(value, QTensor) else value.to(dtype)


def join(parts: Sequence[QTensor]) -> QTensor:
    """Stack weights that share an input along the output axis: Q, K, V or gate, up. Exact.

    Raises ValueError when the parts mean different things (spec, input width): say which.
    """
    first = parts[0]
    for part in parts[1:]:
        if part.spec != first.spec or part.shape[1] != first.shape[1]:
            raise ValueError(f"cannot join {first.spec} {first.shape} with {part.spec} {part.shape}")
        if (part.order is None) != (first.order is None) or (
            first.order is not None and not torch.equal(part.order, first.order)
        ):
            raise ValueError("cannot join weights whose groups are ordered differently (GPTQ g_idx)")
    widened = [_per_row(p) if first.spec.tile[0] != 1 else p for p in parts]
    spec = widened[0].spec
    cat = lambda ts: None if ts[0] is None else torch.cat(ts, 0)  # noqa: E731
    return QTensor(spec, cat([p.codes for p in widened]), cat([p.scale for p in widened]),
                   cat([p.zero for p in widened]), cat([p.over for p in widened]), first.order)


def _per_row(q: QTensor) -> QTensor:
    """Repeat tiles that span rows to one scale per row, so that tensors with different scales can be stacked exactly."""
    n, _ = q.shape
    rows = lambda s: None if s is None else (s.repeat_interleave(q.spec.tile[0] or n, 0)[:n])  # noqa: E731
    return replace(q, spec=replace(q.spec, tile=(1, q.spec.tile[1])), scale=rows(q.scale), zero=rows(q.zero))


def cut(q: QTensor, axis: int, start: int, stop: int) -> QTensor:
    """Rows (axis 0) or input channels (axis 1) [start, stop). A cut through a group repeats its scale instead of failing."""
    if axis == 0:
        q = _per_row(q)
        row = lambda t: None if t is None else t[start:stop]  # noqa: E731
        return QTensor(q.spec, row(q.codes), row(q.scale), row(q.zero), row(q.over), q.order)
    codes = q.codes[:, start:stop]
    if q.scale.shape[1] == 1 or q.order is not None:
        order = None if q.order is None else q.order[start:stop]
        return replace(q, codes=codes, order=order)
    group = q.spec.group
    if start % group == 0 and (stop % group == 0 or stop == q.shape[1]):
        tiles = slice(start // group, -(-stop // group))
        return replace(q, codes=codes, scale=q.scale[:, tiles], zero=None if q.zero is None else q.zero[:, tiles])
    step = gcd(group, start, stop)
    index = torch.arange(start, stop, step, device=q.scale.device) // group
    spec = q.spec.with_group(step)
    return replace(q, spec=spec, codes=codes, scale=q.scale[:, index], zero=None if q.zero is None else q.zero[:, index])
