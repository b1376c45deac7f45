"""Throughput of the engine in this process: a fixed set of random requests, at most so many at once, drain included.

The workload is the one peers are measured with: prompt and answer lengths log-normal (sigma 1.0 and 0.7), clipped to 4..1024
and scaled to exact totals, random token ids, greedy, EOS ignored. Peers took the requests in order of arrival; a batch call of
ours (`LLM.generate`) starts the longest answers first, and so does this unless told otherwise.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import sys
import time
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

WARM_INPUT, WARM_OUTPUT = 64, 8  # tokens, at most, of the requests before the measurement


def lengths(count: int, mean: float, sigma: float, seed: int, low: int = 4, high: int = 1024) -> list[int]:
    """`count` log-normal lengths in [low, high] whose sum is exactly round(count * mean)."""
    if count < 1 or not low <= mean <= high:
        raise ValueError(f"{count} requests with a mean length of {mean}: wants 1 or more, of {low} to {high} tokens")
    rng = random.Random(seed)
    raw = [rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) for _ in range(count)]
    factor = 1.0
    for _ in range(50):  # clipping moves the mean: rescale until it does not
        clipped = [min(high, max(low, r * factor)) for r in raw]
        factor *= count * mean / sum(clipped)
    out = [round(c) for c in clipped]
    total, i = round(count * mean), 0
    while sum(out) != total:
        step = 1 if sum(out) < total else -1
        if low <= out[i % count] + step <= high:
            out[i % count] += step
        i += 1
    return out


def run(
    model: str,
    *,
    scheme: str | None = None,
    kv: str = "int8",
    requests: int = 1000,
    concurrency: int = 128,
    input_mean: float = 248,
    output_mean: float = 240,
    longest: int = 1024,
    dummy: bool = False,
    order: str = "longest",
    results: Path | None = None,
    device: str = "auto",
    loaded: Any = None,
    **engine_options: Any,
) -> str:
    """Run the workload once and return the report; `results` gets one JSON line. `loaded` reuses a `models.Decoder`.

    scheme: of dummy weights (None: w4a8; "w4a8+w8a8" has W8A8 logits), or a label for `loaded`; a checkpoint has its own.
    Raises ValueError.
    A closed loop: the next request is sent when one has ended. order: "longest" answers first, or "arrival". decode_ms_step
    is the median over steps in which all `concurrency` rows generate, gpu_busy the share of decode steps in which the device
    works, host_ms_step what the host does per step beside waiting, ttft_p50 the median seconds (`unit`) from a request to its
    first token, itl_p99 the seconds between two tokens of a request that one of a hundred exceeds.
    """
    from nybble.engine.config import EngineConfig
    from nybble.engine.core import Engine
    from nybble.engine.load import open_engine
    from nybble.engine.messages import Delta, SamplingParams, Submit
    from nybble.hardware import describe, pick_device

    if requests < 1 or concurrency < 1:
        raise ValueError(f"requests = {requests}, concurrency = {concurrency}: wants 1 or more of each")
    if order not in ("longest", "arrival"):
        raise ValueError(f"order = {order!r}: wants longest or arrival")
    if scheme is not None and not dummy and loaded is None:
        raise ValueError(f"scheme = {scheme}: goes with --dummy; {model} is run in the scheme that it was made in")
    scheme = scheme or ("w4a8" if dummy else "")
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
    target = pick_device(device)
    inputs, outputs = (
        lengths(requests, mean, sigma, seed, high=longest)
        for mean, sigma, seed in ((input_mean, 1.0, 0), (output_mean, 0.7, 1))
    )
    longest_pair = max(*map(sum, zip(inputs, outputs)), WARM_INPUT + WARM_OUTPUT)
    config = EngineConfig(kv=None if kv == "auto" else kv, max_batch=concurrency, max_context=longest_pair, seed=0,
                          prefix_caching=False, model_name=model, scheme=scheme, **engine_options)
    engine = open_engine(model, device, config, dummy=dummy) if loaded is None else Engine(loaded, config)
    sys.stderr.write(f"{engine.runner.memory}\n")
    rng, vocab = random.Random(2), engine.runner.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in inputs]
    wanted = list(zip(prompts, outputs))
    if order == "longest":
        wanted.sort(key=itemgetter(1), reverse=True)

    def generate(wanted: list[tuple[list[int], int]]) -> tuple[int, list[float], list[float], list[float]]:
        """-> tokens; seconds of the steps in which all generate, from requests to their first tokens, and between tokens."""
        generated, steps, before, firsts, gaps, sent = 0, [], time.perf_counter(), [], [], {}
        waiting = iter(enumerate(wanted))
        while True:
            for i, (prompt, length) in islice(waiting, concurrency - len(sent)):
                params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                sent[str(i)] = [time.perf_counter(), 0]
                engine.submit(Submit(str(i), prompt, params))
            if not engine.has_work:
                return generated, steps, firsts, gaps
            deltas = [event for event in engine.step() if isinstance(event, Delta)]
            now = time.perf_counter()
            for delta in deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
                request = sent[delta.request_id]
                (gaps if request[1] else firsts).append(now - request[0])
                request[0], request[1] = now, request[1] + len(delta.token_ids)
                generated += len(delta.token_ids)
                if delta.finish_reason is not None:
                    del sent[delta.request_id]
            if len(deltas) == concurrency:
                steps.append(now - before)
            before = now

    # Compile and capture everything once.
    generate([(prompts[i % requests][:WARM_INPUT], WARM_OUTPUT) for i in range(concurrency)])
    before, start = engine.info(), time.perf_counter()
    generated, steps, firsts, gaps = generate(wanted)
    seconds, after = time.perf_counter() - start, engine.info()
    wall_s = after.decode_wall_s - before.decode_wall_s
    assert generated == sum(outputs), (generated, sum(outputs))
    record = {
        "bench": "offline", "model": model, "scheme": after.scheme, "kv": after.kv, "concurrency": concurrency,
        "order": order, "requests": requests, "in_tok": sum(inputs), "out_tok": generated,
        "out_tok_s": round(generated / seconds, 1),
        "decode_ms_step": round(median(steps) * 1e3, 3) if steps else None,
        "gpu_busy": round((after.decode_busy_s - before.decode_busy_s) / wall_s, 4) if wall_s else None,
        "host_ms_step": round((after.host_s - before.host_s) / (after.steps - before.steps) * 1e3, 3),
        "ttft_p50": round(median(firsts), 4),
        "itl_p99": round(sorted(gaps)[len(gaps) * 99 // 100], 4) if gaps else None,
        "unit": "s",
        "wall_s": round(seconds, 3),
        "device": describe(target),
        "command": f"nybble bench offline {shlex.quote(model)} {f'--dummy --scheme {scheme} ' if dummy else ''}--kv {kv} "
        f"--requests {requests} --concurrency {concurrency} --input-mean {input_mean} --output-mean {output_mean} "
        f"--longest {longest} --order {order} --device {device}"
        + "".join(f" --{name.replace('_', '-')} {value}" for name, value in engine_options.items()),
    }  # fmt: skip
    if results is not None:
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return json.dumps(record)
