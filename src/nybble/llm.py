"""The engine in this process: `LLM(path).generate(...)`, and `pipeline(path)` for those who come from LMDeploy.

No server, no sockets: a loop over `Engine.step`. What is generated does not depend on how prompts are batched.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import count, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from nybble.engine.messages import Delta, Info, Refused, SamplingParams, Submit, TokenLogprob
from nybble.serve.protocol import checkpoint_sampling
from nybble.serve.stream import TextStream

if TYPE_CHECKING:
    from nybble.engine.core import Engine

Prompt = str | list[int]
Messages = list[dict[str, Any]]
Progress = Callable[[str, float], None]  # what is being done, and how much of it in [0, 1]


@dataclass
class Response:
    """One completion. `finish_reason`: "stop" | "length" | "error"; `index` counts the prompts, `choice` the `n` of each."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_token_len: int = 0
    cached_tokens: int = 0
    index: int = 0
    choice: int = 0
    error: str | None = None

    @property
    def generate_token_len(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Piece:
    """A piece of a stream: text that will not change any more, and the completion so far."""

    text: str
    response: Response


class LLM:
    """A model, its tokenizer and an engine.

    path: a Hugging Face directory (16-bit or quantized) or a .gguf. kv: a key of `formats.spec.KV`, or "auto": what the
    checkpoint asks for, else int8. device: "auto", "cpu", "cuda", "cuda:N". Further keywords are fields of
    `engine.config.EngineConfig` (kv_memory, max_batch, max_batched_tokens, max_context, prefix_caching, chunked_prefill, ...).

    Raises FileNotFoundError or ValueError with what was wrong and what would do.
    """

    def __init__(self, path: str | Path, *, kv: str = "auto", device: str = "auto", progress: Progress | None = None,
                 **engine: Any) -> None:
        from nybble.engine.config import EngineConfig
        from nybble.engine.load import open_engine
        from nybble.text import load_tokenizer

        self.path, self.sampling = Path(path), checkpoint_sampling(path)
        known = [*(option.name for option in fields(EngineConfig)), "device", "progress"]
        if unknown := [name for name in engine if name not in known]:
            near = get_close_matches(unknown[0], known, 3, 0.5) or known
            raise ValueError(f"LLM has no option {unknown[0]}; there are {', '.join(near)}")
        config = EngineConfig(kv=None if kv == "auto" else kv, **engine)
        self.engine = open_engine(self.path, device, config, progress)
        self.tokenizer = load_tokenizer(self.path)
        self._ids = count()
        self._mail: dict[str, list[Delta | Refused]] = {}  # request -> its call's inbox: streams may be read by turns
        self._turn = Lock()  # threads that share this take turns at the engine; a step serves all of their requests
        self._left: list[str] = []  # requests whose callers left before their end

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the device memory back."""
        self.__dict__.pop("engine", None)
        gc.collect()  # runner and graphs refer to each other

    def info(self) -> Info:
        return self._opened().info()

    def _opened(self) -> Engine:
        if "engine" not in self.__dict__:
            raise ValueError(f"this LLM was closed: make another from {self.path}")
        return self.engine

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What calls without params get, by vLLM's name for it: what the checkpoint's generation_config.json says of sampling,
        and else what `SamplingParams()` does. changes: fields to have otherwise."""
        return SamplingParams(**self.sampling | changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[int], None] | None = None,
    ) -> Any:
        """Complete one prompt (str or token ids) -> `Response` (a list of n with `params.n` > 1), or a list of prompts -> a
        list of those, in order. `params`: one for all or one each (None: `get_default_sampling_params()`); prompts with the
        largest max_tokens start first, which changes no answer. `on_token(count)` is called as tokens arrive.

        Raises ValueError for a prompt that cannot run (empty, longer than the context), naming it; nothing is generated then.
        """
        if not isinstance(prompts, Sequence):
            raise ValueError(f"{type(prompts).__name__} is no prompt: give a string, a list of token ids, or a list of those")
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        each = self._params_for(params, len(batch))
        done: list[Response] = []
        for piece in self._run(batch, each):
            if on_token is not None:
                on_token(len(piece.response.token_ids))
            if piece.response.finish_reason is not None:
                done.append(piece.response)
        ordered = iter(sorted(done, key=lambda response: (response.index, response.choice)))
        answers = [next(ordered) if one.n == 1 else list(islice(ordered, one.n)) for one in each]
        return answers[0] if single else answers

    def chat(self, conversations: Messages | Sequence[Messages], params: SamplingParams | None = None) -> Any:
        """Like `generate`, for lists of {"role", "content"} messages through the model's chat template."""
        several = isinstance(conversations, (list, tuple)) and not (conversations and isinstance(conversations[0], dict))
        prompts = [self.render(messages) for messages in conversations] if several else self.render(conversations)
        return self.generate(prompts, params or self.get_default_sampling_params(max_tokens=None))

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces of text as they are generated. Leaving the loop early aborts the request."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = self.render(prompt)  # type: ignore[arg-type]
        yield from self._run([prompt], self._params_for(params, 1))  # type: ignore[list-item]

    def render(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages):
            raise ValueError(f'{messages!r:.80} is no conversation: give a list of {{"role", "content"}} messages')
        return self.tokenizer.encode(self.tokenizer.chat(messages, add_generation_prompt=True), add_special=False)

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * prompts
        if not isinstance(params, Sequence) or any(not isinstance(one, SamplingParams) for one in params):
            raise ValueError(f"params: wants SamplingParams, or one for each prompt in a list; got {params!r}")
        if len(params) != prompts:
            raise ValueError(f"{len(params)} sampling params for {prompts} prompts: give one, or one for each")
        return list(params)

    def _encode(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompt {index}: {type(prompt).__name__} is no prompt: give a string or a list of token ids")
        if (odd := next((item for item in prompt if type(item) is not int), None)) is not None:
            raise ValueError(f"prompt {index}: {odd!r} is no token id: give a string or a list of ints")
        return list(prompt)

    def _run(self, prompts: list[Prompt], each: list[SamplingParams]) -> Iterator[Piece]:
        live: dict[str, list[tuple[Response, TextStream]]] = {}
        inbox: list[Delta | Refused] = []
        submits = [Submit(f"local-{next(self._ids)}", self._encode(prompt, index), params)
                   for index, (prompt, params) in enumerate(zip(prompts, each))]
        for index, submit in enumerate(submits):
            self._mail[submit.request_id] = inbox
            before = submit.token_ids if isinstance(prompts[index], str) else ()  # ids may end in a chat's own marks
            live[submit.request_id] = [(Response(input_token_len=len(submit.token_ids), index=index, choice=choice),
                                        TextStream(self.tokenizer, submit.params, before))
                                       for choice in range(submit.params.n)]
        try:
            with self._turn:
                self._opened().submit(*submits)
            while live:
                with self._turn:
                    if not inbox:
                        self._abort_left()
                        for event in self._opened().step():
                            self._mail.get(event.request_id, []).append(event)
                    events, inbox[:] = inbox[:], []
                for event in events:
                    if event.request_id not in live:
                        continue
                    if isinstance(event, Refused):
                        [(response, _), *_] = live.pop(event.request_id)
                        raise ValueError(f"prompt {response.index}: {event.message} ({event.field})")
                    yield from self._advance(event, live)
        finally:
            for submit in submits:
                del self._mail[submit.request_id]
            self._left += live
            while self._left and self._turn.acquire(blocking=False):  # else who is at the engine does it
                try:
                    self._abort_left()
                finally:
                    self._turn.release()

    def _abort_left(self) -> None:
        """By whoever has the turn. Nobody waits for it in order to leave: a stream that is forgotten ends where Python collects
        it, and that may be in the middle of a step."""
        while self._left:
            request_id = self._left.pop()
            if "engine" in self.__dict__:
                self.engine.abort(request_id)

    def _advance(self, delta: Delta, live: dict[str, list[tuple[Response, TextStream]]]) -> Iterator[Piece]:
        response, stream = live[delta.request_id][delta.index]
        if response.finish_reason is not None:
            return
        text, used, response.finish_reason = stream.take(delta)
        response.text += text
        response.token_ids += delta.token_ids[:used]
        response.logprobs += (delta.logprobs or [])[:used]
        response.prompt_logprobs += delta.prompt_logprobs or []
        response.cached_tokens, response.error = delta.cached_tokens, delta.error
        if response.finish_reason is not None:
            if all(other.finish_reason is not None for other, _ in live[delta.request_id]):
                del live[delta.request_id]
            if delta.finish_reason is None:
                with self._turn:
                    self._opened().abort(delta.request_id, delta.index)
        yield Piece(text, response)


class Pipeline:
    """LMDeploy's calling convention over `LLM`: strings get the chat template, lists of messages are conversations."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __call__(self, prompts: Any, gen_config: SamplingParams | Sequence[SamplingParams] | None = None,
                 do_preprocess: bool = True) -> Any:
        """A string or a conversation -> `Response`; a list of them -> a list. `do_preprocess=False`: no template."""
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], dict))
        batch = [self._ids(p, do_preprocess) for p in ([prompts] if single else prompts)]
        answers = self.llm.generate(batch, gen_config or SamplingParams(temperature=0.0, max_tokens=512))
        return answers[0] if single else answers

    def stream_infer(self, prompt: Any, gen_config: SamplingParams | None = None,
                     do_preprocess: bool = True) -> Iterator[Piece]:
        """Pieces of one answer."""
        return self.llm.stream(self._ids(prompt, do_preprocess), gen_config or SamplingParams(temperature=0.0, max_tokens=512))

    def _ids(self, prompt: str | Messages, do_preprocess: bool) -> list[int]:
        if isinstance(prompt, str):
            if not do_preprocess or not self.llm.tokenizer.has_chat_template:
                return self.llm.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        return self.llm.render(prompt)

    def close(self) -> None:
        self.llm.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pipeline(path: str | Path, **options: Any) -> Pipeline:
    """`pipeline(path)(["Hi!", "What is 4-bit quantization?"])`. Options are those of `LLM`."""
    return Pipeline(LLM(path, **options))
