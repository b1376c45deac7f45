"""Paged attention in portable Triton: prompt rows on tensor cores, decode rows split over fixed ranges of positions.

One idea: everything that fixes the order of a row's arithmetic (tiles, splits, how splits are summed) is a function of
positions alone. A row's bits then do not depend on the batch, on how a prompt was chunked, or on how many programs share the
work. Splits keep their running maximum as an *integer* power of two, so bringing two partial sums to a common maximum is
exact and summing them in registers or through memory gives the same bits.

Integer caches are never dequantized element by element: with value = code * scale + minimum per token,
    q . k = scale_k * (q . codes) + min_k * sum(q)        sum p v = sum (p * scale_v) * codes + sum p * min_v.
Codes of 8 bits and fewer become fp16 exactly (bit tricks, no conversion unit); all sums are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.formats.spec import KV
from nybble.kernels.types import LayerKV, Step

LOG2_E = 1.4426950408889634
_FLOOR = tl.constexpr(-1.0e30)  # a maximum over nothing: finite, so that differences of two of them are 0 and not NaN
_CHAIN = tl.constexpr(8)  # splits summed one after the other; more than that are summed as chains

# ---- codes to fp16, exactly ---------------------------------------------------------------------------------------


@triton.jit
def _half_codes(raw, KIND: tl.constexpr, ASM: tl.constexpr):
    """What one stored element means, before scale and minimum: fp16 for 8-bit kinds (fp8 e4m3 as value / 256, since its
    exponent is only shifted into place), the value itself for 16- and 32-bit kinds."""
    if KIND == "int8":
        if ASM:  # a byte under the exponent of 1024 is 1024 + code
            return tl.inline_asm_elementwise(
                "{ .reg .b32 m; mov.b32 m, 0x64646464; prmt.b32 $0, $2, m, 0x4140; prmt.b32 $1, $2, m, 0x4342;"
                " mov.b32 m, 0x64006400; sub.rn.f16x2 $0, $0, m; sub.rn.f16x2 $1, $1, m; }",
                "=&r,=&r,r", [raw], dtype=tl.float16, is_pure=True, pack=4)
        else:
            return raw.to(tl.float16)
    elif KIND == "fp8":
        if ASM:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 s, m; prmt.b32 s, $2, 0, 0x1404; shr.b32 m, s, 1; and.b32 m, m, 0x3f803f80;"
                " and.b32 s, s, 0x80008000; or.b32 $0, s, m;"
                " prmt.b32 s, $2, 0, 0x3424; shr.b32 m, s, 1; and.b32 m, m, 0x3f803f80;"
                " and.b32 s, s, 0x80008000; or.b32 $1, s, m; }",
                "=&r,=&r,r", [raw], dtype=tl.float16, is_pure=True, pack=4)
        else:
            wide = raw.to(tl.uint16)
            return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif KIND == "fp8_e5m2":
        if ASM:
            return tl.inline_asm_elementwise("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;", "=&r,=&r,r",
                                             [raw], dtype=tl.float16, is_pure=True, pack=4)
        else:
            return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        return raw


@triton.jit
def _half_nibbles(raw, ASM: tl.constexpr):
    """(low, high) nibbles of packed bytes as fp16."""
    if ASM:  # low: 1024 + n. high: 1024 + 16 n, then one multiply-add
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, m, one, sixteenth, back; mov.b32 m, 0x64646464; mov.b32 one, 0x64006400;"
            " mov.b32 sixteenth, 0x2c002c00; mov.b32 back, 0xd400d400;"
            " prmt.b32 a, $4, m, 0x4140; prmt.b32 b, $4, m, 0x4342;"
            " and.b32 $0, a, 0xff0fff0f; and.b32 $1, b, 0xff0fff0f; sub.rn.f16x2 $0, $0, one; sub.rn.f16x2 $1, $1, one;"
            " and.b32 a, a, 0xfff0fff0; and.b32 b, b, 0xfff0fff0;"
            " fma.rn.f16x2 $2, a, sixteenth, back; fma.rn.f16x2 $3, b, sixteenth, back; }",
            "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)
    else:
        return (raw & 15).to(tl.float16), (raw >> 4).to(tl.float16)


@triton.jit
def _scale_min(params):
    """The two fp16 of a parameter word. int32 -> fp32 (scale, minimum)."""
    scale = (params & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = ((params >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _power_of_two(x):
    """(2^e, 2^-e) with 2^e <= x < 2^(e + 1), for a normal x; (0, 2^127) for 0."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


# ---- decode, one query per KV head: vector arithmetic ---------------------------------------------------------------


@triton.jit
def _decode_vector(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, out_ptr, part_ptr, stat_ptr,
                   table_width, window, num_splits, q_scale, v_scale,
                   HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr,
                   TILE: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr, STAGES: tl.constexpr):
    """One program: a (row, KV head) and every STRIDE-th split of its positions; GROUP is 1. STRIDE 1 writes the result,
    else each split leaves its sums for `_combine`. A tile is [TILE // SLOTS, SLOTS, channels]: the first axis lies in a
    thread's registers, and each of the SLOTS keeps its own running maximum, so the loop needs no exchange between warps."""
    INTEGER: tl.constexpr = KIND == "int8" or KIND == "int4"
    INT4: tl.constexpr = KIND == "int4"
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    seen = tl.maximum(context - window, 0)
    channel = tl.arange(0, LANES)
    in_width = channel < WIDTH
    q_base = q_ptr + (row * HEADS + head).to(tl.int64) * DIM
    q = tl.load(q_base + channel, mask=in_width, other=0.0).to(tl.float32) * q_scale
    q_sum = tl.sum(q, 0)
    q_high = q
    if INT4:
        q_high = tl.load(q_base + WIDTH + channel, mask=in_width, other=0.0).to(tl.float32) * q_scale
        q_sum += tl.sum(q_high, 0)
    tile = tl.arange(0, TILE // SLOTS)[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
    table = table_ptr + row.to(tl.int64) * table_width
    best, total = _FLOOR, 0.0
    out = tl.zeros((LANES,), tl.float32)
    out_high = tl.zeros((LANES,), tl.float32)
    for split in range(seen // SPLIT + tl.program_id(2), tl.cdiv(context, SPLIT), STRIDE):
        stop = tl.minimum(context, (split + 1) * SPLIT)
        start = tl.maximum(split * SPLIT, seen // TILE * TILE)
        m = tl.full((SLOTS,), _FLOOR, tl.float32)
        weight = tl.zeros((SLOTS,), tl.float32)
        bias = tl.zeros((SLOTS,), tl.float32)
        acc = tl.zeros((SLOTS, LANES), tl.float32)
        acc_high = tl.zeros((SLOTS, LANES), tl.float32)
        for first in tl.range(start, stop, TILE, num_stages=STAGES):
            position = first + tile
            kept = (position >= seen) & (position < stop)
            block = tl.load(table + position // BLOCK_SIZE, mask=kept, other=0).to(tl.int64)
            token = (block * HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
            offset = token[:, :, None] * WIDTH + channel[None, None, :]
            loaded = kept[:, :, None] & in_width[None, None, :]
            k_raw = tl.load(k_ptr + offset, mask=loaded, other=0)
            if INTEGER:
                k_params = tl.load(k_params_ptr + token, mask=kept, other=0)
                v_params = tl.load(v_params_ptr + token, mask=kept, other=0)
            v_raw = tl.load(v_ptr + offset, mask=loaded, other=0)
            if INT4:
                k, k_high = _half_nibbles(k_raw, ASM)
                score = tl.sum(q[None, None, :] * k.to(tl.float32) + q_high[None, None, :] * k_high.to(tl.float32), 2)
            else:
                score = tl.sum(q[None, None, :] * _half_codes(k_raw, KIND, ASM).to(tl.float32), 2)
            if INTEGER:
                k_scale, k_min = _scale_min(k_params)
                score = score * k_scale + k_min * q_sum
            score = tl.where(kept, score, float("-inf"))
            m_next = tl.maximum(m, tl.max(score, 0))
            fade = tl.exp2(m - m_next)
            p = tl.exp2(score - m_next[None, :])
            weight = weight * fade + tl.sum(p, 0)
            if INTEGER:
                v_factor, v_min = _scale_min(v_params)
                bias = bias * fade + tl.sum(p * v_min, 0)
                p = p * v_factor
            if INT4:
                v, v_high = _half_nibbles(v_raw, ASM)
                acc_high = acc_high * fade[:, None] + tl.sum(p[:, :, None] * v_high.to(tl.float32), 0)
            else:
                v = _half_codes(v_raw, KIND, ASM)
            acc = acc * fade[:, None] + tl.sum(p[:, :, None] * v.to(tl.float32), 0)
            m = m_next
        top = tl.ceil(tl.max(m, 0))
        share = tl.exp2(m - top)
        split_weight = tl.sum(weight * share, 0)
        split_bias = tl.sum(bias * share, 0)
        split_out = tl.sum(acc * share[:, None], 0) + split_bias
        split_high = split_out
        if INT4:
            split_high = tl.sum(acc_high * share[:, None], 0) + split_bias
        if STRIDE == 1:
            common = tl.maximum(best, top)
            old, new = tl.exp2(best - common), tl.exp2(top - common)
            total = total * old + split_weight * new
            out = out * old + split_out * new
            out_high = out_high * old + split_high * new
            best = common
        else:
            index = ((row * HEADS + head) * num_splits + split).to(tl.int64)
            tl.store(part_ptr + index * DIM + channel, split_out, mask=in_width)
            if INT4:
                tl.store(part_ptr + index * DIM + WIDTH + channel, split_high, mask=in_width)
            tl.store(stat_ptr + index * 2, top)
            tl.store(stat_ptr + index * 2 + 1, split_weight)
    if STRIDE == 1:
        total = tl.where(total > 0, total, 1.0)
        target = out_ptr + (row * HEADS + head).to(tl.int64) * DIM + channel
        dtype = out_ptr.dtype.element_ty
        tl.store(target, (tl.math.div_rn(out, total) * v_scale).to(dtype), mask=in_width)
        if INT4:
            tl.store(target + WIDTH, (tl.math.div_rn(out_high, total) * v_scale).to(dtype), mask=in_width)


@triton.jit
def _combine(part_ptr, stat_ptr, context_ptr, out_ptr, window, num_splits, v_scale,
             HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, CHAINS: tl.constexpr):
    """Sum a (row, query head)'s splits: eight in a chain, then CHAINS chains in a fixed tree, then tree after tree. One
    chain padded with empty ones is the same sum, so CHAINS may be 1 where no row has more than eight splits."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    first = tl.maximum(context - window, 0) // SPLIT
    last = tl.cdiv(context, SPLIT)
    channel = tl.arange(0, LANES)
    in_dim = channel < DIM
    base = (row * HEADS + head).to(tl.int64) * num_splits
    chain = tl.arange(0, CHAINS) * _CHAIN
    every = tl.arange(0, CHAINS * _CHAIN)
    best, total = _FLOOR, 0.0
    out = tl.zeros((LANES,), tl.float32)
    for start in range(first // (CHAINS * _CHAIN) * (CHAINS * _CHAIN), last, CHAINS * _CHAIN):
        split = start + every
        tops = tl.load(stat_ptr + (base + split) * 2, mask=(split >= first) & (split < last), other=_FLOOR)
        common = tl.maximum(best, tl.max(tops, 0))
        weight = tl.zeros((CHAINS,), tl.float32)
        acc = tl.zeros((CHAINS, LANES), tl.float32)
        for link in tl.static_range(_CHAIN):
            split = start + chain + link
            kept = (split >= first) & (split < last)
            share = tl.exp2(tl.load(stat_ptr + (base + split) * 2, mask=kept, other=_FLOOR) - common)
            weight += share * tl.load(stat_ptr + (base + split) * 2 + 1, mask=kept, other=0.0)
            part = tl.load(part_ptr + (base + split)[:, None] * DIM + channel[None, :],
                           mask=kept[:, None] & in_dim[None, :], other=0.0)
            acc += share[:, None] * part
        old = tl.exp2(best - common)
        total = total * old + tl.sum(weight, 0)
        out = out * old + tl.sum(acc, 0)
        best = common
    total = tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (row * HEADS + head).to(tl.int64) * DIM + channel,
             (tl.math.div_rn(out, total) * v_scale).to(out_ptr.dtype.element_ty), mask=in_dim)


# ---- tensor-core tiles: grouped decode and prompts -------------------------------------------------------------------


@triton.jit
def _queries(q_ptr, offset, kept, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Query rows in the type of the dot, and the power of two each was divided by to be safe there (1 when it is as loaded).
    offset [M, C] -> [M, C], [M]."""
    q = tl.load(q_ptr + offset, mask=kept, other=0.0)
    return q.to(tl.float32)


@triton.jit
def _tiles(q, q_high, q_factor, q_sum, last_seen, m, weight, bias, acc, acc_high, start, stop, seen, end,
           k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
           KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           KIND: tl.constexpr, ASM: tl.constexpr, P_FACTOR: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
           STAGES: tl.constexpr):
    """Online softmax of M query rows over the tiles of [start, stop). Positions outside [seen, end) are never loaded; row i
    sees positions in (last_seen[i] - window, last_seen[i]]. MASKED False promises that all of that is true of every tile."""
    INTEGER: tl.constexpr = KIND == "int8" or KIND == "int4"
    INT4: tl.constexpr = KIND == "int4"
    channel = tl.arange(0, LANES)
    in_width = channel < WIDTH
    column = tl.arange(0, TILE)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        position = first + column
        if MASKED:
            kept = (position >= seen) & (position < end)
            block = tl.load(table + position // BLOCK_SIZE, mask=kept, other=0).to(tl.int64)
            loaded = kept[:, None] & in_width[None, :]
        else:
            kept = position >= 0
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            loaded = in_width[None, :]
        token = (block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = token[:, None] * WIDTH + channel[None, :]
        if MASKED or LANES != WIDTH:
            k_raw = tl.load(k_ptr + offset, mask=loaded, other=0)
            v_raw = tl.load(v_ptr + offset, mask=loaded, other=0)
        else:
            k_raw = tl.load(k_ptr + offset)
            v_raw = tl.load(v_ptr + offset)
        if INTEGER:
            k_params = tl.load(k_params_ptr + token, mask=kept, other=0)
            v_params = tl.load(v_params_ptr + token, mask=kept, other=0)
        if INT4:
            k, k_high = _half_nibbles(k_raw, ASM)
            score = tl.dot(q, tl.trans(k))
            score = tl.dot(q_high, tl.trans(k_high), score)
        else:
            score = tl.dot(q, tl.trans(_half_codes(k_raw, KIND, ASM)), input_precision="ieee")
        if INTEGER:
            k_scale, k_min = _scale_min(k_params)
            score = score * k_scale[None, :] + q_sum[:, None] * k_min[None, :]
        score = score * q_factor[:, None]
        if MASKED:
            visible = (position[None, :] <= last_seen[:, None]) & (position[None, :] > last_seen[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        m_next = tl.maximum(m, tl.max(score, 1))
        fade = tl.exp2(m - m_next)
        p = tl.exp2(score - m_next[:, None])
        weight = weight * fade + tl.sum(p, 1)
        if INTEGER:
            v_factor, v_min = _scale_min(v_params)
            bias = bias * fade + tl.sum(p * v_min[None, :], 1)
            p = p * (v_factor * P_FACTOR)[None, :]
        acc = acc * fade[:, None]
        if INT4:
            v, v_high = _half_nibbles(v_raw, ASM)
            acc_high = tl.dot(p.to(tl.float16), v_high, acc_high * fade[:, None])
        else:
            v = _half_codes(v_raw, KIND, ASM)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = m_next
    return m, weight, bias, acc, acc_high
