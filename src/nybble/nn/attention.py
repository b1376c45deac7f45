"""Attention of one layer: project, turn and store, attend over the paged cache, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nybble.formats.spec import PER_TOKEN_INT8
from nybble.kernels.reference import head_norm
from nybble.kernels.registry import Ops
from nybble.kernels.types import LayerKV, Rows, Step, Turn
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
    turn: Turn | None = None  # for caches of 8 bits and fewer (`models.turn`)

    def project(self, x: Rows | Tensor, kv: LayerKV, step: Step, observe: Observe | None = None) -> Tensor:
        """[T, H] float, or int8 rows when `qkv.takes` them -> queries [T, heads, D]. Writes the step's K and V to `kv`. Where
        `attend` does all that at once: the projections [T, (heads + 2 kv_heads) * D]."""
        qkv, norms = self.qkv(x, observe), (self.q_norm, self.k_norm)
        if observe is None and self._at_once(kv, step):
            return qkv
        if kv.k_heads is not None or kv.v_heads is not None:
            qkv, norms = self._divide_heads(qkv, kv), (None, None)
        q = self.ops.rope_write(qkv, kv, step, self.cos_sin, self.kv_heads, *norms, self.eps, self._turn(kv))
        return q if kv.k_heads is None else (q * self._per_query(kv.k_heads, q)).to(q.dtype)

    def attend(self, q: Tensor, kv: LayerKV, step: Step, *out: Any) -> Tensor | Rows:
        """Queries -> what they see, same shape. A GPU may be given where to put it (tokens of no row stay as they are), and a
        dictionary in which the layers of a step keep launches for each other. Of projections: what they see, or its int8 rows
        when `o.takes` them."""
        if q.ndim == 2:
            assert self.ops.decode is not None
            return self.ops.decode(q, kv, step, self.cos_sin, self.kv_heads, self.head_dim**-0.5, self.window,
                                   self.o.takes == PER_TOKEN_INT8)
        seen = self.ops.attention(q, kv, step, self.head_dim**-0.5, self.window, *out)
        turn = self._turn(kv)
        if turn is not None and turn.out is not None:
            seen.copy_(self.ops.turn_heads(seen, turn.out))
        return seen if kv.v_heads is None else seen.mul_(self._per_query(kv.v_heads, q))

    def _at_once(self, kv: LayerKV, step: Step) -> bool:
        return self.ops.decode is not None and step.sees_own and self.plain(kv)

    def plain(self, kv: LayerKV) -> bool:
        """Whether nothing lies between the projection, rotation and a cache like `kv`: one kernel may then do all of it."""
        return all(x is None for x in (self.q_norm, self.k_norm, self._turn(kv), kv.k_heads, kv.v_heads))

    def _turn(self, kv: LayerKV) -> Turn | None:
        """A cache of 16 bits takes K and V as they are, and so does one whose scales were measured on them."""
        measured = kv.k_heads is not None or kv.v_heads is not None or kv.k_scale != 1.0 or kv.v_scale != 1.0
        return self.turn if kv.spec.num.bits <= 8 and not measured else None

    def _divide_heads(self, qkv: Tensor, kv: LayerKV) -> Tensor:
        """Normed heads with K and V divided by their own scales, for a cache that has one per head. Rotation is linear, so
        what is stored is the rotated K over its scale; Q and the output are multiplied instead of what is read back."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split((heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads), 1)
        q = q if self.q_norm is None else head_norm(q, self.q_norm, self.eps)
        k = k if self.k_norm is None else head_norm(k, self.k_norm, self.eps)
        k = k if kv.k_heads is None else k / kv.k_heads[:, None]
        v = v if kv.v_heads is None else v / kv.v_heads[:, None]
        return torch.cat((q, k.to(q.dtype), v.to(q.dtype)), 1).flatten(1)

    def _per_query(self, scale: Tensor, q: Tensor) -> Tensor:
        """float32 [kv_heads] -> [query heads, 1]."""
        return scale.repeat_interleave(q.shape[1] // self.kv_heads)[:, None]
