"""The engine's process and its client over real sockets, with a scripted model: no weights, no torch in the process."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from scripted import answer, small

from nybble.engine.client import EngineClient, EngineDied, RequestRefused
from nybble.engine.config import ProcessConfig
from nybble.engine.messages import Ask, Delta, FromEngine, Info, SamplingParams, Submit, ToEngine

FACTORY = "scripted:make"


@pytest.fixture(autouse=True)
def _scripted_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def config(model: str = "scripted", **changes: object) -> ProcessConfig:
    return ProcessConfig(model=model, factory=FACTORY, engine=small(), **changes)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **changes})


@asynccontextmanager
async def started(settings: ProcessConfig) -> AsyncIterator[EngineClient]:
    client = EngineClient(settings)
    await client.start(timeout_s=30)
    try:
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, name: str, prompt: list[int], wanted: SamplingParams) -> list[int]:
    return [t async for delta in client.generate(name, prompt, wanted) for t in delta.token_ids]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(200):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never became true")


def test_many_requests_each_get_their_own_answer() -> None:
    async def main() -> None:
        async with started(config("overlap")) as client:
            prompts = [[i, i + 1, i + 2] for i in range(1, 41)]
            got = await asyncio.gather(*(collect(client, str(i), p, params()) for i, p in enumerate(prompts)))
            assert got == [answer(p, 8) for p in prompts]
            info = await client.info()
            assert (info.running, info.waiting, info.generated_tokens) == (0, 0, 320)
            assert info.free_blocks + info.cached_blocks == info.num_blocks

    asyncio.run(main())


def test_refused_requests_raise_and_leave_the_rest_alone() -> None:
    async def main() -> None:
        async with started(config()) as client:
            with pytest.raises(RequestRefused) as caught:
                await collect(client, "a", [1] * 500, params())
            assert caught.value.field == "token_ids"
            assert await collect(client, "a", [1, 2], params()) == answer([1, 2], 8)
            async with aclosing(client.generate("b", [1], params(max_tokens=100))) as deltas:
                await anext(deltas)
                with pytest.raises(ValueError, match="in use"):
                    await anext(client.generate("b", [1], params()))

    asyncio.run(main())


def test_leaving_early_and_abort_free_the_engine() -> None:
    async def main() -> None:
        async with started(config()) as client:

            async def idle() -> bool:
                info = await client.info()
                return info.running == info.waiting == 0

            async with aclosing(client.generate("a", [1], params(max_tokens=190))) as deltas:
                async for _ in deltas:
                    break
            await eventually(idle)
            assert (await client.info()).generated_tokens < 100
            reasons = []
            async for delta in client.generate("b", [1], params(max_tokens=190, n=2)):
                reasons.append(delta.finish_reason)
                await client.abort("b")
            assert reasons[-2:] == ["abort", "abort"]
            assert reasons.count(None) < 100
            task = asyncio.create_task(collect(client, "c", [1], params(max_tokens=190)))
            await asyncio.sleep(0.05)
            task.cancel()
            await eventually(idle)
            assert (await client.info()).generated_tokens < 300

    asyncio.run(main())


def test_an_engine_that_cannot_load_says_why() -> None:
    async def main() -> None:
        with pytest.raises(EngineDied, match="there is no such checkpoint"):
            await EngineClient(config("unloadable")).start(timeout_s=30)

    asyncio.run(main())


def test_a_start_that_is_given_up_leaves_no_process() -> None:
    async def main() -> None:
        client = EngineClient(config("slow"))
        with pytest.raises(TimeoutError):
            await client.start(timeout_s=0.5)
        assert client._process.returncode == -signal.SIGTERM

    asyncio.run(main())


def test_a_dead_engine_fails_what_waits_and_what_comes() -> None:
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        async with started(config()) as client:
            waiting = [asyncio.create_task(collect(client, str(i), [1], params(max_tokens=190))) for i in range(6)]
            await asyncio.sleep(0.05)
            client._process.kill()
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, EngineDied)
                assert "killed (SIGKILL)" in str(outcome)
                assert "memory" in str(outcome)
            assert not client.alive
            with pytest.raises(EngineDied):
                await collect(client, "late", [1], params())
            with pytest.raises(EngineDied):
                await client.info()
        gc.collect()  # a future whose exception nobody fetched complains when it goes

    asyncio.run(main())
    assert complaints == []


def test_a_bug_in_the_engine_is_reported_to_the_clients() -> None:
    async def main() -> None:
        async with started(config("fragile")) as client:
            with pytest.raises(EngineDied, match="a bug in the engine"):
                await collect(client, "a", [1], params(max_tokens=100))

    asyncio.run(main())


# ---- a process that somebody else started ---------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/e"


def spawn(settings: ProcessConfig, address: str) -> subprocess.Popen:
    text = msgspec.json.encode(msgspec.structs.replace(settings, address=address)).decode()
    return subprocess.Popen([sys.executable, "-m", "nybble.engine.process", "--config", text])


def test_two_clients_may_use_the_same_ids_and_one_that_leaves_takes_its_requests_along(address: str) -> None:
    process = spawn(config(), address)

    async def main() -> None:
        one, two = EngineClient(address=address), EngineClient(address=address)
        await one.start(30)
        await two.start(30)
        got = await asyncio.gather(collect(one, "x", [1, 2], params()), collect(two, "x", [3, 4], params()))
        assert got == [answer([1, 2], 8), answer([3, 4], 8)]
        task = asyncio.create_task(collect(two, "y", [5], params(max_tokens=190)))
        await asyncio.sleep(0.05)
        await two.close()
        with pytest.raises(EngineDied, match="it was stopped"):
            await task

        async def idle() -> bool:
            return (await one.info()).running == 0

        await eventually(idle)
        assert (await one.info()).generated_tokens < 100
        process.send_signal(signal.SIGTERM)
        task = asyncio.create_task(collect(one, "z", [5], params(max_tokens=190)))
        with pytest.raises(EngineDied, match="socket"):
            await task
        await one.close()

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("silent", [True, False])
def test_a_client_that_vanishes_has_its_requests_aborted(address: str, silent: bool) -> None:
    """Its socket is closed, or stays open and says nothing any more."""
    settings = config(silence_limit_s=1.5 if silent else 60)
    process = spawn(settings, address)
    context = zmq.Context()
    vanishing = context.socket(zmq.DEALER)
    vanishing.connect(address)
    encode = msgspec.msgpack.Encoder().encode
    for i in range(200):
        vanishing.send(encode(Submit(str(i), [1, i % 90], params(max_tokens=150))))

    async def main() -> None:
        watcher = EngineClient(address=address)
        await watcher.start(30)

        async def busy() -> bool:
            return (await watcher.info()).waiting > 100

        async def idle() -> bool:
            info: Info = await watcher.info()
            return info.running == info.waiting == 0

        await eventually(busy)
        if not silent:
            vanishing.close(linger=0)
        await eventually(idle)
        assert (await watcher.info()).generated_tokens < 200 * 150
        await watcher.close()

    try:
        asyncio.run(main())
        if silent:  # it may only have been stopped, and waits for ends
            ended, decode = set(), msgspec.msgpack.Decoder(list[FromEngine]).decode
            while vanishing.poll(2000):
                ended |= {one.request_id for one in decode(vanishing.recv()) if isinstance(one, Delta) and one.finish_reason}
            assert ended == {str(i) for i in range(200)}
    finally:
        process.kill()
        process.wait()
        vanishing.close(linger=0)
        context.term()


def test_a_message_that_is_none_is_ignored(address: str) -> None:
    process = spawn(config(), address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        for body in (b"", b"\xc1 nonsense", msgspec.msgpack.encode({"type": "Submit"}), msgspec.msgpack.encode([1])):
            socket.send(body)
        socket.send(msgspec.msgpack.Encoder().encode(Ask()))
        assert socket.poll(30_000)
        assert b"Info" in socket.recv()
    process.kill()
    process.wait()


def test_the_process_does_not_outlive_its_parent(address: str) -> None:
    """A parent that starts an engine and is killed; the engine leaves by itself."""
    text = msgspec.json.encode(msgspec.structs.replace(config(), address=address)).decode()
    code = (
        "import json, os, subprocess, sys, time\n"
        f"config = json.loads({text!r}); config['parent'] = os.getpid()\n"
        "child = subprocess.Popen([sys.executable, '-m', 'nybble.engine.process', '--config', json.dumps(config)])\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:  # it is up
        socket.linger = 0
        socket.connect(address)
        socket.send(msgspec.msgpack.Encoder().encode(Ask()))
        assert socket.poll(30_000)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while time.monotonic() < end and _runs(child):
        time.sleep(0.1)
    assert not _runs(child)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Two ranks on this machine: rank 1 does what the text of its module says."""
    from torch import device

    from nybble.engine.ranks import Ranks

    def start(text: str) -> Ranks:
        (tmp_path / "rank_work.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return Ranks(2, device("cpu"), "rank_work:work")

    return start


def test_a_rank_that_dies_while_all_meet_is_not_waited_for(ranks: Callable) -> None:
    leaves = "import os\nfrom nybble.engine import ranks\nranks.open_group = lambda *_: os._exit(3)\nwork = None\n"
    with pytest.raises(RuntimeError, match="rank 1 ended: exit status 3"):
        ranks(leaves)


def test_closing_ends_a_stopped_rank_before_the_client_loses_patience(ranks: Callable) -> None:
    from nybble.engine import client
    from nybble.engine.ranks import CLOSE_S

    both = ranks("def work(group, channel):\n    group.least(1)\n    channel.receive()\n")
    assert both.group.least(2) == 1
    (process,) = both._processes
    process.send_signal(signal.SIGSTOP)
    both.close()
    assert process.returncode == -signal.SIGKILL
    assert CLOSE_S < client.CLOSE_S


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_clients_side_loads_no_torch() -> None:
    code = "import sys, nybble.engine.client, nybble.engine.core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_messages_survive_the_wire() -> None:
    message = Submit("a", [1, 2], params(stop=("x",), seed=2**62, logprobs=3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message
    body = msgspec.to_builtins(message)
    body["params"]["temperature"] = -1
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=ToEngine)


def test_a_client_wants_a_config_or_an_address() -> None:
    with pytest.raises(ValueError, match="config"):
        EngineClient()
