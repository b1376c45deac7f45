"""Steps as CUDA graphs, recorded at start and replayed from then on: the host launches a step in less time than it takes.

A step in which every row generates one token is one graph, by (rows, blocks per row). A step that mixes prompts in is cut at
its attentions: all between two of them is a graph, by the number of tokens, and attention runs as usual on this step's rows.
Graphs read the step from the stage's buffer, where steps of one shape always lie at the same addresses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.kernels.types import LayerKV, Step
from nybble.models.decoder import Pieces, attend
from nybble.nn.attention import Attention


def row_buckets(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 32, of 16 to 128 and of 32 above: a decode step hardly costs more for the padding."""
    buckets = [b for b in (1, 2, 4, 8, 16, 24, *range(32, 129, 16), *range(160, max_batch + 32, 32)) if b < max_batch]
    return [*buckets, max_batch]


def width_buckets(max_blocks: int) -> list[int]:
    """Blocks per row: powers of two from 8 up, and the most there can be."""
    buckets = [8 << i for i in range(max_blocks.bit_length()) if 8 << i < max_blocks]
    return [*buckets, max_blocks]


def token_buckets(max_tokens: int) -> list[int]:
    """Tokens of a mixed step: 32, 64, then steps of 64 to 512, of 128 to 2048, of 256 above. Linears work in tiles of 64 and
    128 tokens, so that padding costs little."""
    buckets = (32, 64, *range(128, 513, 64), *range(640, 2049, 128), *range(2304, max_tokens, 256))
    return [*(b for b in buckets if b < max_tokens), max_tokens]


@dataclass(frozen=True)
class _Bytes:
    __cuda_array_interface__: dict


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, without keeping it: the graphs' pool may use it again in graphs that are replayed later."""
    size = tensor.numel() * tensor.element_size()
    view = _Bytes({"data": (tensor.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3})
    return torch.as_tensor(view, device=tensor.device).view(tensor.dtype).view(tensor.shape)


class Recorder:
    """Records on a stream of its own; all graphs share one pool of memory, so only the last replayed one's results live."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), stream

    def rehearse(self, work: Callable[[], object]) -> None:
        """Run what will be recorded: it compiles, and libraries take the memory they keep for this stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def graph(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """What `work` launches, once it has been rehearsed. Raises what it raises."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        self._stream.wait_stream(torch.cuda.current_stream())
        gc.disable()  # a collection could free a tensor of another stream in between
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph


class DecodeGraphs:
    """`forward(step, slots)` launches the same kernels for every step of one shape, and returns tensors."""

    def __init__(self, forward: Callable[[Step, Tensor], tuple[Tensor, ...]], recorder: Recorder, max_batch: int,
                 max_blocks: int) -> None:
        self._forward, self._recorder = forward, recorder
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.rows, self.widths = row_buckets(max_batch), width_buckets(max_blocks)

    def shape_for(self, rows: int, blocks: int) -> tuple[int, int]:
        """What a step of so many rows with at most so many blocks is padded to."""
        return next(r for r in self.rows if r >= rows), next(w for w in self.widths if w >= blocks)

    def run(self, step: Step, slots: Tensor) -> tuple[Tensor, ...]:
        """What `forward` gives for a step that the stage padded to a bucket: valid until the next replay."""
        graph, results = self._graphs[step.num_decode, step.block_table.shape[1]]
        graph.replay()
        return results

    def record(self, step: Step, slots: Tensor) -> None:
        key = (step.num_decode, step.block_table.shape[1])
        if key not in self._graphs:
            self._recorder.rehearse(lambda: self._forward(step, slots))
            results: list[Tensor] = []
            graph = self._recorder.graph(lambda: results.extend(self._forward(step, slots)))
            self._graphs[key] = graph, tuple(borrowed(result) for result in results)


@dataclass(frozen=True)
class Cut:
    """Graphs with the attention that follows each, and the last one with what it computes."""

    parts: list[tuple[torch.cuda.CUDAGraph, Attention, Tensor, LayerKV]]
    last: torch.cuda.CUDAGraph
    x: Tensor
    residual: Tensor | None


class MixedGraphs:
    """`pieces(step)` is a forward pass that stops at every attention (see `models.decoder.Pieces`)."""

    def __init__(self, pieces: Callable[[Step], Pieces], recorder: Recorder, max_tokens: int) -> None:
        self._pieces, self._recorder = pieces, recorder
        self._cuts: dict[int, Cut] = {}
        self._attended: Tensor | None = None  # what attention leaves for the graph after it
        self.tokens = token_buckets(max_tokens)

    def tokens_for(self, tokens: int) -> int | None:
        """What a step of so many tokens is padded to; None when no graph is that large."""
        return next((t for t in self.tokens if t >= tokens), None)

    def run(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """(x, residual) of a step that the stage padded to a bucket: valid until the next replay."""
        cut = self._cuts[len(step.token_ids)]
        assert self._attended is not None
        attended, launches = self._attended[: len(step.token_ids)], {}
        for graph, attention, q, kv in cut.parts:
            graph.replay()
            attention.attend(q, kv, step, attended, launches)
        cut.last.replay()
        return cut.x, cut.residual

    def record(self, step: Step) -> None:
        """The largest step first: it takes the buffers that the others use parts of."""
        self._recorder.rehearse(lambda: attend(self._pieces(step), step))
        pieces, stops, ends = self._pieces(step), [], []
        parts: list[tuple[torch.cuda.CUDAGraph, Attention, Tensor, LayerKV]] = []
        attended = None if self._attended is None else self._attended[: len(step.token_ids)]

        def advance() -> None:
            try:
                stops.append(pieces.send(attended if parts else None))
            except StopIteration as end:
                ends.append(end.value)

        while True:
            graph = self._recorder.graph(advance)
            if ends:
                x, residual = ends[0]
                last = None if residual is None else borrowed(residual)
                self._cuts[len(step.token_ids)] = Cut(parts, graph, borrowed(x), last)
                return
            attention, q, kv = stops.pop()
            if attended is None:
                attended = self._attended = torch.zeros_like(q)
            parts.append((graph, attention, borrowed(q), kv))
            del q
