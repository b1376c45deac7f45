"""Request bodies and stop strings without a server: what the wire tests do not reach, as properties."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedRunner, small
from test_text import byte_fallback

from nybble.engine.client import EngineDied, joined
from nybble.engine.core import Engine
from nybble.engine.messages import Delta, SamplingParams, Submit, TokenLogprob
from nybble.serve.answers import ChatAnswer, CompletionAnswer
from nybble.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    RequestError,
    checkpoint_sampling,
    decode,
    neutral_values,
)
from nybble.serve.stream import Piece, TextStream
from nybble.serve.tools import FORMATS, Tools, ToolText

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6)


class Letters:
    """A tokenizer, and its detokenizer, whose token ids are code points; the last `lag` letters of a push wait for the next, as
    half a character would."""

    def __init__(self, lag: int = 0) -> None:
        self._lag, self._waiting = lag, ""

    def stream(self, skip_special, prompt):
        return self

    def push(self, ids):
        text = self._waiting + "".join(map(chr, ids))
        keep = min(self._lag, len(text))
        self._waiting = text[len(text) - keep:]
        return text[: len(text) - keep]

    def flush(self):
        rest, self._waiting = self._waiting, ""
        return rest


def first_stop(text, stops, include):
    """The definition: read letter by letter until what was read ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end if include else end - max(map(len, hits))], True
    return text, False


@settings(deadline=None, max_examples=400)
@given(text=st.text("ab c", max_size=30), stops=st.lists(st.text("ab c", min_size=1, max_size=5), max_size=3),
       include=st.booleans(), cuts=st.lists(st.integers(1, 6), max_size=30), lag=st.integers(0, 2))
def test_stop_strings_however_the_tokens_are_cut(text, stops, include, cuts, lag):
    stream = TextStream(Letters(lag), SamplingParams(stop=tuple(stops), include_stop=include))
    got, used, at, reason = "", 0, 0, None
    for size in [*cuts, *[1] * 30]:
        ids = [ord(letter) for letter in text[at : at + size]]
        if not ids or reason:
            break
        at += size
        new, count, reason = stream.take(Delta("", 0, ids))
        got, used = got + new, used + count
        wanted, _ = first_stop(text, stops, include)
        assert wanted.startswith(got)  # nothing is sent that would have to be taken back
        held = min(at, len(wanted)) - len(got)
        assert held <= max((len(stop) - 1 for stop in stops), default=0) + lag  # and no more is held than may be a stop
    if not reason:
        rest, _, reason = stream.take(Delta("", 0, [], finish_reason="length"))
        got += rest
    assert (got, reason == "stop") == first_stop(text, stops, include)
    assert used == len(text) or reason == "stop"


def test_the_first_complete_stop_string_wins():
    stream = TextStream(Letters(), SamplingParams(stop=("bcd", "c")))
    assert stream.take(Delta("", 0, [*b"abcd"])) == ("ab", 3, "stop")
    held = TextStream(Letters(), SamplingParams(stop="xyz"))
    assert [held.take(Delta("", 0, [letter]))[0] for letter in b"axyxyq"] == ["a", "", "", "xy", "", "xyq"]


@pytest.mark.parametrize(("kind", "base", "fields"), [
    (ChatRequest, CHAT, {"functions", "store"}),
    (CompletionRequest, {"model": "m", "prompt": "x"}, {"best_of", "suffix"})])
def test_unsupported_fields_take_only_their_neutral_values(kind, base, fields):
    assert fields <= neutral_values(kind).keys()
    for name, neutral in neutral_values(kind).items():
        for value in (None, *neutral):
            assert decode(kind, json.dumps(base | {name: value}).encode()).params() == decode(
                kind, json.dumps(base).encode()).params()
        for value in ("something", 17, {"a": 1}, ["b"]):
            with pytest.raises(RequestError) as caught:
                decode(kind, json.dumps(base | {name: value}).encode()).params()
            assert (caught.value.status, caught.value.error["param"]) == (400, name)


def test_tokens_that_differ_by_a_space_keep_apart():
    tokenizer = byte_fallback()
    spaced, plain = (tokenizer.backend.token_to_id(piece) for piece in ("▁a", "a"))
    drawn = [TokenLogprob(spaced, -0.5, [(spaced, -0.5), (plain, -1.5)]), TokenLogprob(plain, -0.25, [(plain, -0.25)])]
    params = SamplingParams(logprobs=2)
    body = CompletionRequest(model="m", prompt="b")
    text = CompletionAnswer("m", tokenizer, params, body, None).choice(0, " aa", drawn, "stop")
    assert text["logprobs"] == {"tokens": [" a", "a"], "token_logprobs": [-0.5, -0.25], "text_offset": [0, 2],
                                "top_logprobs": [{" a": -0.5, "a": -1.5}, {"a": -0.25}]}
    body = ChatRequest(model="m", messages=[Message(role="user", content="b")])
    [first, _] = ChatAnswer("m", tokenizer, params, body, None).choice(0, "aa", drawn, "stop")["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == (" a", [*b" a"])


def test_a_forced_call_that_is_cut_short_is_no_content():
    tokenizer = byte_fallback()
    body = ChatRequest(model="m", messages=[Message(role="user", content="b")])
    written, form = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na', FORMATS["Hermes and Qwen"]
    for forced in ((), ("f",)):
        tools = Tools(form, (), forced, True, None)
        for text, calls, content in ((written, ["f"], '{"na'), (written[-16:], [], '<tool_call>\n{"na')):
            whole = ChatAnswer("m", tokenizer, SamplingParams(), body, tools).choice(0, text, [], "length")
            assert [call["function"]["name"] for call in whole["message"].get("tool_calls", ())] == calls
            assert whole["message"]["content"] == (None if forced else content)
            chunks = ChatAnswer("m", tokenizer, SamplingParams(), body, tools).chunks(Piece(0, text, [], 9, 0, "length"))
            assert bool(forced) != any(chunk["delta"].get("content") for chunk in chunks)


def test_message_fields_that_clients_send_back():
    assert {"refusal", "audio"} < neutral_values(Message).keys()
    for name in neutral_values(Message):
        turn = {"role": "assistant", "content": "a", name: None}
        decode(ChatRequest, json.dumps(CHAT | {"messages": [turn]}).encode()).params()
        with pytest.raises(RequestError) as caught:
            decode(ChatRequest, json.dumps(CHAT | {"messages": [turn | {name: "x"}]}).encode()).params()
        assert caught.value.error["param"] == f"messages[0].{name}"
    assert decode(Message, b'{"role":"developer","content":"x"}').rendered({}) == {"role": "system", "content": "x"}


CALLS = [
    # What publishers show: Hermes-2-Pro's card, Qwen2.5's documentation, Mistral-7B-Instruct-v0.3, Llama 3.1's documentation.
    ("Hermes and Qwen", '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n</tool_call>', "",
     [("get_stock_fundamentals", {"symbol": "TSLA"})]),
    ("Hermes and Qwen", '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": "San Francisco"}}\n'
     '</tool_call>\n<tool_call>\n{"name": "get_temperature_date", "arguments": {"location": "San Francisco", "date": '
     '"2024-10-01"}}\n</tool_call>', "", [("get_current_temperature", {"location": "San Francisco"}),
                                          ("get_temperature_date", {"location": "San Francisco", "date": "2024-10-01"})]),
    ("Mistral", '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris", "format": "celsius"}}]', "",
     [("get_current_weather", {"location": "Paris", "format": "celsius"})]),
    ("Llama 3", '{"name": "get_current_conditions", "parameters": {"location": "San Francisco, CA", "unit": "Fahrenheit"}}', "",
     [("get_current_conditions", {"location": "San Francisco, CA", "unit": "Fahrenheit"})]),
    ("Llama 3", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("Mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}][TOOL_CALLS] [{"name": "g", "arguments": {}}]', "",
     [("f", {}), ("g", {})]),
    # Calls beside text, and what only looks like one.
    ("Hermes and Qwen", 'a < b\n<tool_call>{"name": "f", "arguments": {"a": [{"b": "}"}]}}</tool_call>\n\nSo: <tool',
     "a < b\nSo: <tool",
     [("f", {"a": [{"b": "}"}]})]),
    ("Hermes and Qwen", "<tool_call>\nf(1)\n</tool_call> no", "<tool_call>\nf(1)\n</tool_call> no", []),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": ', '<tool_call>{"name": "f", "arguments": ', []),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
    ("Mistral", "see [TOOL_CALLS] of [1, 2]", "see [TOOL_CALLS] of [1, 2]", []),
    ("Mistral", '[TOOL_CALLS][{"x": 1}]', '[TOOL_CALLS][{"x": 1}]', []),
    ("Llama 3", "Hello {x}", "Hello {x}", []),
    ("Llama 3", '{"name": "Bob", "age": 3} is he', '{"name": "Bob", "age": 3} is he', []),
    ("Llama 3", '[1, 2, {"name": "f"', '[1, 2, {"name": "f"', []),
    ("Llama 3", '{"name": "f", "args": {}}{"name": "g", "parameters": {}}',
     '{"name": "f", "args": {}}{"name": "g", "parameters": {}}', []),
    ("Llama 3", '{"parameters": {"name": "f"}}', '{"parameters": {"name": "f"}}', []),
    ("Llama 3", '{"name": "\\ud800", "parameters": {}}', '{"name": "\\ud800", "parameters": {}}', []),
    ("Llama 3", '{"type": "function", "name": "f", "parameters": {"name": "g"}}', "", [("f", {"name": "g"})]),
    ("Mistral", '[TOOL_CALLS] [{"id": "1", "arguments": {"b": "}]\\\\", "c": [{}]}, "type": "x", "name": "a}é"}]', "",
     [("a}é", {"b": "}]\\", "c": [{}]})]),
    # From the brace on, arguments are what was written: cut short, no JSON, or with a brace too few for the call.
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("Mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b\\')]),
    ("Llama 3", '{"name": "f", "parameters": {"a": NaN, "b": "\\ud800"}}', "", [("f", '{"a": NaN, "b": "\\ud800"}')]),
    ("Llama 3", '{"parameters": {"a": NaN}, "name": "f"}', "", [("f", '{"a": NaN}')]),
    ("Hermes and Qwen", '<tool_call>{"name": "f", "arguments": {"a": {}</tool_call>\n<tool_call>{"name": "g", "arguments": {}'
     "</tool_call>", "", [("f", '{"a": {}'), ("g", {})]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_tool_calls_however_the_text_is_cut(form, text, content, calls, data):
    reader, at, got, found = ToolText(FORMATS[form]), 0, "", []
    while at < len(text):
        size = data.draw(st.integers(1, len(text)))
        new, more = reader.push(text[at : at + size], final=at + size >= len(text))
        at, got, found = at + size, got + new, found + more
        assert content.startswith(got)
    whole, at_once = ToolText(FORMATS[form]).push(text, final=True)
    assert (got, whole) == (content, content)
    assert [one["index"] for one in at_once] == list(range(len(calls)))
    for index, (name, arguments) in enumerate(calls):
        first, *rest = [one for one in found if one["index"] == index]
        assert first["function"]["name"] == at_once[index]["function"]["name"] == name
        assert all(set(one) == {"index", "function"} and set(one["function"]) == {"arguments"} for one in rest)
        joined = "".join(one["function"]["arguments"] for one in (first, *rest))
        assert joined == at_once[index]["function"]["arguments"]
        assert (joined if isinstance(arguments, str) else json.loads(joined)) == arguments
    assert {one["index"] for one in found} == set(range(len(calls)))


@pytest.mark.parametrize("cut", range(len("\n</tool_call>\n<tool_call>\n")))
def test_a_tag_that_the_token_limit_cuts_is_no_content(cut):
    call = '<tool_call>\n{"name": "f", "arguments": {}}'
    text = call + "\n</tool_call>\n<tool_call>\n"[:cut]
    content, calls = ToolText(FORMATS["Hermes and Qwen"]).push(text, final=True)
    assert (content, len(calls)) == ("", 1)


SCRAPS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f", "arguments": {', '{"arguments": {}',
          '{"name": "f", "parameters": {"a": 1}}', '"name": "g"', '{"type": "x", ', *'{}[]<",;: \\a\n', "}}", "<tool"]


@given(form=st.sampled_from(list(FORMATS.values())), scraps=st.lists(st.sampled_from(SCRAPS), max_size=14),
       cuts=st.lists(st.integers(1, 9)))
@settings(deadline=None, max_examples=500)
def test_what_is_read_does_not_depend_on_the_cuts(form, scraps, cuts):
    text, reader, got, at = "".join(scraps), ToolText(form), "", 0
    whole, at_once = ToolText(form).push(text, final=True)
    joined = [""] * len(at_once)
    for size in [*cuts, len(text)]:
        content, calls = reader.push(text[at : at + size], final=at + size >= len(text))
        got, at = got + content, at + size
        for call in calls:
            joined[call["index"]] += call["function"]["arguments"]
        if at >= len(text):
            break
    assert (got, joined) == (whole, [call["function"]["arguments"] for call in at_once])


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_leave_as_they_are_written(form):
    """Letter by letter, from the brace that opens them to the one that closes them."""
    arguments, out = '{"a": "b", "c": {"d": [1]}}', []
    whole = f'{FORMATS[form].mark}{{"name": "f", "{FORMATS[form].key}": {arguments}}}'
    reader = ToolText(FORMATS[form])
    for letter in whole:
        content, calls = reader.push(letter)
        assert content == ""
        out += [call["function"]["arguments"] for call in calls]
    assert out == list(arguments)


@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, CHAT), (CompletionRequest, {"model": "m", "prompt": "x"})])
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_any_value_in_any_field_is_answered(kind, base, data):
    """A body either gives valid sampling parameters or a 400 that names a field: nothing else comes out."""
    name = data.draw(st.sampled_from([*kind.__struct_fields__, "unknown"]))
    body = base | {name: data.draw(ANY_JSON)}
    try:
        outcome = decode(kind, json.dumps(body).encode()).params()
    except RequestError as error:
        outcome = error
    if isinstance(outcome, RequestError):
        assert outcome.status == 400
        assert json.loads(outcome.body())["error"]["param"]
    else:
        assert isinstance(outcome, SamplingParams)
        assert name != "unknown"


@given(st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_any_bytes_are_a_400(body):
    with pytest.raises(RequestError) as caught:
        decode(ChatRequest, body).params()
    assert caught.value.status == 400


def test_a_reader_that_fell_behind_gets_the_same_in_fewer_deltas():
    def delta(index, *ids, reason=None, logprobs=True):
        return Delta("r", index, list(ids), [TokenLogprob(i, -1.0, []) for i in ids] if logprobs else None, reason)

    got = joined([delta(0, 1), delta(0, 2), delta(1, 7), delta(0, 3), delta(0, 4, reason="stop"), delta(1, 8),
                  Delta("r", 1, [], finish_reason="error", error="e")])
    assert [(d.index, d.token_ids, d.finish_reason) for d in got] == [
        (0, [1, 2], None), (1, [7], None), (0, [3, 4], "stop"), (1, [8], None), (1, [], "error")]
    assert [[one.token_id for one in d.logprobs or ()] for d in got] == [[1, 2], [7], [3, 4], [8], []]
    assert joined([delta(0, 1, logprobs=False), delta(0, 2, logprobs=False)]) == [Delta("r", 0, [1, 2])]
    died = EngineDied("x")
    assert joined([delta(0, 1), died]) == [delta(0, 1), died]


def test_one_completion_of_two_is_given_up():
    """Its blocks are free at once, the other goes on to its own end."""
    engine = Engine(ScriptedRunner(), small())
    engine.submit(Submit("r", [5, 6, 7], SamplingParams(n=2, max_tokens=20, temperature=0.0)))
    seen = [delta for _ in range(4) for delta in engine.step()]
    used = engine.info().num_blocks - engine.info().free_blocks
    engine.abort("r", 0)
    assert engine.info().num_blocks - engine.info().free_blocks < used
    engine.abort("r", 0)  # has ended: ignored
    engine.abort("r", 7)
    while engine.has_work:
        seen += engine.step()
    ends = [(delta.index, delta.finish_reason) for delta in seen if delta.finish_reason]
    assert ends == [(0, "abort"), (1, "length")]
    assert sum(len(delta.token_ids) for delta in seen if delta.index == 1) == 20
    assert sum(len(delta.token_ids) for delta in seen if delta.index == 0) <= 4


# As published with Qwen2.5-7B-Instruct.
QWEN = {"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"}


@pytest.mark.parametrize("written", [QWEN, {"temperature": 0.6, "top_p": 0.9, "top_k": None}, {"min_p": 0.05}, {}])
def test_what_requests_leave_out_is_what_the_checkpoint_says(tmp_path, written):
    """transformers reads the same file; of what it reads, vLLM takes these fields where they are not its defaults."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    read = transformers.GenerationConfig.from_pretrained(tmp_path).to_diff_dict()
    fields = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
    expected = {field: read[field] for field in fields if read.get(field) is not None}
    sampling = checkpoint_sampling(tmp_path)
    assert sampling == expected
    plain, chat = {"model": "m", "prompt": "x"}, {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for kind, body in ((CompletionRequest, plain), (ChatRequest, chat)):
        off = decode(kind, json.dumps(body | {"top_k": -1}).encode())  # as vLLM says it, too
        assert off.params(**sampling).top_k == 0
        params = decode(kind, json.dumps(body).encode()).params(**sampling)
        assert {field: getattr(params, field) for field in expected} == expected
        said = decode(kind, json.dumps(body | {"temperature": 0, "top_k": 0, "top_p": None}).encode()).params(**sampling)
        assert (said.temperature, said.top_k, said.top_p) == (0, 0, expected.get("top_p", 1.0))


def test_do_sample_false_is_greedy_unless_a_temperature_is_given(tmp_path):
    for written, expected in (({"do_sample": False}, {"temperature": 0.0}), ({"do_sample": True}, {}), ({}, {}),
                              ({"do_sample": False, "temperature": 0.3}, {"temperature": 0.3})):
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
        assert checkpoint_sampling(tmp_path) == expected
    assert checkpoint_sampling(tmp_path / "model.gguf") == {}


@pytest.mark.parametrize(("written", "named"), [
    ('{"temperature": "hot"}', "temperature = 'hot'"), ('{"top_p": 1.5}', "top_p = 1.5"), ('{"top_k": -3}', "top_k = -3"),
    ("[1]", "no JSON object"), ("{", "damaged")])
def test_a_broken_generation_config_is_named(tmp_path, written, named):
    (tmp_path / "generation_config.json").write_text(written)
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        checkpoint_sampling(tmp_path)
    assert "generation_config.json" in str(caught.value)
