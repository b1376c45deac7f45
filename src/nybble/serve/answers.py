"""Pieces of text in OpenAI's shapes: chat and text completions, whole or in chunks, their logprobs and token counts.

It knows neither HTTP nor the engine. Source: the OpenAI API reference (chat/completions, completions).
"""

from __future__ import annotations

import sys
import time
from uuid import uuid4

from nybble.engine.messages import SamplingParams, TokenLogprob
from nybble.serve.protocol import ChatRequest, CompletionRequest
from nybble.serve.stream import Piece
from nybble.serve.tools import Tools, ToolText
from nybble.text import Tokenizer

LEAST = -9999.0  # JSON has no infinity


class Answer:
    """What the shapes of chat and of text completions share. continues: the text goes on from the prompt's. silent: what was
    generated is no part of it. Each shape has `chunks(piece)`, the choices to send for a piece (an event each), and
    `choice(...)`, one of a whole answer."""

    streamed_as: str
    whole_as: str
    prefix: str
    continues = silent = False

    def __init__(self, model: str, tokenizer: Tokenizer, params: SamplingParams, body: ChatRequest | CompletionRequest) -> None:
        self.tokenizer, self.params, self.stream = tokenizer, params, bool(body.stream)
        self.usage_wanted = bool(body.stream_options and body.stream_options.include_usage)
        self.head = {"id": self.prefix + uuid4().hex, "created": int(time.time()), "model": model}

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


class ChatAnswer(Answer):
    streamed_as, whole_as, prefix = "chat.completion.chunk", "chat.completion", "chatcmpl-"

    def __init__(self, model: str, tokenizer: Tokenizer, params: SamplingParams, body: ChatRequest,
                 tools: Tools | None) -> None:
        super().__init__(model, tokenizer, params, body)
        self._texts = None if tools is None else [ToolText(tools.form) for _ in range(params.n)]
        self._forced = tools is not None and bool(tools.forced)
        self._most_calls = 1 if body.parallel_tool_calls is False else sys.maxsize
        self._opened: set[int] = set()

    def _split(self, index: int, text: str, reason: str | None) -> tuple[str, list[dict], str | None]:
        """Content, calls, and the reason of the end when the answer calls tools."""
        if self._texts is None:
            return text, [], reason
        content, calls = self._texts[index].push(text, reason is not None)
        content = "" if self._forced else content  # else the beginning of a call that was cut short
        calls = [call for call in calls if call["index"] < self._most_calls]
        return content, calls, "tool_calls" if reason == "stop" and self._texts[index].count else reason

    def chunks(self, piece: Piece) -> list[dict]:
        out, (content, calls, reason) = [], self._split(piece.index, piece.text, piece.finish_reason)
        if piece.index not in self._opened:  # with tools the content may stay none, as in an answer that is not streamed
            self._opened.add(piece.index)
            begin = {"role": "assistant", "content": None if self._texts else "", "refusal": None}
            out.append(self._chunk(piece.index, begin))
        if content or piece.logprobs:
            out.append(self._chunk(piece.index, {"content": content}, self._logprobs(piece.logprobs)))
        if calls:
            out.append(self._chunk(piece.index, {"tool_calls": calls}))
        if reason:
            out.append(self._chunk(piece.index, {}, None, reason))
        return out

    def choice(self, index: int, text: str, logprobs: list[TokenLogprob], reason: str) -> dict:
        content, calls, reason = self._split(index, text, reason)
        message = {"role": "assistant", "content": content or None if calls or self._forced else content, "refusal": None}
        if calls:
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        return {"index": index, "message": message, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    @staticmethod
    def _chunk(index: int, delta: dict, logprobs: dict | None = None, reason: str | None = None) -> dict:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict | None:
        if self.params.logprobs is None:
            return None
        return {"content": [{**self._token(one.token_id, one.logprob), "top_logprobs": [
            self._token(*pair) for pair in one.top[: self.params.logprobs]]} for one in tokens], "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict:
        return {"token": self.token_text(token_id), "logprob": max(logprob, LEAST),
                "bytes": list(self.tokenizer.token_bytes(token_id))}


class CompletionAnswer(Answer):
    streamed_as, whole_as, prefix, continues = "text_completion", "text_completion", "cmpl-", True

    def __init__(self, model: str, tokenizer: Tokenizer, params: SamplingParams, body: CompletionRequest,
                 echo: list[str] | None) -> None:
        super().__init__(model, tokenizer, params, body)
        self._echo, self._offsets = echo, {}
        self._before = {i: echo[i // params.n] for i in range(len(echo or ()) * params.n)}  # by completion, until it was sent
        self.silent = body.max_tokens == 0

    def chunks(self, piece: Piece) -> list[dict]:
        text = self._before.pop(piece.index, "") + piece.text
        if not (text or piece.logprobs or piece.finish_reason):
            return []
        return [self._choice(piece.index, text, self._logprobs(piece.index, piece.logprobs), piece.finish_reason)]

    def choice(self, index: int, text: str, logprobs: list[TokenLogprob], reason: str) -> dict:
        return self._choice(index, self._before.pop(index, "") + text, self._logprobs(index, logprobs), reason)

    @staticmethod
    def _choice(index: int, text: str, logprobs: dict | None, reason: str | None) -> dict:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: list[TokenLogprob]) -> dict | None:
        if self.params.logprobs is None:
            return None
        out: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in tokens:
            text, offset = self.token_text(one.token_id), self._offsets.get(index, 0)
            pairs = [(one.token_id, one.logprob), *one.top[: self.params.logprobs]]
            begins = one.logprob is None  # a prompt
            whole = self._echo[index // self.params.n] if self._echo else ""
            if whole and not offset and not whole.startswith(text):  # which has no BOS, nor the space before its first word
                text = "" if self.tokenizer.special_id(text) is not None else text.removeprefix(" ")
            self._offsets[index] = offset + len(text)
            out["tokens"].append(self._name(one.token_id))
            out["token_logprobs"].append(None if begins else max(one.logprob, LEAST))
            out["top_logprobs"].append(None if begins else {self._name(i): max(p, LEAST) for i, p in pairs})
            out["text_offset"].append(offset)
        return out

    def _name(self, token_id: int) -> str:
        """The token's text; where that is not text of its own, its bytes, as OpenAI writes them, so that keys differ."""
        text = self.token_text(token_id)
        return text if "�" not in text else "bytes:" + "".join(f"\\x{b:02x}" for b in self.tokenizer.token_bytes(token_id))


class Usage:
    """Token counts of one answer: each prompt once, every generated token of every completion."""

    def __init__(self, prompts: list[list[int]], n: int) -> None:
        self._prompt, self._n, self._generated, self._cached = sum(map(len, prompts)), n, 0, [0] * len(prompts)

    def add(self, piece: Piece) -> None:
        self._generated += piece.num_tokens
        if piece.index % self._n == 0:  # the first completion says what the prompt found in the cache
            prompt = piece.index // self._n
            self._cached[prompt] = max(self._cached[prompt], piece.cached_tokens)

    def as_dict(self) -> dict:
        return {"prompt_tokens": self._prompt, "completion_tokens": self._generated,
                "total_tokens": self._prompt + self._generated, "prompt_tokens_details": {"cached_tokens": sum(self._cached)}}
