"""The OpenAI request bodies Nybble answers, and its error object: what a field means, may be, and why one was refused.

It is not a router and never touches text or tokens. The one idea: no field is ignored. A known field is honoured, or accepted
at the value that changes nothing, or refused by name; an unknown one is refused by name (HTTP 400). Ranges are stated once, in
`engine.messages.SamplingParams`.
Source: the OpenAI API reference (chat/completions, completions); the extra sampling fields have vLLM's names.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from nybble.engine.messages import SamplingParams

Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
ROLES = ("system", "developer", "user", "assistant")
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
T = TypeVar("T")


class RequestError(Exception):
    """An HTTP error with OpenAI's error object. status: the HTTP code; param: the request field that is at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 type: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        kind = type or ("invalid_request_error" if status < 500 else "server_error")
        self.error = {"message": _clean(message), "type": kind, "param": param and _clean(param), "code": code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:2000]


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class Sampled(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions share. None is "not sent" for every field, as null is in the OpenAI API."""

    model: str
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | list[StopString] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Any = None

    def _params(self, logprobs: int | None, max_tokens: int | None, names: dict[str, str]) -> SamplingParams:
        """names: where a field of SamplingParams is called otherwise in this request, for the error."""
        if self.stream_options is not None:
            if not self.stream:
                raise RequestError(400, "stream_options is only for stream = true", param="stream_options")
            _refuse_unless_neutral(self.stream_options, {"include_obfuscation": (False,)}, "stream_options.")
        given = {
            "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "seed": self.seed, "n": self.n,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "include_stop": self.include_stop_str_in_output, "ignore_eos": self.ignore_eos,
            "stop_token_ids": tuple(self.stop_token_ids or ()), "min_tokens": self.min_tokens,
            "skip_special_tokens": self.skip_special_tokens,
        }
        try:
            return SamplingParams(**{k: v for k, v in given.items() if v is not None},
                                  logprobs=logprobs, max_tokens=max_tokens)
        except ValueError as error:
            field, _, rest = str(error).partition(" ")
            field = names.get(field, field)
            raise RequestError(400, f"{field} {rest}", param=field) from None


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. The fields below `content` are those that clients send back as null with an assistant's turn."""

    role: Literal[ROLES]
    content: str | list[TextPart] | None = None
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    def rendered(self) -> dict[str, str]:
        """As chat templates take it. A developer's turn is a system turn: templates know no other name for it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def params(self) -> SamplingParams:
        """Raises RequestError (400) naming the field whose value cannot be honoured."""
        _refuse_unless_neutral(self, CHAT_NEUTRAL)
        check_messages(self.messages)
        for name in self.chat_template_kwargs or ():
            if name in RESERVED_KWARGS or not name.isidentifier():
                raise RequestError(400, f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(400, "max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return self._params((self.top_logprobs or 0) if self.logprobs else None, limits.pop() if limits else None,
                            {"logprobs": "top_logprobs", "max_tokens": limit})


class CompletionRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    """prompt: one text, one list of token ids, or a list of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Any = None
    suffix: Any = None

    def params(self) -> SamplingParams:
        """Raises RequestError (400) naming the field whose value cannot be honoured."""
        _refuse_unless_neutral(self, COMPLETION_NEUTRAL | {"best_of": tuple({1, self.n or 1})})
        if self.echo and self.logprobs is not None:
            raise RequestError(400, "echo with logprobs is not supported: leave out one of them", param="echo")
        return self._params(self.logprobs, 16 if self.max_tokens is None else self.max_tokens, {})

    def prompts(self) -> list[str | list[int]]:
        """Raises RequestError when the list is empty or mixes texts and ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1 or [] in self.prompt:
            raise RequestError(400, "prompt: wants a text, token ids, or a non-empty list of either", param="prompt")
        return [self.prompt] if kinds == {int} else self.prompt


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The ids of a text, or of messages after the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


# What a field that is not honoured may say besides null: the values that ask for nothing.
CHAT_NEUTRAL: dict[str, tuple] = {
    "audio": (), "function_call": ("none", "auto"), "functions": ([],), "logit_bias": ({},), "metadata": ({},),
    "modalities": (["text"],), "parallel_tool_calls": (True, False), "prediction": (),
    "prompt_cache_retention": ("in_memory",), "reasoning_effort": (), "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"), "store": (False,), "tool_choice": ("none", "auto"), "tools": ([],),
    "verbosity": ("medium",), "web_search_options": (),
}
MESSAGE_NEUTRAL: dict[str, tuple] = {
    "name": (), "refusal": (), "annotations": ([],), "audio": (), "function_call": (), "tool_calls": ([],)}
COMPLETION_NEUTRAL: dict[str, tuple] = {"logit_bias": ({},), "suffix": ("",)}
RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "self"})


def _refuse_unless_neutral(struct: Struct, table: dict[str, tuple], where: str = "") -> None:
    for name, neutral in table.items():
        value = getattr(struct, name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            fine = "".join(f" or send {msgspec.json.encode(one).decode()}" for one in neutral)
            raise RequestError(400, f"{where}{name} is not supported: leave it out{fine}", param=where + name)


def check_messages(messages: list[Message]) -> None:
    """Raises RequestError (400) naming the field of a message that cannot be honoured."""
    for index, message in enumerate(messages):
        _refuse_unless_neutral(message, MESSAGE_NEUTRAL, f"messages[{index}].")
        if message.content is None:
            raise RequestError(400, "a message needs its content", param=f"messages[{index}].content")


def decode(kind: type[T], body: bytes) -> T:
    """body: JSON. Raises RequestError (400) whose `param` is the path of the first field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = re.search(r"(?:unknown|required) field `(.*)`", what)
        param = (path.rstrip("`") + ("." + field[1] if field else "")).lstrip(".")
        if what.startswith("Invalid enum value"):  # which does not say what would be valid
            what += ": wants " + ("text, the only kind of part" if param.endswith("type") else ", ".join(ROLES))
        raise RequestError(400, f"{param or 'body'}: {what}", param=param or None) from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None


def schemas(kinds: tuple[type, ...]) -> dict[str, Any]:
    """JSON schemas of the request bodies, for the OpenAPI document's components; a field that is not honoured shows all that it
    may say."""
    found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")[1]
    text = COMPLETION_NEUTRAL | {"best_of": (1,)}
    for name, table in (("ChatRequest", CHAT_NEUTRAL), ("CompletionRequest", text), ("Message", MESSAGE_NEUTRAL)):
        for field, neutral in table.items():
            found[name]["properties"][field] = {"enum": [None, *neutral], "description": "Not supported."}
    return found
