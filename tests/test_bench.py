"""The serving benchmark against servers whose behaviour is written down here, and against our own; plots as parsed SVG.

Times are injected where a value is asserted; against a server that sleeps, only what sleeping guarantees (not less) is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shlex
import socket
import statistics
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import make_tiny

from nybble.bench import kernels, offline, serving
from nybble.bench.plot import HEIGHT, Chart, Point, chart_svg, roofline_svg
from nybble.bench.serving import Load, Run, arrivals, read_sizes, summarize, table
from nybble.bench.spawn import dummy_engine, made_up_tokenizer
from nybble.bench.timing import Timing
from nybble.bench.wire import Exchange, Outcome, Target
from nybble.cli import app
from nybble.formats.qtensor import dense
from nybble.kernels import nvrtc
from nybble.kernels.registry import LinearShape
from nybble.kernels.types import Rows
from nybble.text import load_tokenizer

DATA = Path(__file__).parents[2] / "shared" / "data"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def run(report=lambda _: None, **options):
    return serving.run(serving.Options(**options), report)


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def word(text="x", reason=None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason}], usage=None)


def usage(prompt, generated) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": generated,
                                    "prompt_tokens_details": {"cached_tokens": 3}})


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n" % len(part) + part + b"\r\n" for part in parts)


DONE = b"data: [DONE]\n\n"


class Wire:
    """The transport of an exchange that is fed by hand."""

    def write(self, data):
        self.sent = data

    def close(self):
        self.closed = True


def feed(pieces: list[tuple[float, bytes]]) -> tuple[Exchange, Outcome]:
    """An exchange that received each piece at its time."""
    times = iter([at for at, _ in pieces])
    request = Target("http://x").request("POST", "/v1/completions")
    outcome = Outcome(8)
    exchange = Exchange(request, outcome, clock=lambda: next(times))
    exchange.transport = Wire()
    for _, data in pieces:
        exchange.data_received(data)
    exchange.close()
    return exchange, outcome


def test_times_are_those_at_which_chunks_arrived():
    parts = [word("a"), word("b") + word("c"), word(""), word("d", "length"), usage(5, 6), DONE]
    times = [1.0, 1.25, 2.0, 2.5, 2.75, 3.0]
    pieces = [(0.5, HEAD)] + [(at, framed(part)) for at, part in zip(times, parts)] + [(3.5, b"0\r\n\r\n")]
    exchange, outcome = feed(pieces)
    assert outcome.error is None
    assert outcome.arrivals_s == [1.0, 1.25, 1.25, 2.0, 2.5]  # two chunks in one packet: a gap of nothing
    assert (outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens) == (5, 6, 3)
    assert exchange.transport.closed
    outcome.sent_s = 0.25
    assert (outcome.ttft_s, outcome.e2e_s, outcome.tpot_s) == (0.75, 2.25, 0.3)  # 1.5 s over the 5 tokens after the first


def test_a_stream_without_a_done_event():
    """As `transformers serve` ends it: the reason and the usage in one last chunk."""
    used = {"completion_tokens": 3, "prompt_tokens": 6}
    last = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}], usage=used)
    _, outcome = feed([(1.0, HEAD), (2.0, framed(word("O"))), (3.0, framed(last)), (3.5, b"0\r\n\r\n")])
    assert (outcome.error, outcome.output_tokens, outcome.arrivals_s) == (None, 3, [2.0, 3.0])


def test_an_empty_last_chunk_is_no_token():
    _, outcome = feed([(1.0, HEAD), (2.0, framed(word("a"))), (3.0, framed(word("b"))), (9.0, framed(word("", "length"))),
                       (9.5, framed(usage(1, 2), DONE)), (9.75, b"0\r\n\r\n")])
    assert outcome.arrivals_s == [2.0, 3.0]


@settings(deadline=None, max_examples=200)
@given(cuts=st.lists(st.integers(1, 60), max_size=60), newline=st.sampled_from([b"\n", b"\r\n"]),
       frames=st.integers(1, 7), chunked=st.booleans())
def test_answers_cut_anywhere(cuts, newline, frames, chunked):
    body = b": ping\n\n" + b"".join(word(c) for c in "straße") + usage(2, 6) + DONE
    body = body.replace(b"\n", newline)
    size = -(-len(body) // frames)
    if chunked:
        whole = HEAD + framed(*(body[i : i + size] for i in range(0, len(body), size))) + b"0\r\n\r\n"
    else:
        whole = HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body)) + body
    pieces, at = [], 0
    for cut in [*cuts, len(whole)]:
        if data := whole[at : at + cut]:
            pieces.append((float(len(pieces)), data))
        at += cut
    exchange, outcome = feed(pieces)
    assert (outcome.error, outcome.output_tokens, len(outcome.arrivals_s)) == (None, 6, 6)
    assert outcome.arrivals_s == sorted(outcome.arrivals_s)
    assert exchange.complete


@pytest.mark.parametrize(("answer", "reason"), [
    (HEAD + framed(word(), usage(1, 1)) + b"0\r\n\r\n", "no finish_reason"),
    (HEAD + framed(word(), DONE) + b"0\r\n\r\n", "no usage"),
    (HEAD + framed(usage(1, 0), DONE) + b"0\r\n\r\n", "generated nothing"),
    (HEAD + framed(word(), event(error={"message": "out of luck"}), DONE) + b"0\r\n\r\n", "out of luck"),
    (HEAD + framed(b"data: {oops\n\n", DONE) + b"0\r\n\r\n", "not a completion chunk"),
    (b'HTTP/1.1 503 Busy\r\nContent-Length: 29\r\n\r\n{"error":{"message":"so full"}', "HTTP 503: "),
    (b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\nbang", "HTTP 500: bang"),
])
def test_what_is_not_a_whole_answer_is_a_failure(answer, reason):
    assert reason in feed([(1.0, answer)])[1].error


def outcome(ttft, gaps, tokens=None, error=None):
    at = [10.0 + ttft]
    for gap in gaps:
        at.append(at[-1] + gap)
    return Outcome(len(at), 10.0, 0.0, at, 7, len(at) if tokens is None else tokens, 0, error)


def test_figures_of_known_times():
    """TTFT 1..100 ms; ten gaps of i/2 ms each: linear percentiles of 1..100 are 50.5, 90.1, 99.01."""
    outcomes = [outcome(i / 1e3, [i / 2e3] * 10) for i in range(1, 101)]
    random.Random(0).shuffle(outcomes)
    failed = [outcome(5.0, [9.0], error="HTTP 500: bang"), outcome(5.0, [], error="HTTP 500: bang"), Outcome(4, error="lost")]
    figures = summarize(Run(outcomes + failed, seconds=4.0), slo_ttft_ms=80.0, slo_tpot_ms=30.25)
    for name, scale in (("ttft", 1.0), ("tpot", 0.5), ("itl", 0.5), ("e2e", 6.0)):
        for label, value in (("mean", 50.5), ("p50", 50.5), ("p90", 90.1), ("p99", 99.01)):
            if name != "itl" or label in ("mean", "p50"):  # pooled gaps interpolate elsewhere
                assert figures[f"{name}_{label}"] == pytest.approx(scale * value, rel=1e-3)
    assert figures["itl_p90"] == pytest.approx(statistics.quantiles([i / 2 for i in range(1, 101) for _ in range(10)], n=10,
                                                                    method="inclusive")[8], rel=1e-3)
    assert (figures["requests"], figures["failed"]) == (103, 3)
    assert figures["errors"] == {"HTTP 500: bang": 2, "lost": 1}
    assert (figures["in_tok"], figures["out_tok"], figures["out_tok_s"], figures["requests_s"]) == (700, 1100, 275.0, 25.0)
    assert figures["goodput_requests_s"] == 15.0  # TTFT allows 80, TPOT 60 of them; in 4 seconds
    assert figures["slo_share"] == pytest.approx(60 / 103, abs=1e-4)
    text = table(Load(concurrency=2), figures)
    assert "3 failed" in text
    assert "FAILED 2: HTTP 500: bang" in text


def test_chunks_of_several_tokens():
    """Four tokens a chunk: ITL stays the gap that a reader sees, TPOT counts tokens."""
    figures = summarize(Run([outcome(0.1, [0.4] * 5, tokens=24)], 1.0))
    assert (figures["itl_p50"], figures["tokens_per_chunk"]) == (400.0, 4.0)
    assert figures["tpot_p50"] == pytest.approx(2000 / 23, abs=1e-3)
    at_once = summarize(Run([outcome(0.5, [], tokens=24)], 1.0), slo_tpot_ms=1.0)
    assert (at_once["tpot_mean"], at_once["itl_p99"], at_once["ttft_p50"], at_once["slo_share"]) == (None, None, 500.0, 1.0)
    nothing = summarize(Run([Outcome(4, error="lost")], 1.0))
    assert (nothing["ttft_p50"], nothing["out_tok_s"], nothing["failed"]) == (None, 0.0, 1)
    table(Load(rate=1.5), nothing)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_arrivals_are_gamma(shape):
    """Mean gap 1/rate, coefficient of variation 1/sqrt(shape): 1 is Poisson, whose share of gaps above the mean is 1/e."""
    at = arrivals(40_000, 50.0, shape, random.Random(1))
    gaps = [b - a for a, b in zip(at, at[1:])]
    mean = statistics.fmean(gaps)
    assert at[0] == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.04)
    assert statistics.pstdev(gaps) / mean == pytest.approx(shape**-0.5, rel=0.04)
    if shape == 1.0:
        assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


def test_published_traces(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                     "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:16:46.6805900,5000,55\n"
                     "2023-11-16 18:17:46.68059,9,8\n")
    sizes, left_out = read_sizes(azure, longest=4096)
    assert (left_out, [size[:2] for size in sizes]) == (1, [(374, 44), (396, 109), (9, 8)])
    assert [size.due_s for size in sizes] == pytest.approx([0.0, 4.314579, 120.0], abs=2e-6)
    burst = tmp_path / "burst.csv"
    burst.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n"
                     "45,ChatGPT,1087,230,1317,x\n")
    assert read_sizes(burst)[0] == [(472, 18, 0.0), (1087, 230, 40.0)]
    assert read_sizes(burst, "Total tokens,Response tokens")[0][0] == (490, 18, None)
    with pytest.raises(ValueError, match="the columns TIMESTAMP, .* --columns"):
        read_sizes(azure, "a,b")
    with pytest.raises(ValueError, match="none of 2 rows"):
        read_sizes(burst, longest=10)
    burst.write_text("prompt_tokens,output_tokens\n5,many\n")
    with pytest.raises(ValueError, match="line 2: .*many"):
        read_sizes(burst)


@pytest.mark.skipif(not DATA.is_dir(), reason="the length files are not in this checkout")
def test_real_length_files():
    """Counts and medians as their own notes give them."""
    sizes, left_out = read_sizes(DATA / "sharegpt" / "sharegpt_lengths_llama2.csv")
    assert len(sizes) + left_out == 11137
    assert statistics.median(size.input_tokens for size in sizes) == 36
    assert statistics.median(size.output_tokens for size in sizes) == 278
    vidur = next((DATA / "vidur_traces").glob("*.csv"))
    sizes, left_out = read_sizes(vidur)
    assert (len(sizes), left_out, sizes[0]) == (28257, 0, (3772, 54, None))


# ---- servers on loopback -------------------------------------------------------------------------------------------


class Slow:
    """Answers after `first` seconds, then a chunk every `gap` seconds; keeps what it was asked. odd: by number of the request,
    the bytes to answer in place of all that."""

    def __init__(self, first=0.0, gap=0.0):
        self.first, self.gap, self.odd, self.bodies, self.at, self.running, self.most = first, gap, {}, [], [], 0, 0

    async def __call__(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        self.running += 1
        self.most = max(self.most, self.running)
        with contextlib.suppress(ConnectionError):
            if head.startswith(b"get"):
                body = json.dumps({"data": [{"id": "slow", "owned_by": "test"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            else:
                await self._complete(json.loads(body), writer)
            await writer.drain()
        self.running -= 1
        writer.close()

    async def _complete(self, body, writer):
        number = len(self.bodies)
        self.bodies.append(body)
        self.at.append(time.perf_counter())
        if number in self.odd:
            writer.write(self.odd[number])
            return
        await asyncio.sleep(self.first)
        writer.write(HEAD + framed(word()))
        for _ in range(body["max_tokens"] - 1):
            await asyncio.sleep(self.gap)
            writer.write(framed(word()))
        writer.write(framed(usage(len(body["prompt"]), body["max_tokens"]), DONE) + b"0\r\n\r\n")


@contextlib.contextmanager
def listening(server):
    """Its url, while it runs in a thread of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def main():
        loop.listener = await asyncio.start_server(server, "127.0.0.1", 0, backlog=500)
        ready.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(main()), loop.run_forever()), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield f"http://127.0.0.1:{loop.listener.sockets[0].getsockname()[1]}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


QUICK = {"input_mean": 6, "output_mean": 5, "longest": 12, "warmup": 0}


@pytest.mark.parametrize(("body", "counted"), [
    (b"# TYPE nybble_decode_steps counter\nnybble_decode_steps_total 21.0\nnybble_decode_wall_seconds_total 2.5\n"
     b'nybble_decode_busy_seconds_total 2.25\nother{a="b"} 1.0\n', (21.0, 2.5, 2.25)),
    (b"vllm:num_requests_running 0.0\n", (0.0, 0.0, 0.0)), (b'{"detail":"Not Found"}', (0.0, 0.0, 0.0))])
def test_decode_counters(body, counted):
    async def metrics(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)  # ends with its connection
        writer.close()

    with listening(metrics) as url:
        assert asyncio.run(Target(url).decode_counters()) == counted


def test_known_delays():
    server = Slow(first=0.05, gap=0.02)
    with listening(server) as url:
        figures = run(url=url, requests=12, concurrency="4", **QUICK)[0]
    assert (figures["failed"], figures["in_tok"], figures["out_tok"]) == (0, 72, 60)
    assert server.most == 4
    assert figures["ttft_p50"] >= 49.9  # sleeping is never shorter
    assert figures["e2e_mean"] >= 129.9  # and four gaps of the mean answer
    assert figures["wall_s"] >= 3 * 0.1299
    assert (figures["model"], figures["server"], figures["concurrency"], figures["rate"]) == ("slow", "test", 4, None)
    assert all(body["stream_options"] == {"include_usage": True} and body["ignore_eos"] for body in server.bodies)
    assert all(body["temperature"] == 0 and body["model"] == "slow" for body in server.bodies)


def test_failures_are_counted_and_the_rest_is_measured(tmp_path):
    server = Slow()
    bang = b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\nbang"
    server.odd = {2: bang, 4: HEAD + framed(word()), 5: b"", 7: HEAD + b"5\r\nda"}
    lines = []
    with listening(server) as url:
        figures = run(url=url, requests=10, concurrency="1", results=tmp_path / "r" / "s.jsonl",
                      **QUICK | {"report": lines.append})[0]
    assert figures["failed"] == 4
    assert sorted(figures["errors"].values()) == [1, 3]
    assert figures["errors"]["HTTP 500: bang"] == 1
    assert "FAILED 3: the connection was lost" in "\n".join(lines)
    assert json.loads((tmp_path / "r" / "s.jsonl").read_text()) == figures
    none = pytest.raises(RuntimeError, match="every request failed: no complete answer in 0.2 s$")
    with listening(Slow(first=30.0)) as url, none:
        run(url=url, requests=2, concurrency="2", timeout=0.2, results=tmp_path / "failed.jsonl", **QUICK)
    assert json.loads((tmp_path / "failed.jsonl").read_text())["errors"] == {"no complete answer in 0.2 s": 2}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ValueError, match="no server answers"):
        run(url=f"http://127.0.0.1:{port}", **QUICK)
    with pytest.raises(RuntimeError, match="every request failed: cannot connect"):
        run(url=f"http://127.0.0.1:{port}", model_name="m", requests=2, **QUICK)


@pytest.mark.parametrize("warmup", ["0", "2"])
def test_a_run_without_an_answer_is_a_failed_command(warmup, capsys):
    server, body = Slow(), b'{"error": {"message": "token id 308 is not in the vocabulary of 259"}}'
    server.odd = dict.fromkeys(range(9), b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    words = ["--requests", "3", "--concurrency", "2", "--input-mean", "6", "--output-mean", "5", "--longest", "12", "--warmup"]
    reason = "HTTP 400: token id 308 is not in the vocabulary of 259. Prompts were drawn from 32000 ids.* --vocabulary"
    with listening(server) as url, pytest.raises(RuntimeError, match=reason):  # which `main` makes exit code 2
        app(["bench", "serving", "--url", url, *words, warmup], result_action="return_value")
    server.bodies, server.odd = [], {1: server.odd[1]}
    with listening(server) as url:
        app(["bench", "serving", "--url", url, *words, "0"], result_action="return_value")
    assert "1 failed" in (said := capsys.readouterr().out)
    assert "--vocabulary" in said


def test_open_loop_does_not_wait_for_answers():
    server = Slow(first=0.3)
    with listening(server) as url:
        figures = run(url=url, requests=20, rate="200", **QUICK)[0]
        assert server.most > 4  # more than a closed loop of answers of 0.3 s could have
        assert (figures["failed"], figures["rate"], figures["concurrency"], figures["burstiness"]) == (0, 200.0, None, 1.0)
        server.bodies.clear()
        first, second = run(url=url, requests=3, rate="50,100", **QUICK)
        assert (first["rate"], second["rate"]) == (50.0, 100.0)
        prompts = [tuple(body["prompt"]) for body in server.bodies]
        assert len(set(prompts)) == 6  # a prefix cache cannot know the second load from the first
        assert sorted(map(len, prompts[:3])) == sorted(map(len, prompts[3:]))


def test_replay_of_a_trace(tmp_path):
    trace, plot = tmp_path / "trace.csv", tmp_path / "plot.svg"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n100.0,5,4\n100.4,6,5\n101.0,2000,5\n100.8,7,6\n")
    server, begun = Slow(), time.perf_counter()
    with listening(server) as url:
        figures = run(url=url, trace=trace, speed=2.0, plot=plot, slo_ttft_ms=60_000, **QUICK)[0]
        assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(5, 4), (6, 5), (7, 6)]
        assert server.at[1] - begun >= 0.2
        assert server.at[2] - begun >= 0.4
        assert (figures["requests"], figures["slo_share"]) == (3, 1.0)
        server.bodies.clear()
        run(url=url, trace=trace, concurrency="2", text=True, ignore_eos=False, **QUICK)
        assert sorted(len(body["prompt"].split()) for body in server.bodies) == [5, 6, 7]
        assert not any("ignore_eos" in body for body in server.bodies)
    titles = [text.text for text in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert {"TTFT", "TPOT", "ITL", "E2E"} <= set(titles)
    trace.write_text("input_tokens,output_tokens\n5,4\n")
    with pytest.raises(ValueError, match="no column of times"):
        run(url="http://127.0.0.1:9", trace=trace, **QUICK)


@pytest.mark.parametrize(("options", "reason"), [
    ({}, "--url, or a model"), ({"url": "http://x", "model": "y"}, "one of the two"),
    ({"url": "http://x", "dummy": True}, "shape"),
    ({"url": "http://x", "rate": "1", "concurrency": "1"}, "one of them"),
    ({"url": "http://x", "rate": "fast"}, "--rate fast: wants"), ({"url": "http://x", "rate": "0"}, "--rate 0: wants"),
    ({"url": "http://x", "concurrency": "1,-2"}, "--concurrency 1,-2: wants"),
    ({"url": "http://x", "requests": 0}, "wants a request"), ({"url": "http://x", "vocabulary": 0}, "0: wants"),
    ({"url": "x:80"}, "http://HOST")])
def test_wishes_that_cannot_be_met(options, reason):
    with pytest.raises(ValueError, match=reason):
        run(**QUICK | options)


def test_our_own_server(tmp_path):
    """Started for the run, with prefix caching and everything: tokens as asked, and the record says what was served."""
    make_tiny(tmp_path / "tiny", "llama", eos_token_id=None, vocab_size=1000)  # of which the tokenizer has 259
    lines = []
    first, second = run(model=str(tmp_path / "tiny"), requests=24, concurrency="2,8", input_mean=20, output_mean=16, longest=64,
                        device="cpu", kv="int8", plot=tmp_path / "s.svg", report=lines.append)
    for figures in (first, second):
        assert (figures["failed"], figures["in_tok"], figures["out_tok"], figures["short_answers"]) == (0, 480, 384, 0)
        assert (figures["model"], figures["scheme"], figures["kv"], figures["server"]) == ("tiny", "16bit", "int8", "nybble")
        assert 0 < figures["ttft_p50"] <= figures["e2e_p50"] <= figures["e2e_p99"] <= 1e3 * figures["wall_s"]
    assert any("warm-up: 8 requests, 0 failed" in line for line in lines)
    with pytest.raises(RuntimeError, match="did not start"):
        run(model=str(tmp_path / "nowhere"), **QUICK)


def test_the_offline_benchmark_records_the_checkpoints_own_scheme(tmp_path):
    make_tiny(tmp_path / "a tiny model", "llama")
    options = {"requests": 3, "concurrency": 2, "input_mean": 8.0, "output_mean": 6.0, "longest": 16, "device": "cpu"}
    record = json.loads(offline.run(str(tmp_path / "a tiny model"), results=tmp_path / "new" / "lines", **options))
    assert record["scheme"] == "16bit"
    assert "scheme" not in record["command"]
    assert shlex.split(record["command"])[:4] == ["nybble", "bench", "offline", str(tmp_path / "a tiny model")]
    assert json.loads((tmp_path / "new" / "lines").read_text()) == record
    with pytest.raises(ValueError, match="scheme = w8a8: goes with --dummy"):
        offline.run(str(tmp_path / "a tiny model"), scheme="w8a8", **options)


def test_random_weights_and_a_made_up_tokenizer(tmp_path, monkeypatch):
    from nybble.engine.config import EngineConfig, ProcessConfig
    from nybble.engine.messages import SamplingParams, Submit
    from nybble.models import shapes

    monkeypatch.setitem(shapes.SHAPES, "toy", shapes._llama(128, 256, 2, 4, 2, 1000, 256, 1e4))
    engine = dummy_engine(ProcessConfig(model="toy", device="cpu", engine=EngineConfig(scheme="w4a8", num_blocks=8)))
    engine.submit(Submit("a", [999, 3], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)))
    tokens = [token for _ in range(8) for delta in engine.step() for token in delta.token_ids]
    assert len(tokens) == 5
    assert engine.info().model == "toy"
    made_up_tokenizer(tmp_path, 1000)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 1000
    words = [tokenizer.decode([i]) for i in range(256, 1000)]
    assert len(set(words)) == 744
    assert all(word[0] == " " and word[1:].isalpha() for word in words)


def test_floors_of_linears_by_hand():
    """5120 x 5120: half a byte a weight, two for each group of 128; inputs of one byte or two, outputs of two."""
    weights, tokens = 5120 * 5120, 16 * 5120
    assert kernels.floor_us("w4a8", 5120, 5120, 16) == pytest.approx((weights / 2 + 3 * tokens) / 4.3e6)
    assert kernels.floor_us("w4a16_g128", 5120, 5120, 16) == pytest.approx((weights * (0.5 + 2 / 128) + 4 * tokens) / 4.3e6)
    assert kernels.floor_us("torch bf16", 5120, 5120, 16) == pytest.approx((2 * weights + 4 * tokens) / 4.3e6)
    assert kernels.floor_us("w4a8", 5120, 5120, 4096) == pytest.approx(2 * 4096 * weights / 1500e6)
    assert kernels.floor_us("w4a16", 5120, 5120, 4096) == pytest.approx(2 * 4096 * weights / 790e6)


def test_what_linears_are_timed_with(monkeypatch):
    """The kernel that the engine would take; weights and inputs whose product is near one, in the numbers of the scheme."""
    monkeypatch.setattr(nvrtc, "refusal", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = {"16bit": "hopper 16 bits", "fp8": "hopper fp8", "w8a8": "hopper w8a8"}
    for scheme, name in chosen.items():
        shape = LinearShape(kernels.FORMS[scheme], 5120, 5120, torch.device("cuda"), torch.bfloat16)
        assert kernels.kernels_for(shape)[0].name == name
    for scheme in ("w4a16_zero_g128", "w4a8_g128", "w4a8_whole_g128", *chosen):
        weight, x = (make(scheme, 64, 512, torch.device("cpu")) for make in (kernels.random_weight, kernels.random_input))
        values = x.codes.double() * x.scale[:, None] if isinstance(x, Rows) else x.double()
        assert (values @ dense(weight, torch.float64).t()).std().item() == pytest.approx(1.0, abs=0.3), scheme
        assert isinstance(x, Rows) is (kernels.FORMS[scheme].act is not None)
    assert x.codes.dtype == torch.int8
    assert kernels.random_input("fp8", 3, 32, torch.device("cpu")).codes.dtype == torch.float8_e4m3fn


def test_what_the_kernel_benchmark_writes(tmp_path, monkeypatch):
    """Without a GPU: a kernel that fails its check is shown and not recorded, what raises does not hide the rest."""
    layer = SimpleNamespace(name="fast"), None, [None]
    calls = {"w4a8 | fast": [lambda: 0], "w8a8 | bad": [lambda: 0], "torch bf16": [lambda: 0]}
    replaced = {
        "_weights": lambda scheme, *_: [(scheme, *layer)], "humming_calls": lambda *_: 1 / 0,
        "_calls": lambda *_: (dict(calls), {"w4a8 | fast": 1e-3, "w8a8 | bad": 0.5}, {"w8a8 | bad"}),
        "_time_all": lambda calls, _: {name: Timing(20.0, 19.0, 0.1) for name in calls}}
    for name, value in replaced.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "toy")
    monkeypatch.setattr("sys.argv", ["/bin/nybble", "bench", "kernels", "--tokens", "16"])
    lines, out = [], tmp_path / "new" / "lines"
    records = kernels.run(["w4a8"], tokens=[16], results=out, plot=tmp_path / "roof.svg", report=lines.append)
    assert [json.loads(line) for line in out.read_text().splitlines()] == records
    assert [(r["layer"], r["scheme"], r["kernel"], r["N"], r["M"], r["us"]) for r in records] == [
        (name, "w4a8", "fast", n, 16, 20.0) for name, n in (("qkv", 15360), ("o", 5120), ("gate_up", 27648), ("down", 5120))]
    assert records[1]["share_of_floor"] == pytest.approx(13352960 / 4.3e6 / 20, abs=1e-3)
    assert records[0]["peers"] == {"torch bf16": 20.0}
    assert records[0]["command"] == "nybble bench kernels --tokens 16"
    assert sum("ZeroDivisionError" in line for line in lines) == 4
    assert "w8a8 | bad (wrong)" in lines[-1]
    assert "80.0" in lines[-1]
    hints = [circle[0].text for circle in ElementTree.parse(tmp_path / "roof.svg").iter("{http://www.w3.org/2000/svg}circle")]
    assert [hint.partition(":")[0] for hint in hints] == ["qkv M=16", "o M=16", "gate_up M=16", "down M=16"]


# ---- plots ---------------------------------------------------------------------------------------------------------


def test_points_on_the_roof_are_drawn_on_it():
    peaks, bandwidth = {"int8": 1600e12, "bf16": 800e12}, 4e12
    points = [Point("memory", "a", 40e9, 4e9, 4e9 / 4e12 * 1e6), Point("compute", "b & c", 16e12, 1e9, 1e4, "int8")]
    root = ElementTree.fromstring(roofline_svg(points, bandwidth, peaks, "<Roof>"))
    name = "{http://www.w3.org/2000/svg}"
    int8, bf16 = ([tuple(map(float, p.split())) for p in path.get("d")[1:].split("L")]
                  for path in root.iter(f"{name}path") if path.get("stroke-width"))
    circles = [(float(c.get("cx")), float(c.get("cy")), c[0].text) for c in root.iter(f"{name}circle")]
    assert [hint for _, _, hint in circles] == ["memory: 1000.0 us, 40 T/s, 4000 GB/s, 100% of the roof",
                                                "compute: 10000.0 us, 1.6e+03 T/s, 100 GB/s, 100% of the roof"]
    (x0, y0), (x1, y1), (x2, y2) = int8
    on_slope, on_top = circles[0], circles[1]
    assert x0 < on_slope[0] < x1 < on_top[0] < x2
    assert on_slope[1] == pytest.approx(y0 + (on_slope[0] - x0) / (x1 - x0) * (y1 - y0), abs=0.2)
    assert on_top[1] == pytest.approx(y1, abs=0.2)
    assert bf16[1][1] > y1 == y2  # half the peak lies lower on the page
    assert "<Roof>" in [text.text for text in root.iter(f"{name}text")]
    with pytest.raises(ValueError, match="at least one"):
        roofline_svg([], bandwidth, peaks)


@settings(deadline=None, max_examples=300)
@example([(5e-324, 1.0)], True, False)
@example([(5e-324, 5e-324)], False, False)
@example([(1e-299, 1e9), (1e9, 1e-280)], True, True)
@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=12), st.booleans(), st.booleans())
def test_any_numbers_make_a_picture(points, log_x, log_y):
    """What is drawn stays inside, and a logarithmic axis leaves out what it cannot show."""
    chart = Chart("t", "x", "y", {"one": points, "none": [], "odd": [(math.nan, 1.0), (1.0, math.inf)]}, True, log_x, log_y)
    root = ElementTree.fromstring(chart_svg([chart, chart, chart], "title"))
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    shown = [p for p in points if (p[0] > 1e-290 or not log_x) and (p[1] > 1e-290 or not log_y)]
    assert len(circles) == 3 * len(shown)
    assert all(0 <= float(c.get("cy")) <= HEIGHT for c in circles)
