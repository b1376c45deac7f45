"""Choosing scales, and rounding to nearest. Not error feedback (see gptq), not calibration: only the weight is looked at.

The one idea: a scale is rounded to the precision the checkpoint stores *before* any code is computed against it, so what
is written and what was optimized are the same number.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import INT8_CHANNEL, Spec

# Candidate shrinkages of the mse search, and the exponent of its error: |q - x|^2.4 weighs the large errors that hurt a
# dot product most (GPTQ's and QQQ's choice).
SHRINK = tuple(1.0 - 0.02 * step for step in range(36))
ERROR_POWER = 2.4


def check_spec(spec: Spec) -> None:
    """Raises ValueError for weight specs that these quantizers do not write."""
    if spec.zero or spec.tile[0] != 1 or spec.over not in (None, INT8_CHANNEL):
        raise ValueError(
            f"cannot choose scales for {spec}: wants symmetric weights, one scale per channel or per group of input channels"
        )


def tiles(weight: Tensor, spec: Spec) -> Tensor:
    """[N, K] -> [N, K / group, group], a view. Raises ValueError where the group does not divide K (see `fit_group`)."""
    n, k = weight.shape
    group = spec.group or k
    if k % group:
        raise ValueError(f"groups of {group} do not divide {k} input channels: fit_group({group}, {k}) gives one that does")
    return weight.view(n, k // group, group)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` stores them, back in fp32: rounded, and never inf, nor 0, and so its weights, where it was none."""
    if dtype == torch.float16:  # whose smallest step is 2^-24
        scale = torch.where(scale > 0, scale.clamp_min(2.0**-24), scale)
    return scale.clamp(max=torch.finfo(dtype).max).to(dtype).float()


def covering(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of largest values as `storable`, but up where float16 has only few steps: the nearest would cut these values."""
    if dtype == torch.float16:
        scale = torch.where(scale < 32 * 2.0**-24, torch.ceil(scale * 2.0**24) / 2.0**24, scale)
    return storable(scale, dtype)


WHOLE = 16  # the largest whole group scale: 8 * 16 is as far as an int8 goes


def snap(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Group scales [N, G] -> (whole numbers [N, G], 1..16 or for dead groups 0, the channel's unit [N, 1]): nearest products.

    The unit keeps so few bits that every product is exact in `dtype`; of the units that put the row's largest scale between
    8 and 16, the one with the least squared relative error.
    """
    bits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24) - 4
    drop = 2.0 ** (24 - bits) + 1  # Veltkamp: c - (c - x) with c = x * drop keeps the top bits
    top = scale.amax(1, keepdim=True)
    best, best_unit, best_loss = torch.zeros_like(scale), torch.zeros_like(top), torch.full_like(top, torch.inf)
    for reach in [8 + step / 4 for step in range(4 * (WHOLE - 8) + 1)]:
        unit = top / reach
        unit = unit * drop - (unit * drop - unit)
        if dtype == torch.float16:
            steps = torch.minimum(torch.round(unit * 2.0**24), torch.floor(top * 2.0**24 / 7.5))  # the largest stays 8 or more
            unit = steps.clamp_min(1) / 2.0**24
        whole = torch.round(scale / unit.clamp_min(1e-38)).clamp_(1, WHOLE) * (scale > 0)
        error = (whole * unit / scale.clamp_min(1e-30) - 1).clamp_max(1) * (scale > 0)  # of a scale far below its unit: 1
        loss = error.square().sum(1, keepdim=True)
        better = loss < best_loss
        best, best_unit = torch.where(better, whole, best), torch.where(better, unit, best_unit)
        best_loss = torch.where(better, loss, best_loss)
    return best, torch.where(top > 0, best_unit, torch.zeros_like(best_unit))


def settle(scale: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """Scales as they can be stored: rounded to `dtype`, and onto whole multiples where the spec says so."""
    if spec.over is None:
        return storable(scale, dtype)
    whole, unit = snap(storable(scale, dtype), dtype)
    return whole * unit


def with_scale(spec: Spec, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> QTensor:
    """Codes [N, K] and settled scales [N, G] as a `QTensor`."""
    if spec.over is None:
        return QTensor(spec, codes, scale)
    whole, unit = snap(scale, dtype)
    assert torch.equal(whole * unit, scale)
    return QTensor(spec, codes, whole, over=unit)


def absmax_scale(weight: Tensor, spec: Spec, scale_dtype: torch.dtype) -> Tensor:
    """absmax / qmax of each tile. float [N, K] -> float32 [N, K / group], storable in `scale_dtype`; 0 for dead tiles."""
    check_spec(spec)
    return covering(tiles(weight.float(), spec).abs().amax(-1) / spec.num.qmax, scale_dtype)


def mse_scale(weight: Tensor, spec: Spec, scale_dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """The scale of each tile that loses least, searched over shrunken ranges. float [N, K] -> float32 [N, K / group].

    Loss per tile: sum of |q - w|^2.4; with `importance` (float [K], e.g. the Hessian's diagonal) the sum of
    importance * (q - w)^2 instead, which is the output error that this tile's rounding alone would cause.
    """
    wide = weight.float()
    widest = absmax_scale(wide, spec, torch.float32)
    best = covering(widest, scale_dtype)
    best_loss = torch.full_like(best, torch.inf)
    weights = None if importance is None else importance.float().clamp_min(importance.float().mean() * 1e-4)
    for shrink in SHRINK:
        scale = covering(widest * shrink, scale_dtype)
        error = dequantize(quantize_weight(wide, spec, scale)).sub_(wide).abs_()
        error = error.pow_(ERROR_POWER) if weights is None else error.square_().mul_(weights)
        loss = tiles(error, spec).sum(-1)
        better = loss < best_loss
        best, best_loss = torch.where(better, scale, best), torch.where(better, loss, best_loss)
    return best


def quantize_rtn(weight: Tensor, spec: Spec, scale_dtype: torch.dtype = torch.float16, mse: bool = False,
                 name: str = "this layer") -> QTensor:
    """Round to nearest. float [N, K] -> QTensor of `spec`; scales absmax / qmax, or searched with `mse`.

    Raises ValueError when a weight is not finite, or when the spec or its group does not fit.
    """
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name}: the weight holds NaN or infinity: the checkpoint is damaged or overflowed its dtype")
    plain = replace(spec, over=None)
    scale = mse_scale(weight, plain, scale_dtype) if mse else absmax_scale(weight, plain, scale_dtype)
    scale = settle(scale, spec, scale_dtype)
    return with_scale(spec, quantize_weight(weight, plain, scale).codes, scale, scale_dtype)
