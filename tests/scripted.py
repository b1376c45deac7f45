"""A runner without weights: the next token is a function of every token of the context, read back through the block table.

What the scheduler or the allocator gets wrong, it gets wrong too: it remembers only what rows wrote to slots.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from nybble.engine.config import EngineConfig, ProcessConfig, Sampled
from nybble.engine.core import Engine
from nybble.engine.messages import TokenLogprob
from nybble.engine.scheduler import Plan

VOCAB = 97
EOS = 96
BROKEN = 95  # a context that ends with it has logits that are not numbers
CRASH = 94  # a step with it fails
LOSE = 93  # and so does every other one after it


class AcceleratorError(RuntimeError):
    """Named as torch's, which a test of this size does not import."""


def next_token(context: Sequence[int]) -> int:
    """Never one of the special ones."""
    return (sum(token * (position + 3) for position, token in enumerate(context)) * 31 + 7 * len(context)) % 90


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What a prompt generates, alone."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


def nothing(*_: object) -> None:
    """No step runs beside."""


class ScriptedRunner:
    vocab_size = VOCAB
    bytes_per_token = 10
    decode_steps, decode_wall_s, decode_busy_s = 0, 0.0, 0.0

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_context: int = 200,
        max_batched_tokens: int = 16,
        overlap: bool = False,
        pause_s: float = 0.0,
        beside_tokens: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.max_context = num_blocks, block_size, max_context
        self.max_batched_tokens, self.overlap, self.pause_s = max_batched_tokens, overlap, pause_s
        self.cells: list[int | None] = [None] * (num_blocks * block_size)
        self.last: dict[int, int] = {}  # slot -> token drawn last
        self.plans: list[tuple[list[int], int]] = []  # (counts, num_decode)
        self.beside_tokens, self.rng = beside_tokens, random.Random(beside_tokens)
        self.besides: list[list[int]] = []  # counts
        self.write_beside: Callable[..., None] = nothing
        self.end_beside: Callable[..., None] = nothing

    def launch(self, plan: Plan) -> Callable[[], Sampled]:
        time.sleep(self.pause_s)
        if plan.joins and plan.beside is None:
            self.end_beside()
        self.plans.append((plan.counts, plan.num_decode))
        burns = any(CRASH in request.tokens for request in plan.requests)
        for request, start, count in zip(plan.requests, plan.starts, plan.counts):
            for position in range(start, start + count):
                token = request.tokens[position] if position < len(request.tokens) else self.last[request.slot]
                if token == CRASH and not self.overlap:
                    raise RuntimeError("the device caught fire")
                if burns:
                    continue  # nothing is written, and whoever waits is told
                if token == LOSE:
                    raise AcceleratorError("an illegal memory access")
                self.cells[self.slot(request.blocks, position)] = token
        sampled = self.draw([self.sampled(plan, row) for row in plan.samples])
        return self.burn if burns else lambda: sampled

    def sampled(self, plan: Plan, row: int) -> tuple[list[int], int, bool]:
        """Of a row that draws: the slots it reads, its row of `last`, and whether it wants logprobs."""
        request, end = plan.requests[row], plan.starts[row] + plan.counts[row]
        slots = [self.slot(request.blocks, position) for position in range(end)]
        return slots, request.slot, request.params.logprobs is not None

    def draw(self, rows: list[tuple[list[int], int, bool]]) -> Sampled:
        tokens, logprobs = [], []
        for slots, slot, wanted in rows:
            context = [self.cells[at] or 0 for at in slots]
            token = next_token(context) if context[-1] != BROKEN else -1
            tokens.append(token)
            self.last[slot] = token
            logprobs.append(TokenLogprob(token, -0.5, [(token, -0.5)]) if wanted else None)
        return Sampled(tokens, logprobs)

    def launch_beside(self, plan: Plan) -> Callable[[], Sampled]:
        """Addresses are those of now; memory is written bit by bit at any later time, and read at the end."""
        self.end_beside()
        assert plan.num_decode == 0
        self.besides.append(plan.counts)
        burns = any(CRASH in request.tokens for request in plan.requests)
        writes = [
            (self.slot(request.blocks, position), request.tokens[position])
            for request, start, count in zip(plan.requests, plan.starts, plan.counts)
            for position in range(start, start + count)
        ]
        rows, drawn = [self.sampled(plan, row) for row in plan.samples], []

        def write(count: int) -> None:
            for at, token in writes[:count]:
                self.cells[at] = token
            del writes[:count]

        def end() -> None:
            write(0 if burns else len(writes))
            drawn.append(self.draw(rows))
            self.write_beside, self.end_beside = nothing, nothing

        def wait() -> Sampled:
            if not drawn:
                end()
            return self.burn() if burns else drawn[0]

        self.write_beside, self.end_beside = write, end
        return wait

    def beside_ends(self) -> bool:
        """Sometimes it has ended, sometimes that is only what one could think."""
        chance = self.rng.random()
        if chance < 0.1:
            self.end_beside()
        self.write_beside(self.rng.randint(0, 3))
        return self.end_beside is nothing or chance > 0.9

    def burn(self) -> Sampled:
        raise RuntimeError("the device caught fire")

    def slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size


def make(config: ProcessConfig) -> Engine:
    """The factory of the engine's process; `config.model` says what should happen."""
    if config.model == "unloadable":
        raise FileNotFoundError("unloadable: there is no such checkpoint")
    if config.model == "slow":
        time.sleep(60)
    runner = ScriptedRunner(block_size=config.engine.block_size, pause_s=0.002, overlap=config.model == "overlap")
    engine = Engine(runner, config.engine)
    if config.model == "fragile":
        step, count = engine.step, iter(range(20))

        def breaks() -> list:
            if next(count, None) is None:
                raise SystemError("a bug in the engine")
            return step()

        engine.step = breaks
    return engine


def small(**changes: object) -> EngineConfig:
    """An engine of four requests at once and blocks of four."""
    return EngineConfig(**{"block_size": 4, "max_batch": 4, "eos_ids": (EOS,), **changes})
