"""Latency and throughput of a server as clients see them: of any that speaks OpenAI's streaming /v1/completions.

The one idea: while the load runs only record (`wire`), decide nothing; every figure is computed afterwards from the records.

What is counted: tokens as the server's `usage` says, never chunks. Latencies from the moment a request is sent (connecting
included). TTFT: to the first chunk. TPOT: (last chunk - first chunk) / (tokens - 1), per request. ITL: the gap between two
chunks, whatever a chunk holds, so that a stall stays a stall; `tokens_per_chunk` says how many that is. E2E: to the last chunk.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from cyclopts import Parameter

from nybble.bench.offline import lengths
from nybble.bench.plot import Chart, chart_svg
from nybble.bench.wire import Outcome, Request, Target
from nybble.text import load_tokenizer

METRICS = ("ttft", "tpot", "itl", "e2e")
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
# Columns of published length files and traces: ShareGPT lengths, Vidur, Azure, BurstGPT, Mooncake.
INPUT_COLUMNS = ("prompt_tokens", "num_prefill_tokens", "ContextTokens", "Request tokens", "input_length", "input_tokens")
OUTPUT_COLUMNS = ("output_tokens", "num_decode_tokens", "GeneratedTokens", "Response tokens", "output_length")
TIME_COLUMNS = ("arrived_at", "TIMESTAMP", "Timestamp", "timestamp", "arrival_s")
# Short words that common tokenizers give one token each: text prompts of about so many tokens.
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be")


class Size(NamedTuple):
    """One request to make: tokens of prompt and answer, and when it is due (None: the load decides)."""

    input_tokens: int
    output_tokens: int
    due_s: float | None = None


class Load(NamedTuple):
    """concurrency: closed loop, a request starts when another ends. rate: open loop, requests/s, whatever the server does.
    Neither: the trace's own times."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.concurrency:
            return f"concurrency {self.concurrency}"
        return "trace" if self.rate is None else f"{self.rate:g} requests/s"


# ---- what to send ------------------------------------------------------------------------------------------------------


def read_sizes(path: Path, columns: str | None = None, shortest: int = 1, longest: int | None = None) -> tuple[list[Size], int]:
    """Sizes of a CSV with a header, and how many rows were left out for lengths outside shortest..longest.

    columns: "input,output" or "input,output,time"; None looks for the names of published traces. Times are seconds or
    ISO 8601, and count from the first row. Raises ValueError.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no rows")
    names = list(rows[0])
    if columns is None:
        found = [next((n for n in known if n in names), None) for known in (INPUT_COLUMNS, OUTPUT_COLUMNS, TIME_COLUMNS)]
    else:
        found = [*columns.split(","), None][:3]
    if None in found[:2] or any(name is not None and name not in names for name in found):
        raise ValueError(f"{path} has the columns {', '.join(map(str, names))}: name those of input and output tokens with "
                         "--columns")
    source, answer, when = found
    sizes, left_out, start = [], 0, None
    for number, row in enumerate(rows, 2):
        try:
            size = Size(int(float(row[source])), int(float(row[answer])), None if when is None else _seconds(row[when]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if min(size[:2]) < shortest or (longest is not None and max(size[:2]) > longest):
            left_out += 1
            continue
        if size.due_s is not None:
            start = size.due_s if start is None else start
            size = size._replace(due_s=size.due_s - start)
        sizes.append(size)
    if not sizes:
        raise ValueError(f"{path}: none of {len(rows)} rows has {shortest} to {longest} tokens")
    return sizes, left_out


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds at which requests are due, the first at 0. Gaps are gamma with mean 1/rate and shape `burstiness`: 1 is a
    Poisson process, below 1 burstier, above 1 more even."""
    at, out = 0.0, []
    for _ in range(count):
        out.append(at)
        at += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return out


def prepare(sizes: Iterable[Size], target: Target, wish: Options, what: str) -> list[Request]:
    """The requests as they go over the wire, with prompts that only this seed and `what` draw: no prefix cache knows them."""
    vocabulary = wish.ids()
    rng, out = random.Random(f"{wish.seed} {what}"), []
    for size in sizes:
        words = rng.choices(WORDS, k=size.input_tokens) if wish.text else None
        prompt = " ".join(words) if words else [rng.randrange(vocabulary) for _ in range(size.input_tokens)]
        body = {
            "model": target.model, "prompt": prompt, "max_tokens": size.output_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if wish.ignore_eos else {})  # fmt: skip
        out.append(target.request("POST", "/v1/completions", msgspec.json.encode(body)))
    return out


# ---- the load ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """All outcomes of one load, and how the client itself fared."""

    outcomes: list[Outcome]
    seconds: float = 0.0
    client_cpu: float = 0.0
    loop_lag_s: list[float] = field(default_factory=list)


async def drive(target: Target, requests: Sequence[Request], sizes: Sequence[Size], load: Load, due: Sequence[float] | None,
                timeout_s: float = 600.0) -> Run:
    """Send every request and wait for every end. due: seconds from now, None for a closed loop."""
    run = Run([Outcome(size.output_tokens) for size in sizes])

    async def one(index: int) -> None:
        outcome = run.outcomes[index]
        outcome.sent_s = time.perf_counter()
        try:
            (await target.exchange(requests[index], timeout_s, outcome)).close()
        except TimeoutError:
            outcome.error = f"no complete answer in {timeout_s:g} s"
        except OSError as error:
            outcome.error = f"cannot connect: {error.strerror or error}"

    async def worker(queue: Iterable[int]) -> None:
        for index in queue:
            await one(index)

    ticker = asyncio.create_task(_lag(run.loop_lag_s))
    begun, cpu = time.perf_counter(), time.process_time()
    if due is None:
        queue = iter(range(len(requests)))
        await asyncio.gather(*(worker(queue) for _ in range(min(load.concurrency or 1, len(requests)))))
    else:
        async with asyncio.TaskGroup() as group:
            for index, at in enumerate(due):
                if (wait := begun + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                run.outcomes[index].late_s = time.perf_counter() - begun - at
                group.create_task(one(index))
    run.seconds = time.perf_counter() - begun
    run.client_cpu = (time.process_time() - cpu) / run.seconds
    ticker.cancel()
    return run


async def _lag(out: list[float]) -> None:
    """How late the event loop wakes, fifty times a second."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.02)
        out.append(time.perf_counter() - before - 0.02)


# ---- figures -----------------------------------------------------------------------------------------------------------


def samples(outcomes: Iterable[Outcome]) -> dict[str, np.ndarray]:
    """Milliseconds of every metric over the requests that succeeded: one per request, for ITL one per gap."""
    good = [one for one in outcomes if one.error is None]
    gaps = [np.diff(one.arrivals_s) for one in good]
    values = {
        "ttft": [one.ttft_s for one in good],
        "tpot": [one.tpot_s for one in good if one.tpot_s is not None],
        "itl": np.concatenate(gaps) if gaps else [],
        "e2e": [one.e2e_s for one in good],
    }
    return {name: np.asarray(value, dtype=float) * 1e3 for name, value in values.items()}


def summarize(run: Run, slo_ttft_ms: float | None = None, slo_tpot_ms: float | None = None) -> dict[str, Any]:
    """Figures of one load; latencies in milliseconds, None where nothing was measured.

    Percentiles interpolate linearly. seconds: from the first request sent to the last end, the drain included. Tokens are
    those of complete answers. goodput: complete answers per second within both limits; a failed request meets none.
    """
    good = [one for one in run.outcomes if one.error is None]
    tokens, chunks = sum(one.output_tokens for one in good), sum(len(one.arrivals_s) for one in good)
    within = [
        one for one in good
        if (slo_ttft_ms is None or one.ttft_s * 1e3 <= slo_ttft_ms)
        and (slo_tpot_ms is None or (one.tpot_s or 0.0) * 1e3 <= slo_tpot_ms)
    ]  # fmt: skip
    figures: dict[str, Any] = {
        "requests": len(run.outcomes),
        "failed": len(run.outcomes) - len(good),
        "errors": dict(Counter(one.error for one in run.outcomes if one.error is not None)),
        "short_answers": sum(one.output_tokens < one.wanted_tokens for one in good),
        "in_tok": sum(one.input_tokens for one in good),
        "out_tok": tokens,
        "cached_tok": sum(one.cached_tokens for one in good),
        "wall_s": round(run.seconds, 3),
        "requests_s": round(len(good) / run.seconds, 3),
        "out_tok_s": round(tokens / run.seconds, 1),
        "tokens_per_chunk": round(tokens / chunks, 3) if chunks else None,
        "unit": "ms",
    }
    for name, values in samples(run.outcomes).items():
        figures[f"{name}_mean"] = round(float(values.mean()), 3) if len(values) else None
        for label, q in QUANTILES.items():
            figures[f"{name}_{label}"] = round(float(np.percentile(values, q)), 3) if len(values) else None
    if slo_ttft_ms is not None or slo_tpot_ms is not None:
        figures |= {"slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms}
        figures["slo_share"] = round(len(within) / len(run.outcomes), 4)
        figures["goodput_requests_s"] = round(len(within) / run.seconds, 3)
    for name, values in (("lag", run.loop_lag_s or [0.0]), ("late", [one.late_s for one in run.outcomes])):
        figures[f"client_{name}_ms_p99"] = round(float(np.percentile(values, 99)) * 1e3, 2)
    return figures | {"client_cpu": round(run.client_cpu, 3)}


def table(load: Load, figures: dict[str, Any]) -> str:
    """One load for people."""
    show = lambda value: "-" if value is None else f"{value:.1f}"  # noqa: E731
    lines = [
        f"{load}: {figures['requests']} requests, {figures['failed']} failed, {figures['wall_s']:.1f} s; "
        f"{figures['in_tok']} tokens in, {figures['out_tok']} out",
        f"  output {figures['out_tok_s']:.1f} tokens/s, {figures['requests_s']:.2f} requests/s",
        f"  {'ms':<6}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}",
    ]
    for name in METRICS:
        cells = (show(figures[f"{name}_{label}"]) for label in ("mean", *QUANTILES))
        lines.append(f"  {name.upper():<6}" + "".join(f"{cell:>10}" for cell in cells))
    if "goodput_requests_s" in figures:
        limits = [f"{n.upper()} <= {v:g} ms" for n in ("ttft", "tpot") if (v := figures[f"slo_{n}_ms"]) is not None]
        share = f"{figures['slo_share']:.1%} of all had {' and '.join(limits)}"
        lines.append(f"  goodput {figures['goodput_requests_s']:.2f} requests/s: {share}")
    if (figures["tokens_per_chunk"] or 1.0) > 1.02:
        lines.append(f"  a chunk held {figures['tokens_per_chunk']} tokens: ITL is between chunks, TPOT counts tokens")
    if figures["short_answers"]:
        lines.append(f"  {figures['short_answers']} answers were shorter than asked for")
    kinds = Counter(figures["errors"]).most_common()
    lines += [f"  FAILED {count}: {error}" for error, count in kinds[:5]]
    if kinds[5:]:
        lines.append(f"  FAILED {sum(count for _, count in kinds[5:])} for {len(kinds) - 5} further reasons")
    busy = figures["client_cpu"] > 0.7 or figures["client_lag_ms_p99"] > 5.0
    note = ": it may be what limits; run it elsewhere or send less" if busy else ""
    lag = f"event loop late by {figures['client_lag_ms_p99']} ms, requests by {figures['client_late_ms_p99']} ms (P99)"
    lines.append(f"  client: {figures['client_cpu']:.0%} of a core, {lag}{note}")
    return "\n".join(lines)


def plot(results: Sequence[tuple[Load, dict[str, Any], dict[str, np.ndarray]]], title: str) -> str:
    """An SVG: distributions of the latencies of one load, or throughput and latencies over several."""
    if len(results) == 1:
        charts = []
        for name in METRICS:
            values = np.sort(results[0][2][name])
            thin = values[:: max(1, len(values) // 400)]
            share = [(float(v), (i + 1) / max(len(thin), 1)) for i, v in enumerate(thin)]
            charts.append(Chart(name.upper(), "ms", "share of requests" if name != "itl" else "share of gaps", {"": share}))
        return chart_svg(charts, f"{title}, {results[0][0]}")
    label = "concurrency" if results[0][0].concurrency else "requests/s offered"
    at = [load.concurrency or load.rate or 0.0 for load, _, _ in results]
    pick = lambda key: [(x, f[key]) for x, (_, f, _) in zip(at, results) if f.get(key) is not None]  # noqa: E731
    charts = [Chart("Output", label, "tokens/s", {"": pick("out_tok_s")}, marks=True)]
    for name in METRICS[:3]:
        charts.append(Chart(name.upper(), label, "ms", {q.upper(): pick(f"{name}_{q}") for q in QUANTILES}, marks=True))
    return chart_svg(charts, title)


# ---- the command -------------------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, as the command line has it."""

    model: Annotated[str | None, Parameter(
        help="Serve this for the run: a checkpoint, or with --dummy a shape (llama-2-13b, llama-3-8b, llama-3-70b)."
    )] = field(default=None, kw_only=False)
    url: Annotated[str | None, Parameter(help="Or measure the server that runs here.")] = None
    model_name: Annotated[str | None, Parameter(help="What the server calls its model; default: first of /v1/models.")] = None
    api_key: Annotated[str | None, Parameter(help='Sent as "Authorization: Bearer KEY"; default: OPENAI_API_KEY.')] = None
    requests: Annotated[int, Parameter(help="How many, for each load.")] = 1000
    concurrency: Annotated[str | None, Parameter(
        help="Closed loop: so many requests at once; several with commas make a sweep. Default: 128.")] = None
    rate: Annotated[str | None, Parameter(
        help="Open loop: so many requests a second whatever the server does; several with commas make a sweep.")] = None
    burstiness: Annotated[float, Parameter(
        help="Shape of the gamma-distributed gaps of --rate: 1 is Poisson, below 1 is burstier.")] = 1.0
    trace: Annotated[Path | None, Parameter(
        help="CSV with a column of times: its requests, sent when it says (or under --rate or --concurrency).")] = None
    speed: Annotated[float, Parameter(help="Replay the trace so many times faster.")] = 1.0
    lengths: Annotated[Path | None, Parameter(
        help="CSV of input and output tokens to draw lengths from; default: log-normal with the means below.")] = None
    columns: Annotated[str | None, Parameter(
        help="The CSV's columns as INPUT,OUTPUT or INPUT,OUTPUT,TIME, where their names are not known ones.")] = None
    shortest: Annotated[int, Parameter(help="Fewest tokens of a prompt or answer; rows with fewer are left out.")] = 4
    longest: Annotated[int, Parameter(help="Most tokens of a prompt or answer; rows with more are left out.")] = 1024
    input_mean: Annotated[float, Parameter(help="Mean prompt length.")] = 248
    output_mean: Annotated[float, Parameter(help="Mean answer length.")] = 240
    text: Annotated[bool, Parameter(help="Prompts of plain words in place of token ids, for servers that take no ids.")] = False
    vocabulary: Annotated[int | None, Parameter(
        help="Prompts are drawn from this many ids; default: as MODEL's tokenizer has, with --url or --dummy 32000.")] = None
    ignore_eos: Annotated[bool, Parameter(
        help="Ask for answers of exactly the wanted length (an extension that OpenAI itself refuses).")] = True
    slo_ttft_ms: Annotated[float | None, Parameter(help="For goodput: the first token within this.")] = None
    slo_tpot_ms: Annotated[float | None, Parameter(help="For goodput: the mean time per further token within this.")] = None
    warmup: Annotated[int | None, Parameter(help="Requests before the measurement; default: the highest concurrency.")] = None
    timeout: Annotated[float, Parameter(help="Seconds after which a request counts as failed.")] = 600.0
    seed: Annotated[int, Parameter(help="Of lengths, prompts and arrivals.")] = 0
    dummy: Annotated[bool, Parameter(help="Serve random weights of that shape, made on the device.")] = False
    scheme: Annotated[str | None, Parameter(help="With --dummy the scheme of the weights, else a label for results.")] = None
    kv: Annotated[str | None, Parameter(help="KV cache type of the server started here, else a label for the results.")] = None
    device: Annotated[str, Parameter(help="auto, cpu, cuda, cuda:N.")] = "auto"
    results: Annotated[Path | None, Parameter(help="Append one JSON line per load here.")] = None
    plot: Annotated[Path | None, Parameter(help="Write an SVG here.")] = None

    def check(self) -> None:
        """Raises ValueError for a wish that cannot be met."""
        for wrong, reason in (
            ((self.url is None) == (self.model is None), "wants a running server's --url, or a model to serve: one of the two"),
            (self.url is not None and not self.url.startswith(("http://", "https://")), f"--url {self.url}: wants http://HOST:PORT"),
            (self.dummy and self.model is None, "--dummy goes with the name of a shape"),
            (self.vocabulary is not None and self.vocabulary < 1, f"vocabulary = {self.vocabulary}: wants 1 or more"),
            (self.requests < 1 or self.burstiness <= 0 or self.speed <= 0, "wants a request, a burstiness and a speed above 0"),
            (None not in (self.concurrency, self.rate), "--concurrency is a closed loop, --rate an open one: give one of them"),
        ):
            if wrong:
                raise ValueError(reason)

    def loads(self) -> list[Load]:
        if self.concurrency is None and self.rate is None and self.trace is not None:
            return [Load()]
        given, kind = (self.concurrency or "128", int) if self.rate is None else (self.rate, float)
        option = f"--{'concurrency' if self.rate is None else 'rate'} {given}"
        try:
            numbers = [kind(part) for part in given.split(",")]
        except ValueError:
            raise ValueError(f"{option}: wants a number, or several with commas between") from None
        if min(numbers) <= 0:
            raise ValueError(f"{option}: wants numbers above 0")
        return [Load(concurrency=n) if self.rate is None else Load(rate=n) for n in numbers]

    def sizes(self, report: Callable[[str], object]) -> list[Size]:
        path, count, limits = self.trace or self.lengths, self.requests, (self.shortest, self.longest)
        if path is None:
            return [Size(*pair) for pair in zip(lengths(count, self.input_mean, 1.0, self.seed, *limits),
                                                lengths(count, self.output_mean, 0.7, self.seed + 1, *limits))]  # fmt: skip
        sizes, left_out = read_sizes(path, self.columns, *limits)
        if left_out:
            allowed = f"{self.shortest} to {self.longest} tokens each way"
            report(f"{path}: {left_out} of {left_out + len(sizes)} rows left out: not {allowed}")
        if self.trace is None:
            rng = random.Random(self.seed)
            return rng.sample(sizes, count) if count <= len(sizes) else rng.choices(sizes, k=count)
        if self.rate is None and self.concurrency is None and sizes[0].due_s is None:
            raise ValueError(f"{path} has no column of times: name one with --columns, or give a --rate or --concurrency")
        return sizes[:count]

    def ids(self) -> int:
        """How many ids prompts are drawn from: the model's own where it is at hand, else what common models have at least.

        A padded embedding has rows that no token has, and a server refuses their ids: the tokenizer's size counts.
        """
        if self.vocabulary or not self.model or self.dummy:
            return self.vocabulary or 32000
        config, known = Path(self.model) / "config.json", load_tokenizer(self.model).vocab_size
        return min(known, json.loads(config.read_text()).get("vocab_size", known)) if config.is_file() else known


def command(wish: Options = Options()) -> None:  # noqa: B008
    """Latency and throughput of a running server, or of one started for the run, as its clients see it."""
    run(wish)


def run(wish: Options, report: Callable[[str], object] = print) -> list[dict[str, Any]]:
    """Measure a server under each load and return one record per load. Raises ValueError for a wish that cannot be met,
    RuntimeError when no request of any load succeeded, after the records were written."""
    wish.check()
    loads, sizes = wish.loads(), wish.sizes(report)
    for path in (wish.results, wish.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if wish.url is not None:
        return asyncio.run(_measure(wish, wish.url, loads, sizes, report))
    from nybble.bench.spawn import own_server

    most = max((load.concurrency or 0 for load in loads), default=0)
    engine = {"kv": wish.kv or "auto", "device": wish.device} | ({"max_batch": most} if most else {})
    with own_server(str(wish.model), wish.dummy, wish.scheme or "w4a8", engine, report) as address:
        return asyncio.run(_measure(wish, address, loads, sizes, report))


def _all_failed(wish: Options, url: str, what: str, errors: Counter[str]) -> RuntimeError:
    """errors: how many requests failed for each reason."""
    [(reason, count)] = errors.most_common(1)
    share = "" if count == errors.total() else f" ({count} of {errors.total()} times)"
    cure = _cure(wish, [reason])
    return RuntimeError(f"{url}: every {what} failed: {reason}{share}{cure and f'. {cure}'}")


def _cure(wish: Options, errors: Iterable[str]) -> str:
    """What to do about errors that token ids make; nothing about others."""
    if wish.text or not any(re.search(r"\bvocab|token.?ids?\b", error, re.IGNORECASE) for error in errors):
        return ""
    return (f"Prompts were drawn from {wish.ids()} ids: give the size of the server's vocabulary with --vocabulary, or --text "
            "for a server that takes no ids")  # fmt: skip


async def _measure(wish: Options, url: str, loads: list[Load], sizes: list[Size],
                   report: Callable[[str], object]) -> list[dict[str, Any]]:
    target = Target(url, wish.model_name or "", wish.api_key or os.environ.get("OPENAI_API_KEY"))
    about = await target.described() if not target.model else {"id": target.model}
    target = replace(target, model=about["id"])
    context = about.get("max_model_len") or sys.maxsize
    if too_long := sum(size.input_tokens + size.output_tokens > context for size in sizes):
        report(f"{too_long} of {len(sizes)} requests want more than the server's context of {context}: --longest limits them")
    most = max(load.concurrency or 16 for load in loads)
    first = sizes[: most if wish.warmup is None else wish.warmup]
    if first:
        first = [size._replace(output_tokens=min(size.output_tokens, 16)) for size in first]
        warm = await drive(target, prepare(first, target, wish, "warm-up"), first, Load(most), None, wish.timeout)
        failed = Counter(one.error for one in warm.outcomes if one.error is not None)
        if failed.total() == len(first):
            raise _all_failed(wish, url, "warm-up request", failed)
        report(f"warm-up: {len(first)} requests, {failed.total()} failed, {warm.seconds:.1f} s (not in the figures)")
    records, kept = [], []
    for load in loads:
        wire, due = prepare(sizes, target, wish, str(load)), None
        if load.rate is not None:
            due = arrivals(len(sizes), load.rate, wish.burstiness, random.Random(f"{wish.seed} {load} arrivals"))
        elif load.concurrency is None:
            due = [(size.due_s or 0.0) / wish.speed for size in sizes]
        before = await target.decode_counters()
        outcome = await drive(target, wire, sizes, load, due, wish.timeout)
        steps, wall_s, busy_s = (after - start for start, after in zip(before, await target.decode_counters()))
        figures, device = summarize(outcome, wish.slo_ttft_ms, wish.slo_tpot_ms), {}
        report(table(load, figures))
        if cure := _cure(wish, figures["errors"]):
            report(f"  {cure}")
        if steps and wall_s:
            device = {"decode_ms_step": round(wall_s / steps * 1e3, 3), "gpu_busy": round(busy_s / wall_s, 4)}
            report(f"  server: {device['decode_ms_step']} ms a decode step; the device worked {device['gpu_busy']:.1%} of it")
        record = {
            "bench": "serving", "model": target.model, "scheme": about.get("scheme") or wish.scheme,
            "kv": about.get("kv_cache") or wish.kv, "server": about.get("owned_by"), "concurrency": load.concurrency,
            "rate": load.rate, "burstiness": wish.burstiness if load.rate else None, **figures, **device,
            "date": time.strftime("%Y-%m-%d"),
            "command": re.sub(r"(--api-key[= ])\S+", r"\1KEY", shlex.join(["nybble", *sys.argv[1:]])),
        }  # fmt: skip
        records.append(record)
        kept.append((load, figures, samples(outcome.outcomes)))
        if wish.results is not None:
            with wish.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    if len(records) > 1:
        report(_overview(loads, records))
    if all(record["failed"] == record["requests"] for record in records):
        raise _all_failed(wish, url, "request", Counter(records[0]["errors"]))
    if wish.plot is not None:
        wish.plot.write_text(plot(kept, f"{target.model} served by {about.get('owned_by') or url}"), encoding="utf-8")
        report(f"plot: {wish.plot}")
    return records


def _overview(loads: Sequence[Load], records: Sequence[dict[str, Any]]) -> str:
    keys = ["out_tok_s", "requests_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "failed"]
    keys += [key for key in ("goodput_requests_s",) if key in records[0]]
    width = max(map(len, map(str, loads)))
    lines = [" " * width + "".join(f"{key.removesuffix('_requests_s') + (' ms' if '_p' in key else ''):>13}" for key in keys)]
    for load, record in zip(loads, records):
        cells = ("-" if record[key] is None else format(record[key], ".5g") for key in keys)
        lines.append(f"{load!s:<{width}}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)
