"""The OpenAI-compatible HTTP API over an engine client and a tokenizer.

Not a process (that is `launch`) and no torch: requests are checked, tokenized and streamed here, the engine computes elsewhere.
The one idea: an answer is an async iterator of pieces; streaming writes them as they come, not streaming adds them up, and
whoever stops listening closes the iterator, which gives the engine its blocks back.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from nybble.config import VERSION
from nybble.engine.client import EngineClient, EngineDied, RequestRefused
from nybble.engine.messages import Info, SamplingParams, TokenLogprob
from nybble.serve.answers import ChatAnswer, CompletionAnswer, Usage
from nybble.serve.metrics import Metrics
from nybble.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestError,
    T,
    TokenizeRequest,
    check_messages,
    decode,
    schemas,
)
from nybble.serve.stream import EngineFailed, Piece, merged, pieces
from nybble.serve.tools import Tools, tools_of
from nybble.text import Tokenizer

OPEN_PATHS = frozenset({"/", "/health", "/version"})
BODIES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/tokenize": TokenizeRequest,
          "/detokenize": DetokenizeRequest}
SHOWN = (*BODIES, "/v1/models", "/health", "/metrics", "/version")
INFO_S = 2.0  # for the engine's figures
SILENT_S = 120.0  # longer than any step, the first of a kind included
MOST_ECHOED = 1 << 20  # log-probabilities of prompts in an answer: some 150 bytes each, and a second of the event loop
LONG = 20_000  # characters, ids or log-probabilities from which work on them leaves the event loop
# What JSON may hold as it is and no end of a line in an event stream, but is one for Python's str.splitlines.
LINE_ENDS = {b"\\u%04x" % code: chr(code).encode() for code in (0x85, 0x2028, 0x2029)}
encode = msgspec.json.encode


@dataclass(eq=False)
class Server:
    """What the routes share. info: the engine's last word; its name, context and pool do not change."""

    client: EngineClient
    tokenizer: Tokenizer
    info: Info
    name: str
    max_waiting: int
    sampling: dict[str, Any]
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    async def refresh(self) -> Info | None:
        """The engine's figures now, or None when it is in a long step. Raises EngineDied."""
        with suppress(TimeoutError):
            self.info = await asyncio.wait_for(self.client.info(), INFO_S)
            return self.info
        return None


def create_app(client: EngineClient, tokenizer: Tokenizer, info: Info, *, name: str | None = None, api_key: str | None = None,
               max_waiting: int = 1024, max_body_bytes: int = 16 << 20, sampling: dict[str, Any] | None = None,
               allowed_origins: Sequence[str] = ()) -> FastAPI:
    """The application. Its routes: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health,
    /metrics, /version and a chat page at /.

    info: what the engine said when it was ready. name: what clients call the model (default: the engine's).
    api_key: wanted as `Authorization: Bearer KEY` on all but /, /health and /version. max_waiting: completions without a
    first token beyond which new ones get 503 with Retry-After. max_body_bytes: larger bodies get 413.
    sampling: fields of SamplingParams, for what requests leave out. allowed_origins: of web pages that may call this server, or
    "*" for any.
    """
    server = Server(client, tokenizer, info, name or info.model, max_waiting, sampling or {})
    app = FastAPI(title="Nybble", version=VERSION, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes, metrics=server.metrics)
    if allowed_origins:  # before the gate: a browser asks without the key whether it may send it
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=("GET", "POST"), allow_headers=("*",))
    app.state.server = server

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Chat completion, streamed or not."""
        body = await _read(server, request, ChatRequest)
        params, tools = body.params(**server.sampling), tools_of(body, tokenizer)
        if tools is not None:
            params = tools.applied(params)
        token_ids = await _chat_ids(tokenizer, body.messages, True, body.chat_template_kwargs or {}, tools)
        params = _fit(server, params, [token_ids], "messages", explicit=params.max_tokens is not None)
        return await _answer(server, request, ChatAnswer(server.name, tokenizer, params, body, tools), [token_ids], params)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Text completion of one or several prompts, streamed or not."""
        body = await _read(server, request, CompletionRequest)
        params, prompts = body.params(**server.sampling), body.prompts()
        token_ids = [await _ids(tokenizer, one) if isinstance(one, str) else one for one in prompts]
        params = _fit(server, params, token_ids, "prompt", explicit=body.max_tokens is not None)
        echo = [one if isinstance(one, str) else await _run(len(one), tokenizer.decode, one) for one in prompts
                ] if body.echo else None
        return await _answer(server, request, CompletionAnswer(server.name, tokenizer, params, body, echo), token_ids, params)

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model served here."""
        return _json({"object": "list", "data": [_model(server)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        _check_model(server, model)
        return _json(_model(server))

    @app.post("/tokenize", openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages after the chat template."""
        body = await _read(server, request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError(400, "send prompt or messages, one of them", param="prompt")
        if body.messages is not None:
            check_messages(body.messages)
            ids = await _chat_ids(tokenizer, body.messages, body.add_generation_prompt, {})
        else:
            ids = await _ids(tokenizer, body.prompt, body.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": server.info.max_context})

    @app.post("/detokenize", openapi_extra=_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await _read(server, request, DetokenizeRequest)
        _check_ids(tokenizer, body.tokens, "tokens")
        return _json({"prompt": await _run(len(body.tokens), tokenizer.decode, body.tokens, skip_special=False)})

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine lives (also in a long step), else 503: it is down, or has said nothing for SILENT_S."""
        info, silence_s = await server.refresh(), client.silence_s
        if info is None and silence_s > SILENT_S:
            raise RequestError(503, f"the engine has said nothing for {silence_s:.0f} s", code="engine_silent")
        return _json({"status": "ok", "running": info.running, "waiting": info.waiting} if info else {"status": "busy"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(server.metrics.render(await server.refresh()), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def show_version() -> Response:
        return _json({"version": VERSION})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        content = files("nybble.serve").joinpath("page.html").read_bytes()
        return Response(content, media_type="text/html", headers={"Content-Security-Policy":
                        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"})

    for kind in (RequestError, RequestRefused, EngineDied, EngineFailed, ClientDisconnect, HTTPException):
        app.add_exception_handler(kind, _on_error)
    # FastAPI keeps the document it makes; it knows the routes, not the bodies.
    app.openapi().setdefault("components", {}).setdefault("schemas", {}).update(schemas(tuple(BODIES.values())))
    return app


# Requests to tokens.

async def _read(server: Server, request: Request, kind: type[T]) -> T:
    body = decode(kind, await request.body())
    _check_model(server, body.model)
    return body


def _check_model(server: Server, model: str | None) -> None:
    if model is not None and model != server.name:
        raise RequestError(404, f"the model {model!r} is not served here: this is {server.name!r}", param="model",
                           code="model_not_found")


async def _run(length: int, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return work(*args, **kwargs) if length < LONG else await asyncio.to_thread(work, *args, **kwargs)


async def _ids(tokenizer: Tokenizer, text: str, add_special: bool = True) -> list[int]:
    return await _run(len(text), tokenizer.encode, text, add_special=add_special)


async def _chat_ids(tokenizer: Tokenizer, messages: list, add_generation_prompt: bool, kwargs: dict,
                    tools: Tools | None = None) -> list[int]:
    if not tokenizer.has_chat_template:
        raise RequestError(400, "this model has no chat template: use /v1/completions", param="messages")
    called = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    turns = [message.rendered(called) for message in messages]
    length = sum(len(turn["content"]) for turn in turns)
    try:
        text = await _run(length, tokenizer.chat, turns, tools and tools.described(),
                          add_generation_prompt=add_generation_prompt, **kwargs)
    except Exception as error:  # a template is the checkpoint's program: it may refuse an order of roles, or fail
        reason = str(error) if isinstance(error, ValueError) else f"the chat template failed: {error!r}"
        raise RequestError(400, reason, param="messages") from None
    return await _ids(tokenizer, text, add_special=False)


def _check_ids(tokenizer: Tokenizer, token_ids: list[int], param: str) -> None:
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        raise RequestError(400, f"token id {max(token_ids)} is not in the vocabulary of {tokenizer.vocab_size}", param=param)


def _fit(server: Server, params: SamplingParams, prompts: list[list[int]], param: str, explicit: bool) -> SamplingParams:
    """params with max_tokens within the context. Raises RequestError when a prompt, or what was asked for, is too long."""
    context, longest = server.info.max_context, max(map(len, prompts))
    if not all(prompts):
        raise RequestError(400, f"{param} has no tokens", param=param)
    for token_ids in prompts:
        _check_ids(server.tokenizer, token_ids, param)
    wanted = params.max_tokens if explicit else 1
    if longest + wanted > context:
        raise RequestError(400, f"the model's context is {context} tokens; this asks for {longest + wanted} ({longest} in "
                           f"{param}, {wanted} to generate)", param=param, code="context_length_exceeded")
    room = context - longest
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > limit:
        raise RequestError(400, f"min_tokens is {params.min_tokens}, but at most {limit} fit", param="min_tokens")
    if params.prompt_logprobs is not None:
        echoed = sum(map(len, prompts)) * (1 + params.prompt_logprobs) * params.n
        if echoed > MOST_ECHOED:
            raise RequestError(400, f"echo with logprobs asks for {echoed} log-probabilities; at most {MOST_ECHOED}: send "
                               "fewer prompts, or lower logprobs or n", param="echo")
    asked = len(prompts) * params.n
    if asked > server.max_waiting:
        raise RequestError(400, f"{asked} completions at once; at most {server.max_waiting}", param=param)
    if server.metrics.queued + asked > server.max_waiting:
        raise RequestError(503, f"{server.metrics.queued} completions are waiting: try again later", code="overloaded",
                           headers={"Retry-After": "1"})
    return msgspec.structs.replace(params, max_tokens=limit)


# Answers: whole, or as events.

async def _answer(server: Server, request: Request, answer: ChatAnswer | CompletionAnswer, prompts: list[list[int]],
                  params: SamplingParams) -> Response:
    """Submit, wait for the first piece (so that a refusal is still an HTTP error), then stream or collect."""
    usage = Usage(prompts, params.n)
    stream = merged([pieces(server.client, server.tokenizer, token_ids, params, server.metrics, i * params.n, answer.continues,
                            answer.silent) for i, token_ids in enumerate(prompts)])
    if answer.stream:
        first = await until_gone(request.receive, anext(stream))
        return EventStream(_events(answer, usage, first, stream))
    return _json(await until_gone(request.receive, _collect(answer, usage, stream, len(prompts) * params.n)))


async def _collect(answer: ChatAnswer | CompletionAnswer, usage: Usage, stream: AsyncIterator[Piece],
                   count: int) -> dict:
    texts: list[list[str]] = [[] for _ in range(count)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
    reasons = ["stop"] * count
    async with aclosing(stream):
        async for piece in stream:
            usage.add(piece)
            texts[piece.index].append(piece.text)
            logprobs[piece.index] += piece.logprobs
            reasons[piece.index] = piece.finish_reason or reasons[piece.index]

    def choices() -> list[dict]:
        return [answer.choice(i, "".join(texts[i]), logprobs[i], reasons[i]) for i in range(count)]

    numbers = sum(map(len, logprobs)) * (1 + (answer.params.logprobs or 0))
    return {**answer.head, "object": answer.whole_as, "choices": await _run(numbers, choices), "usage": usage.as_dict()}


async def _events(answer: ChatAnswer | CompletionAnswer, usage: Usage, first: Piece,
                  stream: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
    """The answer as server-sent events, ended by [DONE]."""
    head = {**answer.head, "object": answer.streamed_as}
    tail = {"usage": None} if answer.usage_wanted else {}

    def events(piece: Piece) -> bytes:
        usage.add(piece)
        return b"".join(_event({**head, "choices": [one], **tail}) for one in answer.chunks(piece))

    async with aclosing(stream):
        try:
            yield events(first)
            async for piece in stream:
                if body := events(piece):
                    yield body
            if answer.usage_wanted:
                yield _event({**head, "choices": [], "usage": usage.as_dict()})
        except Exception as error:
            if (known := _as_request_error(error)) is None:
                raise
            yield _event({"error": known.error})
        yield b"data: [DONE]\n\n"


def _event(data: dict) -> bytes:
    body = encode(data)
    for code, raw in LINE_ENDS.items():
        body = body.replace(raw, code)
    return b"data: " + body + b"\n\n"


def _json(data: dict) -> Response:
    return Response(encode(data), media_type="application/json")


def _model(server: Server) -> dict:
    info = server.info
    return {"id": server.name, "object": "model", "created": server.created, "owned_by": "nybble",
            "max_model_len": info.max_context, "scheme": info.scheme, "weights": info.weights,
            "activations": info.activations, "kv_cache": info.kv}


def _body(kind: type) -> dict:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


# Hanging up.

async def until_gone(receive: Callable[[], Awaitable[dict]], work: Coroutine) -> Any:
    """work's result. When the client hangs up first, cancels work, waits for its clean-up, raises ClientDisconnect."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(gone()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends what an async iterator yields; closes it whether the client stays or hangs up."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        async def pump() -> None:
            async with aclosing(self._events) as events:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(ClientDisconnect):
            await until_gone(receive, pump())


class Gate:
    """ASGI middleware before everything: API key, body size, and the count of answers by status."""

    def __init__(self, app: Callable, api_key: str | None, max_body_bytes: int, metrics: Metrics) -> None:
        self._app, self._limit, self._metrics = app, max_body_bytes, metrics
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET; uvicorn leaves the body out
            scope = scope | {"method": "GET"}
        headers, path, size, started = dict(scope["headers"]), scope["path"], 0, False
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")

        async def counted(message: dict) -> None:
            nonlocal started
            if message["type"] == "http.response.start":  # by the route's path: what clients make up must not grow the metrics
                started = True
                self._metrics.responses.labels(getattr(scope.get("route"), "path", "other"), message["status"]).inc()
            await send(message)

        async def limited() -> dict:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, f"the body is larger than {self._limit} bytes")
            return message

        error = None
        known = kind.lower() == b"bearer" and self._key and hmac.compare_digest(key.strip(), self._key)
        if self._key and path not in OPEN_PATHS and not known:
            error = RequestError(401, "wrong or missing API key: send Authorization: Bearer KEY", code="invalid_api_key",
                                 headers={"WWW-Authenticate": "Bearer"})
        elif int(headers.get(b"content-length", b"0")) > self._limit:
            error = RequestError(413, f"the body is larger than {self._limit} bytes")
        if error is not None:
            await _error(error)(scope, receive, counted)
            return
        try:
            await self._app(scope, limited, counted)
        except Exception as error:  # a bug: told here, where CORS headers are added to the answer, and logged by the server
            if not started:
                known = RequestError(500, f"internal error: {type(error).__name__}", code="internal_error")
                await _error(known)(scope, receive, counted)
            raise


# Errors as OpenAI's error object.

def _as_request_error(error: Exception, request: Request | None = None) -> RequestError | None:
    """None for a bug."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        message = str(error.detail)
        if error.status_code in (404, 405):
            routes = (f"{method} {route.path}" for route in request.app.routes
                      for method in sorted(route.methods or ()) if method != "HEAD" and route.path in SHOWN)
            message = f"{request.method} {request.url.path} is not served here; these are: {', '.join(routes)}"
        return RequestError(error.status_code, message, headers=dict(error.headers or {}))
    if isinstance(error, RequestRefused):
        said = {"token_ids": "prompt", "prompt_logprobs": "echo"}  # by the engine, where clients say otherwise
        return RequestError(400, error.message, param=said.get(error.field, error.field))
    if isinstance(error, EngineDied):
        return RequestError(503, f"the engine is down: {error}", code="engine_died")
    if isinstance(error, EngineFailed):
        return RequestError(500, f"the engine failed: {error}", code="engine_error")
    return None


def _error(error: RequestError) -> Response:
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it; the count of answers does
    return _error(_as_request_error(error, request))
