"""`nybble serve`: the engine in its own process, the HTTP server in this one, and both down together.

It holds no policy: routes are `app`'s, the engine's settings are `EngineConfig`'s. The one idea: everything that can be wrong
before a model is loaded (the path, the port, the tokenizer) is found before it is loaded.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import uvicorn

from nybble.engine.client import EngineClient, EngineDied
from nybble.engine.config import EngineConfig, ProcessConfig
from nybble.engine.messages import Info
from nybble.serve.app import create_app
from nybble.serve.protocol import checkpoint_sampling
from nybble.text import Tokenizer, load_tokenizer

SAY_EVERY_S = 5.0
KEEP_ALIVE_S = 75  # clients give up idle connections after 5 s, httpx, to 60; who closes last loses no request
LAST_WORDS_S = 5  # after `drain_s`, for errors to get out


class ServeError(RuntimeError):
    """The server cannot start or go on; the message says what would help."""


def serve(model: str | Path, *, host: str = "127.0.0.1", port: int = 8000, model_name: str | None = None,
          api_key: str | None = None, allowed_origins: Sequence[str] = (), generation_config: Literal["auto", "none"] = "auto",
          engine: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Serve a checkpoint until SIGINT or SIGTERM: then no request is taken any more, those running have a while to end.

    port: 0 is any free one. model_name: what clients call the model; default the checkpoint's. generation_config: "none" leaves
    the checkpoint's sampling settings aside. engine: as `LLM` takes them, kv, device and fields of `EngineConfig`. options, and
    allowed_origins: of `run` and `create_app`. Raises ServeError.
    """
    path = Path(model)
    if not 0 <= port <= 65535:
        raise ServeError(f"port = {port}: wants 0 (any free one) to 65535")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise ServeError("api_key (or NYBBLE_API_KEY): wants ASCII text without spaces at its ends; without one, leave it out")
    for origin in allowed_origins:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ServeError(f"--allowed-origins {origin}: wants origins as browsers say them, like https://host:port, or *")
    if not path.exists():
        raise ServeError(f"there is no model at {model}: give a Hugging Face folder or a .gguf file")
    with closing(listen(host, port)) as listener:
        sampling = checkpoint_sampling(path) if generation_config == "auto" else {}
        tokenizer, config = load_tokenizer(path), process_config(str(path), **(engine or {}))
        asyncio.run(run(config, tokenizer, listener, name=model_name, api_key=api_key, sampling=sampling,
                        allowed_origins=allowed_origins, **options))


def process_config(model: str, *, kv: str = "auto", device: str = "auto", factory: str = ProcessConfig().factory,
                   **engine: Any) -> ProcessConfig:
    """kv, device and engine: as `LLM` takes them."""
    return ProcessConfig(model=model, device=device, engine=EngineConfig(kv=None if kv == "auto" else kv, **engine),
                         factory=factory)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServeError when the address is taken or is not ours."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        taken = ". Is a server running there? --port 0 takes any free port" if error.errno == errno.EADDRINUSE else ""
        why = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror  # below 0: the resolver's own numbers
        raise ServeError(f"cannot listen on {host} port {port}: {why}{taken}") from None


async def run(config: ProcessConfig, tokenizer: Tokenizer, listener: socket.socket, *,
              progress: Callable[[str], None] | None = None, drain_s: int = 30, log_level: str = "warning",
              **options: Any) -> None:
    """Start the engine, serve on `listener` (which gets closed) until a signal, stop the engine. options: of `create_app`.
    progress: told in words what happens, at the end of starting where the server is. drain_s: seconds that running requests
    have after the signal.

    Raises ServeError when the engine cannot start, or dies while serving.
    """
    client, progress = EngineClient(config), progress or (lambda _: None)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    server: Server | None = None

    def on_signal() -> None:
        if stop.is_set() and server is not None:  # the second one does not wait for running requests
            server.force_exit = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stopping = asyncio.create_task(stop.wait())
    try:
        info = await _start(client, config, stopping, progress)
        if info is None:
            return
        app = create_app(client, tokenizer, info, **options)
        server = Server(uvicorn.Config(app, log_level=log_level, lifespan="off", ws="none", server_header=False,
                                       timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=drain_s + LAST_WORDS_S))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        dying = asyncio.create_task(client.died.wait())
        host, port = listener.getsockname()[:2]
        url, name = f"http://{f'[{host}]' if ':' in host else host}:{port}", options.get("name") or info.model
        progress(f"{name}: {info.scheme}, KV cache {info.kv} with room for {info.num_blocks * info.block_size:,} tokens, "
                 f"{info.max_context:,} of them in one request")
        progress(f"{name} is served at {url} (chat there in a browser; OpenAI clients: {url}/v1)")
        if options.get("sampling"):
            said = ", ".join(f"{field} {value}" for field, value in options["sampling"].items())
            progress(f"requests that do not say get {said}, as generation_config.json has it")
        if not options.get("api_key") and not ipaddress.ip_address(host).is_loopback:
            progress("anyone who reaches this address can use it: --api-key asks for a key")
        await asyncio.wait({stopping, serving, dying}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            progress("stopping when running requests are done; a second signal stops at once")
        server.should_exit = True
        died = dying.done()
        dying.cancel()
        await asyncio.wait({serving}, timeout=drain_s)
        await client.close()  # what still runs is told
        await serving
        if died:
            raise ServeError(f"the engine died, and the server with it: {client.dead}")
    except EngineDied as error:
        raise ServeError(f"the engine did not start: {str(error).removeprefix('the engine ended: ')}") from None
    finally:
        stopping.cancel()
        await client.close()


async def _start(client: EngineClient, config: ProcessConfig, stopping: asyncio.Task,
                 progress: Callable[[str], None]) -> Info | None:
    """The engine's Info when it is ready; None when a signal came first."""
    starting, begun = asyncio.create_task(client.start()), time.monotonic()
    progress(f"loading {config.model}")
    try:
        while not starting.done():
            await asyncio.wait({starting, stopping}, timeout=SAY_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return None
            if not starting.done():
                progress(f"loading {config.model}: {time.monotonic() - begun:.0f} s")
        return starting.result()
    finally:
        starting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await starting


class Server(uvicorn.Server):
    """uvicorn that leaves signals to `run`: it would raise them again before the engine was told to stop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
