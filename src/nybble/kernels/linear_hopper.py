"""W4A8 on Hopper (sm_90a), in Gluon: per channel, and groups whose scales are whole numbers on an int8 grid.

Not portable and not for other schemes: those are `linear_triton`'s. Both kernels sum in int32 from the first product to the
last, so tiles, the split of K and the batch cannot change a bit.

The idea: weights are stored in the order in which the tensor core's register operand wants them. One bulk copy brings a tile,
two 16-byte shared loads and three integer instructions per eight weights make it an operand; nothing is shuffled or written
back. One warp copies (weights do not wait for the kernel before this one, activations do), eight warps multiply with two
groups of products in flight. A program owns an equal share of all (tile, 128 channels) units, so no processor idles on a
ragged last wave; tiles that several programs share are added up in int32 by the last to arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nybble.formats.qtensor import QTensor
from nybble.formats.spec import INT4, PER_TOKEN_INT8
from nybble.kernels import linear_triton
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import Rows

BLOCK = 128  # input channels of a step
ROWS = 256  # packed N is a multiple of it; a packed tile is 64 rows x 64 bytes


# ---- device code --------------------------------------------------------------------------------------------------


@gluon.jit
def _low(w, scale, GROUPED: gl.constexpr):
    """The operand of channels 0..63 of a step. Per channel: 16 * code, two instructions for four weights.

    Groups: nibbles u = code + 8 and a whole scale s <= 16 -> code * s. u * s + 128 - 8 s fits an unsigned byte, so one
    multiply serves four lanes without a carry, and flipping the top bits takes the 128 off again.
    """
    if GROUPED:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 t, z; mul.lo.u32 z, $2, 0x08080808; sub.u32 z, 0x80808080, z;
            and.b32 t, $1, 0x0F0F0F0F; mad.lo.u32 t, t, $2, z; xor.b32 $0, t, 0x80808080; }""",
            "=r,r,r,r,r,r", [w, scale], dtype=gl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }", "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4
        )


@gluon.jit
def _high(w, scale, GROUPED: gl.constexpr):
    """The operand of channels 64..127."""
    if GROUPED:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 t, z; mul.lo.u32 z, $2, 0x08080808; sub.u32 z, 0x80808080, z;
            shr.u32 t, $1, 4; and.b32 t, t, 0x0F0F0F0F; mad.lo.u32 t, t, $2, z; xor.b32 $0, t, 0x80808080; }""",
            "=r,r,r,r,r,r", [w, scale], dtype=gl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4
        )


@gluon.jit
def _keep(x):
    """Hold the registers of an operand until here: the products that read them may still be in flight."""
    gl.inline_asm_elementwise("// keep $0", "=r,0", [x], dtype=gl.int8, is_pure=False, pack=4)


@gluon.jit
def _place(tile, tiles_n, tiles_m, ORDER: gl.constexpr):
    """Tile index -> (row tile, token tile): ORDER token tiles share a row tile before the next."""
    band = tile // (ORDER * tiles_n)
    height = gl.minimum(tiles_m - band * ORDER, ORDER)
    inside = tile - band * ORDER * tiles_n
    return inside // height, band * ORDER + inside % height


@gluon.jit
def _share(U, steps, tiles, STREAM: gl.constexpr):
    """This program's units: (first tile, step in it, stride between its tiles, units)."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if STREAM:
        first = program * U // programs
        return first // steps, first % steps, 1, (program + 1) * U // programs - first
    else:
        return program, 0, programs, (tiles - program + programs - 1) // programs * steps


@gluon.jit
def _copy_weights(
    w_desc, s_desc, ws, ss, bar, stage, n_tile, step, steps, pred,
    BM: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    LINES: gl.constexpr = BM // 16  # 1 KiB lines of a tile
    line = ((n_tile * BM // 256) * steps + step) * 16 + (n_tile % (256 // BM)) * LINES
    tma.async_copy_global_to_shared(w_desc, [line, 0], bar, ws.index(stage), pred=pred)
    if GROUPED:
        tma.async_copy_global_to_shared(s_desc, [step, n_tile * BM], bar, ss.index(stage), pred=pred)


@gluon.jit
def _producer(
    w_desc, x_desc, s_desc, ws, xs, ss, full, empty, U, steps, tiles_n, tiles_m,
    BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, STREAM: gl.constexpr, ORDER: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = BT * 128 + BM * 64 + (BM if GROUPED else 0)
    tile0, step0, stride, units = _share(U, steps, tiles_n * tiles_m, STREAM)
    for i in gl.static_range(STAGES):
        n_tile, m_tile = _place(tile0 + (step0 + i) // steps * stride, tiles_n, tiles_m, ORDER)
        bar = full.index(i)
        mbarrier.expect(bar, BYTES, pred=i < units)
        _copy_weights(w_desc, s_desc, ws, ss, bar, i, n_tile, (step0 + i) % steps, steps, i < units, BM, GROUPED)
    gdc_wait()
    for i in gl.static_range(STAGES):
        n_tile, m_tile = _place(tile0 + (step0 + i) // steps * stride, tiles_n, tiles_m, ORDER)
        at = [m_tile * BT, (step0 + i) % steps * 128]
        tma.async_copy_global_to_shared(x_desc, at, full.index(i), xs.index(i), pred=i < units)
    for i in range(STAGES, units):
        stage = i % STAGES
        bar = full.index(stage)
        step = (step0 + i) % steps
        n_tile, m_tile = _place(tile0 + (step0 + i) // steps * stride, tiles_n, tiles_m, ORDER)
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        _copy_weights(w_desc, s_desc, ws, ss, bar, stage, n_tile, step, steps, True, BM, GROUPED)
        tma.async_copy_global_to_shared(x_desc, [m_tile * BT, step * 128], bar, xs.index(stage))


@gluon.jit
def _load(
    i, ws, xs, ss, full, fragments: gl.constexpr, operand: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """Unit i once it has arrived: packed weights and their scales in registers, activations in shared memory."""
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    w = ws.index(stage)._reinterpret(gl.int8, [BM, 64], fragments).load(operand)
    scale = w
    if GROUPED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        rows = ss.index(stage)._reinterpret(gl.int8, [BM], flat).load(gl.SliceLayout(1, operand)).to(gl.int32)
        scale, _ = gl.broadcast(rows[:, None], w)
    return w, scale, xs.index(stage)


@gluon.jit
def _consumer(
    w_scale, x_scale, y, partials, arrivals, M, N, U, steps, tiles_n, tiles_m, ws, xs, ss, full, empty,
    BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, STREAM: gl.constexpr, ORDER: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = BT if BT < 128 else 128
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, WIDTH, 32])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    # Bytes of a 64 x 64 tile as `fragment_order` stores them; 64-row tiles follow each other.
    BASES: gl.constexpr = [
        [0, 1], [0, 2], [8, 0], [0, 16], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 32],
    ]  # fmt: skip
    if BM == 64:
        fragments: gl.constexpr = gl.SharedLinearLayout(offset_bases=BASES)
    elif BM == 128:
        fragments: gl.constexpr = gl.SharedLinearLayout(offset_bases=BASES + [[64, 0]])
    else:
        fragments: gl.constexpr = gl.SharedLinearLayout(offset_bases=BASES + [[64, 0], [128, 0]])
    tile0, step0, stride, units = _share(U, steps, tiles_n * tiles_m, STREAM)
    gdc_wait()  # scales, partial sums and outputs may belong to the kernel before this one
    gdc_launch_dependents()
    parts = (step0 + units + steps - 1) // steps
    for part in range(parts):
        begin = gl.maximum(part * steps - step0, 0)
        end = gl.minimum((part + 1) * steps - step0, units)
        # Two products of half a step each are in flight: while one runs, the other's operand is unpacked. An operand's
        # registers are kept until its product is done; the compiler does not know that the tensor core still reads them.
        acc = warpgroup_mma_init(gl.zeros((BM, BT), gl.int32, mma))
        w, scale, x = _load(begin, ws, xs, ss, full, fragments, operand, BM, STAGES, GROUPED)
        lo = _low(w, scale, GROUPED)
        acc = warpgroup_mma(lo, x.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
        hi = _high(w, scale, GROUPED)
        acc = warpgroup_mma(hi, x.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        _keep(lo)
        for i in range(begin + 1, end):
            w, scale, x = _load(i, ws, xs, ss, full, fragments, operand, BM, STAGES, GROUPED)
            lo = _low(w, scale, GROUPED)
            acc = warpgroup_mma(lo, x.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            _keep(hi)
            mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
            hi = _high(w, scale, GROUPED)
            acc = warpgroup_mma(hi, x.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            _keep(lo)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        _keep(hi)
        mbarrier.arrive(empty.index((end - 1) % STAGES), count=1)
        tile = tile0 + part * stride
        if STREAM:
            _finish_shared(total, w_scale, x_scale, y, partials, arrivals, M, N, U, steps, tiles_n, tiles_m, tile,
                           begin, end, mma, BM, BT, ORDER)  # fmt: skip
        else:
            _store(total, w_scale, x_scale, y, M, N, tile, tiles_n, tiles_m, mma, BM, BT, ORDER)


@gluon.jit
def _finish_shared(
    acc, w_scale, x_scale, y, partials, arrivals, M, N, U, steps, tiles_n, tiles_m, tile, begin, end,
    mma: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Store the tile when this program did all of it; else leave a partial sum, and the last program adds them all.

    A program has at most two partial tiles, its first and its last: slots 2 p and 2 p + 1 of `partials`.
    """
    if end - begin == steps:
        _store(acc, w_scale, x_scale, y, M, N, tile, tiles_n, tiles_m, mma, BM, BT, ORDER)
    else:
        programs = gl.num_programs(0)
        program = gl.program_id(0)
        SIZE: gl.constexpr = BM * BT
        r = gl.arange(0, BM, layout=gl.SliceLayout(1, mma))
        c = gl.arange(0, BT, layout=gl.SliceLayout(0, mma))
        inside = r[:, None] * BT + c[None, :]
        slot = 2 * program + gl.where(begin == 0, 0, 1)
        gl.store(partials + slot * SIZE + inside, acc, cache_modifier=".cg")
        gl.thread_barrier()
        done = gl.atomic_add(arrivals + tile, end - begin, sem="acq_rel")
        if done + end - begin == steps:
            first = ((tile * steps + 1) * programs - 1) // U  # the program that owns the tile's first unit
            last = ((tile * steps + steps) * programs - 1) // U
            for other in range(first, last + 1):
                if other != program:
                    slot = 2 * other + gl.where(other * U // programs >= tile * steps, 0, 1)
                    acc += gl.load(partials + slot * SIZE + inside, cache_modifier=".cg")
            gl.store(arrivals + tile, 0)
            _store(acc, w_scale, x_scale, y, M, N, tile, tiles_n, tiles_m, mma, BM, BT, ORDER)


@gluon.jit
def _store(
    acc, w_scale, x_scale, y, M, N, tile, tiles_n, tiles_m,
    mma: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Scale and write rows of y. Through shared memory, so that a thread writes eight neighbouring outputs of one token."""
    n_tile, m_tile = _place(tile, tiles_n, tiles_m, ORDER)
    r = n_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, mma))
    c = m_tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, mma))
    row_scale = gl.load(w_scale + r)
    token_scale = gl.load(x_scale + c, mask=c < M, other=0.0)
    out = (acc.to(gl.float32) * row_scale[:, None] * token_scale[None, :]).to(y.dtype.element_ty)
    warps: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = BM // 8 if BM < 256 else 32
    lines: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, warps], [0, 1])
    out = gl.convert_layout(out, lines)
    r = n_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, lines))
    c = m_tile * BT + gl.arange(0, BT, layout=gl.SliceLayout(0, lines))
    pointer = y + c.to(gl.int64)[None, :] * N + r[:, None]
    gl.store(pointer, out, mask=(r < N)[:, None] & (c < M)[None, :])


@gluon.jit(do_not_specialize=["M", "U", "tiles_m"])
def w4a8(
    w_desc, x_desc, s_desc, w_scale, x_scale, y, partials, arrivals, M, N, U, steps, tiles_n, tiles_m,
    BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, STREAM: gl.constexpr, ORDER: gl.constexpr,
    GROUPED: gl.constexpr,
):  # fmt: skip
    """y[m, n] = x_scale[m] * w_scale[n] * (exact int32 sum). See `Packed` for the operands; U = tiles * steps units."""
    LINES: gl.constexpr = BM // 16
    xs = gl.allocate_shared_memory(gl.int8, [STAGES, BT, 128], x_desc.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, LINES, 256], w_desc.layout)
    if GROUPED:
        ss = gl.allocate_shared_memory(gl.int8, [STAGES, 1, BM], s_desc.layout)
    else:
        ss = ws
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consumer, (w_scale, x_scale, y, partials, arrivals, M, N, U, steps, tiles_n, tiles_m, ws, xs, ss, full, empty,
                         BM, BT, STAGES, STREAM, ORDER, GROUPED)),
            (_producer, (w_desc, x_desc, s_desc, ws, xs, ss, full, empty, U, steps, tiles_n, tiles_m,
                         BM, BT, STAGES, STREAM, ORDER, GROUPED)),
        ],
        [1], [40],
    )  # fmt: skip
