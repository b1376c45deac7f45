"""One completion as the engine sees it: a list of tokens and three lengths. No device, no text, no status flags.

`num_computed <= num_tokens <= max_tokens_total`: the tokens whose keys and values are in the cache (or in a step that was
launched), the tokens that exist (or that a launched step will draw), and the most there may ever be. Everything else follows
from them. `tokens` holds the known ones: it is shorter than `num_tokens` only while a step is in flight.
"""

from __future__ import annotations

from typing import Any

from nybble.engine.messages import SamplingParams, TokenLogprob

NO_SLOT = -1
_WORD = 2**64 - 1


class Request:
    """Mutable state of completion `index` of request `request_id`. Only the scheduler writes the lengths and the blocks."""

    __slots__ = (
        "admission", "blocks", "cached_tokens", "chain", "finish_reason", "grammar", "index", "max_tokens_total",
        "num_computed", "num_prompt", "num_registered", "num_tokens", "params", "penalized", "plain", "prompt_logprobs",
        "request_id", "seed", "slot", "stop_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        max_tokens_total: int,
        stop_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.params = params
        self.tokens = list(prompt)
        self.num_prompt = self.num_tokens = len(prompt)
        self.max_tokens_total = max_tokens_total
        self.stop_ids = stop_ids
        self.seed = seed  # of this completion's own random stream
        self.num_computed = 0
        self.blocks: list[int] = []
        self.chain = 0  # identity of the cached prefix that ends at block `num_registered`
        self.num_registered = 0
        self.slot = NO_SLOT  # row of the device's token pool and block tables while running
        self.admission = 0  # serial number of the last time it was given blocks and a slot
        self.cached_tokens = 0  # prompt tokens found in the prefix cache when first admitted
        self.prompt_logprobs: list[TokenLogprob | None] | None = None  # if wanted, until they are said
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [TokenLogprob(prompt[0], None, []), *[None] * (len(prompt) - 1)]
        self.finish_reason: str | None = None
        self.grammar: Any = None  # `grammar.Matcher` of its own: what `tokens` has generated is behind it
        self.penalized = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        # Nothing but the largest logit matters: the sampler's fast path.
        self.plain = (
            params.temperature == 0
            and params.logprobs is None
            and params.min_tokens == 0
            and not self.penalized
            and params.grammar is None
            and not params.logit_bias
        )

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def in_flight(self) -> bool:
        return self.num_tokens > len(self.tokens)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}/{self.index}: {self.num_computed} computed <= {self.num_tokens} tokens "
            f"<= {self.max_tokens_total}, prompt {self.num_prompt}, {len(self.blocks)} blocks, {self.finish_reason})"
        )


def completion_seed(seed: int, index: int) -> int:
    """The random stream of completion `index` of a seeded request, 64 bits; completion 0 has the seed itself."""
    return seed if index == 0 else _splitmix(seed ^ _splitmix(index))


def _splitmix(z: int) -> int:
    """One SplitMix64 output (Steele, Lea, Flood, OOPSLA 2014)."""
    z = (z + 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    return z ^ (z >> 31)
