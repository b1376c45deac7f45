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
_ROUND = tl.constexpr(12582912.0)  # adding and subtracting 1.5 * 2^23 rounds to the nearest integer
_CHAIN = tl.constexpr(8)  # splits summed one after the other; more than that are summed as chains

# ---- stored numbers to numbers that multiply --------------------------------------------------------------------------


@triton.jit
def _units(raw, KIND: tl.constexpr, ASM: tl.constexpr):
    """Sixteen stored bits to fp16 codes, exactly, for the tensor cores: four tensors like `raw` (of which 16- and 32-bit kinds
    use one, 8-bit kinds two). int8: channels 2j, 2j + 1. int4: 2j, 2j + 1, D/2 + 2j, D/2 + 2j + 1. Two neighbouring channels
    in one load is what lets V be transposed on the way to the registers (ldmatrix moves 16 bits). An fp8 e4m3 comes as
    value / 256: its exponent is only shifted into place. Integers pass through 0x6400 | n, the fp16 1024 + n."""
    if KIND == "copy":
        return raw, raw, raw, raw
    elif KIND == "int8":
        if ASM:
            even, odd = tl.inline_asm_elementwise(
                "{ .reg .b32 m; mov.b32 m, 0x64006400; and.b32 $0, $2, 0x00ff00ff; or.b32 $0, $0, m;"
                " prmt.b32 $1, $2, m, 0x7371; sub.rn.f16x2 $0, $0, m; sub.rn.f16x2 $1, $1, m; }",
                "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            even, odd = (raw & 0xFF).to(tl.float16), ((raw >> 8) & 0xFF).to(tl.float16)
        return even, odd, even, odd
    elif KIND == "int4":
        if ASM:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 m, t, f; mov.b32 m, 0x64006400; mov.b32 f, 0x2c002c00; shr.u32 t, $4, 8;"
                " and.b32 $0, $4, 0x000f000f; or.b32 $0, $0, m; sub.rn.f16x2 $0, $0, m;"
                " and.b32 $1, t, 0x000f000f; or.b32 $1, $1, m; sub.rn.f16x2 $1, $1, m; mov.b32 m, 0xd400d400;"
                " and.b32 $2, $4, 0x00f000f0; or.b32 $2, $2, 0x64006400; fma.rn.f16x2 $2, $2, f, m;"
                " and.b32 $3, t, 0x00f000f0; or.b32 $3, $3, 0x64006400; fma.rn.f16x2 $3, $3, f, m; }",
                "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            return ((raw & 15).to(tl.float16), ((raw >> 8) & 15).to(tl.float16),
                    ((raw >> 4) & 15).to(tl.float16), ((raw >> 12) & 15).to(tl.float16))
    elif KIND == "fp8":
        if ASM:
            even, odd = tl.inline_asm_elementwise(
                "{ .reg .b32 e, s; shl.b32 e, $2, 8; and.b32 s, e, 0x80008000; shr.u32 e, e, 1; and.b32 e, e, 0x3f803f80;"
                " or.b32 $0, e, s; and.b32 s, $2, 0x80008000; shr.u32 e, $2, 1; and.b32 e, e, 0x3f803f80; or.b32 $1, e, s; }",
                "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            even, odd = raw << 8, raw & -256
            even = ((even & -32768) | ((even >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
            odd = ((odd & -32768) | ((odd >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
        return even, odd, even, odd
    else:
        if ASM:
            even, odd = tl.inline_asm_elementwise(
                "{ shl.b32 $0, $2, 8; and.b32 $0, $0, 0xff00ff00; and.b32 $1, $2, 0xff00ff00; }",
                "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            even, odd = (raw << 8).to(tl.float16, bitcast=True), (raw & -256).to(tl.float16, bitcast=True)
        return even, odd, even, odd


@triton.jit
def _wide_codes(raw, KIND: tl.constexpr, ASM: tl.constexpr):
    """Stored bytes to fp32 for vector arithmetic: (low, high), high for int4 only. With ASM an integer n comes as 1024 + n
    and a high nibble as 1024 + 16 n; whoever sums them takes the offset out once (`_OFFSET`)."""
    if KIND == "int8":
        if ASM:
            x = tl.inline_asm_elementwise(
                "{ .reg .b32 a, b; .reg .b16 c, d, e, f; prmt.b32 a, $4, 0x64646464, 0x4140;"
                " prmt.b32 b, $4, 0x64646464, 0x4342; mov.b32 {c, d}, a; mov.b32 {e, f}, b; cvt.f32.f16 $0, c;"
                " cvt.f32.f16 $1, d; cvt.f32.f16 $2, e; cvt.f32.f16 $3, f; }",
                "=f,=f,=f,=f,r", [raw], dtype=tl.float32, is_pure=True, pack=4)
        else:
            x = raw.to(tl.float32)
        return x, x
    elif KIND == "int4":
        if ASM:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 a, t; .reg .b16 c, d; shr.u32 t, $8, 8;"
                " and.b32 a, $8, 0xf000f; or.b32 a, a, 0x64006400; mov.b32 {c, d}, a; cvt.f32.f16 $0, c; cvt.f32.f16 $2, d;"
                " and.b32 a, t, 0xf000f; or.b32 a, a, 0x64006400; mov.b32 {c, d}, a; cvt.f32.f16 $1, c; cvt.f32.f16 $3, d;"
                " and.b32 a, $8, 0xf000f0; or.b32 a, a, 0x64006400; mov.b32 {c, d}, a; cvt.f32.f16 $4, c; cvt.f32.f16 $6, d;"
                " and.b32 a, t, 0xf000f0; or.b32 a, a, 0x64006400; mov.b32 {c, d}, a; cvt.f32.f16 $5, c; cvt.f32.f16 $7, d; }",
                "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [raw], dtype=(tl.float32, tl.float32), is_pure=True, pack=4)
        else:
            return (raw & 15).to(tl.float32), (raw >> 4).to(tl.float32)
    else:
        x = raw.to(tl.float32)
        return x, x


@triton.jit
def _byte_dot(raw, high, low):
    """Codes times 16-bit integer queries (high * 256 + low, both int8), four channels at a time: int32, exact. Three of four
    results are the constant 0, which the sum over channels folds away."""
    return tl.inline_asm_elementwise(
        "{ .reg .s32 t; dp4a.u32.s32 t, $4, $5, 0; shl.b32 t, t, 8; dp4a.u32.s32 $0, $4, $6, t;"
        " mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r", [raw, high, low], dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def _nibble_dot(raw, high, low, high_of_high, low_of_high):
    """`_byte_dot` of packed int4: low nibbles with the first pair, high nibbles with the second."""
    return tl.inline_asm_elementwise(
        "{ .reg .s32 t; .reg .b32 a, b; and.b32 a, $4, 0x0f0f0f0f; shr.u32 b, $4, 4; and.b32 b, b, 0x0f0f0f0f;"
        " dp4a.u32.s32 t, a, $5, 0; dp4a.u32.s32 t, b, $7, t; shl.b32 t, t, 8; dp4a.u32.s32 t, a, $6, t;"
        " dp4a.u32.s32 $0, b, $8, t; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r,r,r", [raw, high, low, high_of_high, low_of_high], dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def _integer_query(q, factor):
    """q * factor rounded to 16 bits and split in two int8: (high, low) with high * 256 + low; its sum is exact too."""
    whole = ((q * factor + _ROUND) - _ROUND).to(tl.int32)
    high = (whole + 128) >> 8
    return high.to(tl.int8), (whole - high * 256).to(tl.int8), tl.sum(whole, 0)


@triton.jit
def _scale_min(params):
    """The two fp16 of a parameter word. int32 -> fp32 (scale, minimum)."""
    scale = (params & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = ((params >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _power_of_two(x):
    """(2^e, 2^-e) with 2^e <= x < 2^(e + 1), for a normal x > 0."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


# ---- decode, one query per KV head: vector arithmetic ---------------------------------------------------------------

_SIZES = ["table_width", "window", "num_splits", "stride", "first_row"]  # a new value must not mean a new compilation


@triton.jit(do_not_specialize=_SIZES)
def _decode_vector(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, out_ptr, part_ptr, stat_ptr,
                   table_width, window, num_splits, stride, q_scale, v_scale,
                   HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr,
                   TILE: tl.constexpr, SLOTS: tl.constexpr, DIRECT: tl.constexpr):
    """One program: a (row, KV head) and every stride-th split of its positions; GROUP is 1. DIRECT (stride 1) writes the
    result, else each split leaves its sums for `_combine`. A tile is [SLOTS, TILE // SLOTS, channels]: the middle axis lies in
    a thread's registers and each slot keeps its own running maximum, so warps exchange nothing until a split ends. Positions
    past the end are clamped, not masked: they repeat a row that is there and get weight 0."""
    INTEGER: tl.constexpr = KIND == "int8" or KIND == "int4"
    INT4: tl.constexpr = KIND == "int4"
    BYTE_DOT: tl.constexpr = ASM and INTEGER
    OFFSET: tl.constexpr = 1024.0 if ASM else 0.0
    NIBBLE: tl.constexpr = 1.0 / 16 if ASM else 1.0
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    seen = tl.maximum(context - window, 0)
    channel = tl.arange(0, LANES)
    in_width = channel < WIDTH
    q_base = q_ptr + (row * HEADS + head).to(tl.int64) * DIM
    q = tl.load(q_base + channel, mask=in_width, other=0.0).to(tl.float32) * q_scale
    q_high = q
    if INT4:
        q_high = tl.load(q_base + WIDTH + channel, mask=in_width, other=0.0).to(tl.float32) * q_scale
    if BYTE_DOT:
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(q), tl.abs(q_high)), 0), 1e-30)
        q_step = largest / 32512.0
        a, b, whole_sum = _integer_query(q, 1.0 / q_step)
        if INT4:
            a_high, b_high, high_sum = _integer_query(q_high, 1.0 / q_step)
            whole_sum += high_sum
        q_sum = whole_sum.to(tl.float32) * q_step
    else:
        q_sum = tl.sum(q, 0)
        if INT4:
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
        steps = tl.zeros((SLOTS,), tl.float32)
        acc = tl.zeros((SLOTS, LANES), tl.float32)
        acc_high = tl.zeros((SLOTS, LANES), tl.float32)
        position = tl.minimum(tl.maximum(start + tile, seen), stop - 1)
        block = tl.load(table + position // BLOCK_SIZE)
        for first in tl.range(start, stop, TILE):
            kept = (first + tile >= seen) & (first + tile < stop)
            token = (block * HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
            offset = token.to(tl.int64)[:, :, None] * WIDTH + channel[None, None, :]
            if INTEGER:
                k_params = tl.load(k_params_ptr + token)
                v_params = tl.load(v_params_ptr + token)
            if LANES == WIDTH:
                k_raw = tl.load(k_ptr + offset)
                v_raw = tl.load(v_ptr + offset)
            else:
                k_raw = tl.load(k_ptr + offset, mask=in_width[None, None, :], other=0)
                v_raw = tl.load(v_ptr + offset, mask=in_width[None, None, :], other=0)
            position = tl.minimum(tl.maximum(first + TILE + tile, seen), stop - 1)
            block = tl.load(table + position // BLOCK_SIZE)  # for the next tile, while this one is on its way
            if BYTE_DOT:
                if INT4:
                    dots = _nibble_dot(k_raw, a[None, None, :], b[None, None, :], a_high[None, None, :],
                                       b_high[None, None, :])
                else:
                    dots = _byte_dot(k_raw, a[None, None, :], b[None, None, :])
                score = tl.sum(dots, 2).to(tl.float32) * q_step
            else:
                k, k_high = _wide_codes(k_raw, KIND, False)
                score = q[None, None, :] * k
                if INT4:
                    score += q_high[None, None, :] * k_high
                score = tl.sum(score, 2)
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
                steps = steps * fade + tl.sum(p, 1)
            v, v_high = _wide_codes(v_raw, KIND, ASM)
            acc = acc * fade[:, None] + tl.sum(p[:, :, None] * v, 1)
            if INT4:
                acc_high = acc_high * fade[:, None] + tl.sum(p[:, :, None] * v_high, 1)
            m = m_next
        top = tl.ceil(tl.max(m, 0))
        share = tl.exp2(m - top)
        split_weight = tl.sum(weight * share, 0)
        split_out = tl.sum(acc * share[:, None], 0)
        split_high = split_out
        if INTEGER:
            split_bias = tl.sum(bias * share, 0)
            split_steps = tl.sum(steps * share, 0) * OFFSET
            split_out += split_bias - split_steps
            if INT4:
                split_high = tl.sum(acc_high * share[:, None], 0) * NIBBLE + (split_bias - split_steps * NIBBLE)
        if DIRECT:
            common = tl.maximum(best, top)
            old, new = tl.exp2(best - common), tl.exp2(top - common)
            total = total * old + split_weight * new
            out = out * old + split_out * new
            out_high = out_high * old + split_high * new
            best = common
        else:
            index = (row * HEADS + head).to(tl.int64) * num_splits + split
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
def _part(q_ptr, base, kept, PART: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr,
          KIND: tl.constexpr):
    """The channels of M query rows that meet the PART-th tensor of `_units`. fp32 [M, LANES]."""
    unit = tl.arange(0, LANES)
    channel = unit if KIND == "copy" else 2 * unit + PART % 2 + PART // 2 * (DIM // 2)
    return tl.load(q_ptr + base[:, None] + channel[None, :], mask=kept[:, None] & (unit < UNITS)[None, :], other=0.0
                   ).to(tl.float32)


@triton.jit
def _queries(q_ptr, base, kept, k_ptr, DIM: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr):
    """M query rows at offsets `base` in the type of the dot: (four parts as `_units` has, what each row was divided by [M], sum
    over channels [M]). fp16 rows are divided by a power of two first, so that a bf16 outlier cannot overflow."""
    dtype = k_ptr.dtype.element_ty if KIND == "copy" else tl.float16
    q0 = _part(q_ptr, base, kept, 0, DIM, UNITS, LANES, KIND)
    q1 = _part(q_ptr, base, kept, 1, DIM, UNITS, LANES, KIND) if KIND != "copy" else q0
    q2 = _part(q_ptr, base, kept, 2, DIM, UNITS, LANES, KIND) if KIND == "int4" else q0
    q3 = _part(q_ptr, base, kept, 3, DIM, UNITS, LANES, KIND) if KIND == "int4" else q1
    largest = tl.max(tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3))), 1)
    if dtype == tl.float16:
        factor, inverse = _power_of_two(tl.maximum(largest, 1e-30))
    else:
        factor, inverse = tl.zeros_like(largest) + 1.0, tl.zeros_like(largest) + 1.0
    q0 = (q0 * inverse[:, None]).to(dtype)
    q1 = (q1 * inverse[:, None]).to(dtype)
    q2 = (q2 * inverse[:, None]).to(dtype)
    q3 = (q3 * inverse[:, None]).to(dtype)
    q_sum = tl.sum(q0.to(tl.float32) + q1.to(tl.float32), 1)
    if KIND == "int4":
        q_sum += tl.sum(q2.to(tl.float32) + q3.to(tl.float32), 1)
    return q0, q1, q2, q3, factor, q_sum


@triton.jit
def _store_parts(ptr, base, kept, a0, a1, a2, a3, DIM: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr,
                 KIND: tl.constexpr):
    """Put the parts of M rows back in channel order, at offsets `base`, in the pointer's type."""
    dtype = ptr.dtype.element_ty
    if KIND == "copy":
        unit = tl.arange(0, LANES)
        tl.store(ptr + base[:, None] + unit[None, :], a0.to(dtype), mask=kept[:, None] & (unit < UNITS)[None, :])
    else:
        channel = tl.arange(0, 2 * LANES)
        target = ptr + base[:, None] + channel[None, :]
        kept = kept[:, None] & (channel < 2 * UNITS)[None, :]
        tl.store(target, tl.interleave(a0, a1).to(dtype), mask=kept)
        if KIND == "int4":
            tl.store(target + DIM // 2, tl.interleave(a2, a3).to(dtype), mask=kept)


@triton.jit
def _tiles(q0, q1, q2, q3, q_factor, q_sum, last_seen, m, weight, bias, a0, a1, a2, a3, start, stop, seen, end,
           k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
           KV_HEADS: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           KIND: tl.constexpr, ASM: tl.constexpr, P_FACTOR: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
           STAGES: tl.constexpr):
    """Online softmax of M query rows over the tiles of [start, stop). Positions are clamped to [seen, end), so what is loaded
    is there; row i sees (last_seen[i] - window, last_seen[i]]. MASKED False promises that every row sees every position."""
    INTEGER: tl.constexpr = KIND == "int8" or KIND == "int4"
    PARTS: tl.constexpr = 1 if KIND == "copy" else (4 if KIND == "int4" else 2)
    unit = tl.arange(0, LANES)
    # A tile inside one block needs one table entry, else one for each position; read one tile ahead.
    column = tl.arange(0, TILE)
    SCALAR: tl.constexpr = BLOCK_SIZE % TILE == 0
    if SCALAR:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < stop, other=0)
    else:
        block = tl.load(table + tl.minimum(tl.maximum(start + column, seen), end - 1) // BLOCK_SIZE, mask=start < stop, other=0)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        position = first + column
        if MASKED:
            position = tl.minimum(tl.maximum(position, seen), end - 1)
        if SCALAR:
            token = (block * KV_HEADS + head) * BLOCK_SIZE + first % BLOCK_SIZE + (position - first)
            block = tl.load(table + tl.minimum(first + TILE, end - 1) // BLOCK_SIZE)
        else:
            token = (block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
            block = tl.load(table + tl.minimum(tl.maximum(first + TILE + column, seen), end - 1) // BLOCK_SIZE)
        offset = token.to(tl.int64)[:, None] * UNITS + unit[None, :]
        if LANES == UNITS:
            k_raw = tl.load(k_ptr + offset)
            v_raw = tl.load(v_ptr + offset)
        else:
            k_raw = tl.load(k_ptr + offset, mask=(unit < UNITS)[None, :], other=0)
            v_raw = tl.load(v_ptr + offset, mask=(unit < UNITS)[None, :], other=0)
        if INTEGER:
            k_params = tl.load(k_params_ptr + token)
            v_params = tl.load(v_params_ptr + token)
        k0, k1, k2, k3 = _units(k_raw, KIND, ASM)
        score = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if PARTS > 1:
            score = tl.dot(q1, tl.trans(k1), score)
        if PARTS > 2:
            score = tl.dot(q2, tl.trans(k2), score)
            score = tl.dot(q3, tl.trans(k3), score)
        if INTEGER:
            k_scale, k_min = _scale_min(k_params)
            score = score * k_scale[None, :] + q_sum[:, None] * k_min[None, :]
        if MASKED:
            place = first + column
            visible = (place[None, :] <= last_seen[:, None]) & (place[None, :] > last_seen[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        m_next = tl.maximum(m, tl.max(score, 1) * q_factor)
        fade = tl.exp2(m - m_next)
        p = tl.exp2(score * q_factor[:, None] - m_next[:, None])
        weight = weight * fade + tl.sum(p, 1)
        if INTEGER:
            v_factor, v_min = _scale_min(v_params)
            bias = bias * fade + tl.sum(p * v_min[None, :], 1)
            p = p * (v_factor * P_FACTOR)[None, :]
        v0, v1, v2, v3 = _units(v_raw, KIND, ASM)
        p = p.to(v0.dtype)
        a0 = tl.dot(p, v0, a0 * fade[:, None], input_precision="ieee")
        if PARTS > 1:
            a1 = tl.dot(p, v1, a1 * fade[:, None])
        if PARTS > 2:
            a2 = tl.dot(p, v2, a2 * fade[:, None])
            a3 = tl.dot(p, v3, a3 * fade[:, None])
        m = m_next
    return m, weight, bias, a0, a1, a2, a3


@triton.jit(do_not_specialize=_SIZES)
def _decode_dot(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, out_ptr, part_ptr, stat_ptr,
                table_width, window, num_splits, stride, q_scale, v_scale,
                HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr,
                BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, SPLIT: tl.constexpr,
                TILE: tl.constexpr, ROWS: tl.constexpr, P_FACTOR: tl.constexpr, DIRECT: tl.constexpr,
                STAGES: tl.constexpr):
    """As `_decode_vector`, for the GROUP query heads that share a KV head (padded to ROWS for the tensor cores)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    seen = tl.maximum(context - window, 0)
    member = tl.arange(0, ROWS)
    real = member < GROUP
    query = (row * HEADS + head).to(tl.int64) * GROUP + member
    q0, q1, q2, q3, q_factor, q_sum = _queries(q_ptr, query * DIM, real, k_ptr, DIM, UNITS, LANES, KIND)
    q_factor = q_factor * q_scale
    last_seen = tl.zeros((ROWS,), tl.int32) + (context - 1)
    table = table_ptr + row.to(tl.int64) * table_width
    best = tl.full((ROWS,), _FLOOR, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o0 = tl.zeros((ROWS, LANES), tl.float32)
    o1, o2, o3 = o0, o0, o0
    for split in range(seen // SPLIT + tl.program_id(2), tl.cdiv(context, SPLIT), stride):
        stop = tl.minimum(context, (split + 1) * SPLIT)
        start = tl.maximum(split * SPLIT, seen // TILE * TILE)
        zero = tl.zeros((ROWS,), tl.float32)
        zeros = tl.zeros((ROWS, LANES), tl.float32)
        m, weight, bias, a0, a1, a2, a3 = _tiles(
            q0, q1, q2, q3, q_factor, q_sum, last_seen, zero + _FLOOR, zero, zero, zeros, zeros, zeros, zeros,
            start, stop, seen, stop, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
            HEADS, UNITS, LANES, BLOCK_SIZE, KIND, ASM, P_FACTOR, TILE, True, STAGES)
        top = tl.ceil(m)
        share = tl.exp2(m - top)[:, None]
        weight = weight * tl.exp2(m - top)
        a0 = (a0 * (1.0 / P_FACTOR) + bias[:, None]) * share
        a1 = (a1 * (1.0 / P_FACTOR) + bias[:, None]) * share
        a2 = (a2 * (1.0 / P_FACTOR) + bias[:, None]) * share
        a3 = (a3 * (1.0 / P_FACTOR) + bias[:, None]) * share
        if DIRECT:
            common = tl.maximum(best, top)
            old, new = tl.exp2(best - common), tl.exp2(top - common)
            total = total * old + weight * new
            o0 = o0 * old[:, None] + a0 * new[:, None]
            o1 = o1 * old[:, None] + a1 * new[:, None]
            o2 = o2 * old[:, None] + a2 * new[:, None]
            o3 = o3 * old[:, None] + a3 * new[:, None]
            best = common
        else:
            index = query * num_splits + split
            _store_parts(part_ptr, index * DIM, real, a0, a1, a2, a3, DIM, UNITS, LANES, KIND)
            tl.store(stat_ptr + index * 2, top, mask=real)
            tl.store(stat_ptr + index * 2 + 1, weight, mask=real)
    if DIRECT:
        inverse = (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        _store_parts(out_ptr, query * DIM, real, o0 * inverse, o1 * inverse, o2 * inverse, o3 * inverse,
                     DIM, UNITS, LANES, KIND)


@triton.jit(do_not_specialize=_SIZES)
def _prompt(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, query_start_ptr, out_ptr,
            table_width, window, first_row, q_scale, v_scale,
            HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
            TILE: tl.constexpr, ROWS: tl.constexpr, P_FACTOR: tl.constexpr, STAGES: tl.constexpr):
    """One program: ROWS consecutive prompt tokens of one row under one query head (HEADS counts KV heads). Tiles of keys lie
    at multiples of TILE and a tile that a query does not see changes nothing, so where a chunk starts cannot be told from the
    result. Programs with the most keys start first."""
    query_head = tl.program_id(0)
    row = first_row + tl.program_id(2)
    begin = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - begin
    context = tl.load(context_ptr + row)
    offset = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    if offset < length:
        line = offset + tl.arange(0, ROWS)
        real = line < length
        query = ((begin + line).to(tl.int64) * GROUP * HEADS + query_head) * DIM
        q0, q1, q2, q3, q_factor, q_sum = _queries(q_ptr, query, real, k_ptr, DIM, UNITS, LANES, KIND)
        q_factor = q_factor * q_scale
        last_seen = context - length + line
        position = context - length + offset  # of the first line
        end = tl.minimum(context, position + ROWS)
        seen = tl.maximum(position + 1 - window, 0)
        start = seen // TILE * TILE
        table = table_ptr + row.to(tl.int64) * table_width
        head = query_head // GROUP
        m = tl.full((ROWS,), _FLOOR, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        bias = tl.zeros((ROWS,), tl.float32)
        a0 = tl.zeros((ROWS, LANES), tl.float32)
        a1, a2, a3 = a0, a0, a0
        if not WINDOWED:
            whole = (position + 1) // TILE * TILE
            m, weight, bias, a0, a1, a2, a3 = _tiles(
                q0, q1, q2, q3, q_factor, q_sum, last_seen, m, weight, bias, a0, a1, a2, a3,
                start, whole, seen, end, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
                HEADS, UNITS, LANES, BLOCK_SIZE, KIND, ASM, P_FACTOR, TILE, False, STAGES)
            start = whole
        m, weight, bias, a0, a1, a2, a3 = _tiles(
            q0, q1, q2, q3, q_factor, q_sum, last_seen, m, weight, bias, a0, a1, a2, a3,
            start, end, seen, end, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table, head, window,
            HEADS, UNITS, LANES, BLOCK_SIZE, KIND, ASM, P_FACTOR, TILE, True, STAGES)
        inverse = (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
        bias = bias[:, None]
        _store_parts(out_ptr, query, real, (a0 * (1.0 / P_FACTOR) + bias) * inverse, (a1 * (1.0 / P_FACTOR) + bias) * inverse,
                     (a2 * (1.0 / P_FACTOR) + bias) * inverse, (a3 * (1.0 / P_FACTOR) + bias) * inverse,
                     DIM, UNITS, LANES, KIND)


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


# The dot's probabilities carry scale_v, at most 131008 / levels: a factor that uses fp16's range and cannot leave it.
_P_FACTOR = {"int8": 64.0, "int4": 4.0}
_FP8_SHIFT = {"fp8": 256.0}  # e4m3's exponent bias against fp16's
_PROGRAMS = 4224  # what keeps 132 multiprocessors evenly busy to the end
_LONGEST_CHAIN = 8


def decode_tiles(kind: str, group: int, head_dim: int, element_size: int = 2) -> Tiles:
    """Never a function of the batch: tile and split decide the order of sums. Swept on an H200 at head_dim 128."""
    if element_size == 4:
        return Tiles(16, 1, 1, vector=True) if group == 1 else Tiles(32, 4, 1)
    if group == 1 and kind in ("int8", "int4"):
        return Tiles(32 if head_dim <= 128 else 16, 1, 1, split=512 if kind == "int8" else 256, vector=True)
    if group == 1 and kind == "copy":
        return Tiles(128, 4, 1, split=512, vector=True) if head_dim <= 128 else Tiles(16, 1, 1, vector=True)
    if head_dim > 128:
        return Tiles(32, 4, 2)
    if kind in ("int8", "int4"):
        return Tiles(32, 1, 3, split=512)
    return Tiles(64, 2, 2, split=512) if kind == "copy" else Tiles(64, 4, 3, split=512)


def prompt_tiles(kind: str, head_dim: int, element_size: int, shared_bytes: int) -> tuple[int, Tiles]:
    """(query rows a program, tiles) for a multiprocessor with `shared_bytes` of shared memory. A function of the model and
    the device: a row's bits may not depend on the batch, so neither may these."""
    if element_size == 4:
        return 32, Tiles(32, 4, 1)
    lines, tile, warps = (128, 64, 8) if head_dim <= 128 else (64, 32, 4)
    lanes = triton.next_power_of_2(head_dim)
    room = shared_bytes - 2 * lanes * (lines if kind == "copy" else 2 * tile)
    stages = max(1, min(3 if kind == "copy" else 2, room // (2 * tile * lanes * element_size)))
    return lines, Tiles(tile, warps, stages)


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 65536
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 65536)


def _arguments(q: Tensor, kv: LayerKV, scale: float, vector: bool = False) -> tuple[tuple, float, float, tuple]:
    """(cache pointers, q_scale, v_scale, constants) for one of the kernels: the vector kernel reads bytes, the others units
    of 16 bits. Raises ValueError when the shapes do not fit each other or the units."""
    kind = kv.name if KV[kv.name].num.bits <= 8 else "copy"
    _, kv_heads, block_size, width = kv.v.shape
    head_dim = q.shape[2]
    if head_dim != width * (2 if kind == "int4" else 1) or q.shape[1] % kv_heads:
        raise ValueError(f"queries [{q.shape[1]} heads, {head_dim}] do not fit a {kv.name} cache [{kv_heads} heads, {width}]")
    if kind != "copy" and width % 2:
        raise ValueError(f"a {kv.name} cache row of {width} bytes has no whole 16-bit units: head_dim {head_dim} is not "
                         "supported here; use a 16-bit cache")
    if kv.v.numel() // width >= 1 << 31:
        raise ValueError("a cache of 2^31 or more (token, head) pairs in one layer is not addressed here: use fewer blocks")
    word = lambda t, other: other if t is None else t.view(torch.int32)  # noqa: E731
    k, v, least = storage(kv.k), storage(kv.v), 1
    if not vector:
        least = 16  # the narrowest dot
        if kind != "copy":
            k, v, width = k.view(torch.int16), v.view(torch.int16), width // 2
    shift = _FP8_SHIFT.get(kind, 1.0)
    constants = (kv_heads, q.shape[1] // kv_heads, head_dim, width, max(least, triton.next_power_of_2(width)), block_size,
                 kind, not _portable())
    return ((k, v, word(kv.k_params, k), word(kv.v_params, v)), scale * LOG2_E * kv.k_scale * shift, kv.v_scale * shift,
            constants)


def decode(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor, tiles: Tiles | None = None,
           stride: int | None = None) -> None:
    """The first `step.num_decode` rows of `attention`, into `out`. `stride` programs share a row's splits: it moves no bit."""
    rows, heads, head_dim = step.num_decode, kv.v.shape[1], q.shape[2]
    group = q.shape[1] // heads
    kind = kv.name if KV[kv.name].num.bits <= 8 else "copy"
    tiles = tiles or decode_tiles(kind, group, head_dim, kv.v.element_size())
    cache, q_scale, v_scale, constants = _arguments(q, kv, scale, tiles.vector)
    splits = max(1, triton.cdiv(step.max_context, tiles.split))
    if stride is None:
        stride = min(splits, max(triton.cdiv(_PROGRAMS, rows * heads), triton.cdiv(splits, _LONGEST_CHAIN)))
    if stride == 1 and splits > _LONGEST_CHAIN:
        raise ValueError(f"one program sums at most {_LONGEST_CHAIN} splits in the order `_combine` does, asked for {splits}")
    part, stat = out, out
    if stride > 1:
        part = torch.empty((rows, q.shape[1], splits, head_dim), dtype=torch.float32, device=q.device)
        stat = torch.empty((rows, q.shape[1], splits, 2), dtype=torch.float32, device=q.device)
    window = window or 1 << 30
    arguments = (q, *cache, step.block_table, step.context_len, out, part, stat, step.block_table.shape[1], window, splits,
                 stride, q_scale, v_scale, *constants, tiles.split, tiles.tile)
    grid = (heads, rows, stride)
    if tiles.vector:
        threads_per_row = max(1, constants[4] * cache[1].element_size() // 16)
        slots = min(tiles.tile, max(1, 32 * tiles.warps // threads_per_row))
        _decode_vector[grid](*arguments, slots, stride == 1, num_warps=tiles.warps)
    else:
        _decode_dot[grid](*arguments, max(16, triton.next_power_of_2(group)), _P_FACTOR.get(kind, 1.0), stride == 1,
                          tiles.stages, num_warps=tiles.warps)
    if stride > 1:
        chains = 1 if splits <= _LONGEST_CHAIN else 16
        _combine[(q.shape[1], rows)](part, stat, step.context_len, out, window, splits, v_scale, q.shape[1], head_dim,
                                     triton.next_power_of_2(head_dim), tiles.split, chains, num_warps=1 if chains == 1 else 4)


def prompt(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor,
           tiles: tuple[int, Tiles] | None = None) -> None:
    """The rows of `attention` after the first `step.num_decode`, into `out`."""
    cache, q_scale, v_scale, constants = _arguments(q, kv, scale)
    kind = constants[6]
    lines, cut = tiles or prompt_tiles(kind, q.shape[2], kv.v.element_size(), _shared_bytes(q.device))
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
