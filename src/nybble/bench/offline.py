"""Throughput of the engine in this process: a fixed set of random requests, at most so many at once, drain included.

The workload is the one peers are measured with: prompt and answer lengths log-normal (sigma 1.0 and 0.7), clipped to 4..1024
and scaled to exact totals, random token ids, greedy, EOS ignored.
"""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from statistics import median
from typing import Any


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
    scheme: str = "w4a8",
    kv: str = "int8",
    requests: int = 1000,
    concurrency: int = 128,
    input_mean: float = 248,
    output_mean: float = 240,
    dummy: bool = False,
    results: Path | None = None,
    device: str = "auto",
    loaded: Any = None,
    **engine_options: Any,
) -> str:
    """Run the workload once and return the report; `results` gets one JSON line. `loaded` reuses a `models.Decoder`.

    The decode step time is the median over steps in which all `concurrency` rows generate.
    """
    import torch

    from nybble.engine.config import EngineConfig
    from nybble.engine.core import Engine
    from nybble.engine.load import open_engine
    from nybble.engine.messages import Delta, SamplingParams, Submit
    from nybble.formats.spec import SCHEMES
    from nybble.hardware import describe, pick_device

    target = pick_device(device)
    kv_name = None if kv == "auto" else kv
    config = EngineConfig(
        kv=kv_name,
        max_batch=concurrency,
        max_context=2048,
        seed=0,
        prefix_caching=False,
        model_name=model,
        scheme=scheme,
        **engine_options,
    )
    if loaded is not None:
        engine = Engine(loaded, config)
    elif dummy:
        from nybble.models import SHAPES, dummy_model

        if scheme not in SCHEMES or model not in SHAPES:
            raise ValueError(f"--dummy wants a shape ({', '.join(SHAPES)}) and a scheme ({', '.join(SCHEMES)})")
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
        engine = Engine(dummy_model(SHAPES[model], SCHEMES[scheme], target, dtype, seed=0), config)
    else:
        engine = open_engine(model, device, config)
    inputs, outputs = lengths(requests, input_mean, 1.0, seed=0), lengths(requests, output_mean, 0.7, seed=1)
    rng = random.Random(2)
    vocab = engine.runner.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in inputs]

    def generate(wanted: list[tuple[list[int], int]]) -> tuple[int, list[float]]:
        for i, (prompt, length) in enumerate(wanted):
            engine.submit(Submit(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)))
        generated, steps, before = 0, [], time.perf_counter()
        while engine.has_work:
            deltas = [event for event in engine.step() if isinstance(event, Delta)]
            for delta in deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
            generated += sum(len(delta.token_ids) for delta in deltas)
            now = time.perf_counter()
            if len(deltas) == concurrency:
                steps.append(now - before)
            before = now
        return generated, steps

    generate([(prompts[i % requests][:64] or [0], 8) for i in range(concurrency)])  # compile and capture everything once
    start = time.perf_counter()
    generated, steps = generate(list(zip(prompts, outputs)))
    seconds = time.perf_counter() - start
    assert generated == sum(outputs), (generated, sum(outputs))
    record = {
        "bench": "offline",
        "model": model,
        "scheme": scheme,
        "kv": engine.info().kv,
        "concurrency": concurrency,
        "requests": requests,
        "in_tok": sum(inputs),
        "out_tok": generated,
        "out_tok_s": round(generated / seconds, 1),
        "decode_ms_step": round(median(steps) * 1e3, 3) if steps else None,
        "wall_s": round(seconds, 2),
        "device": describe(target),
        "command": f"nybble bench offline {model} {'--dummy ' if dummy else ''}--scheme {scheme} --kv {kv} "
        f"--requests {requests} --concurrency {concurrency} --input-mean {input_mean} --output-mean {output_mean}",
    }
    if results is not None:
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return json.dumps(record)
