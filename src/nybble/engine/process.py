"""The engine in its own process: `python -m nybble.engine.process --config '{"address": "ipc://...", "model": "..."}'`.

One thread reads messages, steps, and sends what the step answered: one message per client and step. A client that leaves or
falls silent has its requests aborted; a closed socket shows at the next message to it, a beat at the latest. The process ends
with its parent.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from nybble.engine.config import ProcessConfig
from nybble.engine.core import Engine
from nybble.engine.messages import BEAT_S, Abort, Ask, Beat, Fatal, FromEngine, Shutdown, Submit, ToEngine

log = logging.getLogger("nybble.engine")


def load(config: ProcessConfig) -> Engine:
    """The default factory: the checkpoint's model on the device."""
    from nybble.engine.load import open_engine

    engine = open_engine(config.model, config.device, config.engine)
    engine.grammars.prepare()
    log.info("%s on %s: %s", engine.config.model_name, engine.runner.device, engine.runner.memory)
    return engine


class Connections:
    """The socket and who is at its other end. A client is its socket's identity, in hex: inside the engine its request ids
    begin with it, for they are its own. heard: when each client last said something; who is not in it was given up, and what is
    left of its requests is still sent to it."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone is an error, not a silence
        for unlimited in (zmq.SNDHWM, zmq.RCVHWM):  # a slow client costs memory, never a step
            self._socket.setsockopt(unlimited, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        self.heard: dict[str, float] = {}
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, wait_s: float) -> list[tuple[str, ToEngine]]:
        """All that has arrived, as (client, message); waits up to `wait_s` for the first."""
        received: list[tuple[str, ToEngine]] = []
        if not self._socket.poll(int(wait_s * 1000)):
            return received
        while True:
            try:
                identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            client = identity.hex()
            self.heard[client] = time.monotonic()
            try:
                received.append((client, self._decoder.decode(body)))
            except msgspec.DecodeError as error:
                log.error("client %s sent what is no message: %s", client, error)

    def send(self, client: str, messages: list[FromEngine]) -> bool:
        """False when the client is not there any more."""
        try:
            self._socket.send_multipart((bytes.fromhex(client), self._encoder.encode(messages)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("client %s cannot be reached: %s", client, error)
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def serve(engine: Engine, connections: Connections, silence_limit_s: float) -> None:
    """Run until a client says `Shutdown`."""
    next_beat = 0.0
    while True:
        if lost := getattr(engine.runner, "lost", None):
            raise RuntimeError(lost)
        for client, message in connections.receive(0 if engine.has_work else BEAT_S):
            match message:
                case Submit():
                    engine.submit(msgspec.structs.replace(message, request_id=f"{client}/{message.request_id}"))
                case Abort():
                    engine.abort(f"{client}/{message.request_id}", message.index)
                case Ask():
                    connections.send(client, [engine.info()])
                case Shutdown():
                    return
        earliest = time.monotonic() - silence_limit_s  # all that arrived is read, however long the last step took
        gone = {client for client, heard in connections.heard.items() if heard < earliest}
        answers: dict[str, list[FromEngine]] = {}
        if engine.has_work:
            for answer in engine.step():
                client, _, own = answer.request_id.partition("/")
                answers.setdefault(client, []).append(msgspec.structs.replace(answer, request_id=own))
        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + BEAT_S
            for client in connections.heard:
                answers.setdefault(client, []).append(Beat())
        gone.update(client for client, messages in answers.items() if not connections.send(client, messages))
        for client in gone:
            connections.heard.pop(client, None)
            for request_id in engine.live_ids():
                if request_id.startswith(f"{client}/"):
                    engine.abort(request_id)


def end_with(parent: int) -> None:
    """Leave when the parent is gone, whatever the main thread is doing (it may be loading for minutes)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(BEAT_S / 2)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def run(config: ProcessConfig) -> int:
    if config.parent is not None:
        end_with(config.parent)
    connections, engine = Connections(config.address), None
    try:
        module, _, name = config.factory.partition(":")
        engine = getattr(importlib.import_module(module), name)(config)
        serve(engine, connections, config.silence_limit_s)
        return 0
    except Exception as error:
        # Before there is an engine, these are about what the user brought, and say so themselves.
        mendable = engine is None and isinstance(error, (ValueError, OSError, MemoryError))
        if not mendable:
            log.exception("the engine ends")
        connections.receive(BEAT_S)  # who waits for the start has asked by now
        for client in connections.heard:
            connections.send(client, [Fatal(str(error) if mendable else f"{type(error).__name__}: {error}")])
        return 1
    finally:
        connections.close()
        zmq.Context.instance().term()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nybble.engine.process", description="The engine's own process.")
    parser.add_argument("--config", required=True, help="JSON of engine.config.ProcessConfig, or a file that holds it")
    text = parser.parse_args(arguments).config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    body = text if text.lstrip().startswith("{") else Path(text).read_text()
    return run(msgspec.json.decode(body, type=ProcessConfig))


if __name__ == "__main__":
    sys.exit(main())
