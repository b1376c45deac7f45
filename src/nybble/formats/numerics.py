"""The vocabulary's arithmetic: one place that says how a float becomes a code.

Half-to-even rounding, codes of int8 activations clamped to +-127, fp8 by divide, clamp, cast (a bare cast overflows
differently from one torch version to the next).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor, expand
from nybble.formats.spec import FP8, FP8_E5M2, FP8_FNUZ, Num, Spec, fit_group

FLOAT8 = {FP8.name: torch.float8_e4m3fn, FP8_FNUZ.name: torch.float8_e4m3fnuz, FP8_E5M2.name: torch.float8_e5m2}

# A token whose largest magnitude is below this quantizes to zeros with a finite scale instead of dividing by zero.
SMALLEST_ABSMAX = 1e-10


def to_float8(x: Tensor, scale: Tensor | float, num: Num) -> Tensor:
    """x / scale in fp32, clamped to the finite range, then cast. Same bytes on every torch version and device."""
    return (x.float() / scale).clamp_(num.qmin, num.qmax).to(FLOAT8[num.name])


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for 0: dead groups never become inf or NaN."""
    return torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token symmetric int8. [M, K] float -> (int8 [M, K], float32 [M]); scale = max(absmax, eps) / 127.

    Codes are rint(x * (127 / absmax)), the reciprocal taken once per row in fp32: what every kernel does.
    """
    wide = x.float()
    absmax = wide.abs().amax(-1).clamp_min(SMALLEST_ABSMAX)
    inverse = torch.full_like(absmax, 127.0) / absmax  # torch computes `127.0 / tensor` as reciprocal * 127: rounded twice
    codes = torch.round(wide * inverse[..., None]).clamp_(-127, 127)
    return codes.to(torch.int8), absmax / 127.0


def quantize_min_max(x: Tensor, levels: int, centred: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric over the last axis, as the KV cache stores it: (uint8 codes, float16 scale, float16 minimum).

    The codes are computed against the *stored* half-precision scale and minimum, so that code * scale + minimum is the
    nearest the cache can hold. A constant vector has scale 0, codes 0 and comes back as its minimum. centred: the minimum
    that is returned makes the errors sum to zero, so that the vector's component along (1, .., 1) is kept in half precision.
    """
    wide = x.float()
    low, high = wide.amin(-1), wide.amax(-1)
    scale = ((high - low) / levels).to(torch.float16)
    minimum = low.to(torch.float16)
    step = scale.float()
    codes = torch.round((wide - minimum.float()[..., None]) * reciprocal(step)[..., None]).clamp_(0, levels)
    if centred:
        minimum = (wide - codes * step[..., None]).mean(-1).to(torch.float16)
    return codes.to(torch.uint8), scale, minimum


def quantize_weight(weight: Tensor, spec: Spec, scale: Tensor, zero: Tensor | None = None) -> QTensor:
    """Round a float [N, K] weight to the nearest code of `spec` for given scales ([N, K // group] fp32). Tiles with scale 0
    get code 0 (or their zero)."""
    values = weight.float() * reciprocal(expand(scale, weight.shape))
    if spec.num.kind == "float":
        return QTensor(spec, values.clamp_(spec.num.qmin, spec.num.qmax).to(FLOAT8[spec.num.name]), scale)
    if zero is not None:
        values = values + expand(zero, weight.shape)
    codes = torch.round(values).clamp_(spec.num.qmin, spec.num.qmax).to(torch.int8)
    return QTensor(spec, codes, scale, zero)


def random_qtensor(spec: Spec, shape: tuple[int, int], generator: torch.Generator, dtype: torch.dtype) -> QTensor:
    """A random [N, K] weight of about unit gain on the generator's device, for benchmarks and self-tests. The group is cut to
    one that divides K; float8 codes are drawn in `dtype`. Scales lie between half and one and a half times their average, so
    that one read from the wrong place shows."""
    k, device = shape[1], generator.device
    spread, low, high = 1.0, int(spec.num.qmin), int(spec.num.qmax)
    if spec.num.kind == "float":
        codes = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator).to(FLOAT8[spec.num.name])
    else:
        whole = torch.int8 if high < 128 else torch.uint8
        codes = torch.randint(low, high + 1, shape, dtype=whole, device=device, generator=generator)
        spread = (high - low + 1) / math.sqrt(12.0)
    spec = spec.with_group(fit_group(spec.group, k))
    tiles = spec.num_scales(shape)
    value = 1.0 / (spread * math.sqrt(k))
    scale = torch.rand(tiles, device=device, generator=generator) + 0.5
    if spec.over is not None:  # an integer grid: int4 codes times scales below 127 / 8
        return QTensor(spec, codes, torch.round(scale * 10), over=torch.full((shape[0], 1), value / 10, device=device))
    zero = torch.full(tiles, (high + 1) / 2, device=device) if spec.zero else None
    return QTensor(spec, codes, scale * value, zero)
