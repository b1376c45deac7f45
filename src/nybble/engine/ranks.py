"""The other ranks of a model that is cut: one process each, `python -m nybble.engine.ranks SOCKET`, told what to run.

Rank 0 is whoever opened the engine. It alone plans and draws; what it sends is a step as packed for the device, so a rank knows
no request. All ranks load, measure memory and record graphs by the same code in the same order, which needs no message; nor
does an evaluation. A rank ends with rank 0, by its socket or by being orphaned; rank 0's group is lost as soon as a rank ends
(`parallel.Group`).
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import msgspec
import torch

from nybble.engine.batch import Staged
from nybble.engine.config import EngineConfig
from nybble.engine.process import end_with
from nybble.nn.parallel import Group, new_meeting, open_group

CLOSE_S = 2.0  # for all ranks to end by themselves; less than a client gives the engine
LAST_WORDS_S = 0.2


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank: how to meet, and the "module:function" that it calls, as f(group, channel, **arguments)."""

    rank: int
    size: int
    device: str
    meeting: bytes
    work: str
    arguments: dict[str, Any]


class Run(msgspec.Struct, frozen=True, tag=True):
    step: Staged


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a rank that has imported everything and is about to meet."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


class Channel:
    """Messages over a stream socket: four bytes of length, then msgpack."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._stream = end, end.makefile("rb")
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Join | Run | Ready | Failed)

    def send(self, message: Join | Run | Ready | Failed) -> None:
        body = self._encoder.encode(message)
        self._end.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self) -> Join | Run | Ready | Failed | None:
        """None: the other end is closed."""
        try:
            length = int.from_bytes(self._stream.read(4), "little")
            body = self._stream.read(length)
        except OSError:
            return None
        return self._decoder.decode(body) if length and len(body) == length else None

    def close(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Ranks:
    """Ranks 1 to size - 1 as rank 0 sees them. group: of all. They end when this is closed, collected, or its process ends.

    work, arguments: see `Join`. Raises ValueError when there are not as many devices, RuntimeError when a rank does not start.
    """

    def __init__(self, size: int, device: torch.device, work: str, **arguments: Any) -> None:
        first = device.index or 0
        if device.type == "cuda" and first + size > torch.cuda.device_count():
            raise ValueError(f"tensor_parallel = {size} from {device} on: there are {torch.cuda.device_count()} GPUs here")
        self._channels, self._processes, group = [], [], []
        self.close = weakref.finalize(self, _end, self._channels, self._processes, group)
        meeting, self._kept = new_meeting(size, device)
        for rank in range(1, size):
            own, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "nybble.engine.ranks", str(theirs.fileno())]
                self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
            self._channels.append(Channel(own))
            place = f"cuda:{first + rank}" if device.type == "cuda" else device.type
            self._channels[-1].send(Join(rank, size, place, meeting, work, arguments))
        for rank, (channel, process) in enumerate(zip(self._channels, self._processes), 1):
            if not isinstance(answer := channel.receive(), Ready):
                raise RuntimeError(_why(rank, answer, process))
        opening: Future[Group] = Future()
        threading.Thread(target=_meet, args=(opening, size, device, meeting), name="meeting", daemon=True).start()
        for rank, channel in enumerate(self._channels, 1):
            watching = (rank, channel, self._processes, opening)
            threading.Thread(target=_watch, args=watching, name=f"rank {rank}", daemon=True).start()
        self.group = opening.result()
        group.append(self.group)

    def tell(self, step: Staged) -> None:
        """Raises RuntimeError when a rank is gone."""
        self.group.check()
        try:
            for channel in self._channels:
                channel.send(Run(step))
        except OSError as error:
            raise RuntimeError(self.group.lost or f"a rank is gone: {error}") from error


def _why(rank: int, answer: object, process: subprocess.Popen) -> str:
    if isinstance(answer, Failed):
        return f"rank {rank} ended: {answer.message}"
    with suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    return f"rank {rank} ended: exit status {process.returncode}, its messages above may say why"


def _meet(opening: Future[Group], size: int, device: torch.device, meeting: bytes) -> None:
    """In a thread of its own: a library that waits for a rank cannot be told that there is none any more."""
    with suppress(InvalidStateError):
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # this thread's
            opening.set_result(open_group(0, size, device, meeting))
        except Exception as error:
            opening.set_exception(error)


def _watch(rank: int, channel: Channel, processes: Sequence[subprocess.Popen], opening: Future[Group]) -> None:
    """A rank says nothing until it ends; then nobody may wait for it, and the others are of no use."""
    why = _why(rank, channel.receive(), processes[rank - 1])
    with suppress(InvalidStateError):
        opening.set_exception(RuntimeError(why))
    if opening.exception() is None:
        opening.result().lose(why)
    for process in processes:
        process.kill()


def _end(channels: Sequence[Channel], processes: Sequence[subprocess.Popen], groups: Sequence[Group]) -> None:
    for group in groups:
        group.lose("the engine is closed")
    for channel in channels:
        channel.close()
    deadline = time.monotonic() + CLOSE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # ends a stopped one too
            process.wait()
    for group in groups:
        group.close()


def follow(group: Group, channel: Channel, path: str, engine: dict[str, Any], dummy: bool) -> None:
    """The work of an engine's ranks, until rank 0 has no more."""
    from nybble.engine.load import open_runner

    runner, _, _ = open_runner(path, group.device, msgspec.convert(engine, EngineConfig), None, dummy, group)
    while isinstance(message := channel.receive(), Run):
        runner.follow(message.step)


def main(descriptor: int) -> int:
    from nybble.hardware import pick_device

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's: it may only stop an answer
    warnings.simplefilter("ignore")  # rank 0 says the same
    end_with(os.getppid())
    channel = Channel(socket.socket(fileno=descriptor))
    join = channel.receive()
    if not isinstance(join, Join):
        return 1
    try:
        device = pick_device(join.device)
        if device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // join.size))
        module, _, name = join.work.partition(":")
        work = getattr(importlib.import_module(module), name)
        channel.send(Ready())
        work(open_group(join.rank, join.size, device, join.meeting), channel, **join.arguments)
    except Exception as error:
        mendable = isinstance(error, (ValueError, OSError, MemoryError))
        with suppress(OSError):  # nobody may be there any more
            channel.send(Failed(str(error) if mendable else f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    from nybble.engine import ranks  # this file under the name that the work imports it by

    status = ranks.main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)  # not through the interpreter's end, which waits for a device that may wait for rank 0
