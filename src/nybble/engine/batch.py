"""From a plan (lists) to a forward step (tensors): numpy arrays side by side in one buffer, and one copy to the device.

The layout of the buffer follows from the step's shape alone, so steps of one shape lie at the same addresses and a CUDA graph
can be replayed on them. Nothing here looks at a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import add

import msgspec
import numpy as np
import torch
from torch import Tensor

from nybble.engine.request import Request
from nybble.engine.sampler import Draws, index, random_keys
from nybble.engine.scheduler import Plan
from nybble.kernels.types import Step

ALIGNMENT = 16  # bytes; what vectorized loads want
Fields = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
PARAMETERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LARGEST_TOP_K = 2**31 - 1  # no vocabulary is larger
# How a slot's request draws. logprobs: alternatives it wants, -1 when it wants no log-probabilities at all.
HOW = dict.fromkeys(PARAMETERS, np.float32) | {
    "top_k": np.int64, "seed": np.uint64, "num_prompt": np.int64, "min_tokens": np.int64, "logprobs": np.int64,
    "penalized": np.bool_, "plain": np.bool_, "biased": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """A step on the device and how its samples are drawn. A token id below 0 stands for pool[-1 - id], what that slot drew
    last."""

    step: Step
    slots: Tensor  # int64 [S]: token pool row of each sample, the last one for padding
    draws: Draws | None  # None: all greedy and plain
    logprob_rows: list[int]  # of the samples
    logprob_count: int  # most alternatives any of them wants
    scored: Callable[[], list] | None = None  # waits for the log-probabilities of prompt rows


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """A packed step for other ranks: sizes and `Step`'s numbers, the fields' bytes, which graph runs it, and whether its tokens
    are drawn in a way that only rank 0 knows."""

    sizes: tuple[int, int, int, int, int]  # of `_step_fields`
    numbers: tuple[int, int, int, int | None]
    data: bytes
    graph: str
    drawn: bool


NUMBERS = ("num_decode", "max_query", "max_context", "max_prompt_context")
TENSORS = ("token_ids", "positions", "slots", "query_start", "context_len", "block_table", "logit_rows")


class Stage:
    """The buffers between host and device, and the host's copy of every running request's block table and parameters."""

    def __init__(self, max_tokens: int, max_rows: int, max_batch: int, max_context: int, block_size: int,
                 device: torch.device) -> None:
        self.device, self.block_size = device, block_size
        self.width = -(-max_context // block_size)
        self._tables = np.zeros((max_batch, self.width), np.int32)
        self._how = {name: np.zeros(max_batch, dtype) for name, dtype in HOW.items()}
        self._filled = [0] * max_batch  # blocks in each table
        self._admission = np.zeros(max_batch, np.int64)  # whose table and parameters they are
        self._drawn = np.full(max_batch, -1)  # position of the token that a slot drew last
        self._numbers = np.arange(max(max_tokens, max_rows) + 1)
        fields = _step_fields(max_tokens, max_rows, max_rows, max_rows, self.width) + _draw_fields(max_batch, max_batch)
        _, size = _layout(fields)
        pinned = device.type == "cuda"
        # Two, so that the next step is written while the copy of this one is under way; on a CPU the host buffer is used.
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 if pinned else 1)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in self._hosts]
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device) if pinned else self._hosts[0]
        self._turn = 0
        self._views = lru_cache(maxsize=256)(self._views_of)  # most steps have the shape of one before

    def pack(self, plan: Plan, rows: int | None = None, width: int | None = None, tokens: int | None = None) -> Batch:
        """rows, width: pad a decode-only plan to this many rows and blocks per row (its samples are then all its rows).
        tokens: pad to this many tokens that belong to no row, and `logit_rows` to the most there can be.

        Padding writes nothing (slot -1), reads block 0 and is not sampled.
        """
        real, samples = len(plan.requests), len(plan.samples)
        total = rows or tokens or plan.num_tokens
        width = width if width is not None else self.width_for(plan)
        starts = np.array(plan.starts, np.int64)
        slots = np.array([request.slot for request in plan.requests], np.int64)
        admissions = np.array([request.admission for request in plan.requests], np.int64)
        follows = (self._drawn[slots] == starts) & (self._admission[slots] == admissions)
        for row in np.flatnonzero(~follows | (starts % self.block_size == 0)):
            self._update(plan.requests[row])
        sampled = np.array(plan.samples, np.int64) if samples < real else self._numbers[:real]
        drawing = slots[sampled]
        how = None if self._how["plain"][drawing].all() else {name: values[drawing] for name, values in self._how.items()}
        penalized = np.flatnonzero(how["penalized"]) if how else ()
        drawn = rows or samples
        fields = _step_fields(total, rows or real, min(tokens, len(self._tables)) if tokens else drawn, drawn, width)
        fields += _draw_fields(samples if how else 0, len(penalized))
        views, tensors, copied = self._views(fields, self._next_host())

        query_start, token_ids = views["query_start"], views["token_ids"]
        query_start[: real + 1] = self._numbers[: real + 1]
        positions, token_slots, used = starts, slots, real
        if plan.num_decode < real:
            np.cumsum(plan.counts, out=query_start[1 : real + 1])
            used = query_start[real]
            row = np.repeat(self._numbers[:real], plan.counts)
            positions, token_slots = self._numbers[:used] + (starts - query_start[:real])[row], slots[row]
        token_ids[:used] = -1 - token_slots
        for row in np.flatnonzero(~follows):
            start, first = plan.starts[row], query_start[row]
            known = plan.requests[row].tokens[start : start + plan.counts[row]]
            token_ids[first : first + len(known)] = known
        views["positions"][:used] = positions
        block, offset = np.divmod(positions, self.block_size)
        views["slots"][:used] = self._tables[token_slots, block] * np.int64(self.block_size) + offset
        ends = starts + (query_start[1 : real + 1] - query_start[:real])
        self._drawn[drawing] = ends[sampled]
        views["context_len"][:real] = ends
        views["block_table"][:real] = self._tables[slots, :width]
        views["logit_rows"][:samples] = query_start[sampled + 1] - 1
        views["draw_slots"][:samples] = drawing
        if tokens is not None:
            views["logit_rows"][samples:] = 0
        if used < total:
            token_ids[used:], views["positions"][used:], views["slots"][used:] = 0, 0, -1
        if rows is not None and real < rows:
            query_start[real + 1 :] = self._numbers[real + 1 : rows + 1]
            views["context_len"][real:], views["block_table"][real:] = 1, 0
            views["logit_rows"][real:] = self._numbers[real:rows]
            views["draw_slots"][real:] = len(self._tables)
        draws, logprob_rows, logprob_count = None, [], 0
        if how:
            views["penalized"][:] = penalized
            draws = self._draws(plan, how, ends[sampled], views, tensors)
            logprob_rows, logprob_count = np.flatnonzero(how["logprobs"] >= 0).tolist(), max(0, int(how["logprobs"].max()))
        self._copy(*copied)

        prompt_context = self._width(plan, plan.num_decode) * self.block_size if plan.num_decode < real else None
        numbers = (rows or plan.num_decode, max(plan.counts[plan.num_decode :], default=0), width * self.block_size,
                   prompt_context)
        return Batch(_step(tensors, numbers), tensors["draw_slots"], draws, logprob_rows, logprob_count)

    def staged(self, batch: Batch, graph: str) -> Staged:
        """Of the step that was packed last."""
        step = batch.step
        sizes = (len(step.token_ids), len(step.context_len), len(step.logit_rows), len(batch.slots), step.block_table.shape[1])
        _, used = _layout(_step_fields(*sizes))
        numbers = tuple(getattr(step, name) for name in NUMBERS)
        return Staged(sizes, numbers, self._hosts[self._turn][:used].numpy().tobytes(), graph, batch.draws is not None)

    def repeat(self, staged: Staged) -> Batch:
        """What another rank's stage packed; its draws stay there."""
        turn = self._next_host()
        _, tensors, copied = self._views(_step_fields(*staged.sizes), turn)
        self._hosts[turn][: len(staged.data)].numpy()[:] = np.frombuffer(staged.data, np.uint8)
        self._copy(*copied)
        return Batch(_step(tensors, staged.numbers), tensors["draw_slots"], None, [], 0)

    def width_for(self, plan: Plan) -> int:
        """Blocks per row of the block table: the longest context's, rounded up to a power of two (few shapes to compile)."""
        return self._width(plan, 0)

    def _width(self, plan: Plan, first: int) -> int:
        longest = max(map(add, plan.starts[first:], plan.counts[first:]))
        blocks = -(-longest // self.block_size)
        return min(1 << (blocks - 1).bit_length(), self.width)

    def _update(self, request: Request) -> None:
        """Its slot's table and parameters."""
        slot, blocks, params, how = request.slot, request.blocks, request.params, self._how
        if self._admission[slot] != request.admission:
            self._admission[slot], self._filled[slot], self._drawn[slot] = request.admission, 0, -1
            for name in (*PARAMETERS, "min_tokens"):
                how[name][slot] = getattr(params, name)
            for name in ("seed", "num_prompt", "penalized", "plain"):
                how[name][slot] = getattr(request, name)
            how["top_k"][slot] = min(params.top_k, LARGEST_TOP_K)
            how["biased"][slot] = bool(params.logit_bias)
            how["logprobs"][slot] = -1 if params.logprobs is None else params.logprobs
        filled = self._filled[slot]
        self._tables[slot, filled : len(blocks)] = blocks[filled:]
        self._filled[slot] = len(blocks)

    def _draws(self, plan: Plan, how: dict[str, np.ndarray], ends: np.ndarray, views: dict[str, np.ndarray],
               tensors: dict[str, Tensor]) -> Draws:
        """ends: positions of the tokens to be drawn."""
        for name in (*PARAMETERS, "top_k"):
            views[name][:] = how[name]
        generated = ends - how["num_prompt"]
        views["keys"][:] = random_keys(how["seed"], generated)
        forbidden = np.array([(i, token) for i in np.flatnonzero(generated < how["min_tokens"])
                              for token in plan.requests[plan.samples[i]].stop_ids], np.int64)  # fmt: skip
        biased = [(i, token, bias) for i in np.flatnonzero(how["biased"]).tolist()
                  for token, bias in plan.requests[plan.samples[i]].params.logit_bias.items()]
        dtypes = (torch.int64, torch.int64, torch.float32)
        return Draws(
            slots=tensors["draw_slots"][: len(ends)],
            temperature=tensors["temperature"],
            top_k=tensors["top_k"],
            top_p=tensors["top_p"],
            min_p=tensors["min_p"],
            repetition=tensors["repetition_penalty"],
            presence=tensors["presence_penalty"],
            frequency=tensors["frequency_penalty"],
            keys=tensors["keys"],
            any_random=bool((how["temperature"] > 0).any()),
            filtered=bool(((how["top_k"] > 0) | (how["top_p"] < 1)).any()),
            penalized=tensors["penalized"] if len(tensors["penalized"]) else None,
            forbidden=tuple(index(forbidden.T.copy(), self.device)) if len(forbidden) else None,
            biased=tuple(index(part, self.device, dtype) for part, dtype in zip(zip(*biased), dtypes)) if biased else None,
        )

    def _next_host(self) -> int:
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self._turn

    def _views_of(self, fields: Fields, turn: int) -> tuple[dict[str, np.ndarray], dict[str, Tensor], tuple[Tensor, Tensor]]:
        """Of the host's buffer and of the device's, and what is to be copied: to, from."""
        offsets, size = _layout(fields)
        host = self._hosts[turn].numpy()
        views, tensors = {}, {}
        for (name, dtype, shape), offset in zip(fields, offsets):
            end = offset + prod(shape) * dtype.itemsize
            views[name] = host[offset:end].view(NUMPY[dtype]).reshape(shape)
            tensors[name] = self._buffer[offset:end].view(dtype).view(shape)
        return views, tensors, (self._buffer[:size], self._hosts[turn][:size])

    def _copy(self, device: Tensor, host: Tensor) -> None:
        event = self._copied[self._turn]
        if event is not None:
            device.copy_(host, non_blocking=True)
            event.record()


def _step(tensors: dict[str, Tensor], numbers: Sequence[int | None]) -> Step:
    return Step(**{name: tensors[name] for name in TENSORS}, **dict(zip(NUMBERS, numbers)))


def _step_fields(tokens: int, rows: int, logits: int, samples: int, width: int) -> Fields:
    return (
        ("token_ids", torch.int64, (tokens,)),
        ("slots", torch.int64, (tokens,)),
        ("positions", torch.int32, (tokens,)),
        ("logit_rows", torch.int64, (logits,)),
        ("draw_slots", torch.int64, (samples,)),
        ("query_start", torch.int32, (rows + 1,)),
        ("context_len", torch.int32, (rows,)),
        ("block_table", torch.int32, (rows, width)),
    )


def _draw_fields(samples: int, penalized: int) -> Fields:
    """After the step's fields, whose addresses then do not depend on how many rows are sampled."""
    return (
        ("top_k", torch.int64, (samples,)),
        ("penalized", torch.int64, (penalized,)),
        ("keys", torch.int64, (samples, 2)),
        *((name, torch.float32, (samples,)) for name in PARAMETERS),
    )


def _layout(fields: Fields) -> tuple[list[int], int]:
    """Byte offset of each field, and the size of all."""
    offsets, at = [], 0
    for _, dtype, shape in fields:
        offsets.append(at)
        at += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, at
