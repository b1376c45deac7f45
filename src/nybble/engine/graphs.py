"""Decode steps as CUDA graphs: one per (rows, blocks per row) bucket, recorded after its first step and replayed from then on.

A graph reads its step from the stage's buffer, where steps of one shape always lie at the same addresses. The first time a
bucket is met its step runs as usual, which compiles what is not compiled yet, and is recorded for the next time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nybble.kernels.types import Step


def row_buckets(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 128 and of 32 above: padding stays below a tile of the linear kernels."""
    buckets = [b for b in (1, 2, 4, *range(8, 129, 8), *range(160, max_batch + 32, 32)) if b < max_batch]
    return [*buckets, max_batch]


class DecodeGraphs:
    """`forward(step) -> logits` must launch the same kernels for every step of one shape."""

    def __init__(self, forward: Callable[[Step], Tensor], max_batch: int) -> None:
        self._forward = forward
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.buckets = row_buckets(max_batch)

    def rows_for(self, rows: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= rows)

    def run(self, step: Step) -> Tensor:
        """Logits of a step that the stage padded to a bucket: valid until the next call."""
        key = (step.num_decode, step.block_table.shape[1])
        if key in self._graphs:
            graph, logits = self._graphs[key]
            graph.replay()
            return logits
        result = self._forward(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(step)
        self._graphs[key] = (graph, logits)
        return result
