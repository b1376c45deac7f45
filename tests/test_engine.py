"""The engine without weights (a scripted runner that remembers only what was written to slots), then with a tiny model."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check
from msgspec import structs
from scripted import BROKEN, CRASH, LOSE, VOCAB, ScriptedRunner, answer, small

from nybble.bench import offline
from nybble.engine.batch import Stage
from nybble.engine.config import EngineConfig
from nybble.engine.core import Engine
from nybble.engine.kvcache import allocate, bytes_per_token, kv_budget
from nybble.engine.messages import Delta, Refused, SamplingParams, Submit, TokenLogprob
from nybble.engine.request import Request
from nybble.engine.scheduler import Plan
from nybble.formats.spec import KV
from nybble.kernels.types import Step
from nybble.models import SHAPES, Decoder, dummy_model, forward_window


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **changes})


class Answers:
    """Everything an engine said, by request and completion."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], str] = {}
        self.refused: dict[str, Refused] = {}
        self.deltas: list[Delta] = []
        self.prompts: dict[tuple[str, int], list[TokenLogprob]] = {}

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
            if item.prompt_logprobs is not None:
                assert key not in self.prompts
                self.prompts[key] = item.prompt_logprobs
            if item.finish_reason is not None:
                self.reasons[key] = item.finish_reason


def run(engine: Engine, answers: Answers | None = None, limit: int = 5000) -> Answers:
    answers = answers or Answers()
    while engine.has_work:
        answers.add(engine.step())
        check(engine.scheduler)
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


def test_what_reads_the_cache_of_a_step_that_failed_fails_too() -> None:
    engine = Engine(ScriptedRunner(overlap=True), small())
    engine.submit(Submit("a", [1, 2, 3, 4, 5, CRASH], greedy()))
    answers = Answers()
    answers.add(engine.step())
    engine.submit(Submit("b", [1, 2, 3, 4, 5], greedy()))  # finds the first four tokens, which were not written
    run(engine, answers)
    assert answers.reasons == {("a", 0): "error", ("b", 0): "error"}


@overlaps
def test_what_ctrl_c_interrupts_is_not_offered_to_others(overlap: bool) -> None:
    engine = Engine(ScriptedRunner(overlap=overlap), small())
    launch = engine.runner.launch

    def interrupted(plan: Plan) -> None:
        raise KeyboardInterrupt

    engine.runner.launch = interrupted
    engine.submit(Submit("a", [1, 2, 3, 4, 5], greedy()))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.launch = launch
    engine.abort("a")  # who was interrupted leaves
    assert run(engine).reasons == {("a", 0): "error"}
    assert engine.info().cached_blocks == 0
    engine.submit(Submit("b", [1, 2, 3, 4, 5], greedy()))
    assert run(engine).tokens["b", 0] == answer([1, 2, 3, 4, 5], 8)


@pytest.mark.parametrize("steps", range(1, 20))
def test_ctrl_c_forgets_no_token_that_a_preempted_request_waits_for(steps: int) -> None:
    engine = Engine(ScriptedRunner(overlap=True, num_blocks=8), small())
    for i in range(3):
        engine.submit(Submit(str(i), [1, 2, 3, i], greedy(max_tokens=20)))
    for _ in range(steps):
        engine.step()
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.launch = launch
    engine.submit(Submit("last", [5, 6], greedy()))
    assert run(engine).tokens["last", 0] == answer([5, 6], 8)


def test_a_preempted_request_that_said_its_prompts_logprobs_comes_from_the_cache() -> None:
    engine = Engine(ScriptedRunner(num_blocks=8), small())
    for i in range(3):
        engine.submit(Submit(str(i), [i] * 9, greedy(max_tokens=12, prompt_logprobs=0)))
    answers = run(engine)
    assert [len(one.prompt_logprobs or ()) for one in answers.deltas if len(one.token_ids)].count(9) == 3
    assert engine.info().preemptions > 0
    assert engine.info().prefix_hits > 0


def test_a_lost_device_answers_its_requests_and_then_ends_the_engine() -> None:
    engine = Engine(ScriptedRunner(), small())
    engine.submit(Submit("a", [1, LOSE], greedy()))
    assert engine.step()[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="device is lost"):
        engine.step()


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
            check(engine.scheduler)
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


def test_of_several_requests_the_longest_answers_start_first_and_nothing_else_changes() -> None:
    prompts, lengths = [[i + 1] * 5 for i in range(7)], [3, 9, None, 9, 1, 12, 9]
    submits = [Submit(str(i), prompt, greedy(max_tokens=length)) for i, (prompt, length) in enumerate(zip(prompts, lengths))]
    engine = Engine(ScriptedRunner(max_context=24), small(max_batch=1, prefix_caching=False))
    engine.submit(Submit("before", [1], greedy(max_tokens=1)), Submit("refused", [], greedy()))
    engine.submit(*submits)
    answers = run(engine)
    ends = [delta.request_id for delta in answers.deltas if delta.finish_reason]
    assert ends == ["before", "2", "5", "1", "3", "6", "0", "4"]  # equals in the order in which they came
    assert list(answers.refused) == ["refused"]
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        assert answers.tokens[str(i), 0] == answer(prompt, length or 19)


def test_the_engines_own_seeds_follow_the_callers_order(model: Decoder) -> None:
    def go(*lengths: int) -> list[int]:
        engine = Engine(model, EngineConfig(kv="int8", num_blocks=32, seed=5))
        drawn = [Submit(str(i), [5, 6, 7], greedy(temperature=20.0, max_tokens=n)) for i, n in enumerate(lengths)]
        engine.submit(*drawn)
        tokens = run(engine).tokens
        return [tokens[str(i), 0][:2] for i in range(len(lengths))]

    assert go(2, 9, 5) == go(9, 5, 2)


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


# ---- with a tiny W4A8 model ---------------------------------------------------------------------------------------

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 256,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Decoder:
    return dummy_model(TINY, "w4a8_g32", "cpu", seed=3)


@pytest.fixture(scope="module")
def mixed() -> list[Submit]:
    """32 requests: short and long prompts, some with a common beginning, a third of them sampled, a fifth with their prompts'
    log-probabilities."""
    rng = random.Random(1)
    system = [rng.randrange(384) for _ in range(40)]
    requests = []
    for i in range(32):
        prompt = system * (i % 3 == 0) + [rng.randrange(384) for _ in range(rng.choice([1, 7, 16, 33, 70]))]
        params = greedy(max_tokens=rng.randint(4, 30))
        if i % 3 == 1:
            params = greedy(max_tokens=20, temperature=1.2, seed=i, top_k=[0, 30][i % 2], top_p=0.9, presence_penalty=0.5)
        requests.append(Submit(str(i), prompt, structs.replace(params, prompt_logprobs=2 if i % 5 == 0 else None)))
    return requests


@pytest.fixture(scope="module")
def alone(model: Decoder, mixed: list[Submit]) -> Answers:
    """Each request by itself, whole prompt at once, nothing cached."""
    answers = Answers()
    for request in mixed:
        config = EngineConfig(kv="int8", block_size=16, max_batch=1, max_batched_tokens=256, num_blocks=16)
        engine = Engine(model, replace(config, prefix_caching=False))
        engine.submit(request)
        run(engine, answers)
    return answers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chunked_prefill": False},
        {"max_batched_tokens": 32},
        {"prefix_caching": False, "max_batched_tokens": 37},
        {"overlap": True},
        {"block_size": 64},
        {"block_size": 4, "num_blocks": 40, "max_batched_tokens": 48},
        {"block_size": 4, "num_blocks": 40, "prefix_caching": False, "overlap": True, "chunked_prefill": False},
    ],
    ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items()) or "together",
)
def test_batching_changes_nothing(model: Decoder, mixed: list[Submit], alone: Answers, changes: dict) -> None:
    config = {"kv": "int8", "block_size": 16, "max_batch": 32, "max_batched_tokens": 256, "num_blocks": 400}
    engine = Engine(model, EngineConfig(**{**config, **changes}))
    answers = Answers()
    for i, request in enumerate(mixed):
        engine.submit(request)
        if i % 8 == 7:  # arrivals while others run
            answers.add(engine.step())
    run(engine, answers)
    assert answers.tokens == alone.tokens
    assert answers.prompts == alone.prompts
    for request in mixed[::5]:
        first, *rest = answers.prompts[request.request_id, 0]
        assert [first.token_id, *(one.token_id for one in rest)] == request.token_ids
        assert first.logprob is None
        assert all(one.logprob < 0 and len(one.top) == 2 for one in rest)
    if "num_blocks" in changes:
        assert engine.info().preemptions > 0
    if changes == {}:
        assert engine.info().prefix_hits > 0


def test_a_repeated_answer_in_a_prompt_is_computed_as_a_prompt(model: Decoder) -> None:
    """A second turn gets the same tokens with the first turn in the cache and without."""
    first = Submit("a", list(range(50)), greedy(max_tokens=40))
    config = EngineConfig(kv="int8", block_size=16, num_blocks=64)
    engine = Engine(model, config)
    engine.submit(first)
    text = list(range(50)) + run(engine).tokens["a", 0]
    second = Submit("b", [*text, 7, 8, 9], greedy(max_tokens=40))
    engine.submit(second)
    warm = run(engine)
    fresh = Engine(model, replace(config, prefix_caching=False))
    fresh.submit(second)
    assert warm.tokens["b", 0] == run(fresh).tokens["b", 0]
    assert warm.deltas[0].cached_tokens == 48


def test_min_tokens_and_logprobs_with_a_model(model: Decoder) -> None:
    config = EngineConfig(kv="fp32", num_blocks=8)
    free, held = Engine(model, config), Engine(model, config)
    free.submit(Submit("a", [5, 6, 7], greedy(max_tokens=30, logprobs=3)))
    answers = run(free)
    text = answers.tokens["a", 0]
    for delta in answers.deltas:
        (entry,) = delta.logprobs
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy: the chosen is the most likely
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert entry.logprob < 0
    assert text[3] not in text[:3]
    for at_least, first in ((3, text[:4]), (4, text[:3])):
        held.submit(Submit("a", [5, 6, 7], greedy(max_tokens=30, min_tokens=at_least, stop_token_ids=(text[3],))))
        tokens = run(held).tokens["a", 0]
        assert tokens[: len(first)] == first
        assert (tokens == first) == (at_least == 3)
        assert text[3] not in tokens[:at_least]


def test_penalties_count_what_was_generated(model: Decoder) -> None:
    """Against penalties written out by hand over logits of the whole text so far."""
    engine = Engine(model, EngineConfig(kv="fp32", num_blocks=8))
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    prompt = [5, 6, 7]
    engine.submit(Submit("a", prompt, greedy(max_tokens=40, **penalties)))
    engine.submit(Submit("free", prompt, greedy(max_tokens=40)))
    answers = run(engine)
    text = list(prompt)
    for token in answers.tokens["a", 0]:
        logits = forward_window(model, torch.tensor([text]), "fp32")[0, -1].double()
        for seen in set(text):
            logits[seen] = logits[seen] / 1.3 if logits[seen] > 0 else logits[seen] * 1.3
        for seen in set(text[3:]):
            logits[seen] -= 0.4 + 0.7 * text[3:].count(seen)
        assert logits[token] >= logits.max() - 1e-4
        text.append(token)
    assert answers.tokens["a", 0] != answers.tokens["free", 0]


def test_completions_of_a_seeded_prompt_differ_and_repeat(model: Decoder) -> None:
    def go() -> dict:
        engine = Engine(model, EngineConfig(kv="int8", num_blocks=32))
        engine.submit(Submit("a", [5, 6, 7], greedy(n=4, temperature=20.0, seed=11, max_tokens=12)))
        return dict(run(engine).tokens)

    tokens = go()
    assert len({tuple(t) for t in tokens.values()}) == 4
    assert min(len(set(t)) for t in tokens.values()) > 8  # near to uniform: each position has its own noise
    assert go() == tokens


def test_what_the_model_or_the_machine_cannot_hold_is_said(model: Decoder) -> None:
    with pytest.raises(ValueError, match="max_context = 512: the model was made for 256"):
        Engine(model, EngineConfig(max_context=512))
    with pytest.raises(ValueError, match="'int3' is not a KV cache type"):
        Engine(model, EngineConfig(kv="int3"))
    with pytest.raises(ValueError, match="holds no block"):
        Engine(model, EngineConfig(kv_memory=1000))
    with pytest.raises(ValueError, match="block_size = 0"):
        EngineConfig(block_size=0)
    with pytest.raises(ValueError, match="kv_memory"):
        kv_budget(-1, torch.device("cpu"), 0)


# ---- tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(KV))
def test_bytes_per_token_is_what_is_allocated(model: Decoder, name: str) -> None:
    layers = allocate(model.config, name, 3, 16, "cpu")
    total = sum(
        t.numel() * t.element_size() for kv in layers for t in (kv.k, kv.v, kv.k_params, kv.v_params) if t is not None
    )
    assert total == bytes_per_token(model.config, name) * 3 * 16
    assert len(layers) == 2
    assert layers[0].k.shape[:3] == (3, 2, 16)
    assert not any(t.view(torch.uint8).any() for t in (layers[0].k, layers[1].v))


def test_kv_memory_becomes_blocks(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(kv="int8", block_size=16, kv_memory=1 << 20))
    per_token = 2 * 2 * 2 * (32 + 4)  # K and V, layers, heads, codes with scale and minimum
    assert engine.info().bytes_per_token == per_token
    assert engine.info().num_blocks == (1 << 20) // (per_token * 16)
    small_cache = Engine(model, EngineConfig(kv="int8", block_size=16, num_blocks=2))
    assert small_cache.info().max_context == 32


def plan_of_three() -> Plan:
    """A decode row whose token is known, one whose token is in flight, and a piece of a prompt."""
    rows = []
    for slot, (length, generated, blocks) in enumerate([(5, 3, [4, 2]), (3, 1, [7]), (9, 0, [1, 0, 3])]):
        request = Request(str(slot), 0, list(range(10 * slot, 10 * slot + length)), greedy(), 40, frozenset(), 0)
        request.tokens += [90 + slot] * generated
        request.blocks, request.slot, request.admission = blocks, slot, slot + 1
        request.num_tokens = len(request.tokens) + 1
        rows.append(request)
    return Plan(rows, [7, 4, 2], [1, 1, 5], 2, [0, 1])


def test_a_plan_becomes_a_step() -> None:
    stage = Stage(64, 16, 4, 40, 4, torch.device("cpu"))
    for _ in range(2):  # the second time the block tables are already there
        batch = stage.pack(plan_of_three())
        step = batch.step
        assert step.token_ids.tolist() == [90, -2, 22, 23, 24, 25, 26]
        assert step.positions.tolist() == [7, 4, 2, 3, 4, 5, 6]
        assert step.slots.tolist()[0] == 2 * 4 + 3
        assert step.slots.tolist()[2:] == [1 * 4 + 2, 1 * 4 + 3, 0, 1, 2]
        assert step.query_start.tolist() == [0, 1, 2, 7]
        assert step.context_len.tolist() == [8, 5, 7]
        assert step.block_table.tolist() == [[4, 2], [7, 0], [1, 0]]
        assert (step.num_decode, step.max_query, step.logit_rows.tolist()) == (2, 5, [0, 1])
        assert step.max_context >= 8
        assert step.max_prompt_context == 2 * 4  # of the third row alone, in whole blocks
        assert (batch.slots.tolist(), batch.draws) == ([0, 1], None)
        dtypes = [t.dtype for t in (step.token_ids, step.slots, step.logit_rows, step.positions, step.query_start)]
        assert dtypes == [torch.int64] * 3 + [torch.int32] * 2


def test_a_padded_step_lies_at_the_same_addresses_and_its_padding_does_nothing() -> None:
    stage = Stage(64, 16, 8, 40, 4, torch.device("cpu"))
    full = plan_of_three()
    addresses = set()
    for rows in (1, 2):
        plan = Plan(full.requests[:rows], full.starts[:rows], [1] * rows, rows, list(range(rows)))
        batch = stage.pack(plan, rows=4, width=8)
        step = batch.step
        pad = 4 - rows
        assert step.slots.tolist()[rows:] == [-1] * pad
        assert step.context_len.tolist()[rows:] == [1] * pad
        assert step.query_start.tolist() == [0, 1, 2, 3, 4]
        assert step.logit_rows.tolist() == [0, 1, 2, 3]
        assert step.block_table.shape == (4, 8)
        assert not step.block_table[rows:].any()
        assert (step.num_decode, step.max_query, step.max_context) == (4, 0, 32)
        assert batch.slots.tolist() == list(range(rows)) + [8] * pad  # the pool's row of nobody
        tensors = (step.token_ids, step.slots, step.positions, step.query_start, step.context_len, step.block_table)
        addresses.add(tuple(t.data_ptr() for t in tensors))
    assert len(addresses) == 1


def test_tokens_of_no_row_write_nothing_and_do_not_move_the_tokens() -> None:
    stage = Stage(64, 16, 8, 40, 4, torch.device("cpu"))
    plain = [t.clone() for t in tokens_of(stage.pack(plan_of_three()).step)]
    addresses = set()
    for plan in (plan_of_three(), Plan(plan_of_three().requests[:1], [7], [1], 1, [0])):
        step = stage.pack(plan, tokens=16).step
        assert step.slots.tolist()[plan.num_tokens :] == [-1] * (16 - plan.num_tokens)
        assert step.query_start.tolist()[-1] == plan.num_tokens
        assert [t[:1].tolist() for t in tokens_of(step)] == [t[:1].tolist() for t in plain]
        addresses.add(tuple(t.data_ptr() for t in tokens_of(step)))
    assert len(addresses) == 1


def tokens_of(step: Step) -> tuple[torch.Tensor, ...]:
    return step.token_ids, step.positions, step.slots


def test_a_padded_decode_step_gives_the_same_logits(model: Decoder) -> None:
    def fresh() -> Stage:  # it has not seen the step before, so it takes the token from the request, not from a runner's pool
        return Stage(64, 16, 8, 40, 16, torch.device("cpu"))

    request = Request("a", 0, [5, 6, 7], greedy(), 40, frozenset(), 0)
    request.blocks, request.slot, request.admission, request.num_tokens = [2], 0, 1, 4
    with torch.inference_mode():
        kv = allocate(model.config, "int8", 4, 16, "cpu")
        prompt = model.forward(fresh().pack(Plan([request], [0], [3], 0, [0])).step, kv)
        request.tokens.append(int(prompt.argmax()))
        request.num_tokens = 5
        plan = Plan([request], [3], [1], 1, [0])
        plain = model.forward(fresh().pack(plan).step, kv).clone()
        padded = model.forward(fresh().pack(plan, rows=4, width=2).step, kv)
    assert padded.shape == (4, 384)
    np.testing.assert_array_equal(padded[:1].numpy(), plain.numpy())


# ---- the benchmark ------------------------------------------------------------------------------------------------


def test_the_offline_benchmark_reports_what_it_did(model: Decoder, tmp_path: Path) -> None:
    options = {"requests": 7, "concurrency": 3, "input_mean": 20.0, "output_mean": 10.0, "longest": 64}
    report = offline.run("tiny", loaded=model, device="cpu", results=tmp_path / "lines", **options, prefill_interval=2)
    line = json.loads(report)
    assert (line["requests"], line["concurrency"], line["in_tok"], line["out_tok"]) == (7, 3, 140, 70)
    assert line["out_tok_s"] == pytest.approx(70 / line["wall_s"], rel=0.2)
    assert 0 < line["ttft_p50"] < line["wall_s"]
    assert 0 < line["itl_p99"] < line["wall_s"]
    assert line["host_ms_step"] > 0
    assert line["gpu_busy"] is None
    assert line["command"].endswith("--longest 64 --order longest --device cpu --prefill-interval 2")
    assert json.loads((tmp_path / "lines").read_text()) == line
    arrival = json.loads(offline.run("tiny", loaded=model, device="cpu", **options, order="arrival"))
    assert (arrival["order"], arrival["in_tok"], arrival["out_tok"]) == ("arrival", 140, 70)
    with pytest.raises(ValueError, match="order = 'shortest': wants longest or arrival"):
        offline.run("tiny", loaded=model, device="cpu", **options, order="shortest")


def test_the_offline_benchmark_gives_random_weights_the_positions_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    tiny = SHAPES["llama-3-8b"] | sizes | {"num_key_value_heads": 1, "max_position_embeddings": 80}
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    lengths = {"requests": 3, "concurrency": 2, "input_mean": 150.0, "output_mean": 6.0, "longest": 200}
    line = json.loads(offline.run("tiny", dummy=True, scheme="w4a8+w8a8", device="cpu", **lengths))
    assert (line["in_tok"], line["out_tok"], line["scheme"]) == (450, 18, "w4a8+w8a8")
