"""RMSNorm, with the residual addition before it and the quantization after it in the same op."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nybble.kernels.registry import Ops
from nybble.kernels.types import Rows


@dataclass(frozen=True)
class RmsNorm:
    """weight: float32 [H] on the device."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor, residual: Tensor | None, quantize: bool) -> tuple[Tensor | Rows, Tensor]:
        """[M, H] (+ residual) -> (the norm, or its int8 rows; the sum that was normed)."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual, quantize)
