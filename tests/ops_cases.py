"""Caches, steps and inputs on which Triton ops meet `kernels.reference`, on a GPU or in the interpreter."""

from __future__ import annotations

import torch

from nybble.kernels import reference
from nybble.kernels.types import LayerKV, Step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.uint8, "int4": torch.uint8,
          "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def poisoned_cache(name, blocks, kv_heads, block_size, dim, device="cpu", k_scale=1.0, v_scale=1.0) -> LayerKV:
    """A cache whose every element is what would show if it were read: NaN, or codes with NaN scales."""
    width = dim // 2 if name == "int4" else dim
    shape = (blocks, kv_heads, block_size, width)

    def codes():
        dtype = DTYPES[name]
        if dtype.itemsize == 1:
            return torch.full(shape, 255, dtype=torch.uint8, device=device).view(dtype)
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    params = [None, None]
    if name in ("int8", "int4"):
        sets = (2,) if name == "int4" else ()
        params = [torch.full((*shape[:2], *sets, block_size, 2), float("nan"), dtype=torch.float16, device=device)
                  for _ in range(2)]
    return LayerKV(name, codes(), codes(), *params, k_scale, v_scale)


def make_step(contexts, queries, block_size, blocks, device="cpu", seed=0, decode=None) -> Step:
    """Rows of the given context lengths whose last `queries[i]` tokens are in this step; decode rows (`decode` of them, by
    default those with one query at the front) first. Blocks are dealt out in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(blocks, generator=generator).tolist()
    width = max(1, max(-(-c // block_size) for c in contexts)) + 1
    table = torch.zeros(len(contexts), width, dtype=torch.int32)
    positions, slots, start = [], [], [0]
    for row, (context, query) in enumerate(zip(contexts, queries)):
        for i in range(-(-context // block_size)):
            table[row, i] = order.pop()
        for position in range(context - query, context):
            positions.append(max(position, 0))
            slots.append(int(table[row, position // block_size]) * block_size + position % block_size if position >= 0 else -1)
        start.append(start[-1] + query)
    if decode is None:
        decode = next((i for i, q in enumerate(queries) if q != 1), len(queries))
    move = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)  # noqa: E731
    return Step(move([0] * len(positions), torch.int64), move(positions, torch.int32), move(slots, torch.int64),
                move(start, torch.int32), move(contexts, torch.int32), table.to(device), decode,
                max(queries[decode:], default=0), max(contexts), None)


def fill(kv: LayerKV, step: Step, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
    """Store each row's K and V [context, heads, D] in its blocks, as `reference.encode_kv` says."""
    for row, (keys, values) in enumerate(zip(k, v)):
        position = torch.arange(keys.shape[0], device=keys.device)
        block = step.block_table[row, position // kv.block_size].long()[:, None]
        offset = (position % kv.block_size)[:, None]
        head = torch.arange(keys.shape[1], device=keys.device)[None]
        for x, codes, params, scale in ((keys, kv.k, kv.k_params, kv.k_scale), (values, kv.v, kv.v_params, kv.v_scale)):
            stored, scale_min = reference.encode_kv(x, kv.name, scale)
            if codes.element_size() == 1:
                codes.view(torch.uint8)[block, head, offset] = stored.view(torch.uint8)
            else:
                codes[block, head, offset] = stored.to(codes.dtype)
            if params is not None:
                params.movedim(-2, 2)[block, head, offset] = scale_min  # int4 has two sets a token, before the tokens


def attention_case(name, contexts, queries, heads, kv_heads, dim, block_size, device="cpu", dtype=torch.float32, seed=0,
                   decode=None):
    """(q, cache, step): K with a per-channel offset as real keys have, V of uneven magnitude per token."""
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    blocks = sum(-(-c // block_size) for c in contexts) + 3
    scales = (0.05, 0.02) if name == "fp8" else (1.0, 1.0)
    kv = poisoned_cache(name, blocks, kv_heads, block_size, dim, device, *scales)
    step = make_step(contexts, queries, block_size, blocks, device, seed, decode)
    offset = random(kv_heads, dim) * 2
    keys = [(random(c, kv_heads, dim) + offset).to(dtype).to(device) for c in contexts]
    values = [(random(c, kv_heads, dim) * (0.2 + random(c, kv_heads, 1).abs())).to(dtype).to(device) for c in contexts]
    fill(kv, step, keys, values)
    q = random(sum(queries), heads, dim).to(dtype).to(device)
    return q, kv, step
