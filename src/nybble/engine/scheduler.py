"""Which tokens the next step computes. Pure Python over integers; it never sees a tensor and never learns what a token means.

Continuous batching in order of arrival. A step takes first one token of every request that generates, then pieces of prompts
up to a budget, then admits from the queue. When blocks run out the latest arrival gives all of its back and is computed again
later, so the oldest request always advances and every request ends. `plan` moves the lengths as if the step had run: the next
step can be planned while this one is on the device.

Generated tokens are always rows of one token, also when a preempted request computes them again: a token then meets the same
kernel both times (see `kernels.types.Step`). All keys and values of a step are written before its attention reads, which lets
one step hold several rows of one request, and lets a request share the prefix that another computes in the same step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from nybble.engine.blocks import BlockPool
from nybble.engine.request import NO_SLOT, Request

# A preempted request computes its generated tokens as rows of one token; this bounds how many join one step.
RECOMPUTE_ROWS = 256
WORTH_A_STEP = 600  # tokens of prompts: on an H200 more of them in one step make none of them cheaper


@dataclass(frozen=True)
class Limits:
    """num_blocks, block_size: the pool. max_batch: requests running at once. max_batched_tokens: tokens in a step.
    With `chunked_prefill` off a prompt goes in whole, and the step's first prompt may exceed the budget.
    prefill_interval: while half of max_batch generates, fewer than WORTH_A_STEP tokens of prompts start only every so many
    steps: one that mixes prompts in costs more than one that only generates (LMDeploy's prefill_interval)."""

    num_blocks: int
    block_size: int
    max_batch: int
    max_batched_tokens: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    prefill_interval: int = 1

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch = {self.max_batch}: wants 1 or more")
        if self.max_batched_tokens < self.max_batch:
            raise ValueError(
                f"max_batched_tokens = {self.max_batched_tokens} is below max_batch = {self.max_batch}: "
                "a step must have room for one token of every running request"
            )

    @property
    def max_rows(self) -> int:
        return self.max_batch + min(RECOMPUTE_ROWS, self.max_batched_tokens)


@dataclass(slots=True)
class Plan:
    """One step as plain lists. Row r holds tokens [starts[r], starts[r] + counts[r]) of requests[r]; the first `num_decode`
    rows hold one generated token each. `samples` are the rows whose last token draws a new one, in increasing order."""

    requests: list[Request]
    starts: list[int]
    counts: list[int]
    num_decode: int
    samples: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class Scheduler:
    """Owns the queue, the running requests and the blocks. Requests in `running` are all older than those in `waiting`."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size, limits.prefix_caching)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up and tokens found, over all admissions
        self.prefix_hits = 0
        self._slots = list(range(limits.max_batch - 1, -1, -1))
        self._admissions = 0
        self._blocked = False  # the head of the queue did not fit, and no block has been given back since
        self._steps_without_prompt = 0

    # ---- what the engine calls --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. The engine has checked that it fits the pool when alone, else it would wait for ever."""
        self.waiting.append(request)

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can be computed (nobody waits, or all that is left is in flight)."""
        decode: list[tuple[Request, int, bool]] = []  # request, position, draws
        prompt: list[tuple[Request, int, int, bool]] = []  # request, first position, count, draws
        behind: list[Request] = []
        running = self.running
        block_size = self.limits.block_size
        i = 0
        while i < len(running):  # `_grow` shortens the list from its end
            request = running[i]
            i += 1
            computed = request.num_computed
            pending = request.num_tokens - computed
            if pending == 1 and computed >= request.num_prompt:
                if request.num_tokens < request.max_tokens_total and (
                    computed < len(request.blocks) * block_size or self._grow(request)
                ):
                    request.num_computed = computed + 1
                    request.num_tokens += 1
                    decode.append((request, computed, True))
            elif pending > 0:
                behind.append(request)
        budget = self.limits.max_batched_tokens - len(decode)
        for request in behind:
            budget = self._fill(request, budget, decode, prompt)
        self._steps_without_prompt += 1
        admitting = (
            bool(behind)
            or 2 * len(decode) < self.limits.max_batch
            or self._steps_without_prompt >= self.limits.prefill_interval
            or sum(request.num_tokens for request in islice(self.waiting, len(self._slots))) >= WORTH_A_STEP
        )
        while admitting and budget > 0 and self.waiting and len(decode) + len(prompt) < self.limits.max_rows:
            if not self._fits_whole(self.waiting[0], budget, prompt) or not self._admit():
                break
            budget = self._fill(self.running[-1], budget, decode, prompt)
        if prompt:
            self._steps_without_prompt = 0
        if not decode and not prompt:
            return None
        # Attention works through rows in this order: who reads the most starts first, so that nobody is waited for at the end.
        decode.sort(key=itemgetter(1), reverse=True)
        num_decode = len(decode)
        return Plan(
            [row[0] for row in decode] + [row[0] for row in prompt],
            [row[1] for row in decode] + [row[1] for row in prompt],
            [1] * num_decode + [row[2] for row in prompt],
            num_decode,
            [r for r, row in enumerate(decode) if row[2]] + [num_decode + r for r, row in enumerate(prompt) if row[3]],
        )

    def accept(self, request: Request, token: int) -> None:
        """The token that a launched step drew for `request` is known."""
        request.tokens.append(token)
        if len(request.tokens) - request.num_registered * self.limits.block_size >= self.limits.block_size:
            self._register(request)

    def finish(self, request: Request, reason: str) -> None:
        """Take a request out, wherever it is. On "error" what it computed is not offered to others."""
        if request.slot != NO_SLOT:
            self.running.remove(request)
            self._release(request, forget=reason == "error")
        elif request in self.waiting:
            self.waiting.remove(request)
        self._blocked = False  # also when the head itself was taken out
        request.finish_reason = reason

    # ---- one request in one step --------------------------------------------------------------------------------------

    def _fill(
        self,
        request: Request,
        budget: int,
        decode: list[tuple[Request, int, bool]],
        prompt: list[tuple[Request, int, int, bool]],
    ) -> int:
        """Rows for as many of the request's pending tokens as fit: a piece of the prompt, then generated tokens. -> budget."""
        start = request.num_computed
        rows = self.limits.max_rows - len(decode) - len(prompt)
        if budget <= 0 or rows <= 0 or not self._fits_whole(request, budget, prompt):
            return budget
        chunk = 0
        if start < request.num_prompt:
            chunk = request.num_prompt - start
            if self.limits.chunked_prefill:
                chunk = min(chunk, budget)
            rows -= 1
        first = start + chunk
        generated = 0
        if first >= request.num_prompt:
            generated = max(0, min(request.num_tokens - first, budget - chunk, rows))
        request.num_computed = first + generated
        draws = request.num_computed == request.num_tokens
        request.num_tokens += draws
        if chunk:
            prompt.append((request, start, chunk, draws and not generated))
        for position in range(first, first + generated):
            decode.append((request, position, draws and position == first + generated - 1))
        self._register(request)
        return budget - chunk - generated

    def _fits_whole(self, request: Request, budget: int, prompt: list[tuple[Request, int, int, bool]]) -> bool:
        left = request.num_prompt - request.num_computed
        return self.limits.chunked_prefill or left <= budget or not prompt

    def _admit(self) -> bool:
        """Move the head of the queue to the running requests, with blocks for all its tokens. False when it has to wait."""
        request = self.waiting[0]
        if not self._slots or request.in_flight:
            return False
        if self._blocked:
            return False
        # The last token is always computed: its logits draw the next one. All are where their log-probabilities are wanted.
        most = request.num_tokens - 1 if request.prompt_logprobs is None else 0
        blocks, chain = self.pool.match(request.tokens, request.num_prompt, most)
        wanted = -(-request.num_tokens // self.limits.block_size) - len(blocks)
        # Room for every running request to grow by a block, else a newcomer is soon preempted and computed twice.
        if wanted + len(self.running) > self.pool.available:
            self.pool.release(blocks)
            self._blocked = True
            return False
        self.waiting.popleft()
        request.num_registered = len(blocks)
        request.chain = chain
        request.num_computed = len(blocks) * self.limits.block_size
        request.blocks = blocks + self.pool.take(wanted)
        request.slot = self._slots.pop()
        self._admissions += 1
        if request.admission == 0:
            request.cached_tokens = min(request.num_computed, request.num_prompt)
        request.admission = self._admissions
        self.prefix_queries += request.num_tokens
        self.prefix_hits += request.num_computed
        self.running.append(request)
        return True

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _grow(self, request: Request) -> bool:
        """One more block for a running request, taken from the latest arrivals if need be. False when it was itself the
        latest and went back to the queue."""
        while self.pool.available == 0:
            victim = self.running.pop()
            self._release(victim)
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is request:
                return False
        request.blocks.extend(self.pool.take(1))
        return True

    def _register(self, request: Request) -> None:
        size = self.limits.block_size
        known = min(request.num_computed, len(request.tokens))
        while (request.num_registered + 1) * size <= known:
            n = request.num_registered
            request.chain = self.pool.register(
                request.blocks[n], request.chain, request.tokens, request.num_prompt, n * size
            )
            request.num_registered = n + 1

    def _release(self, request: Request, forget: bool = False) -> None:
        self.pool.release(request.blocks, forget)
        self._blocked = False
        request.blocks = []
        request.num_computed = request.num_registered = 0
        self._slots.append(request.slot)
        request.slot = NO_SLOT
