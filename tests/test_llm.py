"""The Python API, end to end on tiny models: against transformers where nothing is quantized, against itself where it is."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tiny import make_tiny, token_ids

from nybble import LLM, Grammar, SamplingParams, pipeline
from nybble.quantize import Recipe, quantize_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KV_TYPES = ("fp32", "bf16", "fp16", "int8", "int4", "fp8", "fp8_e5m2")


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llm")


@pytest.fixture(scope="module")
def reference(folder: Path):
    return make_tiny(folder / "float")


@pytest.fixture(scope="module")
def exact(folder: Path, reference) -> LLM:
    """Float weights, float32 KV: what transformers computes."""
    return LLM(folder / "float", kv="fp32", device="cpu", block_size=16)


@pytest.fixture(scope="module")
def llm(folder: Path, reference) -> LLM:
    """W4A8 with an int8 KV cache."""
    quantize_checkpoint(folder / "float", folder / "w4a8", Recipe(method="rtn", group=32), kv="int8", device="cpu")
    return LLM(folder / "w4a8", device="cpu", block_size=16)


def all_free(llm: LLM) -> bool:
    """Nothing runs, and every block is free or only kept for its prefix."""
    info = llm.info()
    return (info.running, info.waiting, info.free_blocks + info.cached_blocks) == (0, 0, info.num_blocks)


def test_greedy_tokens_are_those_of_transformers(exact, reference):
    prompts = [row[:n] for row, n in zip(token_ids(3, 40).tolist(), (1, 17, 40))]
    for prompt, answer in zip(prompts, exact.generate(prompts, GREEDY)):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert answer.token_ids == expected[0, len(prompt):].tolist()
        assert (answer.input_token_len, answer.finish_reason) == (len(prompt), "length")


def test_logprobs_are_those_of_transformers(exact, reference):
    prompt = token_ids(1, 20).tolist()[0]
    answer = exact.generate(prompt, greedy(logprobs=3))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    assert len(answer.logprobs) == 12
    for row, token, found in zip(expected, answer.token_ids, answer.logprobs):
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = torch.topk(row, 3)
        assert [t for t, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompt_logprobs_are_those_of_transformers(exact, folder, reference):
    prompts = [row[:n] for row, n in zip(token_ids(3, 90, seed=5).tolist(), (1, 33, 90))]
    in_pieces = LLM(folder / "float", kv="fp32", device="cpu", block_size=16, max_batched_tokens=20, max_batch=2)
    params = greedy(prompt_logprobs=2, max_tokens=2)
    for llm in (exact, in_pieces):
        llm.generate(prompts, GREEDY)  # the prefix cache has them now
        for prompt, answers in zip(prompts, llm.generate(prompts, replace(params, n=2))):
            with torch.no_grad():
                expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1)
            for answer in answers:
                first, *rest = answer.prompt_logprobs
                assert (first.token_id, first.logprob, first.top) == (prompt[0], None, [])
                assert [one.token_id for one in rest] == prompt[1:]
                for row, one in zip(expected, rest, strict=False):
                    assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
                    assert [p for _, p in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
                assert (answer.cached_tokens, answer.logprobs) == (0, [])
        assert not llm.generate(prompts[1], GREEDY).prompt_logprobs
        assert all_free(llm)


def test_eos_ends_an_answer_where_transformers_ends_it(exact, reference):
    prompt = token_ids(1, 8).tolist()[0]
    free = exact.generate(prompt, GREEDY).token_ids
    stop = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=stop)
    answer = exact.generate(prompt, greedy(stop_token_ids=(stop,)))
    assert (answer.token_ids, answer.finish_reason) == (expected[0, 8:].tolist(), "stop")


def test_a_batch_gives_what_each_prompt_gets_alone(llm):
    prompts = ["Once upon a time", "a", [5, 6, 7], "The quick brown fox jumps over the lazy dog" * 3]
    params = [GREEDY, SamplingParams(temperature=0.9, seed=7, max_tokens=9), greedy(max_tokens=3), GREEDY]
    together = llm.generate(prompts, params)
    assert [r.index for r in together] == [0, 1, 2, 3]
    for prompt, one, answer in zip(prompts, params, together):
        alone = llm.generate(prompt, one)
        assert (alone.token_ids, alone.text) == (answer.token_ids, answer.text)


def test_the_order_of_starts_changes_no_answer(llm):
    prompts = [row[:n] for row, n in zip(token_ids(5, 40, seed=6).tolist(), (3, 40, 9, 21, 1))]
    params = [greedy(max_tokens=n) if n % 2 else SamplingParams(seed=n, temperature=1.5, max_tokens=n, ignore_eos=True, n=2)
              for n in (2, 9, 4, 30, 9)]
    seen: list[int] = []
    with LLM(llm.path, device="cpu", block_size=4, num_blocks=16, max_context=64) as small:
        together = small.generate(prompts, params, on_token=seen.append)
        assert small.info().preemptions > 0
        alone = [small.generate(prompt, one) for prompt, one in zip(prompts, params)]
    whole = llm.generate(prompts, params)
    for answers in (alone, whole):
        for one, other in zip(together, answers):
            pairs = zip(one, other) if isinstance(one, list) else [(one, other)]
            assert all((a.token_ids, a.text, a.choice) == (b.token_ids, b.text, b.choice) for a, b in pairs)
    assert len(seen) == 2 * 2 + 9 + 2 * 4 + 30 * 2 + 9


def test_stream_joins_to_generate_and_leaving_early_frees_everything(llm):
    whole = llm.generate("Tell me", GREEDY)
    pieces = list(llm.stream("Tell me", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text == pieces[-1].response.text
    assert pieces[-1].response.token_ids == whole.token_ids
    for left in llm.stream("Tell me", greedy(max_tokens=100)):
        if len(left.response.token_ids) == 2:
            break
    gc.collect()
    assert llm.generate("Tell me", GREEDY).token_ids == whole.token_ids
    assert all_free(llm)


def test_streams_read_by_turns_lose_nothing(llm):
    first, second = llm.stream("Tell me", GREEDY), llm.stream("abc", greedy(max_tokens=5))
    head = next(first)
    turns = [next(second) for _ in range(2)]
    between = llm.generate("Tell me more", GREEDY)
    texts = [head.text + "".join(p.text for p in first), "".join(p.text for p in [*turns, *second])]
    assert texts == [r.text for r in llm.generate(["Tell me", "abc"], [GREEDY, greedy(max_tokens=5)])]
    assert between.token_ids == llm.generate("Tell me more", GREEDY).token_ids
    assert all_free(llm)


def test_threads_share_a_model(llm):
    prompts = [f"thread {i} " * (i + 1) for i in range(6)]
    alone = [llm.generate(prompt, greedy(max_tokens=12)).token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda prompt: llm.generate(prompt, greedy(max_tokens=12)).token_ids, prompts * 3))
    assert together == alone * 3
    assert all_free(llm)


def test_a_stream_that_is_collected_within_a_step_ends(folder, monkeypatch):
    llm = LLM(folder / "float", device="cpu", block_size=16)
    forgotten = llm.stream("Tell me", greedy(max_tokens=100))
    next(forgotten)
    step = llm.engine.step

    def collecting():
        forgotten.close()  # as Python does to a stream in a cycle, wherever it happens to collect
        return step()

    monkeypatch.setattr(llm.engine, "step", collecting)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(llm.generate("abc", GREEDY)), daemon=True)
    thread.start()
    thread.join(30)
    assert [len(one.token_ids) for one in answers] == [12]
    assert all_free(llm)


def test_a_repeated_prompt_comes_from_the_cache_and_answers_the_same(llm):
    prompt = token_ids(1, 50, seed=3).tolist()[0]
    first, second = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)  # whole blocks of 16
    assert first.token_ids == second.token_ids


def test_n_completions_differ_and_repeat_with_their_seed(llm):
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=8, ignore_eos=True)
    answers = llm.generate("x", params)
    assert [a.choice for a in answers] == [0, 1, 2]
    assert len({tuple(a.token_ids) for a in answers}) == 3
    assert [a.token_ids for a in llm.generate(["x"], params)[0]] == [a.token_ids for a in answers]


def test_stop_strings_cut_the_text_and_min_tokens_waits(exact):
    prompt = token_ids(1, 8, seed=4).tolist()[0]
    letters = greedy(max_tokens=40, logprobs=0)
    text = exact.generate(prompt, letters).text
    stop = next(c for i, c in enumerate(text) if i >= 2 and c not in text[:i] and c != "�")
    answer = exact.generate(prompt, greedy(max_tokens=40, logprobs=0, stop=(stop,)))
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    assert len(answer.logprobs) == len(answer.token_ids) < 40
    kept = exact.generate(prompt, greedy(max_tokens=40, stop=(stop,), include_stop=True))
    assert kept.text == answer.text + stop
    later = exact.generate(prompt, greedy(max_tokens=40, stop=(stop,), min_tokens=len(answer.token_ids) + 1))
    assert later.text.startswith(answer.text + stop)
    assert all_free(exact)


def test_the_text_of_the_id_that_stops_is_no_part_of_the_answer(llm):
    prompt = next([byte] for byte in range(3, 259) if len(set(llm.generate([byte], GREEDY).token_ids[:3])) == 3)
    ids = llm.generate(prompt, GREEDY).token_ids[:3]
    ending = {"stop_token_ids": (ids[2],), "skip_special_tokens": False}
    before, whole = (llm.tokenizer.decode(some, skip_special=False) for some in (ids[:2], ids))
    assert before != whole
    answer = llm.generate(prompt, greedy(**ending))
    assert (answer.token_ids, answer.text, answer.finish_reason) == (ids, before, "stop")
    assert llm.generate(prompt, greedy(**ending, stop=("no such text",))).text == before
    assert llm.generate(prompt, greedy(**ending, include_stop=True)).text == whole


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.filterwarnings("ignore:no KV scales")
def test_every_kv_type_runs_and_is_near_float(exact, folder, kv):
    prompt = token_ids(1, 60, seed=5).tolist()[0]
    with LLM(folder / "float", kv=kv, device="cpu") as other:
        assert other.info().kv == kv
        found = other.generate(prompt, greedy(max_tokens=1, logprobs=1)).logprobs[0]
        assert other.info().bytes_per_token <= exact.info().bytes_per_token
    best, logprob = exact.generate(prompt, greedy(max_tokens=1, logprobs=20)).logprobs[0].top[0]
    assert found.token_id == best or kv in ("int4", "fp8_e5m2")
    assert abs(found.logprob - logprob) < {"int4": 3.0, "fp8_e5m2": 1.0, "fp8": 0.5}.get(kv, 0.1)


def test_conversations_and_the_pipeline(llm, folder):
    conversation = [{"role": "user", "content": "Hi!"}]
    rendered = llm.tokenizer.encode("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n", add_special=False)
    assert llm.render(conversation) == rendered
    expected = llm.generate(rendered, GREEDY).token_ids
    assert llm.chat(conversation, GREEDY).token_ids == expected
    assert [r.token_ids for r in llm.chat([conversation] * 2, GREEDY)] == [expected] * 2
    with pipeline(folder / "w4a8", device="cpu") as pipe:
        one = pipe("Hi!", GREEDY)
        both = pipe(["Hi!", conversation], GREEDY)
        assert [one.token_ids, *(r.token_ids for r in both)] == [expected] * 3
        assert "".join(p.text for p in pipe.stream_infer("Hi!", GREEDY)) == one.text
        assert pipe("Hi!", GREEDY, do_preprocess=False).token_ids == llm.generate("Hi!", GREEDY).token_ids


def test_calls_without_params_take_the_checkpoints_sampling(folder, reference, tmp_path):
    """Against transformers, which takes its own from the same file; and what quantizes the checkpoint keeps the file."""
    written = {"do_sample": False, "repetition_penalty": 1.4, "eos_token_id": [2, 7]}
    model = shutil.copytree(folder / "float", tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(written))
    with LLM(model, kv="fp32", device="cpu", block_size=16) as llm:
        assert llm.get_default_sampling_params(seed=3) == SamplingParams(temperature=0.0, repetition_penalty=1.4, seed=3)
        for prompt in token_ids(3, 20).tolist():
            expected = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, repetition_penalty=1.4,
                                          eos_token_id=[2, 7])
            assert llm.generate(prompt).token_ids == expected[0, len(prompt):].tolist()
    quantize_checkpoint(model, tmp_path / "w8", Recipe(scheme="w8a8", method="rtn", transform="none"), kv="int8", device="cpu")
    assert json.loads((tmp_path / "w8" / "generation_config.json").read_text()) == written
    (model / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p = 1.5"):
        LLM(model, device="cpu")


def test_logit_bias_is_transformers_sequence_bias(exact, reference):
    """Alone, and in a step with rows that have none; ids beyond the vocabulary are refused."""
    prompts = [row[:9] for row in token_ids(3, 20).tolist()]
    plain = [answer.token_ids for answer in exact.generate(prompts, GREEDY)]
    bias = {plain[0][0]: -100, plain[0][3]: -3, 40: 6}
    for prompt in prompts:
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None,
                                      sequence_bias=[[[token], float(value)] for token, value in bias.items()])
        assert exact.generate(prompt, greedy(logit_bias=bias)).token_ids == expected[0, len(prompt):].tolist()
    mixed = exact.generate(prompts, [greedy(logit_bias=bias), GREEDY, greedy(logit_bias=bias)])
    assert mixed[1].token_ids == plain[1]
    assert mixed[2].token_ids == exact.generate(prompts[2], greedy(logit_bias=bias)).token_ids != plain[2]
    with pytest.raises(ValueError, match=r"ids must be in 0 to 383, the model's vocabulary \(logit_bias\)"):
        exact.generate(prompts[0], greedy(logit_bias={384: 1.0}))


def test_a_kv_type_that_is_none_is_refused_and_the_directorys_name_is_the_models(folder, monkeypatch):
    with pytest.raises(ValueError, match="kv = 'int3': wants auto, fp32, bf16, fp16, int8, int4, fp8, fp8_e5m2"):
        LLM(folder / "float", kv="int3", device="cpu")
    monkeypatch.chdir(folder / "float")
    with LLM(".", device="cpu") as llm:
        assert llm.info().model == "float"


def test_params_of_the_wrong_type_are_refused_and_one_stop_string_is_one():
    assert SamplingParams(stop="end").stop == ("end",)
    for name, value in (("max_tokens", 2.5), ("n", True), ("top_k", None), ("temperature", "hot"), ("top_p", None),
                        ("logit_bias", {3: 101}), ("logit_bias", {3: True}), ("logit_bias", [3])):
        with pytest.raises(ValueError, match=f"{name} = "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(("option", "near"), [("max_batch_size", "max_batch"), ("context", "max_context"), ("tp", "max_batch"),
                                              ("tensor_parallel_size", "tensor_parallel"), ("devices", "device")])
def test_an_unknown_option_is_named_with_those_like_it(folder, option, near):
    with pytest.raises(ValueError, match=rf"no option {option}; there are .*\b{near}\b"):
        LLM(folder / "float", device="cpu", **{option: 1})


def test_a_name_of_the_hub_says_how_to_get_it():
    with pytest.raises(FileNotFoundError, match="`hf download Org/Model-1B --local-dir Model-1B`"):
        LLM("Org/Model-1B")


def test_what_is_no_conversation_is_refused(llm):
    for odd in ("hi", "", 5, {"role": "user", "content": "hi"}, [{"content": "no role"}], [["hi"]]):
        with pytest.raises(ValueError, match="no conversation"):
            llm.chat(odd, GREEDY)


def test_a_closed_model_says_so(folder):
    closed = LLM(folder / "float", device="cpu")
    left, read_on = (closed.stream("x", greedy()) for _ in range(2))
    next(left), next(read_on)
    closed.close()
    left.close()
    for call in (lambda: closed.generate("x"), closed.info, lambda: next(read_on)):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize(("prompts", "params", "says"), [
    ("", GREEDY, "prompt 0: the prompt is empty"),
    (["ok", []], GREEDY, "prompt 1: the prompt is empty"),
    ("\ud800", GREEDY, "lone surrogate"),
    ([[5, 9999]], GREEDY, "prompt 0: ids must be in 0 to 383"),
    ("x" * 300, GREEDY, "prompt 0: the prompt has 300 tokens"),
    ("x", greedy(max_tokens=1000), "max_tokens = 1000 exceed the context of 256"),
    (["a", "b"], [GREEDY], "1 sampling params for 2 prompts"),
    ([None], GREEDY, "prompt 0: NoneType is no prompt"),
    (7, GREEDY, "int is no prompt"),
    ([["a"]], GREEDY, "prompt 0: 'a' is no token id"),
    ([5, "a"], GREEDY, "prompt 0: 'a' is no token id"),
    ("a", {"max_tokens": 3}, "params: wants SamplingParams"),
])  # fmt: skip
def test_bad_prompts_are_named_and_the_engine_goes_on(llm, prompts, params, says):
    with pytest.raises(ValueError, match=says):
        llm.generate(prompts, params)
    assert llm.generate([], GREEDY) == []
    assert llm.generate("still there", greedy(max_tokens=2)).finish_reason == "length"
    assert all_free(llm)


def test_a_grammar_without_llguidance_says_what_to_install(exact, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'nybble\[grammar\]' \(grammar\)"):
        exact.generate("a", SamplingParams(grammar=Grammar("regex", "[a-c]+, not seen before")))
    assert all_free(exact)
