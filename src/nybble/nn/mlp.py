"""The gated feed-forward block: silu(gate(x)) * up(x), then down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nybble.kernels.registry import Ops
from nybble.kernels.types import Rows
from nybble.nn.linear import Observe, Projection


@dataclass(frozen=True)
class Mlp:
    """gate_up: gate, up in this order."""

    gate_up: Projection
    down: Projection
    ops: Ops

    def __call__(self, x: Rows | Tensor, observe: Observe | None = None) -> Tensor:
        """[T, H] float, or int8 rows when `gate_up.takes` them -> [T, H]."""
        quantize = observe is None and self.down.takes is not None
        return self.down(self.ops.silu_mul(self.gate_up(x, observe), quantize), observe)
