"""One completion as the engine sees it: a list of tokens and three lengths. No device, no text, no status flags.

`num_computed <= num_tokens <= max_tokens_total`: the tokens whose keys and values are in the cache (or in a step that was
launched), the tokens that exist (or that a launched step will draw), and the most there may ever be. Everything else follows
from them. `tokens` holds the known ones: it is shorter than `num_tokens` only while a step is in flight.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

from nybble.engine.messages import SamplingParams, TokenLogprob

NO_SLOT = -1
_WORD = 2**64 - 1
Words = TypeVar("Words")  # an int below 2^64, or a NumPy array of uint64


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of completion `index` of request `request_id`. Only the scheduler writes the lengths and the blocks."""

    request_id: str
    index: int
    prompt: InitVar[list[int]]
    params: SamplingParams
    max_tokens_total: int
    stop_ids: frozenset[int]
    seed: int  # of this completion's own random stream
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: int = 0  # identity of the cached prefix that ends at block `num_registered`
    num_registered: int = 0
    slot: int = NO_SLOT  # row of the device's token pool and block tables while running
    admission: int = 0  # serial number of the last time it was given blocks and a slot
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when first admitted
    prompt_logprobs: list[TokenLogprob | None] | None = None  # if wanted, until they are said
    finish_reason: str | None = None
    grammar: Any = None  # `grammar.Matcher` of its own: what `tokens` has generated is behind it
    penalized: bool = field(init=False)
    plain: bool = field(init=False)  # nothing but the largest logit matters: the sampler's fast path

    def __post_init__(self, prompt: list[int]) -> None:
        params = self.params
        self.tokens = list(prompt)
        self.num_prompt = self.num_tokens = len(prompt)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [TokenLogprob(prompt[0], None, []), *[None] * (len(prompt) - 1)]
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.penalized = penalties != (1.0, 0.0, 0.0)
        self.plain = (
            params.temperature == 0
            and params.logprobs is None
            and params.min_tokens == 0
            and not self.penalized
            and params.grammar is None
            and not params.logit_bias
        )

    @property
    def in_flight(self) -> bool:
        return self.num_tokens > len(self.tokens)


def completion_seed(seed: int, index: int) -> int:
    """The random stream of completion `index` of a seeded request, 64 bits; completion 0 has the seed itself."""
    seed &= _WORD
    return seed if index == 0 else splitmix(seed ^ splitmix(index))


def splitmix(z: Words) -> Words:
    """One SplitMix64 output of each (Steele, Lea, Flood, OOPSLA 2014)."""
    z = z + 0x9E3779B97F4A7C15 & _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
    return z ^ (z >> 31)
