"""The OpenAI request bodies Nybble answers, and its error object: what a field means, may be, and why one was refused.

It is not a router and never touches text or tokens. The one idea: no field is ignored. A known field is honoured, or accepted
at the value that changes nothing, or refused by name; an unknown one is refused by name (HTTP 400). Ranges are stated once, in
`engine.messages.SamplingParams`.
Source: the OpenAI API reference (chat/completions, completions); the extra sampling fields have vLLM's names.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from nybble.engine.messages import Grammar, SamplingParams
from nybble.text.errors import read_json

RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "self"})
Int = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# Fields that `SamplingParams` has, too.
SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "seed", "n", "ignore_eos", "min_tokens", "skip_special_tokens")
OF_CHECKPOINTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of StructuredOutputs, with "guided_" before them of a request, and kinds of Grammar.
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
# What a field of a few values may be, by the end of its path.
ENUMS = {"role": ", ".join(ROLES), "tool_choice": "none, auto, required, or a function of tools",
         "response_format.type": "text, json_object, json_schema", "content.type": "text, the only kind of part",
         "type": "function", "": "another value"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
T = TypeVar("T")


def unsupported(*neutral: Any) -> Any:
    """The type of a field that is not honoured. neutral: what it may say besides null: the values that ask for nothing."""
    schema = {"enum": [None, *neutral], "description": "Not supported."}
    return Annotated[Any, Meta(extra={"neutral": neutral}, extra_json_schema=schema)]


class RequestError(Exception):
    """An HTTP error with OpenAI's error object. status: the HTTP code; param: the request field that is at fault."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.error = {"message": _clean(message), "type": kind, "param": param and _clean(param), "code": code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


def checkpoint_sampling(path: str | Path) -> dict[str, Any]:
    """What a checkpoint's generation_config.json gives requests that do not say themselves, by field of SamplingParams: as vLLM
    reads it, and `do_sample: false` without a temperature is greedy. Raises ValueError naming the file and the key."""
    file = Path(path) / "generation_config.json"
    found = read_json(file)
    given = {"temperature": 0.0} if found.get("do_sample") is False else {}
    given |= {name: found[name] for name in OF_CHECKPOINTS if found.get(name) is not None}
    try:
        SamplingParams(**given)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return given


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:2000]


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """strict: the answer always keeps to the schema, whatever it says."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of them; vLLM's names. grammar: Lark, as llguidance reads it."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Function(Struct, forbid_unknown_fields=True, kw_only=True):
    """parameters: a JSON schema; without one there are no arguments. strict: a call that tool_choice asks for always is."""

    name: Annotated[str, Meta(max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    function: Function


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """arguments: a JSON object, as text; or what a model wrote in its place, and got cut short, say."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any] | str:
        try:
            return msgspec.json.decode(self.arguments, type=dict)
        except (msgspec.DecodeError, RecursionError):
            return self.arguments


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """index: what clients that collected a stream leave in."""

    id: str
    index: Int | None = None
    type: Literal["function"]
    function: CalledFunction


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: unsupported(False) = None


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
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    logit_bias: dict[TokenId, float] | None = None

    def grammar(self) -> Grammar | None:
        """What the answer has to match. Raises RequestError when two fields say so."""
        found, form = [], self.response_format
        for name, kind in KINDS.items():
            for field, text in ((f"guided_{name}", getattr(self, f"guided_{name}")),
                                (f"structured_outputs.{name}", getattr(self.structured_outputs, name, None))):
                if text is not None:
                    found.append(Grammar(kind, text, field))
        if form is not None and form.type != "text":
            if form.type == "json_schema" and form.json_schema is None:
                raise RequestError(400, "response_format.json_schema is missing: send its name and schema",
                                   param="response_format")
            schema = {"type": "object"} if form.type == "json_object" else form.json_schema.schema
            found.append(Grammar("json_schema", {} if schema is None else schema, "response_format"))
        if len(found) > 1:
            raise RequestError(400, f"{' and '.join(one.field for one in found)} each ask for a form: send one",
                               param=found[1].field)
        return found[0] if found else None

    def _params(self, logprobs: int | None, max_tokens: int | None, names: dict[str, str],
                defaults: dict[str, Any], prompt_logprobs: int | None = None) -> SamplingParams:
        """names: where a field of SamplingParams is called otherwise in this request, for the error."""
        if self.stream_options is not None:
            if not self.stream:
                raise RequestError(400, "stream_options is only for stream = true", param="stream_options")
            _refuse_unless_neutral(self.stream_options, "stream_options.")
        given = {name: getattr(self, name) for name in SAME} | {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()), "include_stop": self.include_stop_str_in_output}
        try:
            return SamplingParams(**defaults | {k: v for k, v in given.items() if v is not None},
                                  logprobs=logprobs, prompt_logprobs=prompt_logprobs, max_tokens=max_tokens,
                                  grammar=self.grammar())
        except ValueError as error:
            field, _, rest = str(error).partition(" ")
            field = names.get(field, field)
            raise RequestError(400, f"{field} {rest}", param=field) from None


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn. name: who speaks, or the tool that does, for templates that say so. The fields below it are those that clients
    send back as null with an assistant's turn."""

    role: Literal[ROLES]
    content: str | list[TextPart] | None = None
    name: str | None = None
    type: unsupported("text", "message") = None
    refusal: unsupported() = None
    annotations: unsupported([]) = None
    audio: unsupported() = None
    function_call: unsupported() = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def rendered(self, called: dict[str, str]) -> dict[str, Any]:
        """As chat templates take it: arguments as objects, the tool's name beside its answer (called: by id). A developer's
        turn is a system turn: templates know no other name for it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        more: dict[str, Any] = {"name": self.name or called.get(self.tool_call_id), "tool_call_id": self.tool_call_id}
        more = {key: value for key, value in more.items() if value is not None}
        if self.tool_calls:
            more["tool_calls"] = [{"id": call.id, "type": "function", "function": {
                "name": call.function.name, "arguments": call.function.for_template()}} for call in self.tool_calls]
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **more}


class ChatRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    audio: unsupported() = None
    function_call: unsupported("none", "auto") = None
    functions: unsupported([]) = None
    metadata: unsupported({}) = None
    modalities: unsupported(["text"]) = None
    parallel_tool_calls: bool | None = None
    prediction: unsupported() = None
    prompt_cache_retention: unsupported("in_memory") = None
    reasoning_effort: unsupported() = None
    service_tier: unsupported("auto", "default") = None
    store: unsupported(False) = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    tools: list[Tool] | None = None
    verbosity: unsupported("medium") = None
    web_search_options: unsupported() = None

    def params(self, **defaults: Any) -> SamplingParams:
        """defaults: for what the request leaves out. Raises RequestError (400) naming the field that cannot be honoured."""
        _refuse_unless_neutral(self)
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
                            {"logprobs": "top_logprobs", "max_tokens": limit}, defaults)


class CompletionRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    """prompt: one text, one list of token ids, or a list of either. echo: the prompt before the answer, its log-probabilities
    too; with max_tokens 0 nothing else."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: unsupported(1) = None
    suffix: unsupported("") = None

    def params(self, **defaults: Any) -> SamplingParams:
        """defaults: for what the request leaves out. Raises RequestError (400) naming the field that cannot be honoured."""
        _refuse_unless_neutral(self, best_of=(self.n,) if self.n not in (None, 1) else ())
        limit = 16 if self.max_tokens is None else self.max_tokens
        if self.echo and limit == 0:
            limit = 1  # which the answer leaves out
        return self._params(self.logprobs, limit, {}, defaults, self.logprobs if self.echo else None)

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


def _refuse_unless_neutral(struct: Struct, where: str = "", **also: tuple) -> None:
    """also: further values that ask for nothing in this request, by field."""
    for name, neutral in neutral_values(type(struct)).items():
        value, neutral = getattr(struct, name), neutral + also.get(name, ())
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            fine = "".join(f" or send {msgspec.json.encode(one).decode()}" for one in neutral)
            raise RequestError(400, f"{where}{name} is not supported: leave it out{fine}", param=where + name)


@cache
def neutral_values(kind: type[Struct]) -> dict[str, tuple]:
    """What each field that is not honoured may say besides null."""
    hints = get_type_hints(kind, include_extras=True)
    metas = {name: meta for name, hint in hints.items() for meta in getattr(hint, "__metadata__", ())}
    return {name: meta.extra["neutral"] for name, meta in metas.items() if meta.extra}


def check_messages(messages: list[Message]) -> None:
    """Raises RequestError (400) naming the field of a message that cannot be honoured."""
    for index, message in enumerate(messages):
        _refuse_unless_neutral(message, where := f"messages[{index}].")
        if message.content is None and not message.tool_calls:
            raise RequestError(400, "a message needs its content", param=where + "content")
        for name, role in (("tool_call_id", "tool"), ("tool_calls", "assistant")):
            if getattr(message, name) and message.role != role:
                raise RequestError(400, f"{where}{name} is only for role {role}: leave it out", param=where + name)


def decode(kind: type[T], body: bytes) -> T:
    """body: JSON. Raises RequestError (400) whose `param` is the path of the first field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).replace("`key` in `$", "`$").partition(" - at `$")
        field = re.search(r"(?:unknown|required) field `(.*)`", what)
        param = (path.rstrip("`") + ("." + field[1] if field else "")).lstrip(".")
        if what.startswith("Invalid enum value"):  # which does not say what would be valid
            what += next(": wants " + values for end, values in ENUMS.items() if re.sub(r"\[\d+\]", "", param).endswith(end))
        raise RequestError(400, f"{param or 'body'}: {what}", param=param or None) from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None


def schemas(kinds: tuple[type, ...]) -> dict[str, Any]:
    """JSON schemas of the request bodies, for the OpenAPI document's components."""
    return msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")[1]
