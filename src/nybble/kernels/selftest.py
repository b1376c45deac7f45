"""Whether a kernel computes what the reference computes on this very device, asked at load, once for each kind of layer.

A compiler, driver or GPU that a kernel was never tried on should cost speed, not answers: what fails here is refused by
`registry` with the reason, loudly, and the next kernel in line is taken. Attention has none: it raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate

import torch

from nybble.formats.numerics import random_qtensor
from nybble.kernels import reference
from nybble.kernels.registry import LinearKernel, LinearShape, Ops, choose
from nybble.kernels.types import LayerKV, Rows, Step

MOST_OUT, IN = 32768, 1024  # rows as the layer has, for tiles go by them; groups of 128, sums in parts where a kernel has those
TOKENS = (1, 40, 100, 300)  # a batch of each kind of tile
STATIC_SCALE = 0.004  # of static activations: one in fourteen is out of its range


def failure(kernel: LinearKernel, shape: LinearShape) -> str | None:
    """Why `kernel` is not to be trusted with layers like `shape` (also when it cannot be built); None when it is."""
    weight = shape.scheme.weight
    if shape.has_order or (weight is None and kernel in reference.KERNELS):
        return None  # not made up in a line, or nothing that could be wrong
    scale = None if shape.act_scale is None else STATIC_SCALE
    small = replace(shape, out_features=min(shape.out_features, MOST_OUT), in_features=IN, act_scale=scale)
    group = None if weight is None else weight.group
    if group is not None and IN % group or kernel.accepts(small) is not None:
        return None  # the trial would be of something else
    return _trial(kernel, small)


@cache
def _trial(kernel: LinearKernel, shape: LinearShape) -> str | None:
    # 16-bit outputs are off by 2^-9 each; products of 16-bit weights and 8-bit rows by a little more
    return _verdict(f"kernel {kernel.name!r} for {shape.scheme.name}", shape.device, _linear_errors(kernel, shape), 0.02)


def _linear_errors(kernel: LinearKernel, shape: LinearShape) -> Iterator[tuple[str, float]]:
    generator = torch.Generator(shape.device).manual_seed(0)
    size = shape.out_features, IN
    if shape.scheme.weight is None:
        weight = torch.randn(size, device=shape.device, generator=generator).to(shape.dtype)
    else:
        weight = random_qtensor(shape.scheme.weight, size, generator, torch.float32)
    wide = replace(shape, dtype=torch.float32)
    known = choose(wide, reference.KERNELS).kernel
    expected_of, packed = known.pack(weight, wide), kernel.pack(weight, shape)
    for tokens in TOKENS:
        x = torch.randn(tokens, IN, device=shape.device, generator=generator).to(shape.dtype)
        rows = reference.quantize_rows(x)
        out = kernel.run(packed, rows if kernel.takes is not None else x)
        want = known.run(expected_of, rows if known.takes is not None else x.float())
        yield f"start-up test on {tokens} tokens", _relative(out, want)


@cache
def rows_failure(ops: Ops, device: torch.device) -> str | None:
    """Why norm, SiLU(gate) * up, quantization and logits of `ops` are not to be trusted on 16-bit rows; None when they are."""
    # one code in a hundred may be the next one
    return _verdict(f"the set of row kernels {ops.name!r}", device, _row_errors(ops, device), 0.01)


def _row_errors(ops: Ops, device: torch.device) -> Iterator[tuple[str, float]]:
    generator = torch.Generator(device).manual_seed(0)
    for rows in (1, 33):  # few rows are spread wider; 1552 leaves a tail for every number of threads
        x = torch.randn(rows, 2 * 1552, device=device, generator=generator).to(torch.bfloat16)
        table = torch.randn(1003, 1552, device=device, generator=generator).to(torch.bfloat16)
        weight = torch.rand(1552, device=device, generator=generator)
        found, wanted = (_row_results(some, x, weight, table) for some in (ops, reference.OPS))
        for name, out in found.items():
            yield f"{name} of {rows} rows", _relative(out, wanted[name])


def _row_results(ops: Ops, x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
    a, b = x.chunk(2, 1)
    results = {"norm": ops.rms_norm(a, weight, 1e-5, b, True)[0], "SiLU": ops.silu_mul(x, True),
               "quantization": ops.quantize_rows(x), "logits": ops.logits(a, table)}  # fmt: skip
    return {name: y.codes * y.scale[:, None] if isinstance(y, Rows) else y for name, y in results.items()}


def _verdict(name: str, device: torch.device, errors: Iterator[tuple[str, float]], most: float) -> str | None:
    """Why what is tried is not to be used: an error, of (of what, relative to the result), above `most`, or an exception."""
    try:
        off = next((f"its {what} is off by {error:.2g} of the result" for what, error in errors if not error < most), None)
    except Exception as error:
        off = f"its start-up test failed: {type(error).__name__}: {str(error).strip()[:200]}"
    if off is not None:
        logging.getLogger(__name__).warning("%s is not used on %s: %s", name, device, off)
    return off


def _relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return ((found.float() - want.float()).norm() / want.float().norm()).item()


def _zeros(like: torch.Tensor, blocks: int) -> torch.Tensor:
    raw = like.view(torch.uint8)  # not every torch fills float8
    return raw.new_zeros((blocks, *raw.shape[1:])).view(like.dtype)


def check_attention(ops: Ops, kv: LayerKV, heads: int, window: int, dtype: torch.dtype) -> None:
    """Turn, store and attend over a small cache like `kv` (which is left alone): generated tokens and a prompt. RuntimeError
    when that is off, or cannot be run: there is no other kernel to take."""
    contexts, queries, (_, kv_heads, size, _) = (1, 70, 700, 200), (1, 1, 1, 130), kv.v.shape
    head_dim, total = kv.head_dim, sum(contexts)
    counts = [-(-context // size) for context in contexts]
    with torch.device(kv.v.device):
        table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):  # from the last block backwards
            table[row, :count] = sum(counts) - 1 - sum(counts[:row]) - torch.arange(count, dtype=torch.int32)
        positions = torch.cat([torch.arange(context) for context in contexts])
        owner = torch.arange(len(contexts)).repeat_interleave(torch.tensor(contexts))
        slots = table[owner, positions // size].long() * size + positions % size
        asked = torch.cat([torch.arange(end - query, end) for end, query in zip(accumulate(contexts), queries)])
        starts = torch.tensor((0, *accumulate(queries)), dtype=torch.int32)
        lengths = torch.tensor(contexts, dtype=torch.int32)
        step = Step(positions, positions.int(), slots, starts, lengths, table, 3, 130, 700, None)
        generator = torch.Generator(kv.v.device).manual_seed(0)
        qkv = torch.randn(total, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
        angle = torch.arange(700)[:, None] / 10.0 ** torch.linspace(0, 3, head_dim // 2)
        cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    stored = []
    for some in (ops, reference.OPS):
        parts = {name: None if x is None else _zeros(x, sum(counts))
                 for name, x in vars(kv).items() if name in ("k", "v", "k_params", "v_params")}  # fmt: skip
        cache = replace(kv, **parts, k_scale=min(kv.k_scale, 1.0), v_scale=min(kv.v_scale, 1.0))
        q = some.rope_write(qkv, cache, step, cos_sin, kv_heads, None, None, 1e-6)
        rows = [reference.gather_kv(cache, step.block_table[row, :count], size * count) for row, count in enumerate(counts)]
        stored.append((cache, q, *(torch.cat(part, 1) for part in zip(*rows))))
    (cache, q, *kept), (_, *expected) = stored
    found, want = (some.attention(q[asked], cache, step, head_dim**-0.5, window).flatten(1) for some in (ops, reference.OPS))
    # 16 bits round differently, and then a code may be the next one: of int4 and e5m2 a few in a hundred
    names = ("turned queries", "stored keys", "stored values")
    errors = {name: _relative(*pair) for name, *pair in zip(names, (q, *kept), expected, strict=True)}
    errors["attention"] = max(_relative(*pair) for pair in zip(found, want))
    if ops.decode is not None:
        one = asked[:3]  # of a row each
        alone = replace(step, positions=step.positions[one], slots=step.slots[one], context_len=step.context_len[:3],
                        block_table=step.block_table[:3])  # fmt: skip
        seen = ops.decode(qkv[one], cache, alone, cos_sin, kv_heads, head_dim**-0.5, window, False)
        errors["attention of generated tokens"] = _relative(seen.flatten(1), found[:3])
    for name, error in errors.items():
        if not error < (0.1 if name.startswith("stored") else 0.05):
            raise RuntimeError(f"{name} ({ops.name}) of a {kv.name} cache on {kv.v.device} are off by {error:.2g} of their size"
                               " in the start-up test: another version of Triton or of the driver, or another kv, may do")
