"""From logits to tokens, on the device: every operation works on each row alone, so a row's token does not depend on the rest.

Randomness has no state. Gumbel-max (Gumbel 1954; argmax of log-probability plus Gumbel noise is a draw from the
distribution) with noise that is a hash of (the request's seed, position, token id): the same request draws the same tokens
in any batch, after a preemption, and on any device whose logits agree.

Order: logit_bias, penalties, forbidden ids (min_tokens, grammar), temperature, top-k, top-p over what is left, min-p.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nybble.engine.request import splitmix
from nybble.kernels import sample_hopper

FAILED = -1  # token of a row whose logits are not numbers
ROWS_AT_ONCE = 64  # of random draws: sorting and noise take some 60 bytes per logit
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Draws:
    """How S rows draw, one entry each on the logits' device. Flags are known on the host: a step pays for what it uses."""

    slots: Tensor  # int64 [S]: row of the token pool and of the penalty counts
    temperature: Tensor  # float32 [S], 0 is greedy
    top_k: Tensor  # int64 [S], 0 is off
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    repetition: Tensor  # float32 [S]
    presence: Tensor  # float32 [S]
    frequency: Tensor  # float32 [S]
    keys: Tensor  # int64 [S, 2]: two 32-bit words per row, see `random_keys`
    any_random: bool
    filtered: bool  # some row has top-k or top-p
    penalized: Tensor | None  # int64: rows with a penalty
    forbidden: tuple[Tensor, Tensor] | None  # int64 pairs (row, token id) that may not be drawn
    biased: tuple[Tensor, Tensor, Tensor] | None = None  # int64 (row, token id), all different, and the float32 to add
    allowed: tuple[Tensor, Tensor] | None = None  # rows with a grammar, int64 [G], and a bit per id, int32 [G, V/32 or more]


class Counts:
    """What penalties look at, kept on the device: how often each slot's request generated each token, and its prompt."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.generated = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)

    def reset(self, slot: int, prompt: list[int], generated: list[int]) -> None:
        """A request moved into `slot`."""
        device = self.generated.device
        self.generated[slot].zero_()
        self.in_prompt[slot].zero_()
        self.in_prompt[slot].index_fill_(0, index(prompt, device), True)
        drawn = index(generated, device)
        self.generated[slot].index_add_(0, drawn, torch.ones_like(drawn, dtype=torch.int32))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """One more token for each of these slots (all different)."""
        places = slots * self.generated.shape[1] + tokens.clamp_min(0)
        self.generated.view(-1).index_add_(0, places, torch.ones_like(slots, dtype=torch.int32))


def index(values: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """On the device, without waiting for it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def greedy(logits: Tensor) -> Tensor:
    """float32 [S, V] -> int64 [S]: the first of the largest (equal logits are common in 16 bits, and `argmax` promises the
    first on every device), FAILED where a row has no finite largest."""
    tokens = logits.argmax(-1)  # a NaN counts as the largest
    return torch.where(logits.gather(-1, tokens[:, None])[:, 0].isfinite(), tokens, FAILED)


def sample(logits: Tensor, draws: Draws, counts: Counts | None) -> Tensor:
    """float32 [S, V] -> int64 [S] tokens, FAILED where no finite logit is left. `logits` is left as it was."""
    if draws.biased is not None:
        *places, bias = draws.biased
        logits = logits.index_put(tuple(places), bias, accumulate=True)
    if draws.penalized is not None:
        assert counts is not None
        logits = logits.index_copy(0, draws.penalized, penalize(logits, draws, counts))
    if draws.forbidden is not None:
        logits = logits.index_put(draws.forbidden, logits.new_tensor(float("-inf")))
    if draws.allowed is not None:
        rows, words = draws.allowed
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1).flatten(1)
        masked = logits[rows].masked_fill(bits[:, : logits.shape[1]] == 0, float("-inf"))
        logits = logits.index_copy(0, rows, masked)
    if draws.any_random and _kernel_failure(logits.device, logits.shape[1]) is None:
        return _in_one_kernel(logits, draws)
    tokens = greedy(logits)
    if not draws.any_random:
        return tokens
    return _drawn(logits, tokens, draws)


def _in_one_kernel(logits: Tensor, draws: Draws) -> Tensor:
    return sample_hopper.draw(logits, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.keys)


@cache
def _kernel_failure(device: torch.device, vocab_size: int) -> str | None:
    """Why the kernel is not used for random draws, None when it is: it draws a few rows as what it stands for does. After this
    none is compiled any more. The engine's largest step at start asks first."""
    if (reason := sample_hopper.refusal(torch.empty(0, vocab_size, device=device))) is not None:
        return reason
    rows = torch.arange(8, device=device)
    logits = torch.randn(8, 500, device=device, generator=torch.Generator(device).manual_seed(0))
    part, keys = rows / 8, torch.stack((rows * 77, rows * 1234567), 1)
    draws = Draws(rows, 0.5 + part, rows * 9, 1 - part / 2, part / 9, part, part, part, keys, True, True, None, None)
    try:
        sample_hopper.prepare(vocab_size, device)
        differ = int((_in_one_kernel(logits, draws) != _drawn(logits, greedy(logits), draws)).sum())
        reason = f"{differ} of 8 tokens differ from those of the torch operations" if differ else None
    except Exception as error:
        reason = f"its start-up test failed: {type(error).__name__}: {str(error).strip()[:200]}"
    if reason is not None:
        logging.getLogger(__name__).warning("the kernel that draws tokens is not used on %s: %s", device, reason)
    return reason


def _drawn(logits: Tensor, tokens: Tensor, draws: Draws) -> Tensor:
    """tokens: the greedy ones."""
    drawn = torch.cat([_draw(logits, tokens, draws, first) for first in range(0, len(tokens), ROWS_AT_ONCE)])
    return torch.where((draws.temperature > 0) & (tokens != FAILED), drawn, tokens)


def _draw(logits: Tensor, tokens: Tensor, draws: Draws, first: int) -> Tensor:
    """Random tokens of rows [first, first + ROWS_AT_ONCE): noise takes memory, and rows do not care who is beside them."""
    part = slice(first, first + ROWS_AT_ONCE)
    temperature, largest = draws.temperature[part, None], logits[part].gather(-1, tokens[part, None].clamp_min(0))
    # The largest is 0 now: no temperature can make it overflow, and the other end only underflows to -inf.
    scaled = (logits[part] - largest) / torch.where(temperature > 0, temperature, 1.0)
    floor = draws.min_p[part, None].log()  # below min_p times the largest probability
    if draws.filtered:
        scaled = keep_top(scaled, draws.top_k[part], draws.top_p[part])
    noise = gumbel(draws.keys[part], logits.shape[1])
    return torch.where(scaled < floor, float("-inf"), scaled + noise).argmax(-1)


def penalize(logits: Tensor, draws: Draws, counts: Counts) -> Tensor:
    """The penalized rows' logits after repetition (CTRL, arXiv 1909.05858: a seen token's logit is divided when positive,
    multiplied when negative), frequency and presence (OpenAI: subtracted) penalties. -> float32 [P, V]."""
    rows = draws.penalized
    assert rows is not None
    x, slots = logits[rows], draws.slots[rows]
    generated = counts.generated[slots]
    seen = counts.in_prompt[slots] | (generated > 0)
    repetition = draws.repetition[rows][:, None]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - draws.frequency[rows][:, None] * generated
    return x - draws.presence[rows][:, None] * (generated > 0)


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the `top_k` largest (0: all) and outside the smallest set of the largest whose probability reaches
    `top_p` (nucleus sampling, arXiv 1904.09751), counted after top-k. Of equal logits the lower id is kept. At least one
    stays. float32 [P, V] -> [P, V]."""
    ordered, ids = logits.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    out_of_k = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    # A border moved by rounding in a sum would be another token on another device: sum integers.
    probability = (ordered.masked_fill(out_of_k, float("-inf")).softmax(-1).double() * 2.0**40).long()
    before = probability.cumsum(-1) - probability
    total = before[:, -1:] + probability[:, -1:]
    out_of_p = (before.double() >= top_p[:, None].double() * total.double()) & (top_p[:, None] < 1) & (rank > 0)
    dropped = torch.zeros_like(out_of_p).scatter_(-1, ids, out_of_k | out_of_p)
    return logits.masked_fill(dropped, float("-inf"))


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model's own distribution (temperature 1, nothing filtered), as OpenAI reports them.

    [S, V], [S] -> chosen float32 [S], the `count` most likely: float32 [S, count], int64 ids [S, count].
    """
    every = logits.log_softmax(-1)
    values, ids = every.topk(count, -1)
    return every.gather(-1, tokens.clamp_min(0)[:, None])[:, 0], values, ids


# ---- randomness ---------------------------------------------------------------------------------------------------


def random_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [S] seeds, int64 [S] positions -> int64 [S, 2], two 32-bit words that depend on both (SplitMix64 twice: of the
    seed, then of the seed's stream at the position)."""
    z = splitmix(splitmix(seeds) + positions.astype(np.uint64))
    low_and_high = z.astype("<u8").view("<u4").reshape(-1, 2)
    return low_and_high[:, ::-1].astype(np.int64)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [S, vocab_size]: a function of (key, token id) alone."""
    return -(-torch.log1p(-uniform(keys, vocab_size))).log()


def uniform(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 [S, vocab_size] in (0, 1 - 2^-24]. 32 random bits, and relative precision near 0: the largest Gumbel values,
    the ones that win, come from there."""
    token = torch.arange(vocab_size, device=keys.device)[None, :]
    bits = _mix32(token * 0x9E3779B1 + keys[:, :1] & _MASK)
    bits = _mix32(bits + keys[:, 1:] & _MASK)
    return ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)


def _mix32(x: Tensor) -> Tensor:
    """Bijection of 32-bit words in int64 (the finalizer of MurmurHash3, public domain)."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & _MASK
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & _MASK
    return x ^ (x >> 16)
