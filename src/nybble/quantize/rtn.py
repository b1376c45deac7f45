"""Choosing scales, and rounding to nearest. Not error feedback (see gptq), not calibration: only the weight is looked at.

The one idea: a scale is rounded to the precision the checkpoint stores *before* any code is computed against it, so what
is written and what was optimized are the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import Spec

# Candidate shrinkages of the mse search, and the exponent of its error: |q - x|^2.4 weighs the large errors that hurt a
# dot product most (GPTQ's and QQQ's choice).
SHRINK = tuple(1.0 - 0.02 * step for step in range(36))
ERROR_POWER = 2.4


def check_spec(spec: Spec) -> None:
    """Raises ValueError for weight specs that these quantizers do not write."""
    if spec.zero or spec.over is not None or spec.tile[0] != 1:
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
    """Scales as `dtype` stores them, back in fp32: rounded, and never inf."""
    return scale.clamp(max=torch.finfo(dtype).max).to(dtype).float()


def absmax_scale(weight: Tensor, spec: Spec, scale_dtype: torch.dtype) -> Tensor:
    """absmax / qmax of each tile. float [N, K] -> float32 [N, K / group], storable in `scale_dtype`; 0 for dead tiles."""
    check_spec(spec)
    return storable(tiles(weight.float(), spec).abs().amax(-1) / spec.num.qmax, scale_dtype)


def mse_scale(weight: Tensor, spec: Spec, scale_dtype: torch.dtype, importance: Tensor | None = None) -> Tensor:
    """The scale of each tile that loses least, searched over shrunken ranges. float [N, K] -> float32 [N, K / group].

    Loss per tile: sum of |q - w|^2.4; with `importance` (float [K], e.g. the Hessian's diagonal) the sum of
    importance * (q - w)^2 instead, which is the output error that this tile's rounding alone would cause.
    """
    wide = weight.float()
    widest = absmax_scale(wide, spec, torch.float32)
    best = storable(widest, scale_dtype)
    best_loss = torch.full_like(best, torch.inf)
    weights = None if importance is None else importance.float().clamp_min(importance.float().mean() * 1e-4)
    for shrink in SHRINK:
        scale = storable(widest * shrink, scale_dtype)
        error = dequantize(quantize_weight(wide, spec, scale)).sub_(wide).abs_()
        error = error.pow_(ERROR_POWER) if weights is None else error.square_().mul_(weights)
        loss = tiles(error, spec).sum(-1)
        better = loss < best_loss
        best, best_loss = torch.where(better, scale, best), torch.where(better, loss, best_loss)
    return best


def quantize_rtn(weight: Tensor, spec: Spec, scale_dtype: torch.dtype = torch.float16, mse: bool = False) -> QTensor:
    """Round to nearest. float [N, K] -> QTensor of `spec`; scales absmax / qmax, or searched with `mse`.

    Raises ValueError when a weight is not finite, or when the spec or its group does not fit.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity: the checkpoint is damaged or overflowed its dtype")
    scale = mse_scale(weight, spec, scale_dtype) if mse else absmax_scale(weight, spec, scale_dtype)
    return quantize_weight(weight, spec, scale)
