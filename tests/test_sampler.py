"""The sampler against float64 formulas and exact probabilities; rows alone and in company."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sass import SPILL, assemble

from nybble.engine.batch import Stage
from nybble.engine.messages import SamplingParams
from nybble.engine.request import Request, completion_seed
from nybble.engine.sampler import (
    FAILED,
    Counts,
    Draws,
    greedy,
    gumbel,
    keep_top,
    logprobs,
    penalize,
    random_keys,
    sample,
    uniform,
)
from nybble.engine.scheduler import Plan
from nybble.kernels import sample_hopper

V = 50


def draws(seeds: list[int], positions: list[int], *, penalized: list[int] | None = None,
          forbidden: list[tuple[int, int]] | None = None, **lists: list[float]) -> Draws:
    """Rows with the given parameters; what is left out is off."""
    rows = len(seeds)
    off = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    values = {k: torch.tensor(lists.get(k, [v] * rows), dtype=torch.float32) for k, v in off.items()}
    top_k = torch.tensor(lists.get("top_k", [0] * rows), dtype=torch.int64)
    return Draws(
        slots=torch.arange(rows),
        top_k=top_k,
        keys=torch.from_numpy(random_keys(np.array(seeds, np.uint64), np.array(positions))),
        any_random=bool((values["temperature"] > 0).any()),
        filtered=bool((top_k > 0).any() or (values["top_p"] < 1).any()),
        penalized=None if penalized is None else torch.tensor(penalized),
        forbidden=None if forbidden is None else tuple(torch.tensor(forbidden).t()),
        **values,
    )


def logits(rows: int, seed: int = 0, width: int = V) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def kept(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that is drawn from, float64, written down from the definitions."""
    x = row.astype(np.float64) / temperature
    order = np.argsort(-x, kind="stable")
    alive = np.zeros(len(x), bool)
    alive[order[: top_k or len(x)]] = True
    p = np.where(alive, np.exp(x - x.max()), 0)
    p /= p.sum()
    total = 0.0
    for token in order:
        if total >= top_p:
            p[token] = 0
        total += p[token]
    p[p < min_p * p.max()] = 0
    return p / p.sum()


# ---- deterministic parts --------------------------------------------------------------------------------------------


def test_greedy_is_the_first_of_the_largest_and_fails_on_what_is_no_number() -> None:
    x = torch.tensor([[1.0, 5, 5, 0], [float("-inf"), -3, float("-inf"), -2], [0, float("nan"), 9, 0],
                      [0, float("inf"), 0, 0], [float("-inf")] * 4])  # fmt: skip
    assert greedy(x).tolist() == [1, 3, FAILED, FAILED, FAILED]
    assert sample(x, draws([1] * 5, [0] * 5, temperature=[0.0] * 5), None).tolist() == [1, 3, FAILED, FAILED, FAILED]
    random = sample(x, draws([1] * 5, [0] * 5), None).tolist()
    assert random[2:] == [FAILED] * 3
    assert random[1] in (1, 3)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), top_k=st.integers(0, V), top_p=st.floats(0.01, 1.0), equal=st.booleans())
def test_top_k_and_top_p_keep_what_the_definitions_keep(seed: int, top_k: int, top_p: float, equal: bool) -> None:
    x = logits(3, seed)
    if equal:
        x = x.round()  # many equal logits
    mine = keep_top(x, torch.tensor([top_k, 0, 5]), torch.tensor([top_p, 1.0, 0.5]))
    for row, k, p in zip(range(3), (top_k, 0, 5), (float(np.float32(top_p)), 1.0, 0.5)):
        assert (mine[row].isfinite().numpy() == (kept(x[row].numpy(), 1.0, k, p, 0.0) > 0)).all()
        alive = mine[row].isfinite()
        assert torch.equal(mine[row][alive], x[row][alive])


def test_a_row_draws_as_the_request_that_now_has_its_slot_asks() -> None:
    stage = Stage(8, 4, 4, 64, 16, torch.device("cpu"))

    def drawing(slot: int, admission: int, generated: int, **params: float) -> Request:
        request = Request("", 0, [1, 2, 3], SamplingParams(max_tokens=None, **params), 64, frozenset({9}), 2**64 - 1 - slot)
        request.slot, request.admission, request.blocks = slot, admission, [slot]
        request.tokens += [5] * generated
        request.num_tokens = 4 + generated
        return request

    def packed(*requests: Request) -> Draws:
        rows = len(requests)
        draws = stage.pack(Plan([*requests], [one.num_tokens - 2 for one in requests], [1] * rows, rows, [*range(rows)])).draws
        assert draws is not None
        return draws

    first = drawing(3, 1, 1, temperature=0.5, top_k=2**63, min_tokens=2)
    second = drawing(1, 2, 4, temperature=0.0, min_p=0.25, presence_penalty=-1.5, min_tokens=4)
    both = packed(first, second)
    assert both.slots.tolist() == [3, 1]
    assert (both.temperature.tolist(), both.min_p.tolist(), both.presence.tolist()) == ([0.5, 0], [0, 0.25], [0, -1.5])
    assert both.top_k[0] >= 2**31 - 1
    assert (both.any_random, both.filtered, both.penalized.tolist()) == (True, True, [1])
    assert [part.tolist() for part in both.forbidden] == [[0], [9]]  # a second token, not a fifth
    expected = random_keys(np.array([2**64 - 4, 2**64 - 2], np.uint64), np.array([1, 4]))
    np.testing.assert_array_equal(both.keys.numpy(), expected)
    biased = packed(first, drawing(2, 4, 0, temperature=0.0, logit_bias={7: -2, 30: 0.5})).biased
    assert [part.tolist() for part in biased] == [[1, 1], [7, 30], [-2.0, 0.5]]
    assert both.biased is None
    alone = packed(drawing(3, 3, 0, temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.25, top_p=0.75))
    assert (alone.temperature.tolist(), alone.top_k.tolist(), alone.top_p.tolist()) == ([0], [0], [0.75])
    assert (alone.frequency.tolist(), alone.repetition.tolist()) == ([0.5], [1.25])
    assert (alone.any_random, alone.penalized.tolist(), alone.forbidden) == (False, [0], None)


def test_penalties_are_those_of_ctrl_and_openai() -> None:
    x = logits(3)
    counts = Counts(3, V, torch.device("cpu"))
    counts.reset(0, [1, 2, 3], [3, 4, 4])
    counts.reset(2, [7], [])
    counts.add(torch.tensor([0, 2]), torch.tensor([5, 9]))
    d = draws([0] * 3, [0] * 3, penalized=[0, 2], repetition=[1.3, 1.0, 0.7], presence=[0.5, 0, -0.25], frequency=[0.2, 0, 1.5])
    mine = penalize(x, d, counts)
    for out, row, r, p, f, prompt, generated in (
        (0, 0, 1.3, 0.5, 0.2, [1, 2, 3], [3, 4, 4, 5]),
        (1, 2, 0.7, -0.25, 1.5, [7], [9]),
    ):
        expected = x[row].double().numpy().copy()
        for token in set(prompt + generated):
            expected[token] = expected[token] / r if expected[token] > 0 else expected[token] * r
        for token in set(generated):
            expected[token] -= p + f * generated.count(token)
        np.testing.assert_allclose(mine[out].numpy(), expected, rtol=1e-6, atol=1e-6)
    counts.reset(0, [8], [])
    assert counts.generated[0].sum() == 0
    assert counts.in_prompt[0].nonzero().tolist() == [[8]]


def test_a_bias_is_added_to_the_logits_before_penalties() -> None:
    """Greedy and drawn tokens, against float64: the sum, then the definition of the penalty, then Gumbel-max."""
    x, bias = logits(3), {0: {4: 100.0, 7: -100.0}, 2: {1: 1.5, 49: -0.25}}
    counts = Counts(3, V, torch.device("cpu"))
    counts.reset(2, [1], [])
    places = [(row, token, value) for row, added in bias.items() for token, value in added.items()]
    for temperature in ([0.0] * 3, [0.7, 1.0, 2.0]):
        for seed in range(30):
            d = draws([seed] * 3, [5] * 3, temperature=temperature, repetition=[1.0, 1.0, 1.5], penalized=[2])
            d = replace(d, biased=tuple(map(torch.tensor, zip(*places))))
            expected = x.double().numpy().copy()
            for row, token, value in places:
                expected[row, token] += value
            expected[2, 1] *= 1.5 if expected[2, 1] < 0 else 1 / 1.5
            noise = gumbel(d.keys, V).double().numpy()
            scores = [one if not t else one / t + more for one, t, more in zip(expected, temperature, noise)]
            assert sample(x, d, counts).tolist() == [int(one.argmax()) for one in scores]
    assert torch.equal(x, logits(3))


def test_penalties_and_forbidden_ids_change_the_token() -> None:
    x = torch.zeros(2, V)
    x[:, 3], x[:, 4], x[:, 5] = 3.0, 2.5, 2.0
    counts = Counts(2, V, torch.device("cpu"))
    counts.reset(0, [], [3])
    d = draws([0, 0], [0, 0], temperature=[0.0, 0.0], presence=[1.5, 0.0], penalized=[0], forbidden=[(0, 4), (1, 3)])
    assert sample(x, d, counts).tolist() == [5, 4]
    assert x[0, 3] == 3.0
    assert sample(x, draws([7, 7], [0, 0], top_k=[1, 1], forbidden=[(0, 3), (1, 3)]), None).tolist() == [4, 4]


def test_rows_with_a_grammar_draw_what_they_would_if_nothing_else_had_a_chance() -> None:
    """Ids on both sides of the words' borders, the sign bit among them; words past the vocabulary are not looked at."""
    x, permitted = logits(4, width=70), {1: [0, 31, 32, 63, 64, 69], 3: [31]}
    bits = np.zeros((2, 96), np.uint8)
    for row, ids in enumerate(permitted.values()):
        bits[row, [*ids, 75]] = 1
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    masked = x.clone()
    for row, ids in permitted.items():
        masked[row, [i for i in range(70) if i not in ids]] = float("-inf")
    for temperature in (0.0, 1.0, 5.0):
        for position in range(20):
            free = draws([1, 2, 3, 4], [position] * 4, temperature=[temperature] * 4, top_k=[0, 3, 2, 0])
            held = replace(free, allowed=(torch.tensor(list(permitted)), words))
            drawn = sample(x, held, None)
            assert drawn.tolist() == sample(masked, free, None).tolist()
            assert all(drawn[row] in ids for row, ids in permitted.items())
            assert drawn[[0, 2]].tolist() == sample(x, free, None)[[0, 2]].tolist()


def test_logprobs_are_of_the_models_own_distribution() -> None:
    x = logits(4)
    tokens = torch.tensor([3, 0, 49, FAILED])
    chosen, values, ids = logprobs(x, tokens, 5)
    wide = x.double().numpy()
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen[:3].numpy(), expected[[0, 1, 2], [3, 0, 49]], rtol=1e-5)
    assert (ids.numpy() == np.argsort(-expected, -1)[:, :5]).all()
    assert [tuple(t.shape) for t in logprobs(x, tokens, 0)] == [(4,), (4, 0), (4, 0)]
    np.testing.assert_allclose(values.numpy(), np.sort(expected, -1)[:, ::-1][:, :5], rtol=1e-5)


# ---- randomness ---------------------------------------------------------------------------------------------------


def test_splitmix_is_the_published_one() -> None:
    """First outputs of SplitMix64 for state 1234567, as listed with the algorithm's public test vectors."""
    from nybble.engine.request import splitmix

    state, golden = 1234567, 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = [(state + i * golden) % 2**64 for i in range(5)]
    assert [splitmix(z) for z in states] == published
    assert splitmix(np.array(states, np.uint64)).tolist() == published


def test_mixing_is_murmurs_finalizer() -> None:
    """Against the same steps in Python integers, including the largest words."""
    from nybble.engine.sampler import _mix32

    def by_hand(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    words = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    assert _mix32(torch.tensor(words)).tolist() == [by_hand(x) for x in words]
    assert by_hand(1) == 0x514E28B7  # published value of fmix32(1)


def keys(count: int, seed: int = 5) -> torch.Tensor:
    return torch.from_numpy(random_keys(np.full(count, seed, np.uint64), np.arange(count)))


def test_noise_is_uniform_across_tokens_and_across_positions() -> None:
    u = uniform(keys(400), 1000).double()
    assert u.min() > 0
    assert u.max() < 1
    expected = u.numel() / 64
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square, 63 degrees: 99.998 %
    for neighbours in (u[:, 1:] * u[:, :-1], u[1:] * u[:-1]):
        spread = 5 * (7 / 144 / neighbours.numel()) ** 0.5  # E = 1/4, Var(xy) = 7/144
        assert abs(neighbours.mean() - 0.25) < spread
    assert abs(gumbel(keys(400), 1000).double().mean() - 0.5772156649) < 0.02


def test_no_key_and_no_token_gives_infinite_noise() -> None:
    words = torch.tensor([[0, 0], [0xFFFFFFFF, 0xFFFFFFFF], [0, 0xFFFFFFFF], [0xFFFFFFFF, 0]])
    assert gumbel(words, 200_000).isfinite().all()
    lowest, highest = (torch.tensor([0.5 * 2.0**-32]), torch.tensor([1 - 2.0**-24]))
    for u in (lowest, highest):
        assert (-(-torch.log1p(-u)).log()).isfinite().all()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (1.5, 7, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (2.0, 20, 0.9, 0.05)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """8,000 draws of one request at successive positions; chi-square against float64 probabilities."""
    row, number = logits(1, 3)[0] / 2, 8_000
    d = draws([11] * number, list(range(number)), temperature=[temperature] * number, top_k=[top_k] * number,
              top_p=[top_p] * number, min_p=[min_p] * number)  # fmt: skip
    tokens = sample(row.expand(number, V), d, None)
    p = kept(row.numpy(), temperature, top_k, top_p, min_p)
    counts = np.bincount(tokens.numpy(), minlength=V)
    assert counts[p == 0].sum() == 0
    often = p * number >= 5
    statistic = ((counts[often] - p[often] * number) ** 2 / (p[often] * number)).sum()
    degrees = often.sum() - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5 + 5


def test_a_row_draws_the_same_token_in_any_company() -> None:
    x = logits(100, 9, 300)
    rng = np.random.default_rng(0)
    lists = {
        "temperature": rng.choice([0.0, 0.7, 1.3], 100).tolist(),
        "top_k": rng.choice([0, 5, 40], 100).tolist(),
        "top_p": rng.choice([1.0, 0.9, 0.3], 100).tolist(),
        "min_p": rng.choice([0.0, 0.05], 100).tolist(),
        "presence": rng.choice([0.0, 0.8], 100).tolist(),
    }
    seeds, positions = rng.integers(0, 2**62, 100).tolist(), rng.integers(0, 1000, 100).tolist()
    counts = Counts(100, 300, torch.device("cpu"))
    counts.generated[:] = torch.from_numpy(rng.integers(0, 2, (100, 300)).astype(np.int32))
    penalized = [i for i in range(100) if lists["presence"][i]]
    together = sample(x, draws(seeds, positions, penalized=penalized, **lists), counts)
    for i in range(100):
        one = {name: [values[i]] for name, values in lists.items()}
        alone = Counts(1, 300, torch.device("cpu"))
        alone.generated[0] = counts.generated[i]
        d = draws(seeds[i : i + 1], positions[i : i + 1], penalized=[0] if i in penalized else None, **one)
        assert sample(x[i : i + 1], d, alone).item() == together[i]


def test_seeds_positions_and_completions_draw_differently_and_repeatably() -> None:
    x = torch.zeros(6, 5000)  # uniform: two draws agree once in 5000
    seeds = [1, 1, 2, completion_seed(1, 1), completion_seed(1, 2), completion_seed(2, 1)]
    positions = [0, 1, 0, 0, 0, 0]
    tokens = sample(x, draws(seeds, positions), None).tolist()
    assert len(set(tokens)) == 6
    assert tokens == sample(x, draws(seeds, positions), None).tolist()
    assert completion_seed(12, 0) == 12
    assert 0 <= completion_seed(-1, 0) < 2**64  # OpenAI's seeds may be negative


def test_extreme_temperatures_and_logits() -> None:
    x = logits(3) * torch.tensor([[1.0], [1e30], [1.0]])
    d = draws([1] * 3, [0] * 3, temperature=[1e-30, 1.0, 100.0], top_p=[0.9, 0.9, 1.0])
    tokens = sample(x, d, None)
    assert tokens[:2].tolist() == x[:2].argmax(-1).tolist()
    assert 0 <= tokens[2] < V


# ---- the device's own ------------------------------------------------------------------------------------------------

KERNELS = """
import torch
from nybble.engine.sampler import greedy
from nybble.kernels.tokens_triton import greedy_into, resolve
inf, nan = float("inf"), float("nan")
x = torch.randn(9, 9001, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()  # with many equal ones
x[1, 17], x[2, 8999], x[3, :], x[4, 4096] = nan, inf, -inf, x[4].max() + 1
x[5, [70, 4100, 9000]] = 99.0
pool = torch.full((12,), 5)
drawn = greedy_into(x, torch.arange(9) + 2, pool)
assert drawn.tolist() == greedy(x).tolist(), drawn
assert drawn[1:6].tolist() == [-1, -1, -1, 4096, 70], drawn
assert pool.tolist() == [5, 5, *drawn.tolist(), 5], pool
ids = torch.tensor([7, -3, 0, -4, -1] + [9] * 300)
assert resolve(ids, pool).tolist() == [7, int(drawn[0]), 0, 0, 5] + [9] * 300
"""


def test_the_kernels_at_both_ends_of_a_step_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", KERNELS], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rows", "vocab"), [(1, 32000), (16, 49152), (64, 32000), (128, 151936)])
def test_the_kernel_for_hopper_compiles_and_keeps_what_it_holds_in_registers(rows: int, vocab: int, tmp_path: Path) -> None:
    for name, most in (("sample", sample_hopper.MOST_LOGITS), ("greedy", sample_hopper.MOST_GREEDY_LOGITS)):
        cluster = sample_hopper.cluster_for(rows, vocab, most)
        lines = assemble(*sample_hopper.source_and_defines(name, vocab, cluster), tmp_path)
        assert not [line for line in lines if SPILL.match(line)]
        assert any("REDUX.MAX" in line for line in lines)
