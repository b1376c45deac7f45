"""Drawing tokens in one kernel: the tokens that the same draws give on a CPU, and frequencies that are the probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from nybble.engine.sampler import FAILED, Draws, _kernel_failure, greedy, random_keys, sample
from nybble.kernels import sample_hopper

pytestmark = pytest.mark.gpu
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")


def draws_of(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, first: int = 0) -> Draws:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value, device="cuda")

    keys = torch.from_numpy(random_keys(np.arange(first, first + rows).astype(np.uint64), np.arange(rows))).cuda()
    slots = torch.arange(rows, device="cuda")
    penalties = full(1.0), full(0.0), full(0.0)
    return Draws(slots, full(temperature), full(float(top_k)).long(), full(top_p), full(min_p), *penalties, keys,
                 temperature > 0, top_k > 0 or top_p < 1, None, None)  # fmt: skip


def repeated(draws: Draws, times: int) -> Draws:
    names = (*PARAMETERS, "keys")
    return replace(draws, **{name: torch.cat([getattr(draws, name)] * times) for name in names})


def on_cpu(logits: Tensor, draws: Draws) -> Tensor:
    moved = {name: value.cpu() for name, value in vars(draws).items() if isinstance(value, Tensor)}
    return sample(logits.cpu(), replace(draws, **moved), None)


def drawn(logits: Tensor, draws: Draws) -> Tensor:
    if (reason := sample_hopper.refusal(logits)) is not None:
        pytest.skip(reason)
    some = [getattr(draws, name) for name in PARAMETERS]
    return sample_hopper.draw(logits, *some, draws.keys).cpu()


@pytest.mark.parametrize("vocab", [5, 300, 4096, 4097, 32000, 151936])
@pytest.mark.parametrize("parameters", [
    (1.0,), (0.7,), (1e-6,), (1e-45,), (100.0,), (1.0, 0, 1.0, 0.05), (0.8, 1), (0.8, 40), (1.0, 0, 0.9), (1.5, 50, 0.8, 0.01),
    (1.0, 0, 1e-9), (0.0, 5),
])  # fmt: skip
def test_tokens_are_those_of_the_same_draws_on_a_cpu(vocab: int, parameters: tuple[float, ...]) -> None:
    """Logits of 8 bits: many are equal. Rounding may move the border of top-p or a tie, in one row of many."""
    logits = (
        torch.randn(64, vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(vocab)).mul(4).bfloat16().float()
    )
    logits[3] = float("-inf")
    logits[4, -1] = float("nan")
    logits[5, vocab // 2 :] = float("-inf")
    logits[6] = 0.0
    draws = draws_of(64, *parameters)
    found, want = drawn(logits, draws), on_cpu(logits, draws)
    assert int((found != want).sum()) <= 1
    assert found[3] == found[4] == FAILED
    assert found[5] < vocab // 2 if vocab > 1 else True
    assert torch.equal(found, drawn(logits, draws))
    assert torch.equal(found, drawn(logits.repeat(3, 1), repeated(draws, 3))[64:128])  # fewer programs a row
    alone = replace(draws, **{name: getattr(draws, name)[17:18].contiguous() for name in (*PARAMETERS, "keys")})
    assert drawn(logits[17:18], alone)[0] == found[17]


@pytest.mark.parametrize(("parameters", "kept"), [((1.0,), 8), ((0.5, 3), 3), ((1.0, 0, 0.8), 4), ((1.0, 0, 1.0, 0.3), 4)])
def test_frequencies_are_the_probabilities(parameters: tuple[float, ...], kept: int) -> None:
    """By hand: probabilities 0.4, 0.2, 0.15, 0.12, ...; top-p 0.8 keeps four, as does 0.3 of the largest."""
    probability = torch.tensor([0.12, 0.03, 0.4, 0.02, 0.2, 0.06, 0.15, 0.02])
    rows = 20000
    logits = probability.log().cuda().expand(rows, 8).contiguous()
    found = drawn(logits, draws_of(rows, *parameters, first=7)).bincount(minlength=8) / rows
    order = probability.argsort(descending=True)[:kept]
    wanted = torch.zeros(8)
    wanted[order] = probability[order] ** (1 / parameters[0])
    wanted /= wanted.sum()
    assert ((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / rows).sqrt()).all()


def test_the_start_up_test_trusts_the_kernel() -> None:
    logits = torch.randn(3, 700, device="cuda")
    if (reason := sample_hopper.refusal(logits)) is not None:
        pytest.skip(reason)
    assert _kernel_failure(logits.device, 700) is None
    assert torch.equal(sample(logits, draws_of(3, 0.9, 50, 0.95), None).cpu(), on_cpu(logits, draws_of(3, 0.9, 50, 0.95)))


@pytest.mark.parametrize("vocab", [1, 5, 4097, 32000, 151936])
@pytest.mark.parametrize("rows", [1, 12, 17, 64, 130])
def test_greedy_tokens_are_the_first_of_the_largest(rows: int, vocab: int) -> None:
    """In clusters of any size. Logits of 8 bits: many are equal."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).bfloat16().float()
    if rows > 6:
        logits[3], logits[4, -1], logits[5, vocab // 2], logits[6] = float("-inf"), float("nan"), float("inf"), -0.0
    if (reason := sample_hopper.refusal(logits.cuda())) is not None:
        pytest.skip(reason)
    slots, pool = torch.randperm(200)[:rows].cuda(), torch.full((200,), -5, device="cuda")
    found = sample_hopper.greedy_into(logits.cuda(), slots, pool)
    assert found.tolist() == greedy(logits).tolist()
    assert torch.equal(pool[slots], found)
    assert int((pool == -5).sum()) == 200 - rows
