"""Attention of one layer: project, turn and store, attend over the paged cache, project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nybble.kernels.registry import Ops
from nybble.kernels.types import LayerKV, Rows, Step
from nybble.nn.linear import Observe, Projection


@dataclass(frozen=True)
class Attention:
    """qkv: q, k, v in this order. q_norm, k_norm: float32 [head_dim] or None. window: tokens seen, 0 is all."""

    qkv: Projection
    o: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos_sin: Tensor
    kv_heads: int
    head_dim: int
    eps: float
    window: int
    ops: Ops

    def __call__(self, x: Rows | Tensor, kv: LayerKV, step: Step, observe: Observe | None = None) -> Tensor:
        """[T, H] float, or int8 rows when `qkv.takes` them -> [T, H]. Writes the step's K and V to `kv`."""
        qkv = self.qkv(x, observe)
        q = self.ops.rope_write(qkv, kv, step, self.cos_sin, self.kv_heads, self.q_norm, self.k_norm, self.eps)
        out = self.ops.attention(q, kv, step, self.head_dim**-0.5, self.window)
        return self.o(out.flatten(1), observe)
