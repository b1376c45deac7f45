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

from dataclasses import dataclass
from typing import Any, NamedTuple

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
def _low(w, scale, offset, GROUPED: gl.constexpr):
    """The operand of channels 0..63 of a step. Per channel: 16 * code, two instructions for four weights.

    Groups: nibbles u = code + 8 and a whole scale s <= 16 -> code * s. u * s + 128 - 8 s fits an unsigned byte, so one
    multiply serves four lanes without a carry, and flipping the top bits takes the 128 off again.
    """
    if GROUPED:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $1, 0x0F0F0F0F; mad.lo.u32 t, t, $2, $6; xor.b32 $0, t, 0x80808080; }",
            "=r,r,r,r,r,r,r,r,r,r", [w, scale, offset], dtype=gl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }", "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4
        )


@gluon.jit
def _high(w, scale, offset, GROUPED: gl.constexpr):
    """The operand of channels 64..127."""
    if GROUPED:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 t, t, 0x0F0F0F0F; mad.lo.u32 t, t, $2, $6;
            xor.b32 $0, t, 0x80808080; }""",
            "=r,r,r,r,r,r,r,r,r,r", [w, scale, offset], dtype=gl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [w], dtype=gl.int8, is_pure=True, pack=4)


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
    BYTES: gl.constexpr = BT * 128 + BM * 64 + ((BM if BM > 128 else 128) if GROUPED else 0)
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
    scale, offset = w, w
    if GROUPED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        rows = ss.index(stage)._reinterpret(gl.int8, [BM], flat).load(gl.SliceLayout(1, operand)).to(gl.int32)
        scale, _ = gl.broadcast(rows[:, None], w)
        offset, _ = gl.broadcast((-0x7F7F7F80 - rows * 0x08080808)[:, None], w)  # 128 - 8 s in every byte
    return w, scale, offset, xs.index(stage)


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
        w, scale, offset, x = _load(begin, ws, xs, ss, full, fragments, operand, BM, STAGES, GROUPED)
        lo = _low(w, scale, offset, GROUPED)
        acc = warpgroup_mma(lo, x.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
        hi = _high(w, scale, offset, GROUPED)
        acc = warpgroup_mma(hi, x.slice(64, 64, dim=1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        _keep(lo)
        for i in range(begin + 1, end):
            w, scale, offset, x = _load(i, ws, xs, ss, full, fragments, operand, BM, STAGES, GROUPED)
            lo = _low(w, scale, offset, GROUPED)
            acc = warpgroup_mma(lo, x.slice(0, 64, dim=1).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            _keep(hi)
            mbarrier.arrive(empty.index((i - 1) % STAGES), count=1)
            hi = _high(w, scale, offset, GROUPED)
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


@gluon.jit(do_not_specialize=["M", "U", "steps", "tiles_n", "tiles_m"])
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
        # a bulk copy lands on 128-byte boundaries, so a stage holds at least that many scales
        ss = gl.allocate_shared_memory(gl.int8, [STAGES, 1, BM if BM > 128 else 128], s_desc.layout)
    else:
        ss = ws
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()  # the copies arrive at these barriers through another path to shared memory
    gl.warp_specialize(
        [
            (_consumer, (w_scale, x_scale, y, partials, arrivals, M, N, U, steps, tiles_n, tiles_m, ws, xs, ss, full, empty,
                         BM, BT, STAGES, STREAM, ORDER, GROUPED)),
            (_producer, (w_desc, x_desc, s_desc, ws, xs, ss, full, empty, U, steps, tiles_n, tiles_m,
                         BM, BT, STAGES, STREAM, ORDER, GROUPED)),
        ],
        [1], [40],
    )  # fmt: skip


# ---- tiles --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """BM weight rows x BT tokens, `stages` steps of 128 channels in flight.

    stream: share all units equally over `per_sm` programs a processor; otherwise whole tiles only, `per_sm` programs a
    processor each taking every so-manieth (0: one program per tile). order: see `_place`. registers: per thread at launch, so
    that two programs, or this one and the next kernel's, fit a processor (0: all of them). overlap: start early.
    """

    BM: int
    BT: int
    stages: int
    stream: bool
    per_sm: int = 1
    order: int = 8
    registers: int = 0
    overlap: bool = True

    @property
    def warps(self) -> int:
        return 4 if self.BM == 64 else 8


# (tokens, rows and input channels at most, tile), the first match wins. From a sweep on an H200 over the four Llama-2-13B
# linears at 16, 64, 128, 256 and 4096 tokens (`python -m nybble.bench.kernels --sweep --family hopper`).
ANY = 1 << 30
TILES: tuple[tuple[int, int, int, Tile], ...] = (
    (16, 6144, 6144, Tile(128, 16, 8, True, 1, 8, 80)),
    (16, 16384, ANY, Tile(128, 16, 6, True, 2, 8, 80)),
    (16, ANY, ANY, Tile(256, 16, 10, False, 0)),
    (32, 16384, ANY, Tile(128, 32, 7, True, 1, 8, 80)),
    (32, ANY, ANY, Tile(256, 32, 6, False, 0)),
    (64, 6144, ANY, Tile(64, 64, 8, True, 2, 8, 120)),
    (64, ANY, ANY, Tile(128, 64, 6, False, 0, 8, 80)),
    (128, 6144, 6144, Tile(64, 64, 8, True, 2, 8, 120)),
    (128, 6144, ANY, Tile(128, 128, 8, True, 1)),
    (128, 16384, ANY, Tile(128, 128, 6, False, 1)),
    (128, ANY, ANY, Tile(256, 128, 5, False, 0)),
    (256, 6144, 6144, Tile(128, 128, 6, False, 1)),
    (256, 6144, ANY, Tile(128, 128, 8, True, 1)),
    (256, 16384, ANY, Tile(256, 128, 5, False, 0)),
    (ANY, 16384, 8192, Tile(256, 128, 4, False, 1)),
    (ANY, ANY, ANY, Tile(256, 128, 4, False, 1, 4)),
)


def tile_for(tokens: int, rows: int, channels: int) -> Tile:
    return next(tile for most, widest, deepest, tile in TILES if tokens <= most and rows <= widest and channels <= deepest)


def shared_bytes(tile: Tile, grouped: bool) -> int:
    """Shared memory of a program, the room for turning an output tile included."""
    return tile.stages * (tile.BM * 64 + tile.BT * BLOCK + (max(tile.BM, 128) if grouped else 0) + 16) + 4608


# ---- packing ------------------------------------------------------------------------------------------------------


def fragment_order() -> Tensor:
    """Where byte i of a packed 64 x 64-byte tile comes from, as an index into the row-major tile. int64 [4096].

    Bit by bit of i: four bytes of k, the row 8 below, k + 16, the four threads of a quad along k, eight rows, the four warps,
    and last k + 32. A thread's 16 bytes are then the operands of two products of 32 channels each.
    """
    steps = [(0, 1), (0, 2), (8, 0), (0, 16), (0, 4), (0, 8), (1, 0), (2, 0), (4, 0), (16, 0), (32, 0), (0, 32)]
    index = torch.arange(4096)
    return sum((index >> bit & 1) * (row * 64 + byte) for bit, (row, byte) in enumerate(steps))


def pack_fragments(nibbles: Tensor) -> Tensor:
    """int8 [N, K / 2] of `linear_triton.pack_nibbles`, N a multiple of 256 -> int32 [N / 256 * K / 128 * 16, 256]: for every
    256 rows, every 128 channels, four 64-row tiles in fragment order."""
    n, half = nibbles.shape
    tiles = nibbles.view(n // ROWS, 4, 64, half // 64, 64).permute(0, 3, 1, 2, 4).reshape(-1, 4096)
    return tiles[:, fragment_order().to(nibbles.device)].contiguous().view(torch.int32).view(-1, 256)


@dataclass(frozen=True)
class Packed:
    """codes: see `pack_fragments`. group_scale: whole numbers, int8 [K / 128, N padded], or None per channel. scale: float32
    [N padded], of the int32 sum. arrivals: int32 counters, zero between launches."""

    n: int
    k: int
    dtype: torch.dtype
    codes: Tensor
    group_scale: Tensor | None
    scale: Tensor
    arrivals: Tensor
    tile: Tile | None = None  # set: this tile whatever the batch (benchmarks, tests)


def whole_scales(weight: QTensor) -> bool:
    """Whether the groups live on the int8 grid exactly: whole scales in 0..16, so that code * scale needs no rounding."""
    return bool(((weight.scale == weight.scale.round()) & (weight.scale >= 0) & (weight.scale <= 16)).all())


def _pack(weight: QTensor | Tensor, shape: LinearShape) -> Packed | linear_triton.Packed:
    """Scales that are not whole (QQQ's) leave the int8 grid to the int8 kernel, bit-exactly."""
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    if weight.over is not None and not whole_scales(weight):
        return linear_triton.pack_int(weight, shape)
    n, k = weight.shape
    n_padded, k_padded = -(-n // ROWS) * ROWS, -(-k // BLOCK) * BLOCK
    codes = torch.nn.functional.pad(weight.codes, (0, k_padded - k, 0, n_padded - n))
    scale = (weight.scale / 16 if weight.over is None else weight.over).expand(n, 1)[:, 0]  # codes enter as 16 * code
    scale = torch.nn.functional.pad(scale, (0, n_padded - n))
    group_scale = None
    if weight.over is not None:
        codes = codes + 8
        whole = torch.nn.functional.pad(weight.scale, (0, k_padded // BLOCK - weight.scale.shape[1], 0, n_padded - n))
        group_scale = whole.t().to(torch.int8).contiguous()
    arrivals = torch.zeros(8192, dtype=torch.int32, device=shape.device)
    packed = pack_fragments(linear_triton.pack_nibbles(codes))
    return Packed(n, k, shape.dtype, packed, group_scale, scale.contiguous(), arrivals)


# ---- launching ----------------------------------------------------------------------------------------------------


def shared_layouts(tile: Tile) -> tuple[Any, Any, Any]:
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    bytes_flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2)
    return flat, gl.NVMMASharedLayout.get_default_for([tile.BT, BLOCK], gl.int8), bytes_flat


def _run(packed: Packed | linear_triton.Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Rows)
    if isinstance(packed, linear_triton.Packed):
        return linear_triton.run_int(packed, x)
    codes = x.codes.contiguous()
    tokens = codes.shape[0]
    y = torch.empty((tokens, packed.n), dtype=packed.dtype, device=codes.device)
    if tokens == 0:
        return y
    tile = packed.tile or tile_for(tokens, packed.n, packed.k)
    steps, tiles_n, tiles_m = -(-packed.k // BLOCK), -(-packed.n // tile.BM), -(-tokens // tile.BT)
    tiles = tiles_n * tiles_m
    stream = tile.stream and tiles <= packed.arrivals.numel()
    processors = torch.cuda.get_device_properties(codes.device).multi_processor_count
    programs = min(processors * max(1, tile.per_sm), tiles * steps)
    stream = stream and tiles * steps * programs < 2**31
    if not stream:
        programs = tiles if tile.per_sm == 0 else min(tiles, programs)
    partials = packed.arrivals
    if stream:
        partials = torch.empty(2 * programs * tile.BM * tile.BT, dtype=torch.int32, device=codes.device)
    flat, tokens_layout, bytes_flat = shared_layouts(tile)
    w_desc = TensorDescriptor.from_tensor(packed.codes, [tile.BM // 16, 256], flat)
    x_desc = TensorDescriptor.from_tensor(codes, [tile.BT, BLOCK], tokens_layout)
    s_desc = w_desc
    if packed.group_scale is not None:
        s_desc = TensorDescriptor.from_tensor(packed.group_scale, [1, max(tile.BM, 128)], bytes_flat)
    options = {"num_warps": tile.warps, "launch_pdl": tile.overlap} | ({"maxnreg": tile.registers} if tile.registers else {})
    w4a8[(programs,)](
        w_desc, x_desc, s_desc, packed.scale, x.scale, y, partials, packed.arrivals, tokens, packed.n, tiles * steps, steps,
        tiles_n, tiles_m, BM=tile.BM, BT=tile.BT, STAGES=tile.stages, STREAM=stream, ORDER=tile.order,
        GROUPED=packed.group_scale is not None, **options,
    )  # fmt: skip
    return y


def _accepts(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num != INT4 or weight.zero or shape.has_order:
        return "wants symmetric int4 weights in contiguous groups"
    if weight.over is None and weight.group not in (None, shape.in_features):
        return "wants one scale per channel, or group scales on an int8 grid"
    if weight.over is not None and weight.group != BLOCK:
        return f"wants groups of {BLOCK} on the int8 grid"
    if weight.tile[0] not in (1, None):
        return f"wants one scale per channel, not a tile of {weight.tile[0]} rows"
    if shape.in_features % 16 or shape.in_features > linear_triton.LARGEST_IN:
        return f"wants input channels in multiples of 16 up to {linear_triton.LARGEST_IN}"
    if shape.device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(shape.device)[0] != 9:
        return "wants a Hopper GPU"
    if not triton.__version__.startswith("3."):
        return f"Gluon is experimental and this is written for Triton 3, not {triton.__version__}"
    return None


KERNELS: tuple[LinearKernel, ...] = (LinearKernel("hopper w4a8", _accepts, _pack, _run, PER_TOKEN_INT8),)
