"""Attention and fused ops on one GPU: check, then time variants of tiles and splits.

    python -m nybble.bench.attention [--budget 220] [--only decode,prompt,fused,small] [--out FILE.jsonl]

Phase 1 compiles every variant in worker processes (Triton's disk cache), phase 2 times them one by one in CUDA graphs,
inputs rotated past L2. Percentages are of 4.3 TB/s (H200 copy bandwidth), bytes count KV codes and parameters once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import time

import torch

from nybble.kernels import attention_triton as at
from nybble.kernels import ops_triton as ops
from nybble.kernels import reference
from nybble.kernels.attention_triton import Tiles
from nybble.kernels.types import LayerKV, Step

PEAK = 4.3e12
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8, "int4": torch.uint8,
          "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
START = time.time()
BLOCK = 64

# name: (rows, context, q heads, kv heads, dim)
SHAPES = {
    "mha 128x370": (128, 370, 40, 40, 128),
    "gqa 64x4096": (64, 4096, 32, 8, 128),
    "gqa 1x131072": (1, 131072, 32, 8, 128),
}
SMALL = {
    "mha 1x370": (1, 370, 40, 40, 128),
    "mha 16x370": (16, 370, 40, 40, 128),
    "mha 64x370": (64, 370, 40, 40, 128),
    "gqa 1x1024": (1, 1024, 32, 8, 128),
    "gqa 16x1024": (16, 1024, 32, 8, 128),
    "gqa 128x370": (128, 370, 32, 8, 128),
    "gqa8 32x4096": (32, 4096, 64, 8, 128),
    "mha64 64x1024": (64, 1024, 32, 32, 64),
    "mha80 64x1024": (64, 1024, 32, 32, 80),
    "gqa96 64x1024": (64, 1024, 32, 8, 96),
    "gqa256 64x1024": (64, 1024, 8, 4, 256),
}


def cache(kind, blocks, heads, dim, device="cuda"):
    width = dim // 2 if kind == "int4" else dim
    shape = (blocks, heads, BLOCK, width)
    dtype = DTYPES[kind]
    generator = torch.Generator(device).manual_seed(1)

    def codes():
        if dtype.itemsize == 2:
            return torch.randn(shape, dtype=dtype, device=device, generator=generator)
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        if kind in ("fp8", "fp8_e5m2"):  # keep magnitudes moderate and free of NaN
            raw = (raw & 0x80) | ((raw & 0x3F) if kind == "fp8" else (raw & 0x3F))
        return raw.view(dtype)

    def params():
        scale = torch.rand(shape[:3], device=device, generator=generator) * 0.02 + 0.002
        scale = scale * (17 if kind == "int4" else 1)
        low = -scale * (255 if kind == "int8" else 15) / 2
        return torch.stack((scale, low), -1).half()

    k, v = codes(), codes()
    k_params, v_params = (params(), params()) if kind in ("int8", "int4") else (None, None)
    return LayerKV(kind, k, v, k_params, v_params, 1.0, 1.0)


def bytes_of(kind, tokens, heads, dim):
    per = {"bf16": 2 * dim, "fp16": 2 * dim, "int8": dim + 4, "int4": dim // 2 + 4}.get(kind, dim)
    return 2 * tokens * heads * per


def decode_step(rows, context, kv_blocks, device="cuda", max_context=None):
    per = -(-context // BLOCK)
    order = torch.randperm(kv_blocks, generator=torch.Generator().manual_seed(0))[: rows * per].int()
    table = order.view(rows, per).to(device)
    number = lambda value, dtype: torch.full((rows,), value, dtype=dtype, device=device)  # noqa: E731
    return Step(number(0, torch.int64), number(context - 1, torch.int32), number(0, torch.int64),
                torch.arange(rows + 1, dtype=torch.int32, device=device), number(context, torch.int32), table, rows, 0,
                max_context or per * BLOCK, None)


def graph_time(calls, repeats=7):
    """Median and least microseconds of a call, over replays of a graph of all `calls`."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    times.sort()
    return times[len(times) // 2], times[0]


def decode_variants(shape, kind):
    """(Tiles, stride | None) to try."""
    rows, context, heads, kv_heads, dim = shape
    out = []
    if heads == kv_heads and kind in ("bf16", "int8", "int4"):
        for tile, warps in ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (128, 4)):
            for split in (256, 512):
                out.append((Tiles(tile, warps, 1, split, True), None))
        out += [(Tiles(32, 1, 1, 256, True), 2), (Tiles(64, 4, 1, 256, True), 2), (Tiles(16, 1, 1, 128, True), None)]
    tries = [(32, 1, 2), (32, 1, 3), (64, 1, 2), (32, 2, 3), (64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2),
             (64, 4, 4), (128, 8, 2), (16, 1, 3), (128, 4, 3)]
    for tile, warps, stages in tries:
        out.append((Tiles(tile, warps, stages, 256, False), None))
    out += [(Tiles(64, 4, 3, 512, False), None), (Tiles(32, 1, 3, 512, False), None), (Tiles(64, 2, 2, 512, False), None)]
    return out


def prompt_variants(kind):
    out = []
    for lines, tile, warps in ((128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (128, 32, 8)):
        for stages in (1, 2, 3):
            if lines == 128 and tile == 128 and stages == 3 and kind == "bf16":
                continue
            out.append((lines, Tiles(tile, warps, stages)))
    return out


PROMPTS = {"gqa 1x8192": (1, 8192, 32, 8, 128), "mha 4x2048": (4, 2048, 40, 40, 128)}


def prompt_step(rows, length, device="cuda"):
    per = -(-length // BLOCK)
    table = torch.randperm(rows * per, generator=torch.Generator().manual_seed(0)).int().view(rows, per).to(device)
    return Step(torch.zeros(rows * length, dtype=torch.int64, device=device),
                torch.arange(length, dtype=torch.int32, device=device).repeat(rows),
                torch.zeros(rows * length, dtype=torch.int64, device=device),
                torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device),
                torch.full((rows,), length, dtype=torch.int32, device=device), table, 0, length, length, None)


def compile_one(job):
    """Run a variant once on a tiny problem, for the disk cache. Returns an error text or None."""
    try:
        what, kind, (heads, kv_heads, dim), tiles, stride = job
        kv = cache(kind, 16, kv_heads, dim)
        if what == "decode":
            step = decode_step(2, 400, 16)
            q = torch.randn(2, heads, dim, device="cuda").bfloat16()
            for s in ({1} if heads == kv_heads and heads == 40 else {1, 2}) if stride is None else {stride}:
                at.decode(q, kv, step, 0.1, 0, torch.empty_like(q), tiles, s)
        else:
            step = prompt_step(1, 200)
            q = torch.randn(200, heads, dim, device="cuda").bfloat16()
            at.prompt(q, kv, step, 0.1, 0, torch.empty_like(q), tiles)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:160]}"


def left(budget):
    return budget - (time.time() - START)


def subset(step, rows):
    return Step(step.token_ids[rows], step.positions[rows], step.slots[rows],
                torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda"), step.context_len[rows], step.block_table[rows],
                len(rows), 0, step.max_context, None)


def bench_decode(shapes, variants_of, budget, emit):
    for name, shape in shapes.items():
        rows, context, heads, kv_heads, dim = shape
        per = -(-context // BLOCK)
        for kind in ("int8", "bf16", "int4", "fp8"):
            if left(budget) < 5:
                return
            torch.cuda.empty_cache()
            size = bytes_of(kind, rows * context, kv_heads, dim)
            copies = min(8, max(1, -(-400_000_000 // size)))
            kvs = [cache(kind, rows * per, kv_heads, dim) for _ in range(copies)]
            step = decode_step(rows, context, rows * per)
            generator = torch.Generator("cuda").manual_seed(2)
            q = torch.randn(rows, heads, dim, device="cuda", generator=generator).bfloat16()
            scale = dim**-0.5
            some = [0] if rows == 1 else [0, rows // 2]
            want = reference.attention(q[some].float(), kvs[0], subset(step, some), scale, 0)
            out = torch.empty_like(q)
            best = None
            for tiles, stride in variants_of(shape, kind):
                if left(budget) < 3:
                    break
                try:
                    out.fill_(float("nan"))
                    at.decode(q, kvs[0], step, scale, 0, out, tiles, stride)
                    error = ((out[some].float() - want).norm() / want.norm()).item()
                    calls = [lambda kv=kv: at.decode(q, kv, step, scale, 0, out, tiles, stride) for kv in kvs]
                    calls = calls * max(1, 8 // len(calls))
                    median, least = graph_time(calls)
                except Exception as problem:
                    print(f"{name} {kind:5} {tiles} {type(problem).__name__} {str(problem)[:90]}", flush=True)
                    continue
                share = size / (median * 1e-6) / PEAK
                form = "vector" if tiles.vector else "dot"
                print(f"{name:15} {kind:5} {form:6} tile {tiles.tile:3} warps {tiles.warps} stages {tiles.stages} split {tiles.split}"
                      f" stride {stride} : {median:8.1f} us (min {least:7.1f}) {size / median / 1e3:7.0f} GB/s {share:6.1%}"
                      f" err {error:.1e}{'  WRONG' if not error < 1e-2 else ''}", flush=True)
                row = {"bench": "attention", "shape": name, "kv": kind, "form": form, **dataclasses.asdict(tiles),
                       "stride": stride, "us": median, "us_min": least, "gb_s": size / median / 1e3, "relerr": error}
                emit(row)
                if error < 1e-2 and (best is None or median < best["us"]):
                    best = row
            if best:
                print(f"BEST {name} {kind}: {best['us']:.1f} us {best['gb_s'] * 1e9 / PEAK:.1%} {best['form']} tile {best['tile']} "
                      f"warps {best['warps']} stages {best['stages']} split {best['split']} stride {best['stride']}", flush=True)
            del kvs


def default_variant(shape, kind):
    return [(at.decode_tiles(kind if kind != "bf16" else "copy", shape[2] // shape[3], shape[4]), None)]


def bench_prompt(budget, emit):
    for name, (rows, length, heads, kv_heads, dim) in PROMPTS.items():
        flops = 4 * rows * heads * dim * length * (length + 1) / 2
        q = torch.randn(rows * length, heads, dim, device="cuda").bfloat16()
        step = prompt_step(rows, length)
        dense = [torch.randn(rows, h, length, dim, device="cuda").bfloat16() for h in (heads, kv_heads, kv_heads)]
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            try:
                from torch.nn.attention import SDPBackend, sdpa_kernel

                with sdpa_kernel(getattr(SDPBackend, backend)):
                    call = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
                        *dense, is_causal=True, enable_gqa=heads != kv_heads)
                    median, _ = graph_time([call] * 3, 5)
                print(f"{name} torch {backend}: {median:.0f} us {flops / median / 1e6:.0f} TFLOP/s", flush=True)
                emit({"bench": "prompt", "shape": name, "kv": "torch " + backend, "us": median, "tflops": flops / median / 1e6})
            except Exception as problem:
                print(name, backend, str(problem)[:100])
        for kind in ("bf16", "int8", "int4", "fp8"):
            kv = cache(kind, step.block_table.numel(), kv_heads, dim)
            head = min(length, 512)
            first = Step(step.token_ids[:head], step.positions[:head], step.slots[:head],
                         torch.tensor([0, head], dtype=torch.int32, device="cuda"),
                         torch.tensor([head], dtype=torch.int32, device="cuda"), step.block_table[:1], 0, head, head, None)
            want = reference.attention(q[:head].float(), kv, first, dim**-0.5, 0)
            best = None
            for lines, tiles in prompt_variants(kind):
                if left(budget) < 3:
                    return
                out = torch.full_like(q, float("nan"))
                try:
                    run = lambda: at.prompt(q, kv, step, dim**-0.5, 0, out, (lines, tiles))  # noqa: E731, B023
                    run()
                    error = ((out[:head].float() - want).norm() / want.norm()).item()
                    finite = bool(torch.isfinite(out).all())
                    median, least = graph_time([run] * 3, 5)
                except Exception as problem:
                    print(f"{name} {kind:5} {lines} {tiles} {type(problem).__name__} {str(problem)[:90]}", flush=True)
                    continue
                print(f"{name:12} {kind:5} lines {lines:3} tile {tiles.tile:3} warps {tiles.warps} stages {tiles.stages}:"
                      f" {median:8.0f} us {flops / median / 1e6:6.0f} TFLOP/s err {error:.1e}"
                      f"{'' if finite and error < 1e-2 else '  WRONG'}", flush=True)
                row = {"bench": "prompt", "shape": name, "kv": kind, "lines": lines, **dataclasses.asdict(tiles), "us": median,
                       "us_min": least, "tflops": flops / median / 1e6, "relerr": error}
                emit(row)
                if error < 1e-2 and finite and (best is None or median < best["us"]):
                    best = row
            if best:
                print(f"BEST {name} {kind}: {best['us']:.0f} us {best['tflops']:.0f} TFLOP/s lines {best['lines']} tile {best['tile']}"
                      f" warps {best['warps']} stages {best['stages']}", flush=True)


def bench_fused(budget, emit):
    hidden, inner = 5120, 13824
    for rows in (1, 16, 64, 128, 1024, 4096):
        if left(budget) < 3:
            return
        def rotated(make, size):
            return [make() for _ in range(min(64, max(1, 300_000_000 // size)))]

        weight = torch.randn(hidden, device="cuda").bfloat16()
        random = lambda *s: torch.randn(*s, device="cuda").bfloat16()  # noqa: E731
        size = rows * hidden * 7
        inputs = rotated(lambda: (random(rows, hidden), random(rows, hidden)), size)  # noqa: B023
        report("rms_norm+residual+int8", rows, size, [lambda a=a, b=b: ops.rms_norm(a, weight, 1e-5, b, True) for a, b in inputs],
               emit)
        size = rows * hidden * 3
        report("quantize_rows", rows, size, [lambda a=a: ops.quantize_rows(a) for a, _ in inputs], emit)
        del inputs
        size = rows * inner * 5
        inputs = rotated(lambda: random(rows, 2 * inner), size)  # noqa: B023
        report("silu_mul+int8", rows, size, [lambda a=a: ops.silu_mul(a, True) for a in inputs], emit)
        report("silu_mul", rows, rows * inner * 6, [lambda a=a: ops.silu_mul(a, False) for a in inputs], emit)
        del inputs
        for heads, kv_heads in ((40, 40), (32, 8)):
            blocks = -(-rows // BLOCK) + 1
            kv = cache("int8", blocks, kv_heads, 128)
            slots = torch.randperm(blocks * BLOCK)[:rows].cuda()
            step = Step(slots, torch.arange(rows, dtype=torch.int32, device="cuda") % 2048, slots,
                        *[torch.zeros(1, dtype=torch.int32, device="cuda")] * 3, 0, 0, 0, None)
            cos_sin = torch.randn(2048, 128, device="cuda")
            size = rows * 128 * (4 * heads + 2 * kv_heads * 3)
            inputs = rotated(lambda: random(rows, (heads + 2 * kv_heads) * 128), size)  # noqa: B023
            report(f"rope_write int8 {heads}:{kv_heads}", rows, size,
                   [lambda a=a: ops.rope_write(a, kv, step, cos_sin, kv_heads, None, None, 1e-6) for a in inputs], emit)  # noqa: B023
            del inputs


def report(name, rows, size, calls, emit):
    median, least = graph_time(calls * max(1, 24 // len(calls)))
    print(f"{name:26} M {rows:5}: {median:7.2f} us (min {least:6.2f}) {size / median / 1e3:6.0f} GB/s {size / median / 1e-6 / PEAK:6.1%}",
          flush=True)
    emit({"bench": "fused", "op": name, "M": rows, "us": median, "us_min": least, "gb_s": size / median / 1e3})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=220)
    parser.add_argument("--only", default="decode,fused,small,prompt")
    parser.add_argument("--out", default="attention.jsonl", help="one JSON line per figure is appended here")
    options = parser.parse_args()
    only = options.only.split(",")
    jobs = []
    if "decode" in only:
        for shape in {s[2:]: s for s in SHAPES.values()}.values():
            for kind in ("int8", "bf16", "int4", "fp8"):
                jobs += [("decode", kind, shape[2:], *variant) for variant in decode_variants(shape, kind)]
    if "small" in only:
        for shape in SMALL.values():
            for kind in ("int8", "bf16", "int4", "fp8"):
                jobs += [("decode", kind, shape[2:], *variant) for variant in default_variant(shape, kind)]
    if "prompt" in only:
        for shape in PROMPTS.values():
            for kind in ("bf16", "int8", "int4", "fp8"):
                jobs += [("prompt", kind, shape[2:], variant, None) for variant in prompt_variants(kind)]
    jobs = list(dict.fromkeys(jobs))
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count() or 1)) as pool:
        problems = [p for p in pool.imap_unordered(compile_one, jobs, 2) if p]
    print(f"compiled {len(jobs)} variants in {time.time() - START:.0f} s; {len(problems)} did not:", flush=True)
    for problem in problems[:40]:
        print("  ", problem)
    import triton

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    with open(options.out, "a") as file:
        def emit(row):
            file.write(json.dumps(row) + "\n")

        if "fused" in only:
            bench_fused(options.budget, emit)
        if "decode" in only:
            bench_decode(SHAPES, decode_variants, options.budget - (40 if "prompt" in only else 0), emit)
        if "small" in only:
            bench_decode(SMALL, default_variant, options.budget - (25 if "prompt" in only else 0), emit)
        if "prompt" in only:
            bench_prompt(options.budget, emit)
    print(f"done in {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
