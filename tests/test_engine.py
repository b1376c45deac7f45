"""The engine without weights (a scripted runner that remembers only what was written to slots), then with a tiny model."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BROKEN, CRASH, VOCAB, ScriptedRunner, answer, small

from nybble.engine.core import Engine
from nybble.engine.messages import Delta, Refused, SamplingParams, Submit


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **changes})


class Answers:
    """Everything an engine said, by request and completion."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], str] = {}
        self.refused: dict[str, Refused] = {}
        self.deltas: list[Delta] = []

    def add(self, answers: list[Delta | Refused]) -> None:
        for item in answers:
            if isinstance(item, Refused):
                assert item.request_id not in self.refused
                self.refused[item.request_id] = item
                continue
            key = item.request_id, item.index
            assert key not in self.reasons, "nothing follows a finish_reason"
            self.deltas.append(item)
            self.tokens[key] += item.token_ids
            if item.finish_reason is not None:
                self.reasons[key] = item.finish_reason


def run(engine: Engine, answers: Answers | None = None, limit: int = 5000) -> Answers:
    answers = answers or Answers()
    while engine.has_work:
        answers.add(engine.step())
        engine.scheduler.check()
        limit -= 1
        assert limit, "the engine does not come to an end"
    assert engine.info().free_blocks + engine.info().cached_blocks == engine.info().num_blocks
    return answers


overlaps = pytest.mark.parametrize("overlap", [False, True])


@overlaps
def test_tokens_stream_one_by_one_and_end_at_max_tokens(overlap: bool) -> None:
    engine = Engine(ScriptedRunner(overlap=overlap), small())
    engine.submit(Submit("a", [1, 2, 3], greedy(max_tokens=5)))
    answers = run(engine)
    assert [d.token_ids for d in answers.deltas] == [[t] for t in answer([1, 2, 3], 5)]
    assert [d.finish_reason for d in answers.deltas] == [None] * 4 + ["length"]


@overlaps
def test_stop_ids_end_a_request_and_are_its_last_token(overlap: bool) -> None:
    text = answer([1, 2, 3], 8)
    at = next(i for i in range(2, 8) if text[i] not in text[:i])
    for eos_ids, params, length, reason in (
        ((), greedy(stop_token_ids=(text[at],)), at + 1, "stop"),
        ((text[at],), greedy(), at + 1, "stop"),
        ((text[at],), greedy(ignore_eos=True), 8, "length"),
        ((text[at],), greedy(ignore_eos=True, stop_token_ids=(text[at],)), at + 1, "stop"),
    ):
        engine = Engine(ScriptedRunner(overlap=overlap), small(eos_ids=eos_ids))
        engine.submit(Submit("a", [1, 2, 3], params))
        answers = run(engine)
        assert answers.tokens["a", 0] == text[:length]
        assert answers.reasons["a", 0] == reason


def test_no_max_tokens_is_up_to_the_end_of_the_context() -> None:
    engine = Engine(ScriptedRunner(max_context=30), small())
    engine.submit(Submit("a", [1, 2, 3], greedy(max_tokens=None)))
    assert run(engine).tokens["a", 0] == answer([1, 2, 3], 27)


def test_requests_that_can_never_run_are_refused_with_the_field() -> None:
    engine = Engine(ScriptedRunner(num_blocks=10, max_context=100), small())  # the pool holds 40 tokens
    for prompt, params, field in (
        ([], greedy(), "token_ids"),
        ([VOCAB], greedy(), "token_ids"),
        ([-1], greedy(), "token_ids"),
        ([1] * 40, greedy(max_tokens=None), "token_ids"),
        ([1] * 30, greedy(max_tokens=11), "max_tokens"),
        ([1] * 30, greedy(max_tokens=5, min_tokens=6), "min_tokens"),
        ([1], greedy(stop_token_ids=(VOCAB,)), "stop_token_ids"),
    ):
        engine.submit(Submit("bad", prompt, params))
        answers = run(engine)
        assert answers.refused["bad"].field == field
        assert not answers.deltas
    engine.submit(Submit("twice", [1], greedy()))
    engine.submit(Submit("twice", [2], greedy()))
    answers = run(engine)
    assert answers.refused["twice"].field == "request_id"
    assert answers.tokens["twice", 0] == answer([1], 8)
    engine.submit(Submit("just", [1] * 30, greedy(max_tokens=10)))
    assert run(engine).tokens["just", 0] == answer([1] * 30, 10)


@overlaps
def test_an_abort_ends_a_request_wherever_it_is(overlap: bool) -> None:
    engine = Engine(ScriptedRunner(overlap=overlap), small(max_batch=2))
    for name in "abcd":
        engine.submit(Submit(name, [1, 2, ord(name) - 90], greedy(max_tokens=20)))
    answers = Answers()
    for _ in range(4):
        answers.add(engine.step())
    for name in ("a", "d", "unknown"):  # running, waiting, neither
        engine.abort(name)
    run(engine, answers)
    assert answers.reasons == {("a", 0): "abort", ("b", 0): "length", ("c", 0): "length", ("d", 0): "abort"}
    for name in "bc":
        assert answers.tokens[name, 0] == answer([1, 2, ord(name) - 90], 20)
    assert 0 < len(answers.tokens["a", 0]) < 20
    assert answers.tokens["d", 0] == []


@overlaps
def test_completions_of_one_prompt_share_its_blocks(overlap: bool) -> None:
    prompt = list(range(1, 14))
    runner = ScriptedRunner(overlap=overlap, max_batched_tokens=64)
    engine = Engine(runner, small())
    engine.submit(Submit("a", prompt, greedy(n=3, max_tokens=4)))
    answers = Answers()
    answers.add(engine.step())
    assert runner.plans[0][0] == [13, 1, 1]  # the first computes the prompt, the others its last token
    assert engine.info().num_blocks - engine.info().free_blocks == 3 + 3  # three shared, one for each
    run(engine, answers)
    assert [answers.tokens["a", i] for i in range(3)] == [answer(prompt, 4)] * 3
    assert engine.info().prefix_hits == 24


def test_a_repeated_prompt_is_found_and_reported() -> None:
    engine = Engine(ScriptedRunner(), small())
    for expected in (0, 8):
        engine.submit(Submit("a", [5] * 11, greedy()))
        answers = run(engine)
        assert {d.cached_tokens for d in answers.deltas} == {expected}
        assert answers.tokens["a", 0] == answer([5] * 11, 8)
    off = Engine(ScriptedRunner(), small(prefix_caching=False))
    for _ in range(2):
        off.submit(Submit("a", [5] * 11, greedy()))
        assert run(off).deltas[0].cached_tokens == 0
    assert off.info().cached_blocks == 0


@overlaps
def test_logits_that_are_not_numbers_fail_their_request_alone(overlap: bool) -> None:
    engine = Engine(ScriptedRunner(overlap=overlap), small())
    engine.submit(Submit("good", [1, 2], greedy()))
    engine.submit(Submit("bad", [3, BROKEN], greedy()))
    answers = run(engine)
    assert answers.tokens["good", 0] == answer([1, 2], 8)
    assert answers.reasons["bad", 0] == "error"
    assert "not finite" in answers.deltas[[d.request_id for d in answers.deltas].index("bad")].error


@overlaps
def test_a_step_that_fails_fails_its_requests_and_not_the_engine(overlap: bool) -> None:
    engine = Engine(ScriptedRunner(overlap=overlap), small())
    engine.submit(Submit("a", [1, 2], greedy()))
    engine.submit(Submit("b", [1, 2, 3, 4, 5, CRASH], greedy()))
    answers = run(engine)
    assert answers.reasons == {("a", 0): "error", ("b", 0): "error"}
    assert "caught fire" in answers.deltas[-1].error
    assert engine.info().cached_blocks == 0  # nothing that may not have been computed is offered to others
    engine.submit(Submit("c", [1, 2, 3, 4, 5], greedy()))
    assert run(engine).tokens["c", 0] == answer([1, 2, 3, 4, 5], 8)


def test_logprobs_come_with_the_requests_that_want_them() -> None:
    engine = Engine(ScriptedRunner(), small())
    engine.submit(Submit("with", [1], greedy(logprobs=1)))
    engine.submit(Submit("without", [2], greedy()))
    for delta in run(engine).deltas:
        if delta.request_id == "with":
            assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        else:
            assert delta.logprobs is None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 40),
    max_batch=st.integers(1, 6),
    budget=st.integers(6, 40),
    chunked=st.booleans(),
    caching=st.booleans(),
    overlap=st.booleans(),
)
def test_a_request_gets_the_same_tokens_whatever_else_happens(
    seed: int, num_blocks: int, max_batch: int, budget: int, chunked: bool, caching: bool, overlap: bool
) -> None:
    rng = random.Random(seed)
    runner = ScriptedRunner(num_blocks=num_blocks, max_batched_tokens=budget, overlap=overlap)
    engine = Engine(runner, small(max_batch=max_batch, chunked_prefill=chunked, prefix_caching=caching))
    answers, wanted, aborted = Answers(), {}, set()
    for i in range(rng.randint(1, 12)):
        prompt = [rng.randint(1, 2)] * rng.randint(1, 20) + [rng.randint(1, 3)]
        n, count = rng.choice([1, 1, 1, 3]), rng.randint(1, 24)
        engine.submit(Submit(str(i), prompt, greedy(max_tokens=count, n=n)))
        wanted.update({(str(i), index): answer(prompt, count) for index in range(n)})
        for _ in range(rng.randint(0, 4)):
            answers.add(engine.step())
            engine.scheduler.check()
        if rng.random() < 0.1:
            aborted.add(str(i))
            engine.abort(str(i))
    run(engine, answers)
    assert set(answers.reasons) == set(wanted)
    for key, tokens in wanted.items():
        got = answers.tokens[key]
        assert got == tokens[: len(got)]
        assert answers.reasons[key] == "length" or key[0] in aborted
        assert len(got) == len(tokens) or answers.reasons[key] == "abort"


def test_preempted_requests_continue_where_they_were() -> None:
    runner = ScriptedRunner(num_blocks=12, max_batched_tokens=8)
    engine = Engine(runner, small(max_batch=4, prefix_caching=False))
    for i in range(4):
        engine.submit(Submit(str(i), [i + 1] * 5, greedy(max_tokens=25)))
    answers = run(engine)
    assert engine.info().preemptions > 0
    for i in range(4):
        assert answers.tokens[str(i), 0] == answer([i + 1] * 5, 25)


def test_info_counts() -> None:
    engine = Engine(ScriptedRunner(), small(model_name="m", scheme="w4a8", kv="int8"))
    engine.submit(Submit("a", [1, 2, 3], greedy(max_tokens=5)))
    run(engine)
    info = engine.info()
    assert (info.prompt_tokens, info.generated_tokens, info.steps) == (3, 5, 5)
    assert (info.model, info.scheme, info.kv, info.max_context) == ("m", "w4a8", "int8", 200)
    assert (info.running, info.waiting, info.prefix_queries) == (0, 0, 3)
