"""The gated feed-forward block: silu(gate(x)) * up(x), then down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nybble.kernels.registry import Ops
from nybble.kernels.types import Rows
from nybble.nn.linear import Observe, Projection

FEW_ROWS = 128  # up to so many one message is less than two


@dataclass(frozen=True)
class Mlp:
    """gate_up: gate, up in this order. hadamard: channels that are turned together before `down`, whose weight is turned too
    (QuaRot, arXiv 2404.00456); 0: none are."""

    gate_up: Projection
    down: Projection
    ops: Ops
    hadamard: int = 0

    def inner(self, x: Rows | Tensor, quantize: bool, observe: Observe | None = None) -> Tensor | Rows:
        """What `down` multiplies: [T, I] float, or its int8 rows. Of many rows ranks exchange the codes, a quarter of what gate
        and up are, once they know the largest magnitude of each row."""
        ranks, own = self.gate_up.outputs, self.gate_up.own(x, observe)
        if quantize and ranks.size > 1 and len(own) > FEW_ROWS and self.ops.silu_mul_part is not None:
            largest = lambda most: ranks.columns(most[None]).view(ranks.size, -1).amax(0)  # noqa: E731
            part = self.ops.silu_mul_part(own, self.hadamard, largest, ranks.size)
            if part is not None:
                return Rows(ranks.columns(part.codes), part.scale)
        return self.ops.silu_mul(ranks.columns(own, 2), quantize, self.hadamard)

    def __call__(self, x: Rows | Tensor, observe: Observe | None = None) -> Tensor:
        """[T, H] float, or int8 rows when `gate_up.takes` them -> [T, H]."""
        return self.down(self.inner(x, observe is None and self.down.takes is not None, observe), observe)
