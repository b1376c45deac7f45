"""One request on the wire, as a client sees it: when each chunk arrived, and what the server says it generated.

An asyncio protocol over h11, so that ten thousand events a second fit on a core. It draws no conclusions: a request that failed
is a record like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11
import msgspec
from prometheus_client.parser import text_string_to_metric_families

DECODE_COUNTERS = ("nybble_decode_steps_total", "nybble_decode_wall_seconds_total", "nybble_decode_busy_seconds_total")


@dataclass(eq=False)
class Outcome:
    """What became of one request. Times in seconds of `time.perf_counter`; error: None when the whole answer came."""

    wanted_tokens: int
    sent_s: float = 0.0
    late_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None where one chunk brought all: its time is in the TTFT."""
        if len(self.arrivals_s) < 2 or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


decode_event = msgspec.json.Decoder(Event).decode


class Request(NamedTuple):
    head: h11.Request
    body: bytes = b""


class Exchange(asyncio.Protocol):
    """One HTTP/1.1 request and its answer, plain or as server-sent events, on a connection of its own.

    outcome: written while the answer comes, and judged by `close`. done: set when the answer is complete or the connection is
    lost. body: of an answer that is no event stream.
    """

    def __init__(self, request: Request, outcome: Outcome, clock: Callable[[], float] = time.perf_counter) -> None:
        self._http, self._clock, self.outcome = h11.Connection(h11.CLIENT), clock, outcome
        self._wire = b"".join(map(self._http.send, (request.head, h11.Data(request.body), h11.EndOfMessage())))
        self.status, self.body, self.complete, self._finished = 0, bytearray(), False, False
        self._usage: Usage | None = None
        self._is_stream = self._last_is_empty = False
        self.done = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(self._wire)

    def connection_lost(self, error: Exception | None) -> None:
        with suppress(h11.RemoteProtocolError):
            self._parse(b"")  # some answers end with their connection
        if not self.complete:
            self._fail(f"the connection was lost: {error or 'closed before the answer was complete'}")
        self.done.set()

    def _fail(self, reason: str) -> None:
        self.outcome.error = self.outcome.error or reason

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        try:
            self._parse(data)
        except h11.RemoteProtocolError as error:
            self._fail(f"this is no HTTP: {error}")
            self.transport.close()
        if self._is_stream:
            *lines, self.body = self.body.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now)
        if self.complete:
            self.transport.close()
            self.done.set()

    def _parse(self, data: bytes) -> None:
        self._http.receive_data(data)
        while not self.complete and (event := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self._is_stream = dict(event.headers).get(b"content-type", b"").startswith(b"text/event-stream")
            elif isinstance(event, h11.Data):
                self.body += event.data
            self.complete = isinstance(event, h11.EndOfMessage)

    def _event(self, payload: bytearray, now: float) -> None:
        if payload == b"[DONE]":
            self._finished = True
            return
        try:
            event = decode_event(payload)
        except msgspec.MsgspecError as error:
            self._fail(f"an event that is not a completion chunk: {error}")
            return
        if bytes(event.error) not in (b"", b"null"):
            self._fail(f"error event: {_message(event.error)}")
        if event.choices:
            self.outcome.arrivals_s.append(now)
            self._last_is_empty = not event.choices[0].text
            self._finished = self._finished or event.choices[0].finish_reason is not None  # not every server adds [DONE]
        self._usage = event.usage or self._usage

    def close(self) -> None:
        """Judge what was seen."""
        outcome, used = self.outcome, self._usage
        if self.status and self.status != 200:
            outcome.error = f"HTTP {self.status}: {_message(self.body)}"
        elif not self._finished:
            self._fail("the stream ended before the answer did (no finish_reason, no [DONE])")
        elif used is None:
            self._fail("the server sent no usage, so its tokens cannot be counted (stream_options.include_usage)")
        elif not outcome.arrivals_s:
            self._fail("the server generated nothing")
        if outcome.error is None:
            outcome.input_tokens, outcome.output_tokens = used.prompt_tokens, used.completion_tokens
            outcome.cached_tokens = (used.prompt_tokens_details or {}).get("cached_tokens") or 0
            if self._last_is_empty and len(outcome.arrivals_s) > used.completion_tokens:
                outcome.arrivals_s.pop()  # brought the reason to end and no token


def _message(body: bytes | bytearray | msgspec.Raw) -> str:
    """The text of an error in OpenAI's shape, or what there is."""
    try:
        error = msgspec.json.decode(body)
        error = error.get("error", error)
        return str(error.get("message") or error.get("detail") or error if isinstance(error, dict) else error)[:200]
    except (msgspec.DecodeError, AttributeError):
        return bytes(body)[:200].decode("utf-8", "replace")


@dataclass(frozen=True)
class Target:
    """A server. url: with or without the trailing /v1."""

    url: str
    model: str = ""
    api_key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> Request:
        parts = urlsplit(self.url)
        headers = {"Host": parts.netloc, "Content-Type": "application/json", "Content-Length": str(len(body)),
                   "Accept": "text/event-stream, application/json", "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key.strip()}"
        path = parts.path.rstrip("/").removesuffix("/v1") + path
        try:
            return Request(h11.Request(method=method, target=path, headers=list(headers.items())), body)
        except h11.LocalProtocolError as error:
            raise ValueError(f"--url {self.url} or the API key cannot go into a request: {error}") from None

    async def exchange(self, request: Request, timeout_s: float, outcome: Outcome | None = None) -> Exchange:
        """Raises TimeoutError, OSError."""
        parts, secure = urlsplit(self.url), self.url.startswith("https")
        loop, port = asyncio.get_running_loop(), parts.port or (443 if secure else 80)
        async with asyncio.timeout(timeout_s):
            _, exchange = await loop.create_connection(lambda: Exchange(request, outcome or Outcome(0)), parts.hostname, port,
                                                       ssl=secure or None)
            try:
                await exchange.done.wait()
            finally:
                exchange.transport.abort()
        return exchange

    async def described(self) -> dict[str, Any]:
        """The first model of /v1/models, as the server tells it. Raises ValueError."""
        try:
            answer = await self.exchange(self.request("GET", "/v1/models"), 30.0)
        except (OSError, TimeoutError) as error:
            raise ValueError(f"no server answers at {self.url}: {error or 'timeout'}") from None
        asked = self.url.rstrip("/").removesuffix("/v1") + "/v1/models"
        if answer.status != 200:
            raise ValueError(f"{asked}: HTTP {answer.status}: {_message(answer.body)}")
        with suppress(ValueError, LookupError, TypeError):
            return dict(msgspec.json.decode(answer.body)["data"][0])
        raise ValueError(f"{asked} names no model: {_message(answer.body)}")

    async def decode_counters(self) -> tuple[float, float, float]:
        """(steps, wall seconds, busy seconds) of decoding so far, as our own server counts them; zeros of any other server."""
        found = {}
        with suppress(OSError, TimeoutError, ValueError, IndexError):  # the last two: no Prometheus text
            answer = await self.exchange(self.request("GET", "/metrics"), 30.0)
            families = text_string_to_metric_families(answer.body.decode())
            found = {sample.name: sample.value for family in families for sample in family.samples}
        return tuple(found.get(name, 0.0) for name in DECODE_COUNTERS)
