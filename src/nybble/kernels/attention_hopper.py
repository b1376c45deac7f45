"""Prompt attention on Hopper (sm_90a), in Gluon, over the 16-bit scratch that `attention_triton.prompt` fills.

Not for windows, not for head_dim other than 64 and 128: those stay with the portable kernel, which computes the same sums.

The idea is FlashAttention-3's (Shah et al., 2024): one warp copies tiles of K and V; two groups of four warps multiply 64
query rows each, and while the tensor core works on a tile's p v, the same warps take the exponentials of the next tile.
As in the portable kernel, tiles lie at multiples of TILE and a tile that a row does not see changes nothing in it.

A program has an item (ROWS queries of a row under a head), of short prompts every so many-th: then the copying warp is at the
next one's keys while the last products of one run, and rows are looked up once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 128  # query rows a program: 64 for each group of warps
TILE = 128  # keys a tile
STAGES = {64: 4, 128: 2}  # tiles of K and of V in flight, by head_dim
PROGRAMS = 132  # for contexts of at most
SHORT = 256  # keys; else one an item: the hardware hands them out more evenly
_SIZES = ["first_row", "rows", "heads", "items", "capacity"]
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name from Triton 3.7 on


@gluon.jit
def _seek(query_start_ptr, first_row, rows, item, row, before, ROWS: gl.constexpr):
    """From a row with `before` items ahead of it to the one that holds an item: (row, items ahead of it, its first token in
    the step, its tokens); `rows` where there is none."""
    begin = gl.load(query_start_ptr + first_row + gl.minimum(row, rows))
    end = gl.load(query_start_ptr + first_row + gl.minimum(row + 1, rows))
    while (row < rows) & (before + (end - begin + ROWS - 1) // ROWS <= item):
        before += (end - begin + ROWS - 1) // ROWS
        row += 1
        begin = end
        end = gl.load(query_start_ptr + first_row + gl.minimum(row + 1, rows))
    return row, before, begin, end - begin


@gluon.jit
def _span(context_ptr, first_row, rows, row, length, index, ROWS: gl.constexpr, TILE: gl.constexpr):
    """Of an item: (line of its first query in the row's, that query's position, key tiles that any of its queries sees)."""
    context = gl.load(context_ptr + first_row + gl.minimum(row, rows - 1))
    offset = ((length + ROWS - 1) // ROWS - 1 - index) * ROWS  # the most keys first
    position = context - length + offset
    tiles = gl.where(row < rows, (gl.minimum(context, position + ROWS) + TILE - 1) // TILE, 0)
    return offset, position, tiles


@gluon.jit
def _producer(k_desc, v_desc, context_ptr, query_start_ptr, first_row, rows, heads, items, capacity, ks, vs, full, empty,
              GROUP: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr):
    BYTES: gl.constexpr = TILE * k_desc.block_type.shape[1] * 2
    row, before, done = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        index = item // (heads * GROUP)
        row, before, begin, length = _seek(query_start_ptr, first_row, rows, index, row, before, ROWS)
        offset, position, tiles = _span(context_ptr, first_row, rows, row, length, index - before, ROWS, TILE)
        line = (row * heads + item % (heads * GROUP) // GROUP) * capacity
        for i in range(tiles):
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES & 1) ^ 1
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            tma.async_copy_global_to_shared(k_desc, [line + i * TILE, 0], full.index(stage), ks.index(stage))
            mbarrier.wait(empty.index(STAGES + stage), phase)
            mbarrier.expect(full.index(STAGES + stage), BYTES)
            tma.async_copy_global_to_shared(v_desc, [line + i * TILE, 0], full.index(STAGES + stage), vs.index(stage))
        done += tiles


@gluon.jit
def _keep(x):
    """Hold the registers of an operand until here: the product that reads them may still be in flight."""
    gl.inline_asm_elementwise("// keep $0", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _softmax(s, m, weight, factor, last_seen, first, MASKED: gl.constexpr, TILE: gl.constexpr):
    """Scores of a tile -> (probabilities, what older sums shrink by, new maximum, new sum)."""
    if MASKED:
        place = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(place[None, :] <= last_seen[:, None], s, float("-inf"))
    m_next = gl.maximum(m, gl.max(s, 1) * factor)
    fade = gl.exp2(m - m_next)
    p = gl.exp2(s * factor[:, None] - m_next[:, None])
    return p, fade, m_next, weight * fade + gl.sum(p, 1)


@gluon.jit
def _tiles(first, last, done, p, acc, m, weight, factor, last_seen, q, ks, vs, full, empty, zeros,
           MASKED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Tiles [first, last) of an item, after `done` tiles of those before it: q k of a tile and p v of the one before it run
    together; p is that one's."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    for i in range(first, last):
        stage = (done + i) % STAGES
        before = (done + i - 1) % STAGES
        mbarrier.wait(full.index(stage), (done + i) // STAGES & 1)
        s = warpgroup_mma(q, ks.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(full.index(STAGES + before), (done + i - 1) // STAGES & 1)
        running = warpgroup_mma(p, vs.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        mbarrier.arrive(empty.index(stage), count=1)
        share, fade, m, weight = _softmax(s, m, weight, factor, last_seen, i * TILE, MASKED, TILE)
        # Passed at once (that tile is still held), but a block of code ends here: else the assembler moves the wait for p v
        # ahead of the exponentials that run beside it.
        mbarrier.wait(full.index(STAGES + before), (done + i - 1) // STAGES & 1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(running,))
        _keep(p)
        mbarrier.arrive(empty.index(STAGES + before), count=1)
        acc = acc * gl.convert_layout(fade, rows)[:, None]
        p = gl.convert_layout(share.to(p.dtype), p.type.layout)
    return p, acc, m, weight


@gluon.jit
def _consumer(q_ptr, out_ptr, context_ptr, query_start_ptr, first_row, rows, heads, items, q_scale, v_scale, qs, ks, vs, full,
              empty, PART: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
              ROWS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr):
    HALF: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = ks.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    row_of: gl.constexpr = gl.SliceLayout(1, scores)
    row, before, done = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        index = item // (heads * GROUP)
        row, before, begin, length = _seek(query_start_ptr, first_row, rows, index, row, before, ROWS)
        offset, position, tiles = _span(context_ptr, first_row, rows, row, length, index - before, ROWS, TILE)
        if tiles > 0:
            line = offset + PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, lines))
            channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, lines))
            query = ((begin + line).to(gl.int64) * HEADS + item % (heads * GROUP))[:, None] * DIM + channel[None, :]
            kept = (line < length)[:, None] & (channel < DIM)[None, :]
            wide = gl.load(q_ptr + query, mask=kept, other=0.0).to(gl.float32)
            factor = gl.full([HALF], 1.0, gl.float32, row_of)
            if dtype == gl.float16:  # divided by a power of two, so that a bf16 outlier cannot overflow
                exponent = gl.maximum(gl.max(gl.abs(wide), 1), 1e-30).to(gl.int32, bitcast=True) & 0x7F800000
                wide = wide * (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
                factor = gl.convert_layout(exponent.to(gl.float32, bitcast=True), row_of)
            factor = factor * q_scale
            q = qs.index(PART)
            q.store(wide.to(dtype))
            fence_async_shared()
            _barrier()

            last_seen = position + PART * HALF + gl.arange(0, HALF, layout=row_of)
            m = gl.full([HALF], -1.0e30, gl.float32, row_of)
            weight = gl.zeros([HALF], gl.float32, row_of)
            zeros = gl.zeros([HALF, TILE], gl.float32, scores)
            acc = gl.zeros([HALF, DIM], gl.float32, sums)
            mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
            s = warpgroup_mma(q, ks.index(done % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            mbarrier.arrive(empty.index(done % STAGES), count=1)
            share, fade, m, weight = _softmax(s, m, weight, factor, last_seen, 0, True, TILE)
            p = gl.convert_layout(share.to(dtype), operand)
            whole = gl.minimum(gl.maximum((position + PART * HALF + 1) // TILE, 1), tiles)
            p, acc, m, weight = _tiles(1, whole, done, p, acc, m, weight, factor, last_seen, q, ks, vs, full, empty, zeros,
                                       False, TILE, STAGES)
            p, acc, m, weight = _tiles(whole, tiles, done, p, acc, m, weight, factor, last_seen, q, ks, vs, full, empty, zeros,
                                       True, TILE, STAGES)
            done += tiles
            stage = (done - 1) % STAGES
            mbarrier.wait(full.index(STAGES + stage), (done - 1) // STAGES & 1)
            running = warpgroup_mma(p, vs.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(running,))
            _keep(p)
            mbarrier.arrive(empty.index(STAGES + stage), count=1)
            inverse = gl.convert_layout(v_scale / gl.where(weight > 0, weight, 1.0), gl.SliceLayout(1, sums))
            out = gl.convert_layout((acc * inverse[:, None]).to(out_ptr.dtype.element_ty), lines)
            gl.store(out_ptr + query, out, mask=kept)


@gluon.jit(do_not_specialize=_SIZES)
def _prompt(q_ptr, k_desc, v_desc, context_ptr, query_start_ptr, out_ptr, first_row, rows, heads, items, capacity, q_scale,
            v_scale, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr,
            TILE: gl.constexpr, STAGES: gl.constexpr):
    """Every so many-th item: ROWS consecutive prompt tokens of one row under one query head, as `attention_triton._prompt`.
    There are at most `items`, heads side by side."""
    HALF: gl.constexpr = ROWS // 2
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, DIM], k_desc.layout)
    vs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, DIM], v_desc.layout)
    qs = gl.allocate_shared_memory(k_desc.dtype, [2, HALF, DIM], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()  # the copies arrive at these barriers through another path to shared memory
    gdc_launch_dependents()
    gdc_wait()
    gl.warp_specialize(
        [
            (_consumer, (q_ptr, out_ptr, context_ptr, query_start_ptr, first_row, rows, heads, items, q_scale, v_scale,
                         qs, ks, vs, full, empty, 0, HEADS, GROUP, DIM, ROWS, TILE, STAGES)),
            (_consumer, (q_ptr, out_ptr, context_ptr, query_start_ptr, first_row, rows, heads, items, q_scale, v_scale,
                         qs, ks, vs, full, empty, 1, HEADS, GROUP, DIM, ROWS, TILE, STAGES)),
            (_producer, (k_desc, v_desc, context_ptr, query_start_ptr, first_row, rows, heads, items, capacity, ks, vs, full,
                         empty, GROUP, ROWS, TILE, STAGES)),
        ],
        [4, 1], [240, 24],
    )


def layout(head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([TILE, head_dim], gl.float16 if dtype == torch.float16 else gl.bfloat16)


def prompt(q: Tensor, k: Tensor, v: Tensor, context_len: Tensor, query_start: Tensor, out: Tensor, max_query: int,
           first_row: int, rows: int, heads: int, group: int, capacity: int, q_scale: float, v_scale: float,
           launch: Callable) -> None:
    """Attention of `rows` rows from `first_row` of the step on, under the query heads of `heads` KV heads, into `out`.

    q, out [T, heads * group or more, D], maybe a part of all heads; k, v [>= rows * heads * capacity, D] fp16 or bf16, capacity
    a multiple of TILE; q_scale is for powers of two. launch: see `attention_triton.launch`.
    """
    head_dim = k.shape[1]
    k_desc, v_desc = (TensorDescriptor.from_tensor(x, [TILE, head_dim], layout(head_dim, k.dtype)) for x in (k, v))
    items = min(rows * triton.cdiv(max_query, ROWS), rows + len(q) // ROWS) * heads * group
    launch(
        _prompt, (min(items, PROGRAMS) if capacity <= SHORT else items, 1, 1),
        q, k_desc, v_desc, context_len, query_start, out, first_row, rows, heads, items, capacity, q_scale, v_scale,
        q.stride(0) // head_dim, group, head_dim, ROWS, TILE, STAGES[head_dim], num_warps=4, launch_pdl=True)
