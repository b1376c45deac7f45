"""The HTTP API on the wire: a real uvicorn server on loopback, the `openai` client, and an engine whose tokens are known.

The engine here is scripted (asyncio, the same interface as EngineClient) so that every expected value is stated in this file:
its tokenizer is byte level without merges, so token id b is byte b, and an answer is the bytes of a text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
import uvicorn
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from nybble.engine.client import EngineDied, RequestRefused
from nybble.engine.messages import Delta, Info, TokenLogprob
from nybble.serve.answers import CompletionAnswer
from nybble.serve.app import create_app
from nybble.serve.launch import ServeError, serve
from nybble.serve.protocol import CompletionRequest
from nybble.text import Tokenizer, load_tokenizer

END, START, BOS = 256, 257, 258
ANSWER = "Grüße, 🌍! The end."
CONTEXT, BLOCKS = 512, 1000
TEMPLATE = ("{% for m in messages %}<|start|>{{ m.name or m.role }}\n{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}{% if shout %}LOUD {% endif %}")


def byte_tokenizer(folder: Path, template: str = TEMPLATE, *more_special: str) -> Path:
    """A tokenizer folder whose ids are bytes: GPT-2's byte alphabet, no merges, three special tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    vocab = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
    special = [{"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False} for i, text in ((END, "<|end|>"), (START, "<|start|>"), (BOS, "<s>"),
                                                                           *enumerate(more_special, BOS + 1))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": special, "normalizer": None, "pre_tokenizer": level, "post_processor": None,
        "decoder": level, "model": {"type": "BPE", "vocab": vocab, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "chat_template": template, "eos_token": "<|end|>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END, "bos_token_id": BOS, "vocab_size": 259}))
    return folder


class ScriptedEngine:
    """Answers `ANSWER`, or what follows "echo:" in the prompt. As with EngineClient, leaving `generate` early is an abort."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.held: dict[str, int] = {}
        self.aborted: list[str] = []
        self.params: list = []
        self.prompts: list[list[int]] = []
        self.per_delta, self.pause, self.stall_after, self.fail_after, self.dead = 1, 0.0, None, None, False
        self.silence_s = 0.0

    @property
    def free_blocks(self) -> int:
        return BLOCKS - sum(self.held.values())

    async def generate(self, request_id, token_ids, params):
        if self.dead:
            raise EngineDied("it was killed")
        if b"refuse me" in bytes(i for i in token_ids if i < 256):
            raise RequestRefused("token_ids", "no thanks")
        self.params.append(params)
        self.prompts.append(token_ids)
        self.held[request_id] = 1 + len(token_ids) // 16
        ended = False
        try:
            async for delta in self._deltas(request_id, token_ids, params):
                ended = delta.finish_reason is not None and delta.index == params.n - 1
                if ended:
                    del self.held[request_id]
                yield delta
        finally:
            if not ended:
                self.aborted.append(request_id)
                del self.held[request_id]

    async def _deltas(self, request_id, token_ids, params):
        answer = getattr(self, "answer", list(ANSWER.encode()))
        text = bytes(i if i < 256 else 0 for i in token_ids)
        if b"echo:" in text:
            answer = list(text.split(b"echo:")[1].split(b"\0")[0])
        answer = [*answer, END][: params.max_tokens]
        reason = "stop" if answer[-1] == END else "length"
        for at in range(0, len(answer), self.per_delta):
            await asyncio.sleep(self.pause)
            if self.fail_after is not None and at >= self.fail_after:
                yield Delta(request_id, params.n - 1, [], finish_reason="error", error="out of luck")
                return
            if self.stall_after is not None and at >= self.stall_after:
                await asyncio.Event().wait()
            ids = answer[at : at + self.per_delta]
            last = at + self.per_delta >= len(answer)
            for index in range(params.n):
                logprobs = None
                if params.logprobs is not None:
                    logprobs = [TokenLogprob(i, -0.25, [(i, -0.25), (65, -1.5)][: params.logprobs]) for i in ids]
                before = None
                if params.prompt_logprobs is not None and at == 0:
                    first, *rest = token_ids
                    top = [(65, -0.1), (66, -3.0)][: params.prompt_logprobs]
                    before = [TokenLogprob(first, None, []), *(TokenLogprob(i, -2.0, top) for i in rest)]
                yield Delta(request_id, index, ids, logprobs, reason if last else None, 16, prompt_logprobs=before)

    async def abort(self, request_id, index=None):
        self.aborted.append((request_id, index))

    async def info(self):
        if self.dead:
            raise EngineDied("it was killed")
        if self.silence_s:
            await asyncio.Event().wait()
        return Info("scripted", "w4a8_g128", "int8", CONTEXT, 16, BLOCKS, self.free_blocks - 100, 100, len(self.held), 0, 3, 7,
                    11, 13, 17, 19, 1234, "int4, a scale per 128", "int8 per token", 1.5, 21, 2.5, 2.25)


@contextlib.contextmanager
def serving(app):
    """The app on a free loopback port, in its own thread and event loop: (base url, loop)."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    box = {}

    async def main():
        box["loop"] = asyncio.get_running_loop()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", box["loop"]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive()


def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.005)
    return value


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def world(tokenizer):
    engine = ScriptedEngine()
    app = create_app(engine, tokenizer, asyncio.run(engine.info()), max_body_bytes=100_000)
    with serving(app) as (url, loop):
        yield engine, url, loop, app


@pytest.fixture
def engine(world):
    world[0].reset()
    yield world[0]
    eventually(lambda: world[0].free_blocks == BLOCKS)
    metrics = world[3].state.server.metrics
    eventually(lambda: (metrics.active, metrics.queued) == (0, 0))


@pytest.fixture
def url(world):
    return world[1]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client


def chat(client, text="hi", **options):
    return client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": text}], **options)


def test_chat(engine, client):
    answer = chat(client)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.model == "scripted"
    prompt = [START, *b"user\nhi", END, START, *b"assistant\n"]
    assert engine.prompts == [prompt]
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens) == (len(prompt), len(ANSWER.encode()) + 1)
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    assert used.prompt_tokens_details.cached_tokens == 16
    assert engine.params[0].max_tokens == CONTEXT - len(prompt)
    assert engine.aborted == []


@pytest.mark.parametrize("per_delta", [1, 3, 100])
def test_chat_stream(engine, client, per_delta):
    engine.per_delta = per_delta
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == ANSWER
    assert not any("�" in text for text in texts)  # the four bytes of the globe came in parts
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "stop"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ANSWER.encode()) + 1


def test_stream_on_the_wire(engine, url):
    """The bytes of the event stream, without a client library."""
    body = {"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 2}
    with httpx.stream("POST", url + "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events] == [("G", None), ("r", "length")]
    assert set(events[0]) == {"id", "object", "created", "model", "choices"}


def test_an_event_is_one_line_to_every_client(engine, url):
    """Python's str.splitlines, which several clients split streams with, knows more ends of lines than the standard."""
    text = "a\x85b\u2028c\u2029d\x0ce\x1ef\rg\nh"
    engine.answer, engine.per_delta = list(text.encode()), 100
    try:
        body = {"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 99}
        with httpx.stream("POST", url + "/v1/completions", json=body) as response:
            events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {")]
    finally:
        del engine.answer
    assert "".join(event["choices"][0]["text"] for event in events) == text


@pytest.mark.parametrize("per_delta", [1, 4, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "include", "text"), [
    ("The", False, "Grüße, 🌍! "), (["zzz", "🌍! T"], False, "Grüße, "), (["ß", "üß"], True, "Grüß"),
    ("end.!", False, ANSWER)])
def test_stop_strings(engine, client, per_delta, stream, stop, include, text):
    engine.per_delta = per_delta
    answer = chat(client, stop=stop, stream=stream, extra_body={"include_stop_str_in_output": include})
    if stream:
        chunks = list(answer)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
        if text != ANSWER:
            stopped = ANSWER.encode().index((text if include else text + (stop if isinstance(stop, str) else "🌍! T")).encode())
            end = stopped + len((text if include else text + (stop if isinstance(stop, str) else "🌍! T")).encode())
            assert answer.usage.completion_tokens == end
    whole = len(ANSWER.encode()) + 1
    assert len(engine.aborted) == (text != ANSWER and per_delta < whole)  # nothing to abort once the engine had ended


def test_stop_waits_for_min_tokens(engine, client):
    answer = client.completions.create(model="scripted", prompt="echo:ab ab ab", stop="ab", max_tokens=20,
                                       extra_body={"min_tokens": 4})
    assert answer.choices[0].text == "ab "  # the second: the first ended before the fourth token


def test_n_and_logprobs(engine, client):
    answer = chat(client, n=3, logprobs=True, top_logprobs=2, max_tokens=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.message.content == "Gr�"  # the third byte is half of ü
        assert choice.finish_reason == "length"
        first, _, third = choice.logprobs.content
        assert (first.token, first.bytes, first.logprob) == ("G", [71], -0.25)
        assert [(t.token, t.logprob) for t in first.top_logprobs] == [("G", -0.25), ("A", -1.5)]
        assert third.bytes == [0xC3]
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    chunks = list(chat(client, n=2, logprobs=True, max_tokens=3, stream=True))
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        tokens = [t for c in mine if c.logprobs for t in c.logprobs.content]
        assert [(t.token, t.top_logprobs) for t in tokens[:2]] == [("G", []), ("r", [])]
        assert len(tokens) == 3
        assert "".join(c.delta.content or "" for c in mine) == "Gr�"


def test_completions_of_every_prompt_form(engine, client):
    for prompt, echoed in (("ab", ["ab"]), (["ab", "cd"], ["ab", "cd"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])):
        answer = client.completions.create(model="scripted", prompt=prompt, max_tokens=1, n=2, echo=True)
        assert [c.text for c in answer.choices] == [text + "G" for text in echoed for _ in range(2)]
        assert [c.index for c in answer.choices] == list(range(2 * len(echoed)))
        assert answer.usage.completion_tokens == 2 * len(echoed)
        assert answer.usage.prompt_tokens == sum(map(len, echoed))
        assert answer.usage.prompt_tokens_details.cached_tokens == 16 * len(echoed)
        streamed = [""] * (2 * len(echoed))
        for chunk in client.completions.create(model="scripted", prompt=prompt, max_tokens=1, n=2, echo=True, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == [c.text for c in answer.choices]
    assert client.completions.create(model="scripted", prompt="ab").usage.completion_tokens == 16  # OpenAI's default


def test_completion_logprobs(engine, client):
    got = client.completions.create(model="scripted", prompt="echo:aü", max_tokens=3, logprobs=1).choices[0].logprobs
    assert got.tokens == ["a", "bytes:\\xc3", "bytes:\\xbc"]
    assert got.token_logprobs == [-0.25] * 3
    assert got.top_logprobs[0] == {"a": -0.25}
    assert got.text_offset == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_echo_with_logprobs(engine, client, max_tokens, stream):
    """As lm-eval's local-completions reads it: of the prompt from its second token on, and what greedy decoding would say."""
    asked = {"model": "scripted", "prompt": [[120, 65], [120, 66, 67]], "echo": True, "logprobs": 1, "max_tokens": max_tokens,
             "n": 1, "stream": stream}
    if stream:
        options = {"stream_options": {"include_usage": True}}
        *chunks, end = client.completions.create(**asked, **options)
        usage = end.usage
        mine = [[c.choices[0] for c in chunks if c.choices[0].index == index] for index in range(2)]
        found = [("".join(c.text for c in one), [c.logprobs for c in one if c.logprobs], one[-1].finish_reason) for one in mine]
    else:
        answer = client.completions.create(**asked)
        usage, found = answer.usage, [(c.text, [c.logprobs], c.finish_reason) for c in answer.choices]
    generated = ANSWER[:max_tokens]
    for (text, parts, reason), prompt, greedy in zip(found, ("xA", "xBC"), ([True], [False, False])):
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        tops = [top for part in parts for top in part.top_logprobs]
        assert (text, reason) == (prompt + generated, "length")
        assert [len(values), len(tops), sum(len(part.text_offset) for part in parts)] == [len(prompt) + max_tokens] * 3
        assert tokens[: len(prompt)] == list(prompt)
        assert values == [None] + [-2.0] * (len(prompt) - 1) + [-0.25] * max_tokens
        assert tops[0] is None
        assert [t == max(top, key=top.get) for t, top in zip(tokens[1 : len(prompt)], tops[1:])] == greedy
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2 * max_tokens)


def test_a_bos_takes_no_room_in_the_text_that_offsets_are_of(engine, client):
    asked = {"model": "scripted", "echo": True, "logprobs": 0, "max_tokens": 1}
    for prompt, offsets in (([END, 120, 65], [0, 0, 1, 2]), ([120, 65], [0, 1, 2])):
        choice = client.completions.create(prompt=prompt, **asked).choices[0]
        assert (choice.text, choice.logprobs.text_offset) == ("xA" + ANSWER[0], offsets)


def test_a_first_words_space_takes_no_room_in_the_text_that_offsets_are_of():
    """SentencePiece puts a space before every text, which the text has not: the offsets are those of its words."""
    words = ["<unk>", "▁Paris", "▁is", "▁big"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, {}, {}, (), None)
    body = CompletionRequest(model="m", prompt=[1, 2], echo=True, logprobs=0)
    answer = CompletionAnswer("m", tokenizer, body.params(), body, [tokenizer.decode([1, 2])])
    scored = [TokenLogprob(1, None, []), TokenLogprob(2, -1.0, []), TokenLogprob(3, -1.0, [])]
    choice = answer.choice(0, " big", scored, "length")
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("Paris is big", [0, 5, 8])


def test_echo_with_more_logprobs_than_memory_should_hold(engine, url):
    """A body of 16 MB can name 8 million tokens, and ask for 21 numbers about each, 128 times."""
    body = {"model": "scripted", "echo": True, "max_tokens": 1}
    for n, logprobs, param in ((128, 20, "echo"), (13, 20, "echo"), (2, 20, None), (32, None, None)):
        asked = body | {"prompt": [[65] * 200] * 20, "n": n, "logprobs": logprobs}
        answer = httpx.post(url + "/v1/completions", json=asked, timeout=60)
        assert answer.json().get("error", {}).get("param") == param


def test_max_tokens_0_is_for_echo(engine, client):
    assert client.completions.create(model="scripted", prompt="ab", echo=True, max_tokens=0).choices[0].text == "ab"
    with pytest.raises(openai.BadRequestError, match="max_tokens = 0"):
        client.completions.create(model="scripted", prompt="ab", max_tokens=0)


def test_sampling_fields_reach_the_engine(engine, client):
    chat(client, temperature=0.5, top_p=0.9, seed=7, presence_penalty=-1, frequency_penalty=1.5, max_completion_tokens=4,
         stop=["q"], user="me", extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1,
                                            "ignore_eos": True, "stop_token_ids": [5], "skip_special_tokens": False})
    p = engine.params[0]
    assert (p.temperature, p.top_p, p.seed, p.presence_penalty, p.frequency_penalty) == (0.5, 0.9, 7, -1, 1.5)
    assert (p.max_tokens, p.stop, p.top_k, p.min_p, p.repetition_penalty) == (4, ("q",), 3, 0.1, 1.2)
    assert (p.min_tokens, p.ignore_eos, p.stop_token_ids, p.skip_special_tokens) == (1, True, (5,), False)
    chat(client)
    assert (engine.params[1].temperature, engine.params[1].top_p, engine.params[1].seed) == (1.0, 1.0, None)
    chat(client, top_p=0, seed=-(2**63))  # OpenAI takes both
    assert (engine.params[2].top_p, engine.params[2].top_k, engine.params[2].seed) == (1.0, 1, -(2**63))


def test_template_inputs_and_special_tokens(engine, client):
    messages = [{"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
                {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "name": "ann", "type": "text"}]
    extra = {"chat_template_kwargs": {"shout": True}, "skip_special_tokens": False}
    answer = client.chat.completions.create(model="scripted", messages=messages,
                                            extra_body={**extra, "include_stop_str_in_output": True})
    assert engine.prompts[0] == [START, *b"system\nbe kind", END, START, *b"ann\nyes", END, START, *b"assistant\nLOUD "]
    assert answer.choices[0].message.content == ANSWER + "<|end|>"
    answer = client.chat.completions.create(model="scripted", messages=messages, extra_body=extra)
    assert answer.choices[0].message.content == ANSWER


BAD = [
    ({"bogus": 1}, "bogus"), ({"temperature": -0.1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"), ({"top_p": -0.1}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"n": 0}, "n"),
    ({"n": 1.5}, "n"), ({"n": 10**30}, "n"), ({"seed": 2**63}, "seed"), ({"seed": 2**64}, "seed"), ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"), ({"stop": ["a"] * 17}, "stop"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": 3}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": 'f"'}}]}, "tools[0].function.name"),
    ({"functions": [{"name": "f"}]}, "functions"), ({"store": True}, "store"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": "yes"}, "stream"), ({"top_k": -2}, "top_k"), ({"min_p": 1}, "min_p"), ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"), ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"model": 3}, "model"), ({"model": None}, "model"), ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"), ({"guided_grammar": "a", "ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"), ({"tool_choice": "must"}, "tool_choice"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "type": "image"}]}, "messages[0].type"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[json.dumps(change)[:60] for change, _ in BAD])
def test_bad_fields_are_named(engine, url, change, param):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]} | change
    response = httpx.post(url + "/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"]
    assert engine.prompts == []


def test_neutral_fields_are_accepted(engine, client):
    answer = chat(client, response_format={"type": "text"}, tool_choice="none", store=False, logit_bias={}, n=1, tools=[],
                  metadata={}, modalities=["text"], service_tier="auto", parallel_tool_calls=True, stop=None, seed=None,
                  max_tokens=None, verbosity="medium", safety_identifier="a", prompt_cache_key="b")
    assert answer.choices[0].message.content == ANSWER
    text = client.completions.create(model="scripted", prompt="a", best_of=1, suffix=None).choices[0].text
    assert text.encode() == ANSWER.encode()[:16]


def test_structured_output_reaches_the_engine(engine, client, url):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for asked, kind, text, field in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}},
         "json_schema", schema, "response_format"),
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}, "response_format"),
        ({"guided_json": schema}, "json_schema", schema, "guided_json"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"structured_outputs": {"regex": '"a+"'}}, "regex", '"a+"', "structured_outputs.regex"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"', "guided_grammar")):
        chat(client, extra_body=asked)
        found = engine.params[-1].grammar
        assert (found.kind, text if kind in ("regex", "lark") else json.loads(found.text), found.field) == (kind, text, field)
        assert kind not in ("regex", "lark") or found.text == text
    client.completions.create(model="scripted", prompt="a", extra_body={"guided_regex": "b"})
    assert engine.params[-1].grammar.text == "b"
    client.completions.create(model="scripted", prompt="a", extra_body={"response_format": {"type": "json_object"}})
    assert json.loads(engine.params[-1].grammar.text) == {"type": "object"}
    assert chat(client, response_format={"type": "text"}).choices[0].message.content == ANSWER
    assert engine.params[-1].grammar is None


WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS_TEMPLATE = ("{% if tools %}{{ tools | tojson }}FORMAT{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
                  "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}("
                  "{{ call.function.arguments | tojson }})#{{ call.id }}{% endfor %}"
                  "{% if m.tool_call_id %}{{ m.name }}#{{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}")
TWO = [("get_weather", {"city": "Zürich"}), ("get_time", {})]
# What templates teach, and an answer as the model's publisher shows it: text before the calls, and two of them.
HERMES = ("<tool_call>", 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
          '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>', "I look.\n")
MISTRAL = ("[TOOL_CALLS]", 'I look.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}}, '
           '{"name": "get_time", "arguments": {}}]', "I look.")
LLAMA = ('"parameters": dictionary of argument name and its value',
         '{"name": "get_weather", "parameters": {"city": "Zürich"}}; {"name": "get_time", "parameters": {}}', "")


@pytest.fixture(scope="module", params=[HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def caller(request, tmp_path_factory):
    """(engine, client, an answer with two calls, the text before them) of a model that knows tools."""
    phrase, answer, before = request.param
    special = ["[TOOL_CALLS]"] if phrase == "[TOOL_CALLS]" else []
    template = TOOLS_TEMPLATE.replace("FORMAT", phrase)
    tokenizer = load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("tools"), template, *special))
    engine = ScriptedEngine()
    # Where the mark is a special token, the model writes that.
    engine.answer = tokenizer.encode(answer, add_special=False)
    info = msgspec.structs.replace(asyncio.run(engine.info()), max_context=2048)
    with serving(create_app(engine, tokenizer, info)) as (url, _):
        yield engine, openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0), answer, before


def called(calls):
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("per_delta", [1, 7, 1000])
def test_tool_calls(caller, per_delta):
    engine, client, answer, before = caller
    engine.per_delta = per_delta
    whole = chat(client, tools=[WEATHER, TIME], n=2)
    for choice in whole.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", before or None)
        assert called(choice.message.tool_calls) == TWO
        assert {call.type for call in choice.message.tool_calls} == {"function"}
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[a-z0-9]{9}", one) for one in ids)
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME], "n": 2}
    with client.chat.completions.stream(**asked) as stream:  # the client joins the pieces
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        joined = stream.get_final_completion()
    assert [(one.finish_reason, one.message.content, called(one.message.tool_calls)) for one in joined.choices] == [
        ("tool_calls", before or None, TWO)] * 2
    assert [call.function.arguments for call in joined.choices[0].message.tool_calls] == [
        call.function.arguments for call in whole.choices[0].message.tool_calls]
    assert per_delta > 1 or len(pieces) >= 2 * len('{"city": "Zürich"}')
    cut = chat(client, tools=[WEATHER], max_tokens=len(before.encode()) + 20)  # before any call's arguments: it is text
    assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)
    assert answer.startswith(cut.choices[0].message.content)
    for stream in (False, True):  # told to make one call at a time, a model that makes two is cut to the first
        one = chat(client, tools=[WEATHER, TIME], parallel_tool_calls=False, stream=stream)
        found = [call for chunk in one for call in chunk.choices[0].delta.tool_calls or ()] if stream else (
            one.choices[0].message.tool_calls)
        assert [call.function.name for call in found if call.function.name] == ["get_weather"]
        assert "".join(call.function.arguments for call in found) == '{"city": "Zürich"}'
    until = engine.answer.index(ord("Z")) + 1
    cut = chat(client, tools=[WEATHER], max_tokens=until).choices[0]  # within them: they end there
    assert (cut.finish_reason, cut.message.tool_calls[0].function.arguments) == ("length", '{"city": "Z')


def test_tools_and_their_answers_in_the_prompt(caller):
    engine, client, *_ = caller
    asked = chat(client, tools=[WEATHER, TIME]).choices[0].message
    turns = [{"role": "user", "content": "hi"}, asked.model_dump(),
             {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "sunny"}]
    client.chat.completions.create(model="scripted", messages=turns, tools=[WEATHER, TIME])
    text = bytes(i if i < 256 else 0 for i in engine.prompts[-1]).decode()
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    filled = {"type": "function", "function": {"name": "get_time", "description": "", "parameters": empty}}
    assert json.dumps([WEATHER, filled]) in text
    assert f'get_weather({{"city": "Zürich"}})#{asked.tool_calls[0].id}' in text
    assert f"tool\nsunnyget_weather#{asked.tool_calls[0].id}" in text
    for arguments in ('{"city": "Zü', "[1]", '{"a": ' + "[" * 1100):  # what was sent is taken back
        turns[1]["tool_calls"][0]["function"]["arguments"] = arguments
        client.chat.completions.create(model="scripted", messages=turns[:2], tools=[WEATHER], max_tokens=1)
        text = bytes(i if i < 256 else 0 for i in engine.prompts[-1]).decode()
        assert f"get_weather({json.dumps(arguments, ensure_ascii=False)})#" in text
    none = chat(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert (none.finish_reason, none.message.tool_calls) == ("stop", None)
    assert b"get_weather" not in bytes(i for i in engine.prompts[-1] if i < 256)


def test_tools_that_cannot_be_had(caller, engine, url):
    _, client, *_ = caller
    for more, param in (({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
                        ({"tools": [WEATHER, WEATHER]}, "tools"),
                        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
                        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "tool_choice")):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, **{"tools": [WEATHER, TIME]} | more)
        assert caught.value.param == param
    plain = httpx.post(url + "/v1/chat/completions", json={"model": "scripted", "tools": [WEATHER],
                                                            "messages": [{"role": "user", "content": "x"}]})
    assert (plain.status_code, plain.json()["error"]["param"]) == (400, "tools")
    assert "chat template has no tools" in plain.json()["error"]["message"]


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": ["a", [1]]}, "prompt"), ({"prompt": [[]]}, "prompt"),
    ({"prompt": [259]}, "prompt"), ({"prompt": [-1]}, "prompt[0]"), ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "logprobs": 21}, "logprobs"), ({}, "prompt"),
    ({"prompt": "a", "logprobs": True}, "logprobs"), ({"prompt": "a", "echo": True, "logprobs": 21}, "logprobs")])
def test_bad_completion_fields(engine, url, body, param):
    response = httpx.post(url + "/v1/completions", json={"model": "scripted"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model":"scripted"}x', b'{"a":' + b"[" * 90000,
                                  b'{"model": NaN}', b'{"model": "\\ud800"}', b'{"\\u0000": 1}', b"1" * 5000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_broken_bodies(engine, url, path, body):
    response = httpx.post(url + path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_too_long(engine, client, url):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "x" * CONTEXT)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="scripted", prompt="x" * 10, max_tokens=CONTEXT - 9)
    assert caught.value.code == "context_length_exceeded"
    fits = client.completions.create(model="scripted", prompt="x" * (CONTEXT - 2))  # OpenAI's 16 by default: cut to the room
    assert (fits.choices[0].text, fits.choices[0].finish_reason) == ("Gr", "length")
    too_big = httpx.post(url + "/v1/completions", content=b" " * 100_001, headers={"content-type": "application/json"})
    assert (too_big.status_code, too_big.json()["error"]["type"]) == (413, "invalid_request_error")
    chunked = httpx.post(url + "/v1/completions", content=(b" " * 1000 for _ in range(101)))
    assert chunked.status_code == 413
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as kept:
        # Closed while the client still sends, it would take the answer along.
        kept.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
        said = kept.recv(1 << 16)
        kept.sendall(b" " * 9_000_000 + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        while b"HTTP/1.1 200 OK" not in said:
            assert (more := kept.recv(1 << 16))
            said += more
        assert said.startswith(b"HTTP/1.1 413")


def test_routes(engine, client, url):
    model = client.models.retrieve(client.models.list().data[0].id)
    assert (model.id, model.max_model_len) == ("scripted", CONTEXT)
    assert (model.scheme, model.weights, model.activations, model.kv_cache) == (
        "w4a8_g128", "int4, a scale per 128", "int8 per token", "int8")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    missing, wrong = httpx.get(url + "/v1/nothing"), httpx.get(url + "/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "POST /v1/chat/completions" in missing.json()["error"]["message"]
    assert "GET /v1/completions is not served" in wrong.json()["error"]["message"]
    assert httpx.get(url + "/health").json()["status"] == "ok"
    assert httpx.get(url + "/version").json() == {"version": metadata.version("nybble")}
    ids = httpx.post(url + "/tokenize", json={"prompt": "aü<|end|>"}).json()
    assert ids == {"tokens": [97, 0xC3, 0xBC, END], "count": 4, "max_model_len": CONTEXT}
    turn = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    assert httpx.post(url + "/tokenize", json=turn).json()["tokens"] == [START, *b"user\na", END]
    assert httpx.post(url + "/detokenize", json={"tokens": [97, 0xC3, 0xBC, END]}).json() == {"prompt": "aü<|end|>"}
    assert httpx.post(url + "/detokenize", json={"tokens": [9999]}).json()["error"]["param"] == "tokens"
    for path in ("/", "/health", "/v1/models", "/v1/completions", "/v1/nothing"):  # RFC 9110, 9.3.2
        asked, head = httpx.get(url + path), httpx.head(url + path)
        assert (head.status_code, head.headers["content-length"], head.content) == (
            asked.status_code, asked.headers["content-length"], b"")
    page = httpx.get(url + "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text
    schemas = httpx.get(url + "/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert "top_k" in schemas["CompletionRequest"]["properties"]
    assert schemas["ChatRequest"]["properties"]["store"]["enum"] == [None, False]
    role = httpx.post(url + "/v1/chat/completions", json={"model": "scripted", "messages": [{"role": "king", "content": "x"}]})
    assert role.json()["error"]["message"].endswith("'king': wants system, developer, user, assistant, tool")


def test_metrics(engine, client, url):
    def figures():
        lines = [line for line in httpx.get(url + "/metrics").text.splitlines() if not line.startswith("#")]
        return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines)}

    before = figures()
    chat(client)
    chat(client, n=2, max_tokens=2)
    after = figures()

    def grew(key):
        return after[key] - before.get(key, 0)

    assert grew('nybble_request_success_total{finished_reason="stop"}') == 1
    assert grew('nybble_request_success_total{finished_reason="length"}') == 2
    assert grew("nybble_time_to_first_token_seconds_count") == 2
    assert grew("nybble_e2e_request_latency_seconds_count") == 2
    assert grew("nybble_inter_token_latency_seconds_count") == len(ANSWER.encode()) + 2
    assert grew('nybble_http_responses_total{path="/v1/chat/completions",status="200"}') == 2
    assert after["nybble_num_preemptions_total"] == 3
    assert after["nybble_generation_tokens_total"] == 13
    assert after["nybble_prefix_cache_hits_total"] == 19
    assert after["nybble_kv_cache_usage_perc"] == 0
    assert after["nybble_decode_busy_seconds_total"] / after["nybble_decode_wall_seconds_total"] == 0.9


def test_64_at_once(engine, url):
    engine.pause = 0.002

    async def one(client, i):
        text = f"request {i} " + "x" * (i % 7)
        if i % 2:
            stream = await client.completions.create(model="scripted", prompt="echo:" + text, max_tokens=100, stream=True)
            return text, "".join([c.choices[0].text async for c in stream])
        answer = await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "echo:" + text}])
        return text, answer.choices[0].message.content

    async def everyone():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    for text, answer in asyncio.run(everyone()):
        assert answer == text
    assert len(engine.prompts) == 64


@pytest.mark.parametrize("stall_after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
def test_hanging_up_gives_the_blocks_back(engine, url, stall_after, stream, prompt):
    engine.stall_after = stall_after
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "scripted", "prompt": prompt, "stream": stream, "max_tokens": 9}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                           b"%d\r\n\r\n" % len(body) + body)
        count = len(prompt)
        eventually(lambda: len(engine.held) == count)
        if stream and stall_after:
            while b"data: " not in connection.recv(65536):
                pass
    eventually(lambda: len(engine.aborted) == count)
    eventually(lambda: engine.free_blocks == BLOCKS)


def test_hanging_up_within_the_body_is_no_error(engine, url):
    def answers(status):
        return re.findall(rf'nybble_http_responses_total{{path="/v1/completions",status="{status}"}} .*',
                          httpx.get(url + "/metrics").text)

    before, bugs = answers(499), answers(500)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.05)
    eventually(lambda: answers(499) != before)
    assert answers(500) == bugs
    assert engine.prompts == []


def test_engine_errors(engine, client, url):
    engine.fail_after = 2
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        chat(client)
    stream = chat(client, stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="out of luck"):
        seen.extend(stream)
    assert "".join(c.choices[0].delta.content or "" for c in seen) == "Gr"
    engine.reset()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no thanks") as caught:
            client.completions.create(model="scripted", prompt=["fine", "refuse me"], stream=stream)
        assert caught.value.param == "prompt"
    eventually(lambda: engine.free_blocks == BLOCKS)

    def ended():
        return {reason: float(count) for reason, count in re.findall(
            r'nybble_request_success_total{finished_reason="(\w+)"} (.*)', httpx.get(url + "/metrics").text)}

    before, engine.dead = ended(), True
    with pytest.raises(openai.InternalServerError, match="engine is down") as caught:
        chat(client)
    assert caught.value.status_code == 503
    assert httpx.get(url + "/health").status_code == 503
    engine.dead = False
    assert ended() == before | {"error": before["error"] + 1}
    assert chat(client).choices[0].message.content == ANSWER


@pytest.mark.parametrize(("silence_s", "status", "says"), [(10.0, 200, "busy"), (300.0, 503, "nothing for 300 s")])
def test_health_in_a_long_step_and_when_it_never_ends(engine, url, silence_s, status, says):
    engine.silence_s = silence_s
    answer = httpx.get(url + "/health", timeout=30)
    assert answer.status_code == status
    assert says in answer.text
    assert httpx.get(url + "/metrics", timeout=30).status_code == 200  # the last known figures


def test_no_leak_over_500_requests(engine, url, world):
    _, _, loop, app = world

    def tasks():
        return len(asyncio.all_tasks(loop))

    async def one(client, i):
        kind = i % 5
        if kind == 0:
            stream = await client.completions.create(model="scripted", prompt="x", max_tokens=50, stream=True)
            async for _ in stream:  # hang up at the first event
                break
            await stream.close()
        elif kind == 1:
            await client.completions.create(model="scripted", prompt=["x", "y"], stop="ß", max_tokens=50)
        elif kind == 2:
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="scripted", prompt="refuse me")
        else:
            answer = await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}],
                                                          stream=kind == 3)
            if kind == 3:
                assert [c async for c in answer][-1].choices[0].finish_reason == "stop"

    async def everyone():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
            gate = asyncio.Semaphore(16)

            async def gated(i):
                async with gate:
                    await one(client, i)

            await asyncio.gather(*(gated(i) for i in range(500)))

    before = tasks()
    asyncio.run(everyone())
    eventually(lambda: engine.held == {})
    eventually(lambda: tasks() <= before)


def test_key_and_overload(tokenizer):
    engine = ScriptedEngine()
    engine.stall_after = 0
    app = create_app(engine, tokenizer, asyncio.run(engine.info()), name="org/m", api_key="sesame", max_waiting=2)
    with serving(app) as (url, _):
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "sesame"}):
            refused = httpx.get(url + "/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(url + "/metrics").status_code == 401
        assert httpx.get(url + "/health").status_code == 200
        client = openai.OpenAI(base_url=url + "/v1", api_key="sesame", max_retries=0)
        assert client.models.retrieve("org/m").id == "org/m"
        assert httpx.get(url + "/metrics", headers={"Authorization": "bearer  sesame"}).status_code == 200  # RFC 9110, 11.1
        headers, body = {"Authorization": "Bearer sesame"}, {"model": "org/m", "prompt": "x"}
        hanging = [threading.Thread(target=lambda: httpx.post(url + "/v1/completions", headers=headers, json=body, timeout=60),
                                    daemon=True) for _ in range(2)]
        for thread in hanging:
            thread.start()
        eventually(lambda: len(engine.held) == 2)
        over = httpx.post(url + "/v1/completions", headers=headers, json=body)
        assert (over.status_code, over.headers["retry-after"], over.json()["error"]["code"]) == (503, "1", "overloaded")
        many = httpx.post(url + "/v1/completions", headers=headers, json=body | {"prompt": ["x"] * 3})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
        many = httpx.post(url + "/v1/completions", headers=headers, json=body | {"n": 3})  # as much work
        assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
    assert len(engine.aborted) == 2  # the server went down: its requests were aborted


def test_what_a_request_leaves_out_is_as_the_checkpoint_says(tokenizer):
    engine = ScriptedEngine()
    app = create_app(engine, tokenizer, asyncio.run(engine.info()), sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    with serving(app) as (url, _), openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        chat(client)
        chat(client, temperature=0, top_p=0.5, logit_bias={"50256": -100, 7: 2.5}, extra_body={"top_k": 0, "min_p": 0.1})
        client.completions.create(model="scripted", prompt="x")
    got = [(one.temperature, one.top_k, one.top_p, one.min_p) for one in engine.params]
    assert [one.logit_bias for one in engine.params] == [{}, {50256: -100, 7: 2.5}, {}]
    assert got == [(0.6, 20, 0.95, 0.0), (0.0, 0, 0.5, 0.1), (0.6, 20, 0.95, 0.0)]


def test_a_checkpoints_sampling_settings_can_be_left_aside(tmp_path, monkeypatch):
    served = []

    async def run(*_, **options):
        served.append(options["sampling"])

    monkeypatch.setattr("nybble.serve.launch.run", run)
    (byte_tokenizer(tmp_path) / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    for choice in ("auto", "none"):
        serve(tmp_path, port=0, generation_config=choice)
    assert served == [{"temperature": 0.6, "top_k": 20}, {}]


@pytest.mark.parametrize("key", [None, "sesame"])
def test_pages_of_allowed_origins_may_call(tokenizer, key):
    """What the Fetch standard has a browser send before a POST of JSON with a key, and read in the answers."""
    engine = ScriptedEngine()
    app = create_app(engine, tokenizer, asyncio.run(engine.info()), api_key=key, allowed_origins=["https://a.example"])
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    body = {"model": "scripted", "prompt": "x", "stream": True}
    with serving(app) as (url, _):
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            path = url + "/v1/completions"
            before = httpx.options(path, headers={"Origin": origin, **asking})
            assert (before.status_code == 200) == (allowed is not None)
            named = before.headers.get("access-control-allow-headers", "")
            assert {"authorization", "content-type"} <= {name.strip().lower() for name in named.split(",")} or not allowed
            for sent, status in ((key, 200), ("wrong", 401 if key else 200)):
                answer = httpx.post(path, json=body, headers={"Origin": origin, "Authorization": f"Bearer {sent}"})
                assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, allowed)
        assert "access-control-allow-origin" not in httpx.get(url + "/health").headers


def test_a_bug_is_told_to_pages_too(tokenizer):
    class Broken(ScriptedEngine):
        async def generate(self, request_id, token_ids, params):
            if params.max_tokens > 1:
                yield Delta(request_id, 0, [71])
            raise TypeError("a bug")

    engine = Broken()
    app = create_app(engine, tokenizer, asyncio.run(engine.info()), allowed_origins=["https://a.example"])
    with serving(app) as (url, _):
        for stream in (False, True):
            answer = httpx.post(url + "/v1/completions", headers={"Origin": "https://a.example"},
                                json={"model": "scripted", "prompt": "x", "max_tokens": 1, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
        with pytest.raises(httpx.RemoteProtocolError):  # it has begun: nothing else can be said
            httpx.post(url + "/v1/completions", json={"model": "scripted", "prompt": "x", "stream": True})
        assert 'path="/v1/completions",status="500"} 2.0' in httpx.get(url + "/metrics").text


def test_other_pages_may_not_call_unless_asked_for(url):
    assert httpx.options(url + "/v1/models", headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
                         ).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(url + "/v1/models", headers={"Origin": "https://a.example"}).headers


# The same over a real engine process: scheduler, blocks and messages are real, only the model is a script.

ENGINE = """
import time

from nybble.engine.config import Sampled
from nybble.engine.core import Engine

ANSWER = {answer!r}.encode() + bytes([10])


class Script:
    vocab_size, num_blocks, max_context, max_batched_tokens, bytes_per_token, overlap = 259, 256, 512, 256, 1, False
    decode_steps, decode_wall_s, decode_busy_s, pause_s = 0, 0.0, 0.0, 0.0

    def launch(self, plan):
        time.sleep(self.pause_s)
        drawn = [plan.requests[row] for row in plan.samples]
        # Byte i of the answer, shifted by the first byte of the prompt and the completion, so that mixed up requests show.
        at = [len(r.tokens) - r.num_prompt for r in drawn]
        tokens = [(ANSWER[i] + r.tokens[0] + r.index) % 256 if i < len(ANSWER) else 256 for i, r in zip(at, drawn)]
        return lambda: Sampled(tokens)


def load(config):
    from dataclasses import replace
    return Engine(Script(), replace(config.engine, eos_ids=(256,), model_name="script", block_size=16))


def slow(config):
    engine = load(config)
    engine.runner.pause_s = 0.02
    return engine


def broken(config):
    raise ValueError("no such weights")
"""

SERVER = """
import asyncio, sys
from nybble.engine.config import ProcessConfig
from nybble.serve.launch import ServeError, listen, run
from nybble.text import load_tokenizer

try:
    asyncio.run(run(ProcessConfig(factory=sys.argv[2]), load_tokenizer(sys.argv[1]), listen("127.0.0.1", 0),
                    progress=lambda text: print(text, flush=True), drain_s=int(sys.argv[3])))
except ServeError as error:
    sys.exit(f"error: {error}")
print("stopped", flush=True)
"""


@contextlib.contextmanager
def launched(folder, factory="scripted_engine:load", drain_s=30):
    """The server as its own process, with its engine's: (process, base url or None)."""
    (folder / "scripted_engine.py").write_text(ENGINE.format(answer=ANSWER))
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(byte_tokenizer(folder)), factory, str(drain_s)],
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])})
    try:
        assert process.stdout.readline().startswith("loading")
        said = ""
        for line in iter(process.stdout.readline, ""):
            said += line
            if found := re.search(r"^script is served at (http://127.0.0.1:\d+) ", line):
                assert "KV cache int8 with room for 4,096 tokens, 512 of them in one request" in said
                yield process, found[1]
                break
        else:
            yield process, None
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def shifted(prompt):
    return bytes((b + ord(prompt[0])) % 256 for b in ANSWER.encode() + b"\n")


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


@linux
def test_over_the_engine_process(tmp_path):
    with launched(tmp_path) as (process, url):
        async def everyone():
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
                async def one(i):
                    prompt = chr(33 + i) + "x" * i
                    if i % 8 == 7:  # hang up after the first event
                        stream = await client.completions.create(model="script", prompt=prompt, max_tokens=400, stream=True,
                                                                 extra_body={"ignore_eos": True})
                        async for _ in stream:
                            break
                        await stream.close()
                        return
                    answer = await client.completions.create(model="script", prompt=prompt, max_tokens=100)
                    assert answer.choices[0].text == shifted(prompt).decode("utf-8", "replace")
                    assert answer.choices[0].finish_reason == "stop"
                await asyncio.gather(*(one(i) for i in range(64)))

        asyncio.run(everyone())

        def figures():
            lines = httpx.get(url + "/metrics").text.splitlines()
            return {key: float(value) for key, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

        eventually(lambda: figures()["nybble_num_requests_running"] == 0)
        assert figures()["nybble_kv_cache_usage_perc"] == 0
        client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
        stopped = client.completions.create(model="script", prompt="\0", max_tokens=100, stop="The")
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("Grüße, 🌍! ", "stop")
        before = figures()["nybble_generation_tokens_total"]
        pair = client.completions.create(model="script", prompt="\0", max_tokens=300, n=2, stop="The",
                                         extra_body={"ignore_eos": True})
        assert (pair.choices[0].text, pair.choices[0].finish_reason) == ("Grüße, 🌍! ", "stop")
        assert pair.choices[1].finish_reason == "length"
        generated = figures()["nybble_generation_tokens_total"] - before
        assert 300 < generated < 450  # the engine gave up the first completion when its text had ended, not at 600
        assert pair.usage.completion_tokens == 300 + len("Grüße, 🌍! The".encode())
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="script", prompt="x" * 600)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:  # only the engine knows
            client.completions.create(model="script", prompt="x", extra_body={"stop_token_ids": [999]})
        assert caught.value.param == "stop_token_ids"
        again = client.completions.create(model="script", prompt="a" * 100, max_tokens=1)
        again = client.completions.create(model="script", prompt="a" * 100, max_tokens=1)
        assert again.usage.prompt_tokens_details.cached_tokens == 96  # six blocks of 16
        engine = children(process.pid)
        assert len(engine) == 1
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0].endswith("stopped\n")
        assert process.returncode == 0
        assert not Path(f"/proc/{engine[0]}").exists()


@linux
def test_the_server_ends_with_its_engine(tmp_path):
    with launched(tmp_path) as (process, url):
        assert httpx.get(url + "/health").status_code == 200
        os.kill(children(process.pid)[0], signal.SIGKILL)
        errors = process.communicate(timeout=20)[1]
        assert process.returncode == 1
        assert "error: the engine died" in errors
        assert "memory ran out" in errors  # what SIGKILL mostly means


@linux
def test_what_still_runs_when_the_time_to_end_is_over_is_told(tmp_path):
    with launched(tmp_path, "scripted_engine:slow", drain_s=1) as (process, url):
        body, texts = {"model": "script", "prompt": "x", "max_tokens": 400, "ignore_eos": True}, {}

        def one(stream):
            with httpx.stream("POST", url + "/v1/completions", json=body | {"stream": stream}, timeout=60) as answer:
                parts = answer.iter_text()
                texts[stream] = answer.status_code, next(parts) + "".join(parts)

        threads = [threading.Thread(target=one, args=(stream,), daemon=True) for stream in (True, False)]
        for thread in threads:
            thread.start()
        eventually(lambda: httpx.get(url + "/health").json()["running"] == 2)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(20)
        assert (texts[True][0], texts[False][0]) == (200, 503)
        assert json.loads(texts[False][1])["error"]["code"] == "engine_died"
        assert texts[True][1].endswith('"code":"engine_died"}}\n\ndata: [DONE]\n\n')
        out, errors = process.communicate(timeout=20)
        assert out.endswith("stopped\n")
        assert "Traceback" not in errors


@linux
def test_an_idle_connection_outlives_the_clients_patience(tmp_path):
    """httpx, and the openai client with it, keeps idle connections for 5 s: a server that closes them then loses requests."""
    with launched(tmp_path) as (_, url), socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as kept:
        for wait_s in (0.0, 6.0):
            time.sleep(wait_s)
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += kept.recv(1 << 16) or b" the server hung up }"
            assert answer.startswith(b"HTTP/1.1 200 OK")


@linux
def test_300_streams_a_third_of_which_hang_up(tmp_path):
    """All at once, more than run together: who stays gets the right text, and who leaves gives the blocks back."""
    with launched(tmp_path) as (process, url):
        async def one(client, i):
            prompt = chr(33 + i % 90) + "x" * (i % 50)
            stream = await client.completions.create(model="script", prompt=prompt, max_tokens=100, stream=True,
                                                     stream_options={"include_usage": True})
            if i % 3 == 0:
                for _ in range(i % 4):
                    await anext(stream, None)
                await stream.close()
                return
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].text for c in chunks if c.choices) == shifted(prompt).decode("utf-8", "replace")
            assert chunks[-1].usage.completion_tokens == len(ANSWER.encode()) + 2

        async def everyone():
            limits = httpx.Limits(max_connections=400)
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0,
                                          http_client=httpx.AsyncClient(limits=limits, timeout=120)) as client:
                await asyncio.gather(*(one(client, i) for i in range(300)))

        asyncio.run(everyone())

        def idle():
            text = httpx.get(url + "/metrics").text
            return "nybble_num_requests_running 0.0" in text and "nybble_server_requests_active 0.0" in text
        eventually(idle)
        assert "nybble_kv_cache_usage_perc 0.0" in httpx.get(url + "/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0].endswith("stopped\n")


@linux
def test_an_engine_killed_in_the_middle_of_streams(tmp_path):
    """Every client is told, nobody hangs, and the server ends with an error for whoever restarts it."""
    with launched(tmp_path, "scripted_engine:slow") as (process, url):
        started, ends = [], []

        def one(i):
            body = {"model": "script", "prompt": "x", "max_tokens": 400, "stream": i % 2 == 0, "ignore_eos": True}
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
                text = ""
                for line in response.iter_lines():
                    text += line
                    started.append(i)
            ends.append((i, response.status_code, text))

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(20)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(set(started)) == 10)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        assert len(ends) == 20
        for i, status, text in ends:
            assert status == (200 if i % 2 == 0 else 503)
            assert '"code":"engine_died"' in text
            assert text.endswith("data: [DONE]") == (i % 2 == 0)
        assert "error: the engine died" in process.communicate(timeout=20)[1]
        assert process.returncode == 1


@linux
def test_a_tiny_model_end_to_end(tmp_path):
    """`serve` on a checkpoint that asks for greedy decoding: its tokens and log probabilities against transformers."""
    torch = pytest.importorskip("torch")
    from tiny import make_tiny

    model = make_tiny(tmp_path, "llama", eos_token_id=None, vocab_size=259)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    prompts = [[5 + i, 40, 70 + 3 * i, 100] * (i + 1) for i in range(6)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(out).logits[0].float(), -1)
        tokens = out[0, len(prompt):].tolist()
        wanted.append((tokens, [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)]))
    script = ("import sys; from nybble.serve.launch import serve; serve(sys.argv[1], port=0, model_name='tiny', "
              "engine={'device': 'cpu', 'kv': 'fp32', 'num_blocks': 64, 'block_size': 16}, "
              "progress=lambda text: print(text, flush=True))")
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], text=True, stdout=subprocess.PIPE) as process:
        try:
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://127.0.0.1:\d+", line)))
            assert next(process.stdout) == "requests that do not say get temperature 0.0, as generation_config.json has it\n"

            async def everyone():
                async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
                    return await asyncio.gather(*(client.completions.create(
                        model="tiny", prompt=prompt, max_tokens=12, logprobs=0, extra_body={"ignore_eos": True},
                    ) for prompt in prompts))

            tokenizer = load_tokenizer(tmp_path)
            for answer, (tokens, logprobs) in zip(asyncio.run(everyone()), wanted):
                assert answer.choices[0].text == tokenizer.decode(tokens)
                assert answer.choices[0].logprobs.token_logprobs == pytest.approx(logprobs, abs=2e-3)
            turn = [{"role": "user", "content": "hi"}]
            chat_answer = openai.OpenAI(base_url=url + "/v1", api_key="unused").chat.completions.create(
                model="tiny", messages=turn, max_tokens=5, temperature=0, extra_body={"ignore_eos": True})
            assert chat_answer.usage.completion_tokens == 5
            assert chat_answer.usage.prompt_tokens == 3 + len("user\nhi\n" + "assistant\n")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


def test_reasons_not_to_start(tmp_path):
    with launched(tmp_path, "scripted_engine:broken") as (process, url):
        assert url is None
        assert "error: the engine did not start" in (errors := process.communicate(timeout=20)[1])
        assert "no such weights" in errors
    for key in ("", " sesame", "sésame", "a\nb"):
        with pytest.raises(ServeError, match="api_key .or NYBBLE_API_KEY.: wants"):
            serve(tmp_path, api_key=key)
    for origin in ("a.example", "https://a.example/", "https://a.example/page"):
        with pytest.raises(ServeError, match=f"--allowed-origins {origin}: wants origins"):
            serve(tmp_path, allowed_origins=[origin])
    with pytest.raises(ServeError, match="there is no model at .*nowhere"):
        serve(tmp_path / "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError, match="cannot listen .* in use"):
        serve(tmp_path, port=taken.getsockname()[1])
