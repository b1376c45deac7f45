"""The two ends of the vocabulary: token ids to vectors, and vectors to logits. Both may share one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels.registry import Ops
from nybble.nn.linear import Projection
from nybble.nn.parallel import ALONE, Group


@dataclass(frozen=True)
class Embedding:
    """table: [V, H] in the dtype it is stored in; vectors come out in `dtype`."""

    table: Tensor
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""
        return F.embedding(token_ids, self.table).to(self.dtype)


@dataclass(frozen=True)
class Head:
    """weight: [V, H], as stored (reading 16 bits is half of what it costs), or a quantized projection. group: ranks that have
    rows of it each."""

    weight: Tensor | Projection
    ops: Ops
    group: Group = ALONE

    def whole(self) -> Head:
        """The same without other ranks. Raises ValueError for a quantized one that is cut."""
        if self.group.size == 1:
            return self
        if isinstance(self.weight, Projection):
            raise ValueError("the head is quantized and cut: compare models without tensor_parallel")
        return Head(self.group.gather(self.weight).flatten(0, 1), self.ops)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[S, H] -> float32 [S, V]."""
        if isinstance(self.weight, Projection):
            return self.group.columns(self.weight(hidden).float())
        return self.group.columns(self.ops.logits(hidden, self.weight))
