"""Structured output on tiny random models, which keep to nothing by themselves. What an answer must be is checked by `json` and
`re`; needs llguidance."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from msgspec.structs import replace
from tiny import make_tiny
from tokenizers import Tokenizer

from nybble import LLM, Grammar, SamplingParams
from nybble.serve.protocol import ChatRequest, decode
from nybble.serve.tools import FORMATS, ToolText, tools_of

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string", "maxLength": 12, "pattern": "^[a-z]+$"},
                         "age": {"type": "integer", "minimum": 0, "maximum": 150},
                         "tags": {"type": "array", "items": {"enum": ["x", "yy", None]}, "maxItems": 3}}}
PROMPTS = ["hello", "a longer prompt than that one", "x"]


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (list(found) == ["name", "age", "tags"] and re.fullmatch("[a-z]{1,12}", found["name"]) is not None
            and type(found["age"]) is int and 0 <= found["age"] <= 150
            and len(found["tags"]) <= 3 and all(tag in ("x", "yy", None) for tag in found["tags"]))


def asking(kind: str, text, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 300, "grammar": Grammar(kind, text), **more})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    make_tiny(folder, max_position_embeddings=1024, vocab_size=264)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "overlap"])
def llm(path, request) -> LLM:
    return LLM(path, device="cpu", block_size=16, overlap=request.param)


def test_json_schema(llm):
    for temperature in (0.0, 1.0):
        answers = llm.generate(PROMPTS, asking("json_schema", PERSON, temperature=temperature))
        for answer in answers:
            assert answer.finish_reason == "stop"
            assert is_person(answer.text), answer.text
            assert answer.token_ids[-1] in llm.tokenizer.eos_ids  # the model's own end, where the grammar lets it


def test_regex_and_choice_and_lark(llm):
    for kind, text, pattern in (("regex", r"[A-Z]{2}-\d{3}( [a-z]+ ?){1,2}", r"[A-Z]{2}-\d{3}( [a-z]+ ?){1,2}"),
                                ("regex", "(ja|nein|vielleicht)", "ja|nein|vielleicht"),
                                ("choice", ["yes", 'say "no"', "né\\€"], r'yes|say "no"|né\\€'),
                                ("lark", 'start: "<" /[0-9]{1,4}/ ">"', "<[0-9]{1,4}>")):
        found = {answer.text for seed in range(4) for answer in llm.generate(PROMPTS, asking(kind, text, seed=seed))
                 if answer.finish_reason == "stop"}
        assert found
        assert all(re.fullmatch(pattern, one) for one in found), (pattern, found)


def test_rows_without_a_grammar_draw_what_they_draw_alone(llm):
    free = [SamplingParams(temperature=temperature, seed=7, max_tokens=40, ignore_eos=True, logprobs=logprobs)
            for temperature, logprobs in ((0.0, None), (1.0, None), (0.0, 2))]
    alone = [llm.generate(PROMPTS[1], one) for one in free]
    both = llm.generate([PROMPTS[1]] * 3 + PROMPTS, [*free, *[asking("json_schema", PERSON)] * 3])
    assert [one.token_ids for one in both[:3]] == [one.token_ids for one in alone]
    assert both[2].logprobs == alone[2].logprobs
    assert all(is_person(answer.text) for answer in both[3:])


def test_rows_with_a_grammar_do_not_depend_on_the_batch_or_on_overlap(path, llm):
    alone = [llm.generate(prompt, asking("json_schema", PERSON)).token_ids for prompt in PROMPTS]
    other = LLM(path, device="cpu", block_size=16, overlap=False)
    assert [one.token_ids for one in llm.generate(PROMPTS, asking("json_schema", PERSON))] == alone
    assert [other.generate(prompt, asking("json_schema", PERSON)).token_ids for prompt in PROMPTS] == alone


def test_every_completion_follows_its_own(llm):
    answers = llm.generate("hi", asking("json_schema", PERSON, n=4))
    assert all(is_person(answer.text) for answer in answers)
    assert len({answer.text for answer in answers}) > 1


def test_preempted_and_computed_again(path):
    """Blocks for two of five answers, which all start at once: rows are taken out midway and come back."""
    wide = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 20, "maxItems": 20}
    params = asking("json_schema", wide, max_tokens=200)
    with LLM(path, device="cpu", block_size=16, num_blocks=14, overlap=True, max_context=224) as small, \
            LLM(path, device="cpu", block_size=16) as large:
        small.generate("abc", replace(params, max_tokens=1))  # compiles the grammar, and keeps it
        answers = small.generate(["abc", "abd", "xyz", "1", "2"], params)
        assert small.info().preemptions > 0
        assert [one.token_ids for one in answers] == [one.token_ids for one in large.generate(["abc", "abd", "xyz", "1", "2"],
                                                                                               params)]
        for answer in answers:
            assert [100 <= one <= 999 for one in json.loads(answer.text)] == [True] * 20


def test_penalties_logprobs_stop_strings_and_limits(llm):
    params = asking("regex", "[ab]{30}", presence_penalty=0.5, repetition_penalty=1.3, top_k=3, top_p=0.9, logprobs=3)
    answer = llm.generate("hi", params)
    assert re.fullmatch("[ab]{30}", answer.text)
    free = llm.generate("hi", SamplingParams(temperature=0.0, max_tokens=1, logprobs=3))
    assert answer.logprobs[0].top == free.logprobs[0].top  # of the model's own distribution
    cut = llm.generate("hi", asking("regex", "[ab]{30}", max_tokens=5))
    assert (len(cut.text), cut.finish_reason) == (5, "length")
    stopped = llm.generate("hi", asking("regex", "x{8}stop[ab]{30}", stop="stop"))
    assert (stopped.text, stopped.finish_reason) == ("x" * 8, "stop")


def test_an_answer_that_has_ended_leaves_the_penalties_of_others_alone(path):
    """The step after its last is under way by then, with both in it."""
    short = asking("choice", ["yes" * 6], presence_penalty=0.5)
    long = asking("regex", "[a-z]{25}", temperature=0.0, frequency_penalty=-2.0)
    with LLM(path, device="cpu", block_size=16, max_batch=2, overlap=True) as llm:
        alone = llm.generate(PROMPTS[1], long)
        llm.generate("x", short)  # compiles its grammar, and keeps it
        ended, both = llm.generate(["x", PROMPTS[1]], [short, long])
    assert (ended.text, ended.finish_reason) == ("yes" * 6, "stop")
    assert both.token_ids == alone.token_ids


@pytest.mark.parametrize(("kind", "text", "why"), [
    ("json_schema", {"type": "nonsense"}, "nonsense"),
    ("json_schema", "{", "no JSON object"),
    ("json_schema", {"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ("regex", "(a", "unclosed group"),
    ("choice", [], "non-empty list"),
    ("lark", "begin: x", "start"),
    ("json_schema", {"$ref": "#"}, "no answer keeps to it"),
    ("lark", "start: start", "no answer keeps to it"),
])  # fmt: skip
def test_what_is_no_grammar_is_refused_and_the_next_request_runs(llm, kind, text, why):
    with pytest.raises(ValueError, match=why):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2), asking(kind, text)])
    assert llm.info().running == llm.info().waiting == 0
    assert is_person(llm.generate("hi", asking("json_schema", PERSON)).text)


@pytest.mark.parametrize("text", ["<|im_end|>", "<|endoftext|>x", "[TOOL_CALLS]", "\x7f\u2028\0"])
def test_text_that_spells_a_special_token_stays_text(llm, text):
    """llguidance makes tokens of forced text as of a prompt, where these are special: EOS among them."""
    assert llm.generate("hi", asking("choice", [text])).text == text
    assert json.loads(llm.generate("hi", asking("json_schema", {"const": {"a": text}})).text) == {"a": text}


def test_thousands_of_choices_and_long_repetitions(llm):
    assert re.fullmatch("c[0-9]{1,4}", llm.generate("hi", asking("choice", [f"c{i}" for i in range(5000)])).text)
    assert llm.generate("hi", asking("regex", "(a{1000}){1000}", max_tokens=9)).text == "a" * 9


def test_params_say_what_does_not_go_together():
    for more in ({"ignore_eos": True}, {"min_tokens": 3}):
        with pytest.raises(ValueError, match="with a grammar, which says where the answer ends"):
            asking("regex", "a", **more)
    with pytest.raises(ValueError, match="wants one of json_schema"):
        Grammar("ebnf", "a")


GREET = {"type": "function", "function": {"name": "greet", "strict": True, "parameters": {
    "type": "object", "properties": {"who": {"$ref": "#/$defs/who"}, "loud": {"type": "boolean"}}, "required": ["who", "loud"],
    "additionalProperties": False, "$defs": {"who": {"enum": ["Ann", "Zoë"]}}}}}
WAIT = {"type": "function", "function": {"name": "wäit"}}


def is_call(name: str, arguments: str) -> bool:
    found = json.loads(arguments)
    return found == {} if name == "wäit" else name == "greet" and found["who"] in ("Ann", "Zoë") and type(found["loud"]) is bool


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_has_to_be_made(llm, form):
    """In each format, the mark of Mistral's being a token of its own."""
    llm.tokenizer.templates["default"] = "{{ tools }}" + FORMATS[form].phrase
    named = {"type": "function", "function": {"name": "greet"}}
    for choice, several, names in (("required", False, {"greet", "wäit"}), (named, True, {"greet"}),
                                   ("required", True, {"greet", "wäit"})):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [GREET, WAIT], "tool_choice": choice,
                "parallel_tool_calls": several}
        tools = tools_of(decode(ChatRequest, json.dumps(body).encode()), llm.tokenizer)
        assert (tools.mark_id is not None) == (form == "Mistral")
        params = tools.applied(SamplingParams(seed=1, max_tokens=600))
        answers = [llm.generate("hi", SamplingParams(seed=seed, max_tokens=600, grammar=params.grammar,
                                                     skip_special_tokens=params.skip_special_tokens)) for seed in range(6)]
        seen, most = set(), 0
        for answer in (one for one in answers if one.finish_reason == "stop"):
            reader = ToolText(FORMATS[form])
            content, calls = reader.push(answer.text, final=True)
            assert content == ""
            assert all(is_call(one["function"]["name"], one["function"]["arguments"]) for one in calls)
            assert calls
            seen, most = seen | {one["function"]["name"] for one in calls}, max(most, len(calls))
            assert tools.mark_id is None or answer.token_ids[0] == tools.mark_id
        assert seen
        assert seen <= names
        assert most == 1 or (choice == "required" and several and form != "Llama 3")


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_does_not_call_keeps_to_the_response_format(llm, form):
    llm.tokenizer.templates["default"] = "{{ tools }}" + FORMATS[form].phrase
    schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"], "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [GREET, WAIT], "response_format": asked}
    request = decode(ChatRequest, json.dumps(body).encode())
    params, seen = tools_of(request, llm.tokenizer).applied(request.params()), set()
    for seed in range(30):
        answer = llm.generate("hi", replace(params, seed=seed, max_tokens=400))
        content, calls = ToolText(FORMATS[form]).push(answer.text, final=True)
        if answer.finish_reason == "stop":
            assert calls or json.loads(content)["age"] in (7, 8)
            assert not calls or content == ""
            assert all(is_call(one["function"]["name"], one["function"]["arguments"]) for one in calls)
            seen.add(bool(calls))
    assert seen == {True, False}
    body["tool_choice"] = "required"
    request = decode(ChatRequest, json.dumps(body).encode())
    assert '"age"' not in tools_of(request, llm.tokenizer).applied(request.params()).grammar.text


@pytest.fixture(scope="module")
def url(path):
    script = ("import sys; from nybble.serve.launch import serve; serve(sys.argv[1], port=0, model_name='tiny', "
              "engine={'device': 'cpu', 'overlap': True, 'block_size': 16, 'num_blocks': 256}, "
              "progress=lambda text: print(text, flush=True))")
    with subprocess.Popen([sys.executable, "-c", script, str(path)], text=True, stdout=subprocess.PIPE) as process:
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://127.0.0.1:\d+", line))) + "/v1"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


TURN = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 5}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


def test_over_http_beside_requests_that_ask_for_nothing(url):
    async def everyone() -> list:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            ask = client.chat.completions.create
            free = {**TURN, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            alone = [(await ask(**free, temperature=temperature)).choices[0].message.content for temperature in (0, 1)]
            return alone, await asyncio.gather(
                ask(**free, temperature=0), ask(**free, temperature=1),
                ask(**TURN, max_tokens=300, response_format=FORM, n=3),
                ask(**TURN, max_tokens=300, extra_body={"guided_regex": "[a-f]{3}(-[0-9]{2}){2}"}),
                client.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"choice": ["é", "no"]}}),
                ask(**TURN, max_tokens=300, tools=[GREET, WAIT], tool_choice="required", parallel_tool_calls=False))

    alone, (greedy, drawn, people, pattern, choice, call) = asyncio.run(everyone())
    assert [greedy.choices[0].message.content, drawn.choices[0].message.content] == alone
    assert all(is_person(one.message.content) and one.finish_reason == "stop" for one in people.choices)
    assert re.fullmatch("[a-f]{3}(-[0-9]{2}){2}", pattern.choices[0].message.content)
    assert choice.choices[0].text in ("é", "no")
    assert call.choices[0].finish_reason == "tool_calls"
    [one] = call.choices[0].message.tool_calls
    assert is_call(one.function.name, one.function.arguments)


def test_streamed_over_http(url):
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    chunks = list(client.chat.completions.create(**TURN, max_tokens=300, response_format=FORM, stream=True))
    assert is_person("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    named = {"type": "function", "function": {"name": "greet"}}
    with client.chat.completions.stream(**TURN, max_tokens=300, tools=[GREET], tool_choice=named) as stream:
        answer = stream.get_final_completion().choices[0]
    [call] = answer.message.tool_calls
    assert is_call(call.function.name, call.function.arguments)
    assert answer.finish_reason == "tool_calls"


def test_arguments_are_an_object_where_parameters_do_not_say_so(url):
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
        "additionalProperties": False}}}
    for seed in range(4):
        answer = client.chat.completions.create(**TURN | {"seed": seed}, max_tokens=300, tools=[tool], tool_choice="required",
                                                parallel_tool_calls=False)
        assert 0 <= json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["a"] <= 9


def test_refused_over_http(url):
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    broken = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    pattern = {"type": "string", "pattern": "^(a+)+$", "minLength": 5000, "maxLength": 100000}  # too many states, later
    endless = {"type": "json_schema", "json_schema": {"name": "a", "schema": pattern}}
    tool, text = ({"type": "function", "function": {"name": "f", "parameters": parameters}}
                  for parameters in ({"properties": {"a": {"type": "nonsense"}}}, {"type": "string"}))
    for asked, param, why in (({"response_format": broken}, "response_format", "nonsense"),
                              ({"response_format": endless}, "response_format", "cannot be followed to its end"),
                              ({"response_format": endless, "n": 3}, "response_format", "cannot be followed to its end"),
                              ({"extra_body": {"guided_regex": "(a"}}, "guided_regex", "unclosed group"),
                              ({"tools": [tool], "tool_choice": "required"}, "tools", "these tools.*nonsense"),
                              ({"tools": [text]}, "tools[0].function.parameters", "arguments are an object")):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=why) as caught:
                client.chat.completions.create(**TURN, **asked, stream=stream)
            assert caught.value.param == param
