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


_SIZES = ["table_width", "window", "num_splits", "stride", "first_row"]  # a new value must not mean a new compilation


@triton.jit(do_not_specialize=_SIZES)
def _decode_vector(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, out_ptr, part_ptr, stat_ptr,
                   table_width, window, num_splits, stride, q_scale, v_scale,
                   HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr,
                   TILE: tl.constexpr, SLOTS: tl.constexpr, DIRECT: tl.constexpr, STAGES: tl.constexpr):
    """One program: a (row, KV head) and every stride-th split of its positions; GROUP is 1. DIRECT (stride 1) writes the
    result, else each split leaves its sums for `_combine`. A tile is [SLOTS, TILE // SLOTS, channels]: the middle axis lies in a
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
    tile = tl.arange(0, SLOTS)[:, None] + tl.arange(0, TILE // SLOTS)[None, :] * SLOTS
    table = table_ptr + row.to(tl.int64) * table_width
    best, total = _FLOOR, 0.0
    out = tl.zeros((LANES,), tl.float32)
    out_high = tl.zeros((LANES,), tl.float32)
    for split in range(seen // SPLIT + tl.program_id(2), tl.cdiv(context, SPLIT), stride):
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
            m_next = tl.maximum(m, tl.max(score, 1))
            fade = tl.exp2(m - m_next)
            p = tl.exp2(score - m_next[:, None])
            weight = weight * fade + tl.sum(p, 1)
            if INTEGER:
                v_factor, v_min = _scale_min(v_params)
                bias = bias * fade + tl.sum(p * v_min, 1)
                p = p * v_factor
            if INT4:
                v, v_high = _half_nibbles(v_raw, ASM)
                acc_high = acc_high * fade[:, None] + tl.sum(p[:, :, None] * v_high.to(tl.float32), 1)
            else:
                v = _half_codes(v_raw, KIND, ASM)
            acc = acc * fade[:, None] + tl.sum(p[:, :, None] * v.to(tl.float32), 1)
            m = m_next
        top = tl.ceil(tl.max(m, 0))
        share = tl.exp2(m - top)
        split_weight = tl.sum(weight * share, 0)
        split_bias = tl.sum(bias * share, 0)
        split_out = tl.sum(acc * share[:, None], 0) + split_bias
        split_high = split_out
        if INT4:
            split_high = tl.sum(acc_high * share[:, None], 0) + split_bias
        if DIRECT:
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
    if DIRECT:
        inverse = v_scale / tl.where(total > 0, total, 1.0)
        target = out_ptr + (row * HEADS + head).to(tl.int64) * DIM + channel
        dtype = out_ptr.dtype.element_ty
        tl.store(target, (out * inverse).to(dtype), mask=in_width)
        if INT4:
            tl.store(target + WIDTH, (out_high * inverse).to(dtype), mask=in_width)


@triton.jit(do_not_specialize=_SIZES)
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
    inverse = v_scale / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (row * HEADS + head).to(tl.int64) * DIM + channel,
             (out * inverse).to(out_ptr.dtype.element_ty), mask=in_dim)


# ---- tensor-core tiles: grouped decode and prompts -------------------------------------------------------------------


@triton.jit
def _queries(q_ptr, base, kept, k_ptr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr):
    """M query rows at offsets `base` in the type of the dot: (q, q_high, what each was divided by [M], sum over channels [M]).
    fp16 queries are divided by a power of two first, so that a bf16 outlier cannot overflow. q_high is int4's upper half."""
    channel = tl.arange(0, LANES)
    loaded = kept[:, None] & (channel < WIDTH)[None, :]
    dtype = k_ptr.dtype.element_ty if KIND == "copy" else tl.float16
    q = tl.load(q_ptr + base[:, None] + channel[None, :], mask=loaded, other=0.0).to(tl.float32)
    high = q
    if KIND == "int4":
        high = tl.load(q_ptr + base[:, None] + WIDTH + channel[None, :], mask=loaded, other=0.0).to(tl.float32)
    if dtype == tl.float16:
        factor, inverse = _power_of_two(tl.max(tl.maximum(tl.abs(q), tl.abs(high)), 1))
        q = q * inverse[:, None]
        high = high * inverse[:, None]
    else:
        factor = tl.sum(q * 0.0, 1) + 1.0
    q = q.to(dtype)
    high = high.to(dtype)
    q_sum = tl.sum(q.to(tl.float32), 1)
    if KIND == "int4":
        q_sum += tl.sum(high.to(tl.float32), 1)
    return q, high, factor, q_sum


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
        kept = (position >= seen) & (position < end)
        if MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=kept, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        token = (block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = token[:, None] * WIDTH + channel[None, :]
        if MASKED:
            loaded = kept[:, None] & in_width[None, :]
            k_raw = tl.load(k_ptr + offset, mask=loaded, other=0)
            v_raw = tl.load(v_ptr + offset, mask=loaded, other=0)
        elif LANES != WIDTH:
            k_raw = tl.load(k_ptr + offset, mask=in_width[None, :], other=0)
            v_raw = tl.load(v_ptr + offset, mask=in_width[None, :], other=0)
        else:
            k_raw = tl.load(k_ptr + offset)
            v_raw = tl.load(v_ptr + offset)
        if INTEGER and MASKED:
            k_params = tl.load(k_params_ptr + token, mask=kept, other=0)
            v_params = tl.load(v_params_ptr + token, mask=kept, other=0)
        elif INTEGER:
            k_params = tl.load(k_params_ptr + token)
            v_params = tl.load(v_params_ptr + token)
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


@triton.jit(do_not_specialize=_SIZES)
def _decode_dot(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, out_ptr, part_ptr, stat_ptr,
                table_width, window, num_splits, stride, q_scale, v_scale,
                HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr,
                TILE: tl.constexpr, ROWS: tl.constexpr, P_FACTOR: tl.constexpr, DIRECT: tl.constexpr,
                STAGES: tl.constexpr):
    """As `_decode_vector`, for the GROUP query heads that share a KV head (padded to ROWS for the tensor cores)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    seen = tl.maximum(context - window, 0)
    channel = tl.arange(0, LANES)
    member = tl.arange(0, ROWS)
    real = member < GROUP
    kept = real[:, None] & (channel < WIDTH)[None, :]
    query = (row * HEADS + head).to(tl.int64) * GROUP + member
    q, q_high, q_factor, q_sum = _queries(q_ptr, query * DIM, real, k_ptr, DIM, WIDTH, LANES, KIND)
    q_factor = q_factor * q_scale
    last_seen = tl.zeros((ROWS,), tl.int32) + (context - 1)
    table = table_ptr + row.to(tl.int64) * table_width
    best = tl.full((ROWS,), _FLOOR, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, LANES), tl.float32)
    out_high = tl.zeros((ROWS, LANES), tl.float32)
    for split in range(seen // SPLIT + tl.program_id(2), tl.cdiv(context, SPLIT), stride):
        stop = tl.minimum(context, (split + 1) * SPLIT)
        start = tl.maximum(split * SPLIT, seen // TILE * TILE)
        m = tl.full((ROWS,), _FLOOR, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        bias = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, LANES), tl.float32)
        acc_high = tl.zeros((ROWS, LANES), tl.float32)
        m, weight, bias, acc, acc_high = _tiles(
            q, q_high, q_factor, q_sum, last_seen, m, weight, bias, acc, acc_high, start, stop, seen, stop,
            k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
            HEADS, WIDTH, LANES, BLOCK_SIZE, KIND, ASM, P_FACTOR, TILE, True, STAGES)
        top = tl.ceil(m)
        share = tl.exp2(m - top)
        weight = weight * share
        acc = (acc * (1.0 / P_FACTOR) + bias[:, None]) * share[:, None]
        acc_high = (acc_high * (1.0 / P_FACTOR) + bias[:, None]) * share[:, None]
        if DIRECT:
            common = tl.maximum(best, top)
            old, new = tl.exp2(best - common), tl.exp2(top - common)
            total = total * old + weight * new
            out = out * old[:, None] + acc * new[:, None]
            if KIND == "int4":
                out_high = out_high * old[:, None] + acc_high * new[:, None]
            best = common
        else:
            index = query * num_splits + split
            part = part_ptr + index[:, None] * DIM + channel[None, :]
            tl.store(part, acc, mask=kept)
            if KIND == "int4":
                tl.store(part + WIDTH, acc_high, mask=kept)
            tl.store(stat_ptr + index * 2, top, mask=real)
            tl.store(stat_ptr + index * 2 + 1, weight, mask=real)
    if DIRECT:
        inverse = (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        target = out_ptr + query[:, None] * DIM + channel[None, :]
        dtype = out_ptr.dtype.element_ty
        tl.store(target, (out * inverse).to(dtype), mask=kept)
        if KIND == "int4":
            tl.store(target + WIDTH, (out_high * inverse).to(dtype), mask=kept)


@triton.jit(do_not_specialize=_SIZES)
def _prompt(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, query_start_ptr, out_ptr,
            table_width, window, first_row, q_scale, v_scale,
            HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
            TILE: tl.constexpr, ROWS: tl.constexpr, P_FACTOR: tl.constexpr, STAGES: tl.constexpr):
    """One program: ROWS consecutive prompt tokens of one row under one query head (HEADS counts KV heads). Tiles of keys lie
    at multiples of TILE, whole tiles a query does not see change nothing, so where a chunk starts cannot be told from the
    result. Long tiles start first."""
    query_head = tl.program_id(0)
    row = first_row + tl.program_id(2)
    begin = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - begin
    context = tl.load(context_ptr + row)
    offset = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    if offset < length:
        channel = tl.arange(0, LANES)
        line = offset + tl.arange(0, ROWS)
        real = line < length
        query = ((begin + line).to(tl.int64) * GROUP * HEADS + query_head) * DIM
        q, q_high, q_factor, q_sum = _queries(q_ptr, query, real, k_ptr, DIM, WIDTH, LANES, KIND)
        q_factor = q_factor * q_scale
        last_seen = context - length + line
        first_position = context - length + offset
        end = tl.minimum(context, first_position + ROWS)
        seen = tl.maximum(first_position + 1 - window, 0)
        start = seen // TILE * TILE
        table = table_ptr + row.to(tl.int64) * table_width
        head = query_head // GROUP
        m = tl.full((ROWS,), _FLOOR, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        bias = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, LANES), tl.float32)
        acc_high = tl.zeros((ROWS, LANES), tl.float32)
        if not WINDOWED:
            whole = (first_position + 1) // TILE * TILE
            m, weight, bias, acc, acc_high = _tiles(
                q, q_high, q_factor, q_sum, last_seen, m, weight, bias, acc, acc_high, start, whole, seen, end,
                k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
                HEADS, WIDTH, LANES, BLOCK_SIZE, KIND, ASM, P_FACTOR, TILE, False, STAGES)
            start = whole
        m, weight, bias, acc, acc_high = _tiles(
            q, q_high, q_factor, q_sum, last_seen, m, weight, bias, acc, acc_high, start, end, seen, end,
            k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
            HEADS, WIDTH, LANES, BLOCK_SIZE, KIND, ASM, P_FACTOR, TILE, True, STAGES)
        inverse = (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
        kept = real[:, None] & (channel < WIDTH)[None, :]
        target = out_ptr + query[:, None] + channel[None, :]
        dtype = out_ptr.dtype.element_ty
        out = acc * (1.0 / P_FACTOR) + bias[:, None]
        tl.store(target, (out * inverse).to(dtype), mask=kept)
        if KIND == "int4":
            out = acc_high * (1.0 / P_FACTOR) + bias[:, None]
            tl.store(target + WIDTH, (out * inverse).to(dtype), mask=kept)


# ---- host ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: keys a tile, warps, pipeline stages; for decode also positions a split (part of the numerics) and
    whether the vector kernel runs."""

    tile: int
    warps: int
    stages: int
    split: int = 256
    vector: bool = False


def storage(tensor: Tensor) -> Tensor:
    """float8 as its bytes: devices without float8 instructions read and write it all the same."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _portable() -> bool:
    """Where PTX cannot run: other vendors, and Triton's interpreter."""
    return torch.version.hip is not None or triton.knobs.runtime.interpret


def _kind(kv: LayerKV) -> str:
    return kv.name if KV[kv.name].num.bits <= 8 else "copy"


# The dot's probabilities carry scale_v, at most 131008 / levels: a factor that uses fp16's range and cannot leave it.
_P_FACTOR = {"int8": 64.0, "int4": 4.0}
_FP8_SHIFT = {"fp8": 256.0}  # e4m3's exponent bias against fp16's
_PROGRAMS = 4224  # what keeps 132 multiprocessors evenly busy to the end
_LONGEST_CHAIN = 8


def decode_tiles(kind: str, group: int, head_dim: int) -> Tiles:
    """Never a function of the batch: tile and split decide the order of sums."""
    if group == 1 and kind != "int4":
        return Tiles(64 if head_dim <= 128 else 32, 4, 1, vector=True)
    return Tiles(64, 4, 3)


def prompt_tiles(kind: str, head_dim: int, element_size: int) -> tuple[int, Tiles]:
    """(query rows a program, tiles)."""
    if element_size == 4 and kind == "copy":
        return 32, Tiles(32, 4, 1)
    if head_dim > 128:
        return 64, Tiles(32, 4, 2)
    return 128, Tiles(64, 8, 3 if kind == "copy" else 2)


def _arguments(q: Tensor, kv: LayerKV, scale: float) -> tuple:
    """(cache pointers, q_scale, v_scale, constants) that all three kernels share."""
    kind = _kind(kv)
    _, kv_heads, block_size, width = kv.v.shape
    head_dim = q.shape[2]
    if head_dim != width * (2 if kind == "int4" else 1) or q.shape[1] % kv_heads:
        raise ValueError(f"queries [{q.shape[1]} heads, {head_dim}] do not fit a {kv.name} cache [{kv_heads} heads, {width}]")
    word = lambda t, other: other if t is None else t.view(torch.int32)  # noqa: E731
    cache = (storage(kv.k), storage(kv.v), word(kv.k_params, kv.k), word(kv.v_params, kv.v))
    shift = _FP8_SHIFT.get(kind, 1.0)
    constants = (kv_heads, q.shape[1] // kv_heads, head_dim, width, max(16, triton.next_power_of_2(width)), block_size, kind,
                 not _portable())
    return cache, scale * LOG2_E * kv.k_scale * shift, kv.v_scale * shift, constants


def decode(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor, tiles: Tiles | None = None,
           stride: int | None = None) -> None:
    """The first `step.num_decode` rows of `attention`, into `out`. `stride` programs share a row's splits: it moves no bit."""
    rows = step.num_decode
    cache, q_scale, v_scale, constants = _arguments(q, kv, scale)
    heads, group, head_dim, width, lanes, _, kind, _ = constants
    tiles = tiles or decode_tiles(kind, group, head_dim)
    splits = max(1, triton.cdiv(step.max_context, tiles.split))
    if stride is None:
        stride = min(splits, max(triton.cdiv(_PROGRAMS, rows * heads), triton.cdiv(splits, _LONGEST_CHAIN)))
    window = window or 1 << 30
    part, stat = out, out
    if stride > 1:
        part = torch.empty((rows, q.shape[1], splits, head_dim), dtype=torch.float32, device=q.device)
        stat = torch.empty((rows, q.shape[1], splits, 2), dtype=torch.float32, device=q.device)
    arguments = (q, *cache, step.block_table, step.context_len, out, part, stat, step.block_table.shape[1], window, splits,
                 stride, q_scale, v_scale, *constants, tiles.split, tiles.tile)
    grid = (heads, rows, stride)
    if tiles.vector:
        lanes_per_row = max(1, lanes * kv.v.element_size() // 16)
        slots = min(tiles.tile, max(1, 32 * tiles.warps // lanes_per_row))
        _decode_vector[grid](*arguments, slots, stride == 1, tiles.stages, num_warps=tiles.warps)
    else:
        _decode_dot[grid](*arguments, max(16, triton.next_power_of_2(group)), _P_FACTOR.get(kind, 1.0), stride == 1, tiles.stages,
                          num_warps=tiles.warps)
    if stride > 1:
        chains = 1 if splits <= _LONGEST_CHAIN else 16
        _combine[(q.shape[1], rows)](part, stat, step.context_len, out, window, splits, v_scale, q.shape[1], head_dim,
                                     triton.next_power_of_2(head_dim), tiles.split, chains, num_warps=1 if chains == 1 else 4)


def prompt(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor,
           tiles: tuple[int, Tiles] | None = None) -> None:
    """The rows of `attention` after the first `step.num_decode`, into `out`."""
    cache, q_scale, v_scale, constants = _arguments(q, kv, scale)
    kind = constants[6]
    lines, cut = tiles or prompt_tiles(kind, q.shape[2], kv.v.element_size())
    grid = (q.shape[1], triton.cdiv(step.max_query, lines), step.block_table.shape[0] - step.num_decode)
    _prompt[grid](q, *cache, step.block_table, step.context_len, step.query_start, out, step.block_table.shape[1],
                  window or 1 << 30, step.num_decode, q_scale, v_scale, *constants, window > 0, cut.tile, lines,
                  _P_FACTOR.get(kind, 1.0), cut.stages, num_warps=cut.warps)


def attention(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int) -> Tensor:
    """`reference.attention`: decode rows by `decode`, prompt rows by `prompt`. Rows of context 0 (padding) give zeros."""
    q = q.contiguous()
    out = torch.empty_like(q)
    if step.num_decode:
        decode(q, kv, step, scale, window, out)
    if step.block_table.shape[0] > step.num_decode and step.max_query:
        prompt(q, kv, step, scale, window, out)
    return out
