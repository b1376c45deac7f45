"""From a plan (lists) to a forward step (tensors): numpy arrays side by side in one buffer, and one copy to the device.

The layout of the buffer follows from the step's shape alone, so steps of one shape lie at the same addresses and a CUDA graph
can be replayed on them. Nothing here looks at a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import msgspec
import numpy as np
import torch
from torch import Tensor

from nybble.engine.sampler import Draws, random_keys
from nybble.engine.scheduler import Plan
from nybble.kernels.types import Step

ALIGNMENT = 16  # bytes; what vectorized loads want
Fields = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
PARAMETERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Batch:
    """A step on the device and how its samples are drawn. Token ids below 0 stand for pool[-1 - id]: not yet known here."""

    step: Step
    slots: Tensor  # int64 [S]: token pool row of each sample, the last one for padding
    draws: Draws | None  # None: all greedy and plain
    logprob_rows: list[int]  # of the samples
    logprob_count: int  # most alternatives any of them wants


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """A packed step for other ranks: sizes and `Step`'s numbers, the fields' bytes, which graph runs it, and whether its tokens
    are drawn in a way that only rank 0 knows."""

    sizes: tuple[int, int, int, int]  # of `_step_fields`
    numbers: tuple[int, int, int, int | None]
    data: bytes
    graph: str
    drawn: bool


NUMBERS = ("num_decode", "max_query", "max_context", "max_prompt_context")
TENSORS = ("token_ids", "positions", "slots", "query_start", "context_len", "block_table", "logit_rows")


class Stage:
    """The buffers between host and device, and the host's copy of every running request's block table."""

    def __init__(self, max_tokens: int, max_rows: int, max_batch: int, max_context: int, block_size: int,
                 device: torch.device) -> None:
        self.device, self.block_size = device, block_size
        self.width = -(-max_context // block_size)
        self._tables = np.zeros((max_batch, self.width), np.int32)
        self._admission = [0] * max_batch  # whose blocks a table holds, and how many
        self._filled = [0] * max_batch
        _, size = _layout(_step_fields(max_tokens, max_rows, max_rows, self.width) + _draw_fields(max_batch))
        pinned = device.type == "cuda"
        # Two, so that the next step is written while the copy of this one is under way; on a CPU the host buffer is used.
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 if pinned else 1)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in self._hosts]
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device) if pinned else self._hosts[0]
        self._turn = self._used = 0
        self._views = lru_cache(maxsize=256)(self._views_of)  # most steps have the shape of one before

    def pack(self, plan: Plan, rows: int | None = None, width: int | None = None, tokens: int | None = None) -> Batch:
        """rows, width: pad a decode-only plan to this many rows and blocks per row (its samples are then all its rows).
        tokens: pad to this many tokens that belong to no row.

        Padding writes nothing (slot -1), reads block 0 and is not sampled.
        """
        real = len(plan.requests)
        total = rows or tokens or plan.num_tokens
        padded = real if rows is None else rows
        samples = len(plan.samples) if rows is None else rows
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.counts, np.int64)
        width = width if width is not None else self.width_for(plan)
        drawing = [plan.requests[row] for row in plan.samples]
        plain = all(request.plain for request in drawing)
        fields = _step_fields(total, padded, samples, width) + _draw_fields(0 if plain else len(drawing))
        views, tensors, self._used = self._views(fields, self._next_host())
        row_slots = self._update_tables(plan)

        token_ids = [
            request.tokens[start] if start < len(request.tokens) else -1 - request.slot
            for request, start in zip(plan.requests[: plan.num_decode], plan.starts)
        ]
        for row in range(plan.num_decode, real):
            start = plan.starts[row]
            token_ids += plan.requests[row].tokens[start : start + plan.counts[row]]
        used = len(token_ids)
        views["token_ids"][:used] = token_ids
        query_start = views["query_start"]
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1 : real + 1])
        positions = np.arange(used) + np.repeat(starts - query_start[:real], counts)
        views["positions"][:used] = positions
        block = self._tables[np.repeat(row_slots, counts), positions // self.block_size].astype(np.int64)
        views["slots"][:used] = block * self.block_size + positions % self.block_size
        views["context_len"][:real] = starts + counts
        views["block_table"][:real] = self._tables[row_slots, :width]
        views["logit_rows"][: len(plan.samples)] = query_start[1:][plan.samples] - 1
        views["draw_slots"][: len(drawing)] = row_slots[plan.samples]
        views["token_ids"][used:], views["positions"][used:], views["slots"][used:] = 0, 0, -1
        if rows is not None:
            query_start[real + 1 :] = np.arange(real + 1, rows + 1)
            views["context_len"][real:], views["block_table"][real:] = 1, 0
            views["logit_rows"][real:] = np.arange(real, rows)
            views["draw_slots"][real:] = len(self._tables)
        if not plain:
            self._write_draws(views, drawing)
        self._copy()

        prompt_context = self._width(plan, plan.num_decode) * self.block_size if plan.num_decode < real else None
        numbers = (rows or plan.num_decode, max(plan.counts[plan.num_decode :], default=0), width * self.block_size,
                   prompt_context)
        draws = None if plain else self._draws(tensors, drawing)
        wanting = [] if plain else [i for i, request in enumerate(drawing) if request.params.logprobs is not None]
        most = max((drawing[i].params.logprobs for i in wanting), default=0)
        return Batch(_step(tensors, numbers), tensors["draw_slots"], draws, wanting, most)

    def staged(self, batch: Batch, graph: str) -> Staged:
        """Of the step that was packed last."""
        step = batch.step
        sizes = (len(step.token_ids), len(step.context_len), len(batch.slots), step.block_table.shape[1])
        _, used = _layout(_step_fields(*sizes))
        numbers = tuple(getattr(step, name) for name in NUMBERS)
        return Staged(sizes, numbers, self._hosts[self._turn][:used].numpy().tobytes(), graph, batch.draws is not None)

    def repeat(self, staged: Staged) -> Batch:
        """What another rank's stage packed; its draws stay there."""
        turn = self._next_host()
        views, tensors, self._used = self._views(_step_fields(*staged.sizes), turn)
        self._hosts[turn][: len(staged.data)].numpy()[:] = np.frombuffer(staged.data, np.uint8)
        self._copy()
        return Batch(_step(tensors, staged.numbers), tensors["draw_slots"], None, [], 0)

    def width_for(self, plan: Plan) -> int:
        """Blocks per row of the block table: the longest context's, rounded up to a power of two (few shapes to compile)."""
        return self._width(plan, 0)

    def _width(self, plan: Plan, first: int) -> int:
        longest = max(start + count for start, count in zip(plan.starts[first:], plan.counts[first:]))
        blocks = -(-longest // self.block_size)
        return min(1 << (blocks - 1).bit_length(), self.width)

    def index(self, values: Sequence[int]) -> Tensor:
        """int64 on the device, without waiting for it."""
        host = torch.tensor(values, dtype=torch.int64)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host

    def _update_tables(self, plan: Plan) -> np.ndarray:
        slots = []
        for request in plan.requests:
            slot, blocks = request.slot, request.blocks
            slots.append(slot)
            if self._admission[slot] != request.admission:
                self._admission[slot], self._filled[slot] = request.admission, 0
            filled = self._filled[slot]
            if filled != len(blocks):
                self._tables[slot, filled : len(blocks)] = blocks[filled:]
                self._filled[slot] = len(blocks)
        return np.array(slots, np.int64)

    def _write_draws(self, views: dict[str, np.ndarray], drawing: list) -> None:
        for row, name in enumerate(PARAMETERS):
            views["parameters"][row] = [getattr(request.params, name) for request in drawing]
        views["top_k"][:] = [request.params.top_k for request in drawing]
        seeds = np.array([request.seed for request in drawing], np.uint64)
        positions = np.array([request.num_tokens - 1 - request.num_prompt for request in drawing], np.int64)
        views["keys"][:] = random_keys(seeds, positions)

    def _draws(self, tensors: dict[str, Tensor], drawing: list) -> Draws:
        penalized = [i for i, request in enumerate(drawing) if request.penalized]
        forbidden = [
            (i, token)
            for i, request in enumerate(drawing)
            # num_tokens already counts the token to be drawn
            if request.num_tokens - request.num_prompt <= request.params.min_tokens
            for token in request.stop_ids
        ]
        parameters = dict(zip(PARAMETERS, tensors["parameters"]))
        return Draws(
            slots=tensors["draw_slots"][: len(drawing)],
            temperature=parameters["temperature"],
            top_k=tensors["top_k"],
            top_p=parameters["top_p"],
            min_p=parameters["min_p"],
            repetition=parameters["repetition_penalty"],
            presence=parameters["presence_penalty"],
            frequency=parameters["frequency_penalty"],
            keys=tensors["keys"],
            any_random=any(request.params.temperature > 0 for request in drawing),
            filtered=any(request.params.top_k > 0 or request.params.top_p < 1 for request in drawing),
            penalized=self.index(penalized) if penalized else None,
            forbidden=(self.index([i for i, _ in forbidden]), self.index([t for _, t in forbidden])) if forbidden else None,
        )

    def _next_host(self) -> int:
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self._turn

    def _views_of(self, fields: Fields, turn: int) -> tuple[dict[str, np.ndarray], dict[str, Tensor], int]:
        """Of the host's buffer and of the device's, and the bytes they take."""
        offsets, size = _layout(fields)
        host = self._hosts[turn].numpy()
        views, tensors = {}, {}
        for (name, dtype, shape), offset in zip(fields, offsets):
            end = offset + prod(shape) * dtype.itemsize
            views[name] = host[offset:end].view(NUMPY[dtype]).reshape(shape)
            tensors[name] = self._buffer[offset:end].view(dtype).view(shape)
        return views, tensors, size

    def _copy(self) -> None:
        event = self._copied[self._turn]
        if event is not None:
            self._buffer[: self._used].copy_(self._hosts[self._turn][: self._used], non_blocking=True)
            event.record()


def _step(tensors: dict[str, Tensor], numbers: Sequence[int | None]) -> Step:
    return Step(**{name: tensors[name] for name in TENSORS}, **dict(zip(NUMBERS, numbers)))


def _step_fields(tokens: int, rows: int, samples: int, width: int) -> Fields:
    return (
        ("token_ids", torch.int64, (tokens,)),
        ("slots", torch.int64, (tokens,)),
        ("positions", torch.int32, (tokens,)),
        ("logit_rows", torch.int64, (samples,)),
        ("draw_slots", torch.int64, (samples,)),
        ("query_start", torch.int32, (rows + 1,)),
        ("context_len", torch.int32, (rows,)),
        ("block_table", torch.int32, (rows, width)),
    )


def _draw_fields(samples: int) -> Fields:
    """After the step's fields, whose addresses then do not depend on how many rows are sampled."""
    return (
        ("top_k", torch.int64, (samples,)),
        ("keys", torch.int64, (samples, 2)),
        ("parameters", torch.float32, (len(PARAMETERS), samples)),
    )


def _layout(fields: Fields) -> tuple[list[int], int]:
    """Byte offset of each field, and the size of all."""
    offsets, at = [], 0
    for _, dtype, shape in fields:
        offsets.append(at)
        at += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, at
