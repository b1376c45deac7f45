"""Messages between the HTTP server (or any client) and the engine process: msgspec structs, encoded as msgpack, never pickle.

This is also the vocabulary of requests: `SamplingParams` here is what `nybble.LLM` users see.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

WHOLE = ("top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "n")
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
# Between tokens of JSON: nothing, a space, or a new line and its indentation. Without a bound some models never stop.
JSON_SPACE = {"whitespace_pattern": r"( ?|\n {0,16})"}
BEAT_S = 1.0
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Grammar(msgspec.Struct, frozen=True):
    """What a whole answer has to match; only tokens that keep to it are drawn, and EOS only where it is complete.

    kind, and what text is: "json_schema" (the schema, or its JSON), "choice" (a list of strings, or its JSON), "regex" (Rust's
    syntax), "lark" (llguidance's dialect). field: the request's field that asked for it, for errors.
    """

    kind: Literal["json_schema", "choice", "regex", "lark"]
    text: Any
    field: str = "grammar"

    def __post_init__(self) -> None:
        if self.kind not in (kinds := ("json_schema", "choice", "regex", "lark")):
            raise ValueError(f"grammar.kind = {self.kind!r}: wants one of {', '.join(kinds)}")
        if not isinstance(self.text, str):
            msgspec.structs.force_setattr(self, "text", msgspec.json.encode(self.text).decode())


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled.

    temperature: 0 is greedy. top_k: 0 is off, and so is -1, as in vLLM. top_p in [0, 1]: 0 keeps the most likely token, as
    OpenAI's; it is then told as top_k = 1. min_p in [0, 1). Penalties
    follow the OpenAI and Hugging Face definitions: presence and frequency on generated tokens, repetition (CTRL, arXiv
    1909.05858) on prompt and generated tokens. seed: the request's own random stream, independent of what else is in the batch.
    logit_bias: what is added to the logits of token ids, before all else.
    stop: strings (or one), cut from the text unless `include_stop`; so is the text of the id that ended the request.
    stop_token_ids: ids that end it, like EOS.
    max_tokens: None is up to the context's end. logprobs: None, or how many top alternatives per token (0: the chosen only).
    prompt_logprobs: the same of the prompt's tokens, which are all computed then, whether or not they are in the prefix cache.
    n: completions per prompt; with a seed, completion i draws from its own stream. grammar: what the answer has to match.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # else its letters would be the stop strings
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        if self.top_p == 0:
            msgspec.structs.force_setattr(self, "top_k", 1)
            msgspec.structs.force_setattr(self, "top_p", 1.0)
        for name in WHOLE:
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name in OPTIONAL):
                raise ValueError(f"{name} = {value!r}: wants a whole number" + (" or None" if name in OPTIONAL else ""))
        for name in REAL:
            if type(value := getattr(self, name)) not in (int, float):
                raise ValueError(f"{name} = {value!r}: wants a number")
        for name, ok, wanted in (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 (greedy) to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 <= self.top_p <= 1.0, "0 to 1"),
            ("min_p", 0.0 <= self.min_p < 1.0, "0 up to, not including, 1"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 10.0, "1e-6 to 10"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("logit_bias", isinstance(self.logit_bias, dict) and len(self.logit_bias) <= 1024 and all(
                type(i) is int and i >= 0 and type(b) in (int, float) and -100 <= b <= 100 for i, b in self.logit_bias.items()),
             "at most 1024 token ids, each with a number from -100 to 100"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more, or None"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "0 to 20, or None"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "0 to 20, or None"),
            ("n", 1 <= self.n <= 128, "1 to 128"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "-2^63 to 2^63 - 1, or None"),
            ("stop", all(self.stop) and len(self.stop) <= 16, "at most 16 non-empty strings"),
            ("grammar", self.grammar is None or isinstance(self.grammar, Grammar), "a Grammar, or None"),
            ("ignore_eos", not (self.ignore_eos and self.grammar), "False with a grammar, which says where the answer ends"),
            ("min_tokens", not (self.min_tokens and self.grammar), "0 with a grammar, which says where the answer ends"),
        ):
            if not ok:
                raise ValueError(f"{name} = {getattr(self, name)!r}: wants {wanted}")


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start a request. The client has applied the chat template and tokenized."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag=True):
    """index: of the completion to end; None ends all of the request's."""

    request_id: str
    index: int | None = None


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Ask for an `Info` (counters and configuration)."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """I am alive; both sides say so every BEAT_S. A client that falls silent, or whose socket is closed when the engine
    says so, has its requests aborted."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing more, free everything, exit."""


ToEngine = Submit | Abort | Ask | Beat | Shutdown


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """logprob: None for the first token of a prompt, which nothing predicts."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one completion (`index` < n). Text is made by the client (`text.detokenize`); stop strings too, which
    then sends `Abort`. finish_reason: None while running, else "stop" | "length" | "abort" | "error". The id that stopped a
    completion (EOS, `stop_token_ids`) is the last of its token_ids: it was generated, and counts. prompt_logprobs: of all the
    prompt's tokens, in the first delta, where they are wanted."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request cannot run, or not to its end. `field` names what was wrong with it."""

    request_id: str
    field: str
    message: str


class Info(msgspec.Struct, frozen=True, tag=True):
    """What the engine is and how busy: everything /metrics, /health and /v1/models report.

    host_s: of all steps, without waiting for tokens. decode_wall_s: of `decode_steps`, each from the end of the step before
    it to its own; decode_busy_s: of that, what the device worked."""

    model: str
    scheme: str
    kv: str
    max_context: int
    block_size: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    preemptions: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    bytes_per_token: int
    weights: str = ""
    activations: str = ""
    host_s: float = 0.0
    decode_steps: int = 0
    decode_wall_s: float = 0.0
    decode_busy_s: float = 0.0


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; every request ends here."""

    message: str


FromEngine = Delta | Refused | Info | Beat | Fatal  # sent as lists: one message per client and step
