"""Attention and the fused ops on one GPU: check against `kernels.reference`, then time.

    python -m nybble.bench.attention [--only decode,prompt,fused,once] [--quick] [--sweep] [--out FILE.jsonl]

CUDA graphs, inputs rotated past L2. Decode: percentages of 4.3 TB/s (H200 copy bandwidth), bytes are KV codes and parameters,
once. Prompts: against torch's flash and cuDNN attention over 16-bit keys that lie ready, in one run. `--quick` stops after
the first three decode shapes and four prompts; `--sweep` tries decode tiles instead of the table's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nybble.bench.timing import Timing, interleave
from nybble.kernels import attention_triton as at
from nybble.kernels import decode_hopper, reference, sample_hopper
from nybble.kernels.attention_triton import Tiles
from nybble.kernels.registry import ops_for
from nybble.kernels.types import LayerKV, Step, cache_shapes

COPY_GB_S = 4300
BLOCK = 64
KINDS = ("bf16", "int8", "fp8", "int4")

# name: (rows, context, q heads, kv heads, dim)
DECODE = {
    "mha 128x370": (128, 370, 40, 40, 128),
    "gqa 64x4096": (64, 4096, 32, 8, 128),
    "gqa 1x131072": (1, 131072, 32, 8, 128),
    "mha 1x370": (1, 370, 40, 40, 128),
    "mha 16x370": (16, 370, 40, 40, 128),
    "gqa 1x1024": (1, 1024, 32, 8, 128),
    "gqa 16x1024": (16, 1024, 32, 8, 128),
    "gqa8 32x4096": (32, 4096, 64, 8, 128),
    "mha64 64x1024": (64, 1024, 32, 32, 64),
    "mha80 64x1024": (64, 1024, 32, 32, 80),
    "gqa96 64x1024": (64, 1024, 32, 8, 96),
    "gqa256 64x1024": (64, 1024, 8, 4, 256),
}
# name: (new tokens, context, q heads, kv heads, dim)
PROMPT = {
    "2k": (2048, 2048, 32, 8, 128),
    "8k": (8192, 8192, 32, 8, 128),
    "32k": (32768, 32768, 32, 8, 128),
    "2k over 16k": (2048, 16384, 32, 8, 128),
    "8k dim 64": (8192, 8192, 32, 8, 64),
    "8k dim 256": (8192, 8192, 8, 4, 256),
}
Emit = Callable[[dict[str, Any]], None]


def tell(emit: Emit, bench: str, timing: Timing, size: float = 0.0, operations: float = 0.0, error: float | None = None,
         **what: Any) -> None:
    """A line to read and a JSON line. size: bytes of a call; error: relative, of what it gave."""
    line = f"{bench:10} {' '.join(f'{x:13}' for x in what.values())} {timing.us:9.2f} us"
    facts = {"bench": bench, **what, "us": timing.us, "us_min": timing.us_min}
    if size:
        facts["gb_s"] = size / timing.us / 1e3
        facts["share_of_copy"] = facts["gb_s"] / COPY_GB_S
        line += f" {facts['gb_s']:6.0f} GB/s {facts['share_of_copy']:6.1%}"
    if operations:
        facts["tflops"] = operations / timing.us / 1e6
        line += f" {facts['tflops']:5.0f} TFLOP/s"
    if error is not None:
        facts["relerr"] = error
        line += f" err {error:.1e}{'' if error < 1e-2 else '  WRONG'}"
    print(line, flush=True)
    emit(facts)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def cache(kind: str, blocks: int, heads: int, dim: int) -> LayerKV:
    """A cache of random values as `reference.encode_kv` stores them; after 64 blocks they repeat."""
    some, scale, dtype = min(blocks, 64), 0.01 if kind == "fp8" else 1.0, cache_shapes(kind, blocks, heads, BLOCK, dim)[1]
    order = torch.arange(blocks, device="cuda") % some
    parts: list[torch.Tensor | None] = []
    for seed in (1, 2):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(some * BLOCK, heads, dim, device="cuda", generator=generator).bfloat16()
        codes, params = reference.encode_kv(x, kind, scale)
        blocked = lambda t: t.view(some, BLOCK, heads, *t.shape[2:]).transpose(1, 2)  # noqa: E731
        raw = codes.view(torch.uint8) if codes.element_size() == 1 else codes.to(dtype)
        parts.append(blocked(raw)[order].contiguous().view(dtype))
        if params is not None:  # int4: two sets of parameters before the tokens
            params = blocked(params).movedim(3, 2) if params.ndim == 4 else blocked(params)
            params = params[order].contiguous()
        parts.append(params)
    return LayerKV(kind, parts[0], parts[2], parts[1], parts[3], scale, scale)  # type: ignore[arg-type]


def cache_bytes(kv: LayerKV, tokens: int) -> float:
    held = sum(t.numel() * t.element_size() for t in (kv.k, kv.v, kv.k_params, kv.v_params) if t is not None)
    return held * tokens / (kv.k.shape[0] * BLOCK)


def make_step(rows: int, context: int, new: int, decode: bool) -> Step:
    """`rows` rows of one context, the last `new` tokens of each in this step, blocks in random order."""
    per = -(-context // BLOCK)
    table = torch.randperm(rows * per, generator=torch.Generator().manual_seed(0)).int().view(rows, per).cuda()
    tokens = torch.zeros(rows * new, dtype=torch.int64, device="cuda")
    start = torch.arange(0, (rows + 1) * new, new, dtype=torch.int32, device="cuda")
    return Step(tokens, tokens.int(), tokens, start, torch.full((rows,), context, dtype=torch.int32, device="cuda"), table,
                rows if decode else 0, 0 if decode else new, per * BLOCK, None)


def bench_decode(some: int | None, sweep: bool, emit: Emit) -> None:
    cuts = [Tiles(tile, warps, stages, split, levels) for tile, warps, stages in ((32, 1, 3), (32, 1, 4), (64, 1, 2), (64, 1, 3))
            for split, levels in ((64, 4), (128, 3), (128, 4), (256, 2))]
    for name, (rows, context, heads, kv_heads, dim) in list(DECODE.items())[:some]:
        step = make_step(rows, context, 1, True)
        q, scale = random(rows, heads, dim), dim**-0.5
        first = dataclasses.replace(step, query_start=step.query_start[:2], context_len=step.context_len[:1],
                                    block_table=step.block_table[:1], num_decode=1)
        for kind in KINDS:
            torch.cuda.empty_cache()
            kv = cache(kind, step.block_table.numel(), kv_heads, dim)
            size = cache_bytes(kv, rows * context)
            kvs = [kv, *(dataclasses.replace(kv, k=kv.k.clone(), v=kv.v.clone()) for _ in range(min(15, int(4e8 / size))))]
            want = reference.attention(q[:1].float(), kv, first, scale, 0)
            sweeps = [(tiles, programs) for tiles in cuts for programs in (None, at.split_count(context, tiles))]
            for tiles, programs in sweeps if sweep else [(None, None)]:
                out = torch.full_like(q, float("nan"))
                call = lambda kv: (at.decode(q, kv, step, scale, 0, out, tiles, programs) if sweep  # noqa: E731
                                   else at.attention(q, kv, step, scale, 0, out))
                try:
                    call(kv)
                except (ValueError, RuntimeError) as problem:
                    print(f"{name} {kind} {tiles} {programs}: {str(problem)[:100]}")
                    continue
                error = ((out[:1].float() - want).norm() / want.norm()).item()
                timing = interleave({"": [lambda kv=kv: call(kv) for kv in kvs]})[""]
                tell(emit, "attention", timing, size, error=error, shape=name, kv=kind,
                     **({} if tiles is None else {**dataclasses.asdict(tiles), "programs": programs or "default"}))


def torch_attention(new: int, context: int, heads: int, kv_heads: int, dim: int) -> dict[str, list[Callable[[], Any]]]:
    """torch's attention of the last `new` tokens, where a backend runs it at all."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = random(1, heads, new, dim), random(1, kv_heads, context, dim), random(1, kv_heads, context, dim)
    calls: dict[str, list[Callable[[], Any]]] = {}
    how = {"is_causal": True} if new == context else {"attn_mask": causal_lower_right(new, context)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        def call(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
        try:
            call()
        except RuntimeError:
            continue
        calls["torch " + backend.name.split("_")[0].lower()] = [call]
    return calls


def bench_prompt(some: int | None, emit: Emit) -> None:
    for name, (new, context, heads, kv_heads, dim) in list(PROMPT.items())[:some]:
        flops = 4 * heads * dim * (new * (context - new) + new * (new + 1) / 2)
        torch.cuda.empty_cache()
        calls = torch_attention(new, context, heads, kv_heads, dim)
        step, q, scale = make_step(1, context, new, False), random(new, heads, dim), dim**-0.5
        errors = {}
        for kind in KINDS:
            kv, out = cache(kind, step.block_table.numel(), kv_heads, dim), torch.full_like(q, float("nan"))
            calls[kind] = [lambda kv=kv, out=out: at.prompt(q, kv, step, scale, 0, out)]
            calls[kind][0]()
            last = dataclasses.replace(step, query_start=torch.tensor([0, 64], dtype=torch.int32, device="cuda"))
            want = reference.attention(q[-64:].float(), kv, last, scale, 0)
            errors[kind] = ((out[-64:].float() - want).norm() / want.norm()).item()
        for key, timing in interleave(calls, 5).items():
            tell(emit, "prompt", timing, operations=flops, error=errors.get(key), shape=name, kv=key)


def bench_fused(emit: Emit) -> None:
    ops = ops_for(torch.device("cuda"))
    hidden, inner, dim, vocab = 5120, 13824, 128, 32000
    weight = random(hidden)

    def report(op: str, rows: int, size: int, calls: list[Callable[[], Any]]) -> None:
        tell(emit, "fused", interleave({"": calls})[""], size, op=op, M=rows)

    for rows in (1, 16, 64, 128, 1024, 4096):
        copies = lambda width: range(min(64, max(1, 300_000_000 // (rows * width))))  # noqa: E731, B023
        xs = [(random(rows, hidden), random(rows, hidden)) for _ in copies(7 * hidden)]
        report("rms_norm+residual+int8", rows, rows * hidden * 7,
               [lambda a=a, b=b: ops.rms_norm(a, weight, 1e-5, b, True) for a, b in xs])
        report("quantize_rows", rows, rows * hidden * 3, [lambda a=a: ops.quantize_rows(a) for a, _ in xs])
        xs = [random(rows, 2 * inner) for _ in copies(5 * inner)]
        report("silu_mul+int8", rows, rows * inner * 5, [lambda a=a: ops.silu_mul(a, True) for a in xs])
        report("silu_mul+hadamard512+int8", rows, rows * inner * 5, [lambda a=a: ops.silu_mul(a, True, 512) for a in xs])
        report("silu_mul", rows, rows * inner * 6, [lambda a=a: ops.silu_mul(a, False) for a in xs])
        for heads, kv_heads in ((40, 40), (32, 8)):
            blocks = -(-rows // BLOCK) + 1
            kv, step = cache("int8", blocks, kv_heads, dim), make_step(rows, 1, 1, True)
            step = dataclasses.replace(step, slots=torch.randperm(blocks * BLOCK)[:rows].cuda())
            cos_sin = torch.randn(2048, dim, device="cuda")
            size = rows * dim * (4 * heads + 2 * kv_heads * 3)
            xs = [random(rows, (heads + 2 * kv_heads) * dim) for _ in copies(size // rows)]
            report(f"rope_write int8 {heads}:{kv_heads}", rows, size,
                   [lambda a=a: ops.rope_write(a, kv, step, cos_sin, kv_heads, None, None, 1e-6) for a in xs])  # noqa: B023
        logits = [torch.randn(rows, vocab, device="cuda") for _ in copies(4 * vocab)]
        if sample_hopper.refusal(logits[0]) is None:
            full = lambda value: torch.full((rows,), value, device="cuda")  # noqa: E731, B023
            keys = torch.randint(1 << 32, (rows, 2), device="cuda")
            for kind, top_k, top_p in (("", 0, 1.0), (" top-k 40 top-p 0.9", 40, 0.9)):
                draws = full(0.8), full(top_k), full(top_p), full(0.0), keys
                report(f"sample{kind}", rows, 4 * rows * vocab, [lambda a=a: sample_hopper.draw(a, *draws) for a in logits])  # noqa: B023


def bench_at_once(emit: Emit) -> None:
    """A layer's rotation, write, attention and quantized output for generated tokens: three ops, or (Hopper) one kernel."""
    ops, heads, dim = ops_for(torch.device("cuda")), 40, 128
    if ops.decode is None:
        return
    for rows, context in ((1, 350), (1, 900), (4, 350), (16, 350), (128, 350)):
        step, cos_sin = make_step(rows, context, 1, True), torch.randn(2048, dim, device="cuda")
        step = dataclasses.replace(step, slots=step.block_table[:, -1].long() * BLOCK + (context - 1) % BLOCK)
        qkv = random(rows, 3 * heads * dim)
        for kind in ("int8", "int4"):
            kv = cache(kind, step.block_table.numel(), heads, dim)
            kvs = [kv, *(dataclasses.replace(kv, k=kv.k.clone(), v=kv.v.clone()) for _ in range(39 if rows < 16 else 3))]

            def three(kv: LayerKV) -> Any:
                q = ops.rope_write(qkv, kv, step, cos_sin, heads, None, None, 0.0)
                return ops.quantize_rows(ops.attention(q, kv, step, dim**-0.5, 0).flatten(1))

            calls = {"three ops": [lambda kv=kv: three(kv) for kv in kvs],
                     "at once": [lambda kv=kv: decode_hopper.run(qkv, heads, kv, step, dim**-0.5, cos_sin, True) for kv in kvs]}
            for name, timing in interleave(calls).items():
                tell(emit, "at once", timing, rows=rows, context=context, kv=kind, how=name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="decode,prompt,fused,once")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", default="attention.jsonl", help="one JSON line per figure is appended here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU, and attention is timed on one")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with open(options.out, "a") as file:
        def emit(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")

        if "decode" in options.only:
            bench_decode(3 if options.quick else None, options.sweep, emit)
        if "prompt" in options.only:
            bench_prompt(4 if options.quick else None, emit)
        if "fused" in options.only:
            bench_fused(emit)
        if "once" in options.only:
            bench_at_once(emit)


if __name__ == "__main__":
    main()
