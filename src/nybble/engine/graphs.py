"""Decode steps as CUDA graphs: one per (rows, blocks per row) bucket, recorded at start and replayed from then on.

A graph reads its step from the stage's buffer, where steps of one shape always lie at the same addresses. A bucket that was
not recorded yet runs as usual first, which compiles what is not compiled yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nybble.kernels.types import Step


def row_buckets(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 32, of 16 to 128 and of 32 above: a decode step hardly costs more for the padding."""
    buckets = [b for b in (1, 2, 4, 8, 16, 24, *range(32, 129, 16), *range(160, max_batch + 32, 32)) if b < max_batch]
    return [*buckets, max_batch]


def width_buckets(max_blocks: int) -> list[int]:
    """Blocks per row: powers of two from 8 up, and the most there can be."""
    buckets = [8 << i for i in range(max_blocks.bit_length()) if 8 << i < max_blocks]
    return [*buckets, max_blocks]


class DecodeGraphs:
    """`forward(step) -> logits` must launch the same kernels for every step of one shape."""

    def __init__(self, forward: Callable[[Step], Tensor], max_batch: int, max_blocks: int) -> None:
        self._forward = forward
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.rows, self.widths = row_buckets(max_batch), width_buckets(max_blocks)

    def shape_for(self, rows: int, blocks: int) -> tuple[int, int]:
        """What a step of so many rows with at most so many blocks is padded to."""
        return next(r for r in self.rows if r >= rows), next(w for w in self.widths if w >= blocks)

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
