"""The engine: requests in, tokens out, one step at a time. It decides when a request ends; it owns no tensor and no socket.

A step plans, launches, and collects. With overlap it collects the step before the one it launched, so the device has work
while the host counts tokens; what was drawn for a request that had already ended is dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

from nybble.engine.config import DEFAULT_KV, EngineConfig, Runner, Sampled
from nybble.engine.grammar import Grammars
from nybble.engine.messages import Delta, Info, Refused, Submit
from nybble.engine.request import Request, completion_seed
from nybble.engine.scheduler import Limits, Plan, Scheduler

__all__ = ["Engine", "EngineConfig"]

Launched = tuple[Plan, Callable[..., Any]]
COMPILING_WAIT_S = 0.01  # when there is nothing else to do; messages are read in between
NOT_FINITE = "the model's logits are not finite for this request"


def default_interval(max_batch: int) -> int:
    """Steps between starts of prompts: so that about four start together when answers take 240 tokens. On an H200 with 128
    requests at once (Llama-2-13B shape), starting every 8 steps makes a prompt token cost 24 us, every step 31 us."""
    return min(8, max(1, max_batch // 16))


class Engine:
    """model: a `models.Decoder`, or anything that already runs plans (`config.Runner`).

    `submit` and `abort` only queue; `step` answers. Every request is answered exactly once per completion with a
    finish_reason ("stop" | "length" | "abort" | "error"), or once by `Refused`. kv_scales: per layer (K, V), for fp8 caches.
    grammars: of the model's tokenizer; without, requests with a grammar are refused.
    """

    def __init__(self, model: Any, config: EngineConfig,
                 kv_scales: Sequence[tuple[float, float] | None] | None = None, grammars: Grammars | None = None) -> None:
        config = replace(config, kv=config.kv or DEFAULT_KV)
        if isinstance(model, Runner):
            self.runner: Runner = model
        else:
            from nybble.engine.runner import ModelRunner

            self.runner = ModelRunner(model, config, kv_scales)
        self.config, self.grammars = config, grammars
        self._compiling: list[tuple[list[Request], futures.Future]] = []
        self.max_context = min(self.runner.max_context, self.runner.num_blocks * config.block_size)
        interval = config.prefill_interval or (default_interval(config.max_batch) if self.runner.overlap else 1)
        self.scheduler = Scheduler(Limits(self.runner.num_blocks, config.block_size, config.max_batch,
                                          self.runner.max_batched_tokens, config.chunked_prefill, config.prefix_caching,
                                          interval))
        self._live: dict[str, list[Request]] = {}  # unfinished completions of each request
        self._answers: list[Delta | Refused] = []  # of submit and abort, for the next step to return
        self._in_flight: Launched | None = None
        self._lost: Exception | None = None  # the device will never work again in this process
        self._steps = self._prompt_tokens = self._generated_tokens = self._seeded = 0
        self._host_s = self._waited_s = 0.0

    # ---- requests ---------------------------------------------------------------------------------------------------

    def submit(self, *messages: Submit) -> None:
        """Queue requests; one that can never run is refused in the next step's answers.

        Of several, those whose answers may be longest start first: then the last of them end together, in steps with many rows
        (longest processing time first: Graham, 1969)."""
        accepted = [request for message in messages for request in self._accept(message)]
        for request in sorted(accepted, key=lambda one: one.params.max_tokens or self.max_context, reverse=True):
            self.scheduler.add(request)

    def _accept(self, message: Submit) -> list[Request]:
        """A message's completions, where nothing keeps them from starting."""
        if refused := self._refusal(message):
            self._answers.append(Refused(message.request_id, *refused))
            return []
        params, prompt = message.params, message.token_ids
        limit = self.max_context if params.max_tokens is None else len(prompt) + params.max_tokens
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.config.eos_ids))
        seed = params.seed if params.seed is not None else self._own_seed()
        live = self._live[message.request_id] = [
            Request(message.request_id, index, prompt, params, limit, stop_ids, completion_seed(seed, index))
            for index in range(params.n)
        ]
        self._prompt_tokens += len(prompt)
        if params.grammar is None:
            return list(live)
        self._compiling.append((live, self.grammars.compile(params.grammar)))
        return []

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End what is left of a request, or only its completion `index`; what is unknown or has ended is ignored."""
        for request in [one for one in self._live.get(request_id, ()) if index in (None, one.index)]:
            self._end(request, "abort")
            self._answers.append(Delta(request_id, request.index, [], finish_reason="abort"))

    def _refusal(self, message: Submit) -> tuple[str, str] | None:
        """(field, why) of a request that can never run."""
        params, length, vocab = message.params, len(message.token_ids), self.runner.vocab_size
        if message.request_id in self._live:
            return "request_id", f"{message.request_id!r} is already running; ids are used once at a time"
        if length == 0:
            return "token_ids", "the prompt is empty; the model wants at least one token"
        if not 0 <= min(message.token_ids) <= max(message.token_ids) < vocab:
            return "token_ids", f"ids must be in 0 to {vocab - 1}, the model's vocabulary"
        if length >= self.max_context:
            return "token_ids", (
                f"the prompt has {length} tokens, and with one token of answer at most {self.max_context} fit in the context"
            )
        if params.max_tokens is not None and length + params.max_tokens > self.max_context:
            return "max_tokens", (
                f"{length} prompt tokens and max_tokens = {params.max_tokens} exceed the context of {self.max_context}; "
                f"at most {self.max_context - length} would fit"
            )
        if params.min_tokens > (params.max_tokens if params.max_tokens is not None else self.max_context - length):
            return "min_tokens", f"{params.min_tokens} is more than may be generated"
        for name in ("stop_token_ids", "logit_bias"):
            if (ids := getattr(params, name)) and not 0 <= min(ids) <= max(ids) < vocab:
                return name, f"ids must be in 0 to {vocab - 1}, the model's vocabulary"
        if params.prompt_logprobs is not None and self.config.tensor_parallel > 1:
            return "prompt_logprobs", "log-probabilities of a prompt are not computed with tensor_parallel: use one device"
        if params.grammar is not None and (self.grammars is None or not self.config.eos_ids):
            return params.grammar.field, "a grammar wants a model whose tokenizer and EOS are known; this one's are not"
        return None

    def _add_compiled(self, answers: list[Delta | Refused]) -> None:
        """Queue the requests whose grammar is ready, refuse those whose grammar is none."""
        for compiling in [one for one in self._compiling if one[1].done()]:
            self._compiling.remove(compiling)
            left, matcher = compiling[0], compiling[1]
            if left and (error := matcher.exception()) is not None:
                self._refuse(left[0], str(error), answers)
                continue
            for request in left:
                request.grammar = matcher.result().deep_copy()
                self.scheduler.add(request)

    def _refuse(self, request: Request, why: str, answers: list[Delta | Refused]) -> None:
        """End all completions of a request for its grammar."""
        answers.append(Refused(request.request_id, request.params.grammar.field, why))
        for completion in [*self._live[request.request_id]]:
            self._end(completion, "error")

    def _own_seed(self) -> int:
        if self.config.seed is None:
            return int.from_bytes(os.urandom(8), "little") >> 1
        self._seeded += 1
        return completion_seed(self.config.seed, self._seeded)

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._answers or self._in_flight)

    def live_ids(self) -> list[str]:
        """Requests that have not been answered to the end."""
        return list(self._live)

    def step(self) -> list[Delta | Refused]:
        """Run one step and return what became known. An error fails the requests of its step, never the engine; only after
        one that leaves the device unusable, and has been answered, does the next step raise RuntimeError."""
        if self._lost is not None:
            raise RuntimeError(f"the device is lost until the process is started anew: {self._lost}") from self._lost
        begin, waited = time.perf_counter(), self._waited_s
        answers, self._answers = self._answers, []
        try:
            self._step(answers)
        except BaseException:  # Ctrl-C: nobody knows what the blocks of those that run hold, and tokens in flight are lost
            for request in [*self.scheduler.running, *(one for one in self.scheduler.waiting if one.in_flight)]:
                self._fail_one(request, "the step was interrupted", answers)
            self._answers, self._in_flight = answers, None
            if self.config.tensor_parallel > 1:  # as in `_fail`
                self._lost = RuntimeError("a step was interrupted, in which other ranks wait")
            raise
        self._host_s += time.perf_counter() - begin - (self._waited_s - waited)
        return answers

    def _step(self, answers: list[Delta | Refused]) -> None:
        self._add_compiled(answers)
        launched = self._launch(answers)
        if self.runner.overlap:
            launched, self._in_flight = self._in_flight, launched
        else:
            launched = self._draw(launched, answers)
        if launched is not None:
            self._collect(*launched, answers)
        elif self._compiling and self._in_flight is None:
            futures.wait([one for _, one in self._compiling], COMPILING_WAIT_S, futures.FIRST_COMPLETED)
        self._in_flight = self._draw(self._in_flight, answers)

    def _launch(self, answers: list[Delta | Refused]) -> Launched | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self._steps += 1
        try:
            return plan, self.runner.launch(plan)
        except Exception as error:
            self._fail(plan, error, answers)
            return None

    def _draw(self, launched: Launched | None, answers: list[Delta | Refused]) -> Launched | None:
        """Masks for a launched step's rows with a grammar, now that all tokens before it are known."""
        if launched is None or all(launched[0].requests[row].grammar is None for row in launched[0].samples):
            return launched
        plan, draw = launched
        sampled = [plan.requests[row] for row in plan.samples]
        rows = [i for i, one in enumerate(sampled) if one.grammar is not None and one.finish_reason is None]
        try:
            masks = self.grammars.masks([sampled[i].grammar for i in rows])
            for request in (sampled[i] for i in rows):
                if request.finish_reason is None and request.grammar.is_error():
                    why = request.grammar.get_error().partition("\n")[0]
                    self._refuse(request, f"this grammar cannot be followed to its end ({why}): make it simpler", answers)
            return plan, draw(rows, masks)
        except Exception as error:
            self._fail(plan, error, answers)
            return None

    def _collect(self, plan: Plan, wait: Callable[[], Sampled], answers: list[Delta | Refused]) -> None:
        begin = time.perf_counter()
        try:
            tokens, logprobs, scored = wait()
            self._waited_s += time.perf_counter() - begin
        except Exception as error:
            self._fail(plan, error, answers)
            if self._in_flight is not None:  # a later step may have read what this one did not write
                self._fail(self._in_flight[0], error, answers)
                self._in_flight = None
            return
        scheduler = self.scheduler
        for row, position, entries in scored:
            plan.requests[row].prompt_logprobs[position : position + len(entries)] = entries
        for i, (row, token) in enumerate(zip(plan.samples, tokens)):
            request = plan.requests[row]
            if request.finish_reason is not None:
                continue
            if token < 0:
                self._fail_one(request, NOT_FINITE, answers)
                continue
            scheduler.accept(request, token)
            if request.grammar is not None and token not in request.stop_ids:
                request.grammar.consume_token(token)
            self._generated_tokens += 1
            reason = None
            if token in request.stop_ids:
                reason = "stop"
            elif len(request.tokens) >= request.max_tokens_total:
                reason = "length"
            if reason is not None:
                self._end(request, reason)
            entries = None if logprobs is None or logprobs[i] is None else [logprobs[i]]
            prompt, request.prompt_logprobs = request.prompt_logprobs, None  # said once
            answers.append(Delta(request.request_id, request.index, [token], entries, reason, request.cached_tokens,
                                 prompt_logprobs=prompt))

    def _fail(self, plan: Plan, error: Exception, answers: list[Delta | Refused]) -> None:
        """A step did not run: its requests fail, and with them what it may not have computed leaves the prefix cache."""
        # torch's error, which this file does not import: CUDA stays broken. And a step that one of several ranks did not run is
        # one that the others wait in.
        if type(error).__name__ == "AcceleratorError" or self.config.tensor_parallel > 1:
            self._lost = error
        for request in dict.fromkeys(plan.requests):
            if request.finish_reason is None:
                self._fail_one(request, f"the step failed: {type(error).__name__}: {error}", answers)

    def _fail_one(self, request: Request, why: str, answers: list[Delta | Refused]) -> None:
        self._end(request, "error")
        answers.append(Delta(request.request_id, request.index, [], finish_reason="error", error=why))

    def _end(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        live = self._live[request.request_id]
        live.remove(request)
        if not live:
            del self._live[request.request_id]

    # ---- report -----------------------------------------------------------------------------------------------------

    def info(self) -> Info:
        config, scheduler, runner = self.config, self.scheduler, self.runner
        return Info(
            model=config.model_name, scheme=config.scheme, weights=config.weights, activations=config.activations or "",
            kv=config.kv or DEFAULT_KV, max_context=self.max_context, block_size=config.block_size,
            num_blocks=runner.num_blocks, free_blocks=scheduler.pool.num_free, cached_blocks=scheduler.pool.num_cached,
            bytes_per_token=runner.bytes_per_token, running=len(scheduler.running), waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions, prefix_queries=scheduler.prefix_queries, prefix_hits=scheduler.prefix_hits,
            steps=self._steps, prompt_tokens=self._prompt_tokens, generated_tokens=self._generated_tokens, host_s=self._host_s,
            decode_steps=runner.decode_steps, decode_wall_s=runner.decode_wall_s, decode_busy_s=runner.decode_busy_s,
        )  # fmt: skip
