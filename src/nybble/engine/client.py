"""The asyncio side of the engine's process: send requests, hand each its own answers. No torch, and no texts.

Every `generate` ends: with its last delta, with RequestRefused, or with EngineDied when the engine's process ends, says that
it cannot go on, or its socket closes. Leaving a `generate` early aborts the request.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from nybble.engine.config import ProcessConfig
from nybble.engine.messages import (
    BEAT_S,
    Abort,
    Ask,
    Beat,
    Delta,
    Fatal,
    FromEngine,
    Info,
    Refused,
    SamplingParams,
    Shutdown,
    Submit,
    ToEngine,
)

CLOSE_S = 5.0  # for the process to end by itself


class RequestRefused(ValueError):
    """The engine will not run the request; `field` names what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class EngineDied(RuntimeError):
    """The engine's process is gone, and every request with it."""


def joined(arrived: list[Delta | Refused | EngineDied]) -> list[Delta | Refused | EngineDied]:
    """The same, neighbouring deltas of one completion made one: a reader that fell behind catches up at the price of one."""
    out = arrived[:1]
    for after in arrived[1:]:
        before = out[-1]
        if isinstance(before, Delta) and isinstance(after, Delta) and before.index == after.index and after.token_ids:
            logprobs = None if after.logprobs is None else [*(before.logprobs or ()), *after.logprobs]
            out[-1] = msgspec.structs.replace(after, token_ids=before.token_ids + after.token_ids, logprobs=logprobs,
                                              prompt_logprobs=before.prompt_logprobs)
        else:
            out.append(after)
    return out


class EngineClient:
    """config: start an engine process that lives as long as this client (its address may be left empty). address: talk to
    an engine that is running. One of the two.

    await start(); async for delta in generate(...); await close(). Use from one event loop.
    """

    def __init__(self, config: ProcessConfig | None = None, address: str | None = None) -> None:
        if (config is None) == (address is None):
            raise ValueError("EngineClient wants a config, to start an engine, or the address of one that runs")
        self._config, self._address = config, address
        self._folder: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._queues: dict[str, asyncio.Queue[Delta | Refused | EngineDied]] = {}
        self._asking: deque[asyncio.Future[Info]] = deque()
        self._tasks: list[asyncio.Task] = []
        self._context: zmq.asyncio.Context | None = None
        self.dead: EngineDied | None = None
        self.died = asyncio.Event()
        self._ready = False
        self._heard = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def alive(self) -> bool:
        return self._context is not None and self.dead is None

    @property
    def silence_s(self) -> float:
        """Seconds since the engine was last heard. It says nothing during a step or while it loads."""
        return time.monotonic() - self._heard

    async def start(self, timeout_s: float | None = None) -> Info:
        """Start or reach the engine and wait until it answers: for as long as it loads, unless `timeout_s` is given.

        Raises EngineDied with the reason when it cannot load, TimeoutError when it does not answer in time.
        """
        try:
            if self._config is not None:
                await self._spawn(self._config)
            self._context = zmq.asyncio.Context()
            self._socket = self._context.socket(zmq.DEALER)
            for unlimited in (zmq.SNDHWM, zmq.RCVHWM):
                self._socket.setsockopt(unlimited, 0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(self._address)
            self._tasks += [asyncio.create_task(work()) for work in (self._receive, self._beat, self._watch_socket)]
            info = await asyncio.wait_for(self.info(), timeout_s)
            self._ready = True
            return info
        except BaseException:
            await self.close()
            raise

    async def generate(self, request_id: str, token_ids: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        """The deltas of all `params.n` completions as they come. Raises RequestRefused, EngineDied, ValueError for an id
        that is in use."""
        if request_id in self._queues:
            raise ValueError(f"request_id {request_id!r} is in use")
        queue: asyncio.Queue[Delta | Refused | EngineDied] = asyncio.Queue()
        self._queues[request_id] = queue
        left = params.n
        try:
            await self._send(Submit(request_id, token_ids, params))
            while left:
                arrived = [await queue.get()]
                while not queue.empty():
                    arrived.append(queue.get_nowait())
                for answer in joined(arrived):
                    if isinstance(answer, Refused):
                        left = 0
                        raise RequestRefused(answer.field, answer.message)
                    if isinstance(answer, EngineDied):
                        raise EngineDied(str(answer))
                    if answer.finish_reason is not None:
                        left -= 1
                    yield answer
        finally:
            del self._queues[request_id]
            if left and self.alive:
                await self._send(Abort(request_id))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one completion of it; its `generate` gets a last delta. What has ended is ignored."""
        if self.alive:
            await self._send(Abort(request_id, index))

    async def info(self) -> Info:
        """Raises EngineDied."""
        future: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self._asking.append(future)
        await self._send(Ask())
        return await future

    async def close(self) -> None:
        """Stop the engine if it is ours, else leave it. What still waits gets EngineDied. May be called again."""
        owned = self._process if self._process is not None and self._process.returncode is None else None
        if owned is not None:
            if self.alive and self._ready:
                await self._send(Shutdown())
            else:  # it loads, and reads no messages
                owned.terminate()
        self._die("it was stopped")
        if owned is not None:
            try:
                await asyncio.wait_for(owned.wait(), CLOSE_S)
            except TimeoutError:
                owned.kill()
                await owned.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._context is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=0)
            self._context.term()
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _spawn(self, config: ProcessConfig) -> None:
        self._folder = tempfile.mkdtemp(prefix="nybble-")  # mode 700: nobody else can talk to the engine
        self._address = config.address or f"ipc://{self._folder}/engine"
        config = msgspec.structs.replace(config, address=self._address, parent=os.getpid())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nybble.engine.process", "--config", msgspec.json.encode(config).decode(),
            start_new_session=True,  # Ctrl-C is for the parent, which then asks the engine to stop
        )  # fmt: skip
        self._tasks.append(asyncio.create_task(self._watch_process(self._process)))

    async def _send(self, message: ToEngine) -> None:
        if self.dead is not None:
            raise EngineDied(str(self.dead))
        if self._context is None:
            raise EngineDied("the client was not started")
        await self._socket.send(self._encoder.encode(message))

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(list[FromEngine])
        while True:
            messages = decoder.decode(await self._socket.recv())
            self._heard = time.monotonic()
            for message in messages:
                match message:
                    case Delta() | Refused():
                        queue = self._queues.get(message.request_id)
                        if queue is not None:
                            queue.put_nowait(message)
                    case Info():
                        future = self._asking.popleft()
                        if not future.done():
                            future.set_result(message)
                    case Fatal():
                        self._die(f"the engine ended: {message.message}")

    async def _beat(self) -> None:
        with suppress(EngineDied):
            while True:
                await asyncio.sleep(BEAT_S)
                await self._send(Beat())

    async def _watch_socket(self) -> None:
        await self._monitor.recv_multipart()
        await asyncio.sleep(0.2)  # a last message, or the exit status, says more than this
        self._die("the engine closed its socket")

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        await asyncio.sleep(0.1)
        self._die("the engine's process was killed (SIGKILL), most often by the system because memory ran out"
                  if status == -signal.SIGKILL else f"the engine's process ended with status {status}; its log says why")

    def _die(self, reason: str) -> None:
        """All that waits, and all that comes, gets EngineDied. The first reason stays."""
        if self.dead is None:
            self.dead = EngineDied(reason)
            self.died.set()
        for queue in self._queues.values():
            queue.put_nowait(self.dead)
        for future in self._asking:
            if not future.done():
                future.set_exception(self.dead)
                future.exception()  # who asked may have left: asyncio would report an exception that nobody fetched
        self._asking.clear()
