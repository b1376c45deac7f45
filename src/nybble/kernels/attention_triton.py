"""Paged attention in portable Triton. Decode rows read the quantized cache, split over fixed ranges of positions; prompt rows
first bring their context into a bounded 16-bit scratch, then multiply at full speed (on Hopper by `attention_hopper`).

One idea: everything that fixes the order of a row's arithmetic (tiles, splits, how splits are summed) is a function of
positions alone. A row's bits then do not depend on the batch, on how a prompt was chunked, or on how many programs share the
work. Splits keep their running maximum as an *integer* power of two, so bringing two partial sums to a common maximum is
exact and summing them in registers or through memory gives the same bits.

Decode never dequantizes integer caches element by element: with value = code * scale + minimum per token and group,
    q . k = scale_k * (q . codes) + min_k * sum(q)        sum p v = sum (p * scale_v) * codes + sum p * min_v.
Codes of 8 bits and fewer become fp16 exactly (bit tricks, no conversion unit); all sums are fp32. Scores are computed as
[keys, queries]: eight queries fill a tensor-core instruction, where [queries, keys] would pad them to sixteen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nybble.formats.spec import INT4_KV_GROUPS
from nybble.kernels import cache_hopper, nvrtc
from nybble.kernels.linear_triton import generation_of
from nybble.kernels.types import LayerKV, Step

LOG2_E = 1.4426950408889634
_FLOOR = tl.constexpr(-1.0e30)  # a maximum over nothing: finite, so that differences of two of them are 0 and not NaN
_SCALES = ("q_scale", "v_scale")  # arguments that differ from layer to layer, beside tensors
_SIZES = ["table_width", "window", "num_splits", "first_row", "first_head", "capacity"]  # new values, no new kernel

# ---- stored numbers to numbers that multiply --------------------------------------------------------------------------


@triton.jit
def _planes(raw, KIND: tl.constexpr, ASM: tl.constexpr):
    """Stored units of 16 bits (or whole numbers, "copy") to fp16, exactly, for the tensor cores: one tensor like `raw` for
    each channel of a unit, in the order of `_channels`. Two bytes in one load is what lets V be transposed on the way to the
    registers (ldmatrix moves 16 bits). An fp8 e4m3 comes as value / 256: its exponent is only shifted into place. With ASM an
    integer n is the subnormal fp16 of the same bits, n / 2^24 (see `_unit_of`): tensor cores multiply it like any other."""
    if KIND == "copy":
        return (raw,)
    elif KIND == "int8":
        if ASM:
            return tl.inline_asm_elementwise(
                "and.b32 $0, $2, 0x00ff00ff; prmt.b32 $1, $2, 0, 0x4341;",
                "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            return (raw & 0xFF).to(tl.float16), ((raw >> 8) & 0xFF).to(tl.float16)
    elif KIND == "int4":
        if ASM:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; shr.u32 t, $4, 8; and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;"
                " and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }",
                "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            return ((raw & 15).to(tl.float16), ((raw >> 4) & 15).to(tl.float16),
                    ((raw >> 8) & 15).to(tl.float16), ((raw >> 12) & 15).to(tl.float16))
    elif KIND == "fp8":
        if ASM:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 e, s; shl.b32 s, $2, 8; shl.b32 e, $2, 7; and.b32 e, e, 0x3f803f80;"
                " lop3.b32 $0, s, 0x80008000, e, 0xea; shr.u32 e, $2, 1; and.b32 e, e, 0x3f803f80;"
                " lop3.b32 $1, $2, 0x80008000, e, 0xea; }",
                "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            return _half_of_e4m3(raw << 8), _half_of_e4m3(raw & -256)
    else:
        return (raw << 8).to(tl.float16, bitcast=True), (raw & -256).to(tl.float16, bitcast=True)


@triton.constexpr_function
def _unit_of(plane, kind, asm):
    """What a 1 is in the plane-th tensor of `_planes`: the odd ones of int4 stay four bits further up."""
    if not asm or kind not in ("int8", "int4"):
        return 1.0
    return 2.0**-20 if kind == "int4" and plane % 2 else 2.0**-24


@triton.jit
def _half_of_e4m3(high):
    """fp16 value / 256 of the e4m3 in the high byte of an int16."""
    return ((high & -32768) | ((high >> 1) & 0x3F80)).to(tl.float16, bitcast=True)


@triton.jit
def _channels(unit, PLANE: tl.constexpr, UNITS: tl.constexpr, KIND: tl.constexpr):
    """Which channels the PLANE-th tensor of `_planes` holds: an int4 unit has one of each quarter of the head, an 8-bit unit
    two neighbours."""
    return PLANE * UNITS + unit if KIND == "copy" or KIND == "int4" else 2 * unit + PLANE


@triton.jit
def _scale_min(params):
    """The two fp16 of a parameter word. int32 -> fp32 (scale, minimum)."""
    scale = params.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (params >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _power_of_two(x):
    """(2^e, 2^-e) with 2^e <= x < 2^(e + 1), for a normal x > 0."""
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


# ---- decode -----------------------------------------------------------------------------------------------------------
# Splits are cut at fixed positions: eight of SPLIT, then four of each double of it, at last (after LEVELS doublings) all of
# one size: short rows get parallel work, long ones few partial sums. A row's splits are summed in order in groups of LINKS,
# and groups in halves: (0 + 4) + (2 + 6) ...


@triton.jit
def _split_start(index, SPLIT: tl.constexpr, LEVELS: tl.constexpr):
    start = index
    for i in tl.static_range(1, LEVELS + 1):
        start = tl.maximum(start, (index - 4 * i) * (1 << i))
    return SPLIT * start


@triton.jit
def _splits(context, SPLIT: tl.constexpr, LEVELS: tl.constexpr):
    """How many splits `context` positions touch; `split_count` on the host."""
    units = (context + SPLIT - 1) // SPLIT
    count = units
    for i in tl.static_range(1, LEVELS + 1):
        count = tl.minimum(count, (units + (4 * i << i) + (1 << i) - 1) >> i)
    return count


def split_count(context: int, tiles: Tiles) -> int:
    """How many splits, each with a partial sum of its own, `context` positions make."""
    units = -(-context // tiles.split)
    return min(units + (4 * i << i) + (1 << i) - 1 >> i for i in range(tiles.levels + 1))


@triton.jit
def _fold(x, TILE: tl.constexpr, ROWS: tl.constexpr):
    """[TILE, ROWS] -> [EVERY, 8, ROWS], a sum over keys 32 apart: `decode_sm90.cu` gives each lane of a warp one of 32."""
    EVERY: tl.constexpr = TILE // 8 if TILE < 32 else 4
    return tl.sum(tl.reshape(x, (TILE // EVERY // 8, EVERY, 8, ROWS)), 0)


@triton.jit(do_not_specialize=_SIZES)
def _decode(q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, out_ptr, part_ptr, stat_ptr,
            table_width, window, num_splits, q_scale, v_scale,
            HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, SETS: tl.constexpr, SPLIT: tl.constexpr,
            LEVELS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, DIRECT: tl.constexpr, STAGES: tl.constexpr,
            PDL: tl.constexpr):
    """One program: the GROUP query heads of a (row, KV head), padded to ROWS, and some consecutive splits of its positions.
    SETS parameters per head and token. DIRECT (all splits) writes the result, else each split leaves its sums for `_combine`.
    Positions past an end are clamped, not masked: they repeat a row that is there and get weight 0. With PDL what happens
    before the wait may read only what is older than the kernel before this one: contexts and tables."""
    INTEGER: tl.constexpr = KIND == "int8" or KIND == "int4"
    PLANES: tl.constexpr = DIM // UNITS
    PER_SET: tl.constexpr = PLANES // SETS
    P_FACTOR: tl.constexpr = 64.0 if KIND == "int8" else (4.0 if KIND == "int4" else 1.0)
    # P_FACTOR: probabilities carry scale_v, at most 131008 / levels; this uses fp16's range and cannot leave it.
    SCORE_UNIT: tl.constexpr = _unit_of(1, KIND, ASM)  # of a dot: even planes of int4 meet queries 16 times as large
    dtype: tl.constexpr = k_ptr.dtype.element_ty if KIND == "copy" else tl.float16
    SCALAR: tl.constexpr = BLOCK_SIZE % TILE == 0  # a tile inside one block needs one table entry, else one a position
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    column = tl.arange(0, TILE)
    table = table_ptr + row.to(tl.int64) * table_width
    seen = tl.maximum(context - window, 0)
    last = tl.maximum(context - 1, 0)
    # Splits of this program: those that start in its share of the positions. The last splits start first.
    sharers = tl.num_programs(2)
    share = sharers - 1 - tl.program_id(2)
    split = _splits(seen + 1, SPLIT, LEVELS) - 1
    if share > 0:
        split = _splits(seen + (context - seen) * share // sharers, SPLIT, LEVELS)
    end = _splits(seen + (context - seen) * (share + 1) // sharers, SPLIT, LEVELS)
    stop = tl.minimum(context, _split_start(end, SPLIT, LEVELS))
    start = tl.maximum(_split_start(split, SPLIT, LEVELS), seen // TILE * TILE)
    split_stop = tl.minimum(stop, _split_start(split + 1, SPLIT, LEVELS))
    if SCALAR:
        block = tl.load(table + tl.minimum(start, last) // BLOCK_SIZE)  # read one tile ahead
    else:
        block = tl.load(table + tl.minimum(tl.maximum(start + column, seen), last) // BLOCK_SIZE)
    if PDL:
        gdc_wait()
        if not DIRECT:  # to `_combine`; what follows a DIRECT one would take room from programs of its successor
            gdc_launch_dependents()
    member = tl.arange(0, ROWS)
    real = member < GROUP
    query = (row * HEADS + head).to(tl.int64) * GROUP + member
    unit = tl.arange(0, LANES)
    in_units = unit < UNITS
    zeros = tl.zeros((LANES, ROWS), tl.float32)
    zero = tl.zeros((ROWS,), tl.float32)

    # Queries in the type of the dot; fp16 ones are divided by a power of two first, so that a bf16 outlier cannot overflow.
    wide = ()
    largest = zero + 1e-30
    for i in tl.static_range(PLANES):
        x = tl.load(q_ptr + query[None, :] * DIM + _channels(unit, i, UNITS, KIND)[:, None],
                    mask=real[None, :] & in_units[:, None], other=0.0).to(tl.float32)
        wide = wide + (x,)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
    factor, inverse = _power_of_two(largest)
    if dtype != tl.float16:
        factor, inverse = zero + 1.0, zero + 1.0
    q = ()
    q_sums = ()
    for s in tl.static_range(SETS):
        q_sum = zero
        for i in tl.static_range(PER_SET):
            x = (wide[s * PER_SET + i] * inverse[None, :]).to(dtype)
            q_sum += tl.sum(x.to(tl.float32), 0)
            q = q + ((x * (SCORE_UNIT / _unit_of(i, KIND, ASM))).to(dtype),)
        q_sums = q_sums + (q_sum * SCORE_UNIT,)
    factor = factor * (q_scale * (1 / SCORE_UNIT))

    best = zero + _FLOOR
    total = zero
    out = (zeros,) * PLANES
    m = zero + _FLOOR
    nothing = _fold(tl.zeros((TILE, ROWS), tl.float32), TILE, ROWS)
    weight = nothing
    bias = (weight,) * SETS
    acc = (zeros,) * PLANES
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        place = first + column
        position = tl.minimum(tl.maximum(place, seen), last)
        page = block * HEADS + head
        if SCALAR:
            inside = first % BLOCK_SIZE + (position - first)
            block = tl.load(table + tl.minimum(first + TILE, last) // BLOCK_SIZE)
        else:
            inside = position % BLOCK_SIZE
            block = tl.load(table + tl.minimum(tl.maximum(place + TILE, seen), last) // BLOCK_SIZE)
        token = page * BLOCK_SIZE + inside
        params = page * (BLOCK_SIZE * SETS) + inside
        token = token.to(tl.int64) * UNITS
        if LANES == UNITS:
            k_raw = tl.load(k_ptr + token[:, None] + unit[None, :])
            v_raw = tl.load(v_ptr + token[None, :] + unit[:, None])
        else:
            k_raw = tl.load(k_ptr + token[:, None] + unit[None, :], mask=in_units[None, :], other=0)
            v_raw = tl.load(v_ptr + token[None, :] + unit[:, None], mask=in_units[:, None], other=0)
        k = _planes(k_raw, KIND, ASM)
        score = tl.zeros((TILE, ROWS), tl.float32)
        for s in tl.static_range(SETS):
            part = tl.zeros((TILE, ROWS), tl.float32)
            for i in tl.static_range(PER_SET):
                part = tl.dot(k[s * PER_SET + i], q[s * PER_SET + i], part, input_precision="ieee")
            if INTEGER:
                k_scale, k_min = _scale_min(tl.load(k_params_ptr + params + s * BLOCK_SIZE))
                score += k_min[:, None] * q_sums[s][None, :]
                score += part * k_scale[:, None]
            else:
                score = part
        kept = (place >= seen) & (place < context)
        score = tl.where(kept[:, None], score, float("-inf"))
        m_next = tl.maximum(m, tl.max(score, 0) * factor)
        fade = tl.exp2(m - m_next)
        p = tl.exp2(score * factor[None, :] - m_next[None, :])
        weight = weight * fade[None, None, :] + _fold(p, TILE, ROWS)
        v = _planes(v_raw, KIND, ASM)
        acc_next = ()
        bias_next = ()
        for s in tl.static_range(SETS):
            portion = p
            if INTEGER:
                v_factor, v_min = _scale_min(tl.load(v_params_ptr + params + s * BLOCK_SIZE))
                # fma, not p * v_min: with which of two products a sum is fused, compilers decide as they like
                lows = tl.fma(p, tl.broadcast_to(v_min[:, None], (TILE, ROWS)), tl.zeros((TILE, ROWS), tl.float32))
                bias_next = bias_next + (bias[s] * fade[None, None, :] + _fold(lows, TILE, ROWS),)
                portion = p * (v_factor * P_FACTOR)[:, None]
            portion = portion.to(dtype)
            for i in tl.static_range(PER_SET):
                old = acc[s * PER_SET + i] * fade[None, :]
                acc_next = acc_next + (tl.dot(v[s * PER_SET + i], portion, old, input_precision="ieee"),)
        acc = acc_next
        if INTEGER:
            bias = bias_next
        m = m_next
        if first + TILE >= split_stop:
            top = tl.ceil(m)
            scale = tl.exp2(m - top)
            split_weight = tl.sum(tl.sum(weight, 0), 0) * scale
            scale *= 1.0 / P_FACTOR
            common = tl.maximum(best, top)
            keep, new = tl.exp2(best - common), tl.exp2(top - common)
            if DIRECT:
                scale *= new  # a power of two: as if done after
            index = query * num_splits + split
            out_next = ()
            for i in tl.static_range(PLANES):
                piece = acc[i]
                if INTEGER:
                    low = tl.sum(tl.sum(bias[i // PER_SET], 0), 0) * P_FACTOR
                    piece = piece * (1 / _unit_of(i, KIND, ASM)) + low[None, :]
                piece *= scale[None, :]
                if DIRECT:
                    keeps = tl.broadcast_to(keep[None, :], (LANES, ROWS))
                    out_next = out_next + (tl.fma(out[i], keeps, piece),)  # not piece's product: it is rounded, as in memory
                else:
                    tl.store(part_ptr + index[None, :] * DIM + _channels(unit, i, UNITS, KIND)[:, None], piece,
                             mask=real[None, :] & in_units[:, None])
            if DIRECT:
                total = total * keep + split_weight * new
                best = common
                out = out_next
            else:
                tl.store(stat_ptr + index * 2, top, mask=real)
                tl.store(stat_ptr + index * 2 + 1, split_weight, mask=real)
            split += 1
            split_stop = tl.minimum(stop, _split_start(split + 1, SPLIT, LEVELS))
            m = zero + _FLOOR
            weight = nothing
            bias = (weight,) * SETS
            acc = (zeros,) * PLANES
    if DIRECT:
        if PDL:
            gdc_launch_dependents()
        final = v_scale / tl.where(total > 0, total, 1.0)
        for i in tl.static_range(PLANES):
            tl.store(out_ptr + query[None, :] * DIM + _channels(unit, i, UNITS, KIND)[:, None],
                     (out[i] * final[None, :]).to(out_ptr.dtype.element_ty), mask=real[None, :] & in_units[:, None])


@triton.jit(do_not_specialize=_SIZES)
def _combine(part_ptr, stat_ptr, context_ptr, out_ptr, window, num_splits, v_scale,
             HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, LEVELS: tl.constexpr,
             LINKS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    """Sum LANES channels of a (row, query head)'s splits: 2^DEPTH groups side by side, LINKS of each one after the other."""
    GROUPS: tl.constexpr = 1 << DEPTH
    head = tl.program_id(0)
    row = tl.program_id(1)
    context = tl.load(context_ptr + row)
    first = _splits(tl.maximum(context - window, 0) + 1, SPLIT, LEVELS) - 1
    last = _splits(context, SPLIT, LEVELS)
    channel = tl.program_id(2) * LANES + tl.arange(0, LANES)
    in_dim = (channel < DIM)[None, :]
    base = (row * HEADS + head).to(tl.int64) * num_splits
    group = tl.arange(0, GROUPS) * LINKS
    if PDL:
        gdc_wait()
    every = tl.arange(0, GROUPS * LINKS)
    common = tl.max(tl.load(stat_ptr + (base + every) * 2, mask=(every >= first) & (every < last), other=_FLOOR), 0)
    total = tl.zeros((GROUPS,), tl.float32)
    out = tl.zeros((GROUPS, LANES), tl.float32)
    for link in tl.static_range(LINKS):
        split = group + link
        kept = (split >= first) & (split < last)
        where = base + split
        share = tl.exp2(tl.load(stat_ptr + where * 2, mask=kept, other=_FLOOR) - common)
        total += share * tl.load(stat_ptr + where * 2 + 1, mask=kept, other=0.0)
        part = part_ptr + where[:, None] * DIM + channel[None, :]
        out += share[:, None] * tl.load(part, mask=kept[:, None] & in_dim, other=0.0)
    for i in tl.static_range(DEPTH):
        total = tl.sum(tl.reshape(total, (2, GROUPS >> (i + 1))), 0)
        out = tl.sum(tl.reshape(out, (2, GROUPS >> (i + 1), LANES)), 0)
    if PDL:
        gdc_launch_dependents()
    inverse = v_scale / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (row * HEADS + head).to(tl.int64) * DIM + channel[None, :],
             (out * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=in_dim)


# ---- prompts ----------------------------------------------------------------------------------------------------------


@triton.jit
def _values(ptr, params_ptr, page, inside, channel, live, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr,
            SETS: tl.constexpr):
    """[tokens, DIM] of a cache as the numbers a prompt multiplies: values, for fp8 codes (e4m3: / 256)."""
    token = (page * BLOCK_SIZE + inside).to(tl.int64)[:, None]
    kept = live[:, None] & (channel < DIM)[None, :]
    if KIND == "copy":
        return tl.load(ptr + token * DIM + channel[None, :], mask=kept, other=0.0)
    elif KIND == "int8" or KIND == "int4":
        if KIND == "int8":
            code = tl.load(ptr + token * DIM + channel[None, :], mask=kept, other=0)
        else:
            quarter = channel // (DIM // 4)
            byte = channel % (DIM // 4) * 2 + quarter // 2
            code = tl.load(ptr + token * (DIM // 2) + byte[None, :], mask=kept, other=0)
            code = (code >> (quarter % 2 * 4).to(tl.uint8)[None, :]) & 15
        where = params_ptr + page * (BLOCK_SIZE * SETS) + inside
        params = tl.load(where, mask=live, other=0)[:, None]  # of a token, not of each of its channels
        if SETS == 2:
            params = tl.where((channel < DIM // 2)[None, :], params, tl.load(where + BLOCK_SIZE, mask=live, other=0)[:, None])
        scale, minimum = _scale_min(params)
        return tl.minimum(tl.maximum(code.to(tl.float32) * scale + minimum, -65504.0), 65504.0).to(tl.float16)
    else:
        high = tl.load(ptr + token * DIM + channel[None, :], mask=kept, other=0).to(tl.int16) << 8
        return _half_of_e4m3(high) if KIND == "fp8" else high.to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=_SIZES)
def _gather(k_ptr, v_ptr, k_params_ptr, v_params_ptr, table_ptr, context_ptr, query_start_ptr, k_out_ptr, v_out_ptr,
            table_width, window, first_row, first_head, capacity,
            HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr,
            SETS: tl.constexpr, TILE: tl.constexpr):
    """TILE tokens of a (row, head), if a query sees any: cache -> k_out, v_out [rows, heads, capacity, DIM]."""
    row = tl.program_id(2)
    head = tl.program_id(1)
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    context = tl.load(context_ptr + first_row + row)
    length = tl.load(query_start_ptr + first_row + row + 1) - tl.load(query_start_ptr + first_row + row)
    seen = context - length + 1 - window
    if (tl.program_id(0) * TILE < context) & ((tl.program_id(0) + 1) * TILE > seen):
        channel = tl.arange(0, LANES)
        block = tl.load(table_ptr + (first_row + row).to(tl.int64) * table_width + position // BLOCK_SIZE,
                        mask=position < context, other=0)
        page = block * HEADS + first_head + head
        inside = position % BLOCK_SIZE
        target = ((row * tl.num_programs(1) + head).to(tl.int64) * capacity + position)[:, None] * DIM + channel[None, :]
        within = (channel < DIM)[None, :]  # zeros up to the tile's end: a weight of 0 times what was there could be NaN
        k = _values(k_ptr, k_params_ptr, page, inside, channel, position < context, DIM, BLOCK_SIZE, KIND, SETS)
        tl.store(k_out_ptr + target, k, mask=within)
        v = _values(v_ptr, v_params_ptr, page, inside, channel, position < context, DIM, BLOCK_SIZE, KIND, SETS)
        tl.store(v_out_ptr + target, v, mask=within)


@triton.jit
def _keys(q, factor, last_seen, m, weight, acc, start, stop, k_ptr, v_ptr, window,
          DIM: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr):
    """Online softmax of M query rows over the tiles of [start, stop); row i sees (last_seen[i] - window, last_seen[i]]. MASKED
    False promises that every row sees every position."""
    unit = tl.arange(0, LANES)
    column = tl.arange(0, TILE)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        place = first + column
        offset = place.to(tl.int64)[:, None] * DIM + unit[None, :]
        if LANES == DIM:
            k, v = tl.load(k_ptr + offset), tl.load(v_ptr + offset)
        else:
            k = tl.load(k_ptr + offset, mask=(unit < DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + offset, mask=(unit < DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = (place[None, :] <= last_seen[:, None]) & (place[None, :] > last_seen[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        m_next = tl.maximum(m, tl.max(score, 1) * factor)
        fade = tl.exp2(m - m_next)
        p = tl.exp2(score * factor[:, None] - m_next[:, None])
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        m = m_next
    return m, weight, acc


@triton.jit(do_not_specialize=_SIZES)
def _prompt(q_ptr, k_ptr, v_ptr, context_ptr, query_start_ptr, out_ptr, window, first_row, first_head, capacity,
            q_scale, v_scale, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
            WINDOWED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """One program: ROWS consecutive prompt tokens of one row under one query head (HEADS counts query heads, program_id(0)
    those of the slice in scratch). Tiles of keys lie at multiples of TILE and a tile that a query does not see changes nothing,
    so where a chunk starts cannot be told from the result. Programs with the most keys start first."""
    slice_row = tl.program_id(2)
    row = first_row + slice_row
    begin = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - begin
    context = tl.load(context_ptr + row)
    offset = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    if offset < length:
        line = offset + tl.arange(0, ROWS)
        unit = tl.arange(0, LANES)
        kept = (line < length)[:, None] & (unit < DIM)[None, :]
        query = ((begin + line).to(tl.int64) * HEADS + first_head * GROUP + tl.program_id(0))[:, None] * DIM + unit[None, :]
        wide = tl.load(q_ptr + query, mask=kept, other=0.0).to(tl.float32)
        factor = tl.zeros((ROWS,), tl.float32) + 1.0
        if k_ptr.dtype.element_ty == tl.float16:  # so that a bf16 outlier cannot overflow
            factor, inverse = _power_of_two(tl.maximum(tl.max(tl.abs(wide), 1), 1e-30))
            wide = wide * inverse[:, None]
        q = wide.to(k_ptr.dtype.element_ty)
        factor = factor * q_scale
        last_seen = context - length + line
        position = context - length + offset  # of the first line
        end = tl.minimum(context, position + ROWS)
        start = tl.maximum(position + 1 - window, 0) // TILE * TILE
        base = (slice_row * (tl.num_programs(0) // GROUP) + tl.program_id(0) // GROUP).to(tl.int64) * capacity * DIM
        m = tl.full((ROWS,), _FLOOR, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, LANES), tl.float32)
        if not WINDOWED:
            whole = (position + 1) // TILE * TILE
            m, weight, acc = _keys(q, factor, last_seen, m, weight, acc, start, whole, k_ptr + base, v_ptr + base, window,
                                   DIM, LANES, TILE, False, STAGES)
            start = whole
        m, weight, acc = _keys(q, factor, last_seen, m, weight, acc, start, end, k_ptr + base, v_ptr + base, window,
                               DIM, LANES, TILE, True, STAGES)
        inverse = (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
        tl.store(out_ptr + query, (acc * inverse).to(out_ptr.dtype.element_ty), mask=kept)


# ---- host ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: keys a tile, warps, pipeline stages; for decode also the smallest split and how
    often its size doubles (all but warps and stages is part of the numerics)."""

    tile: int
    warps: int
    stages: int
    split: int = 64
    levels: int = 4


def storage(tensor: Tensor) -> Tensor:
    """float8 as its bytes: devices without float8 instructions read and write it all the same."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


_PROGRAMS = 1056  # of decode, eight a multiprocessor: so many share long rows...
_ENOUGH = 320  # ... but so many (row, KV head) pairs are worked on alone: what one program sums stays in registers
_SHORT = 512  # ... unless rows may be longer than this, when few pairs would wait for the longest row's program
_ALONE = 4096  # positions that one program may be left with, however many programs there are
_LINKS = 32  # splits that are summed in order; groups of them in halves
_MOST_INT = (1 << 31) - 1  # of a position times programs, which the kernel multiplies in int32
_MOST_ROWS = 65535  # of a launch: CUDA's limit for all but the first axis of a grid
_SCRATCH_BYTES = 256 << 20  # of a prompt's K and V in 16 bits, or of partial sums; more is done in slices of heads and rows
GATHER_TILE = 128  # scratch is written in whole tiles of tokens, so that a kernel may read past a context's end


def decode_tiles(head_dim: int, bits: int) -> Tiles:
    """For a cache of `bits` a channel. Never a function of the batch: tile and splits decide the order of sums. Swept on an
    H200 at head_dim 128: one warp a program was best for every kind of cache."""
    if bits == 32:
        return Tiles(32, 4, 1)
    return Tiles(32, 2, 3) if head_dim > 128 else Tiles(64 if bits == 4 else 32, 1, 3)


def prompt_tiles(head_dim: int, element_size: int, shared_bytes: int) -> tuple[int, Tiles]:
    """(query rows a program, tiles) for a multiprocessor with `shared_bytes` of shared memory. A function of the model and
    the device: a row's bits may not depend on the batch, so neither may these."""
    if element_size == 4:
        return 32, Tiles(32, 4, 1)
    lines, tile, warps = (128, 64, 8) if head_dim <= 128 else (64, 32, 4)
    lanes = triton.next_power_of_2(head_dim)
    stages = max(1, min(3, (shared_bytes - 2 * lanes * lines) // (4 * tile * lanes)))
    return lines, Tiles(tile, warps, stages)


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 65536
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 65536)


def scales_of(kv: LayerKV, scale: float) -> tuple[float, float]:
    """What scores (for powers of two) and results are multiplied by, the kernels' `_SCALES`."""
    shift = 256.0 if kv.name == "fp8" else 1.0  # e4m3's exponent bias against fp16's
    return scale * LOG2_E * kv.k_scale * shift, kv.v_scale * shift


def _sets(kv: LayerKV) -> int:
    """Parameter sets per head and token."""
    return INT4_KV_GROUPS if kv.name == "int4" else 1


def _operands(kv: LayerKV, units: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, V, and the parameters of both as words (the codes again, where there are none). units: codes by 16 bits."""
    k, v = (x.view(torch.int16) if units and kv.codec != "copy" else storage(x) for x in (kv.k, kv.v))
    return k, v, *(x if params is None else params.view(torch.int32) for x, params in ((k, kv.k_params), (v, kv.v_params)))


def _check(q: Tensor, kv: LayerKV) -> None:
    """Raises ValueError when the shapes do not fit each other or the kernels' units and addresses."""
    if not all(x is None or x.is_contiguous() for x in (kv.k, kv.v, kv.k_params, kv.v_params)):
        raise ValueError(f"a {kv.name} cache whose tensors are parts of others is not addressed here: want contiguous ones")
    (_, kv_heads, _, width), head_dim = kv.v.shape, q.shape[2]
    if head_dim != kv.head_dim or q.shape[1] % kv_heads:
        raise ValueError(f"queries [{q.shape[1]} heads, {head_dim}] do not fit a {kv.name} cache [{kv_heads} heads, {width}]")
    if kv.codec != "copy" and width % 2:
        raise ValueError(f"a {kv.name} cache row of {width} bytes has no whole 16-bit units: head_dim {head_dim} is not "
                         "supported here; use int8 or a 16-bit cache")
    if kv.v.numel() // width * _sets(kv) >= 1 << 31:
        raise ValueError("a cache of 2^31 or more (token, head) pairs in one layer is not addressed here: use fewer blocks")


def launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> Any:
    return kernel[grid](*arguments, **options)


class Launches:
    """Launches that can be repeated with other scales, and with other tensors of the same shapes and aligned alike in place of
    `tensors` and their parts. Triton looks at every argument of a launch: that takes the host longer than many a kernel runs.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        self._made: list[tuple[Callable, list, list[tuple[int, int, int]]]] = []

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
        compiled = launch(kernel, grid, *arguments, **options)
        addresses = [(place, x.data_ptr()) for place, x in enumerate(arguments) if isinstance(x, Tensor)]
        moving = [(place, which, address - first) for place, address in addresses
                  for which, (first, size) in enumerate(self._spans) if first <= address < first + size]
        moving += [(kernel.arg_names.index(name), which, 0) for which, name in enumerate(_SCALES, len(self._spans))
                   if name in kernel.arg_names]
        self._made.append((compiled[grid], list(arguments), moving))

    def repeat(self, tensors: Sequence[Tensor], scales: tuple[float, float]) -> None:
        """scales: of `scales_of`."""
        values = [*(tensor.data_ptr() for tensor in tensors), *scales]
        for start, arguments, moving in self._made:
            for place, which, offset in moving:
                arguments[place] = values[which] + offset
            start(*arguments)


def decode(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor, tiles: Tiles | None = None,
           programs: int | None = None, launch: Callable = launch, room: Callable = torch.empty) -> None:
    """The first `step.num_decode` rows of `attention`, into `out`. `programs` share a row's splits, which moves no bit. room:
    gives memory that is written before it is read."""
    rows, head_dim, (_, heads, block_size, _) = step.num_decode, q.shape[2], kv.v.shape
    group, bits = q.shape[1] // heads, kv.spec.num.bits
    if tiles is None:
        tiles = decode_tiles(head_dim, bits)
        if bits == 16 and step.max_context > 1 << 16:
            tiles = replace(tiles, stages=2)  # eight programs of a multiprocessor have room, not six
    splits = max(1, split_count(step.max_context, tiles))
    if programs is None:
        pairs = rows * heads
        share = 1 if pairs >= _ENOUGH else _PROGRAMS // pairs
        if share < 8 and pairs < _PROGRAMS and step.max_context > _SHORT:
            share = max(share, min(triton.cdiv(4 * _PROGRAMS, pairs), step.max_context // 256))
        programs = min(splits, max(share, -(-step.max_context // _ALONE)), _MOST_INT // max(1, step.max_context))
    direct = programs == 1 and splits <= _LINKS
    part, stat = out, out
    most = _MOST_ROWS if direct else min(_MOST_ROWS, max(1, _SCRATCH_BYTES // (4 * q.shape[1] * splits * (head_dim + 2))))
    if rows > most:  # than a grid or the splits' room holds
        largest = lambda shape, **options: room((most, *shape[1:]), **options)[: shape[0]]  # noqa: E731  # one for all slices
        for first in range(0, rows, most):
            some = replace(step, num_decode=min(most, rows - first), context_len=step.context_len[first:],
                           block_table=step.block_table[first:])
            decode(q[first:], kv, some, scale, window, out[first:], tiles, programs, launch, largest)
        return
    if not direct:
        part = room((rows, q.shape[1], splits, head_dim), dtype=torch.float32, device=q.device)
        stat = room((rows, q.shape[1], splits, 2), dtype=torch.float32, device=q.device)
    k, v, k_params, v_params = _operands(kv, True)
    units, window, (q_scale, v_scale) = k.shape[3], window or 1 << 30, scales_of(kv, scale)
    early = generation_of(q.device) >= 9  # see `launch_options`; given by place, for so `Launches` repeats it
    options = {"launch_pdl": True} if early else {}
    least = 16 if torch.version.hip else 8  # queries of the narrowest tensor-core instruction
    launch(
        _decode, (heads, rows, programs),
        q, k, v, k_params, v_params, step.block_table, step.context_len, out, part, stat, step.block_table.stride(0), window,
        splits, q_scale, v_scale, heads, group, head_dim, units, max(16, triton.next_power_of_2(units)), block_size, kv.codec,
        generation_of(q.device) > 0, _sets(kv), tiles.split, tiles.levels, tiles.tile,
        max(least, triton.next_power_of_2(group)), direct, tiles.stages, early, num_warps=tiles.warps,
        **options)
    if not direct:
        links, depth = min(_LINKS, triton.next_power_of_2(splits)), (triton.cdiv(splits, _LINKS) - 1).bit_length()
        lanes = min(128 if links <= 8 else 64 if depth == 0 else 16, triton.next_power_of_2(head_dim))
        launch(
            _combine, (q.shape[1], rows, triton.cdiv(head_dim, lanes)),
            part, stat, step.context_len, out, window, splits, v_scale, q.shape[1], head_dim, lanes, tiles.split,
            tiles.levels, links, depth, early, num_warps=1, **options)


def prompt(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor,
           tiles: tuple[int, Tiles] | None = None, launch: Callable = launch, room: Callable = torch.empty) -> None:
    """The rows of `attention` after the first `step.num_decode`, into `out`. room: as in `decode`."""
    (_, heads, block_size, _), head_dim, device = kv.v.shape, q.shape[2], q.device
    group, dtype = q.shape[1] // heads, kv.v.dtype if kv.codec == "copy" else torch.float16
    rows = step.block_table.shape[0] - step.num_decode
    capacity = triton.cdiv(step.max_prompt_context or step.max_context, GATHER_TILE) * GATHER_TILE
    pairs = max(1, _SCRATCH_BYTES // (2 * capacity * head_dim * dtype.itemsize))  # (row, head) at once
    rows_at_once = min(rows, pairs, _MOST_ROWS)
    heads_at_once = min(heads, max(1, pairs // rows_at_once))
    scratch = room((2, rows_at_once * heads_at_once * capacity, head_dim), dtype=dtype, device=device)
    lanes = triton.next_power_of_2(head_dim)
    lines, cut = tiles or prompt_tiles(head_dim, dtype.itemsize, _shared_bytes(device))
    fast = tiles is None and _on_hopper(device, dtype, head_dim, window)
    gather = _gather_of(kv)
    q_scale, v_scale = scales_of(kv, scale)
    for row in range(0, rows, rows_at_once):
        for head in range(0, heads, heads_at_once):
            some_rows, some = min(rows_at_once, rows - row), min(heads_at_once, heads - head)
            first = step.num_decode + row
            launch(
                gather, (capacity // GATHER_TILE, some, some_rows),
                *_operands(kv, False), step.block_table, step.context_len, step.query_start, *scratch,
                step.block_table.stride(0), window or 1 << 30, first, head, capacity, heads, head_dim, lanes, block_size,
                kv.codec, _sets(kv), GATHER_TILE, num_warps=8)
            if fast:
                from nybble.kernels import attention_hopper

                q_part, out_part = q[:, head * group :], out[:, head * group :]
                attention_hopper.prompt(q_part, *scratch, step.context_len, step.query_start, out_part, step.max_query, first,
                                        some_rows, some, group, capacity, q_scale, v_scale, launch)
                continue
            launch(
                _prompt, (some * group, triton.cdiv(step.max_query, lines), some_rows),
                q, *scratch, step.context_len, step.query_start, out, window or 1 << 30, first, head, capacity, q_scale,
                v_scale, q.shape[1], group, head_dim, lanes, window > 0, cut.tile, lines, cut.stages, num_warps=cut.warps)


def _on_hopper(device: torch.device, dtype: torch.dtype, head_dim: int, window: int) -> bool:
    """Properties of the device and the model alone, so that a row's bits depend on nothing else."""
    return (generation_of(device) == 9 and dtype != torch.float32 and head_dim in (64, 128) and window == 0
            and triton.__version__.startswith(("3.6.", "3.7.")))  # Gluon renames things in every version


def _gather_of(kv: LayerKV) -> Any:
    """`_gather`, or what gives the same bits faster."""
    here = nvrtc.refusal(kv.v.device) or not cache_hopper.Gather.fits(kv)
    return _gather if here else cache_hopper.Gather(kv.v.device)


def _decode_on_hopper(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor) -> bool:
    """The same bits by CUDA, where it can and is faster."""
    if nvrtc.refusal(q.device):
        return False
    from nybble.kernels import decode_hopper  # which imports this file

    if not decode_hopper.fits(q, q.shape[1], kv, step, q.shape[2], window):
        return False
    decode_hopper.run(q, q.shape[1], kv, step, scale, None, False, out=out)
    return True


def attention(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int, out: Tensor | None = None,
              before: dict[Any, Any] | None = None) -> Tensor:
    """`reference.attention`: decode rows by `decode`, prompt rows by `prompt`. Rows of context 0 (padding) give zeros. `out`:
    like q, may hold more tokens than the rows do. before: launches of this step's layers so far, to repeat and to add to, and
    the memory they work in."""
    _check(q, kv)
    q = q.contiguous()
    out = torch.empty_like(q) if out is None else out
    portable = step.num_decode and not _decode_on_hopper(q, kv, step, scale, window, out)
    tensors = [x for x in (q, out, kv.k, kv.v, kv.k_params, kv.v_params) if x is not None]
    alike = (window, *(x.data_ptr() % 16 for x in tensors))
    if before and alike in before:
        before[alike].repeat(tensors, scales_of(kv, scale))
        return out
    start, room = launch, torch.empty
    if before is not None:
        start = before[alike] = Launches(tensors)
        room = before.setdefault("room", cache(torch.empty))  # launches keep it: one for all layers, however many differ
    if portable:
        decode(q, kv, step, scale, window, out, launch=start, room=room)
    if step.block_table.shape[0] > step.num_decode and step.max_query:
        prompt(q, kv, step, scale, window, out, launch=start, room=room)
    return out
