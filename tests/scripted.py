"""A runner without weights: the next token is a function of every token of the context, read back through the block table.

What the scheduler or the allocator gets wrong, it gets wrong too: it remembers only what rows wrote to slots.
"""

from __future__ import annotations

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
    ) -> None:
        self.num_blocks, self.block_size, self.max_context = num_blocks, block_size, max_context
        self.max_batched_tokens, self.overlap, self.pause_s = max_batched_tokens, overlap, pause_s
        self.cells: list[int | None] = [None] * (num_blocks * block_size)
        self.last: dict[int, int] = {}  # slot -> token drawn last
        self.plans: list[tuple[list[int], int]] = []  # (counts, num_decode)

    def launch(self, plan: Plan) -> Callable[[], Sampled]:
        time.sleep(self.pause_s)
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
        tokens, logprobs = [], []
        for row in plan.samples:
            request, end = plan.requests[row], plan.starts[row] + plan.counts[row]
            context = [self.cells[self.slot(request.blocks, position)] or 0 for position in range(end)]
            token = next_token(context) if context[-1] != BROKEN else -1
            tokens.append(token)
            self.last[request.slot] = token
            logprobs.append(None if request.params.logprobs is None else TokenLogprob(token, -0.5, [(token, -0.5)]))
        return self.burn if burns else lambda: Sampled(tokens, logprobs)

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
