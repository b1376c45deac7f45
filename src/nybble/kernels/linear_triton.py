"""Portable Triton linears: W4A8 per channel and per group, W8A8, QQQ, W4A16, and the 16-bit product of the output head.

One source runs on every GPU that Triton knows; the Hopper kernel is another file. Importing this needs no GPU.

The idea: y^T = W x^T. The weight is the left operand of the dot and its unpacked codes stay in registers; tokens are the
right operand, so a small batch is a narrow tile. Within 128 input channels, channels k and k + 64 share a byte: the low and
the high nibbles are then two ready operands and no shuffle is ever needed.

Exactness: int4 x int8 sums in int32, so neither the tile nor split-K can change a bit. Where fp32 scales sit between partial
sums (groups, W4A16), the sum runs in `segments`, a number fixed by the weight's shape alone: each segment adds its groups in
order, segments are added in order. A launch works on all segments of a tile in one program or on one segment per program
(the last to arrive adds them), and both give the same bits for every batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nybble.formats.qtensor import QTensor, inner_codes
from nybble.formats.spec import INT4, PER_TOKEN_INT8
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import Rows

BLOCK = 128  # input channels that pair up in bytes; every packed K is a multiple of it
ROWS = 128  # packed N is a multiple of it
MAGIC = tl.constexpr(0x4B400000)  # bits of 1.5 * 2**23: an int32 sum that starts here is a float plus that constant
MAGIC_FLOAT = tl.constexpr(12582912.0)
LARGEST_IN = 2**31 // (128 * 127)  # int32 holds 16 * int4 * int8 summed over fewer channels than this


# ---- device code --------------------------------------------------------------------------------------------------


@triton.jit
def _unpack_int8(w, ASM: tl.constexpr):
    """Packed bytes -> (low nibbles, high nibbles) as int8 holding 16 * code: three instructions for eight weights."""
    if ASM:
        lo = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }", "=r,r", [w], tl.int8, is_pure=True, pack=4
        )
        hi = tl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [w], tl.int8, is_pure=True, pack=4)
    else:
        lo = (w << 4).to(tl.int8)
        hi = (w & -16).to(tl.int8)
    return lo, hi


def float_assembly(half: bool, high: bool) -> str:
    """Four bytes -> four 16-bit floats (q - zero) * scale + rest of their low or high nibbles q, in 8 or 9 instructions.

    A nibble dropped into the mantissa of 128 (bf16) or 1024 (fp16) is that number plus q; `zero` has the same added, so the
    difference is exact and there is one rounding. Operands: bytes, scale, -zero, rest.
    """
    kind, one, byte = ("f16x2", "0x3C003C00", "0x64646464") if half else ("bf16x2", "0x3F803F80", "0x43434343")
    shift = "shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;" if high else "and.b32 t, $2, 0x0F0F0F0F;"
    return f"""{{ .reg .b32 t, p, q, o; {shift} mov.b32 o, {one};
        prmt.b32 p, t, {byte}, 0x4140; prmt.b32 q, t, {byte}, 0x4342;
        fma.rn.{kind} p, p, o, $5; fma.rn.{kind} q, q, o, $6;
        fma.rn.{kind} $0, p, $3, $7; fma.rn.{kind} $1, q, $4, $8; }}"""


@triton.jit
def _unpack_float(w, scale, zero, rest, SHIFT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Nibbles q = (w >> SHIFT) & 15 of bytes [BN, C] -> (q - zero) * scale + rest; the three are [BN, 1] in 16 bits."""
    if ASSEMBLY != "":
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r,r,r,r,r,r,r", [w, scale, -zero, rest], scale.dtype, is_pure=True, pack=4
        )
    base: tl.constexpr = 1024.0 if scale.dtype == tl.float16 else 128.0
    q = ((w >> SHIFT) & 15).to(tl.float32) + base - zero.to(tl.float32)
    return (q * scale.to(tl.float32) + rest.to(tl.float32)).to(scale.dtype)


@triton.jit
def _tile(M, N, BN: tl.constexpr, BM: tl.constexpr, ORDER: tl.constexpr):
    """Program -> (row tile, token tile). ORDER token tiles share each row tile before the next, so both stay in L2."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(M, BM)
    band = pid // (ORDER * tiles_n)
    height = min(tiles_m - band * ORDER, ORDER)
    inside = pid - band * ORDER * tiles_n
    return inside // height, band * ORDER + inside % height


@triton.jit
def _channel(step, C: tl.constexpr):
    """First input channel of a step that takes C bytes of each row: 64 bytes are a whole block, 32 half of one."""
    if C == 64:
        return step * 128
    else:
        return step // 2 * 128 + step % 2 * 32


@triton.jit
def _last_sum(acc, partials, arrivals, SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Write this program's partial tile; the last program of the tile gets (sum in split order, True)."""
    tile = tl.program_id(0).to(tl.int64)
    base = partials + tile * (SPLIT * BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    tl.store(base + tl.program_id(1) * (BN * BM), acc, cache_modifier=".cg")
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
    last = arrived == SPLIT - 1
    if last:
        acc = tl.load(base, cache_modifier=".cg")
        for s in tl.static_range(1, SPLIT):
            acc += tl.load(base + s * (BN * BM), cache_modifier=".cg")
        tl.store(arrivals + tile, 0)  # ready for the next launch
    return acc, last


@triton.jit
def _store(out, Y, n, m, M, N):
    pointer = Y + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(pointer, out.to(Y.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def int_linear(
    X, XS, W, WS, Y, partials, arrivals, M, N, K, KP,
    BITS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ORDER: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y[m, n] = (sum_k X[m, k] W[n, k]) * WS[n] * XS[m]. X int8 [M, K], W packed [N padded, KP], KP = K padded to BLOCK."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid_n, pid_m = _tile(M, N, BN, BM, ORDER)
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0)
    steps = tl.cdiv(tl.cdiv(KP, BK), SPLIT)
    first = tl.program_id(1) * steps * BK
    last = min(first + steps * BK, KP)
    acc = tl.zeros((BN, BM), tl.int32)
    if BITS == 4:
        HALF: tl.constexpr = BK // 2
        j = tl.arange(0, HALF)
        k = (j // 64) * 128 + j % 64
        w_pointer = W + n.to(tl.int64)[:, None] * (KP // 2) + (first // 2 + j)[None, :]
        x_pointer = X + row.to(tl.int64)[None, :] * K + (first + k)[:, None]
        for k0 in tl.range(first, last, BK, num_stages=STAGES):
            w = tl.load(w_pointer)
            if EVEN:
                x_lo = tl.load(x_pointer)
                x_hi = tl.load(x_pointer + 64)
            else:
                x_lo = tl.load(x_pointer, mask=(k0 + k < K)[:, None], other=0)
                x_hi = tl.load(x_pointer + 64, mask=(k0 + k + 64 < K)[:, None], other=0)
            lo, hi = _unpack_int8(w, ASM)
            acc = tl.dot(lo, x_lo, acc, out_dtype=tl.int32)
            acc = tl.dot(hi, x_hi, acc, out_dtype=tl.int32)
            w_pointer += HALF
            x_pointer += BK
    else:
        k = tl.arange(0, BK)
        w_pointer = W + n.to(tl.int64)[:, None] * KP + (first + k)[None, :]
        x_pointer = X + row.to(tl.int64)[None, :] * K + (first + k)[:, None]
        for k0 in tl.range(first, last, BK, num_stages=STAGES):
            w = tl.load(w_pointer)
            if EVEN:
                x = tl.load(x_pointer)
            else:
                x = tl.load(x_pointer, mask=(k0 + k < K)[:, None], other=0)
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
            w_pointer += BK
            x_pointer += BK
    finish = True
    if SPLIT > 1:
        acc, finish = _last_sum(acc, partials, arrivals, SPLIT, BN, BM)
    if finish:
        out = acc.to(tl.float32) * tl.load(WS + n)[:, None] * tl.load(XS + row)[None, :]
        _store(out, Y, n, m, M, N)


@triton.jit(do_not_specialize=["M", "steps"])
def group_linear(
    X, XS, W, WS, Y, partials, arrivals, M, N, K, KP, NP, steps,
    GROUP: tl.constexpr, EVEN: tl.constexpr, SEGMENTS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    SPLIT: tl.constexpr, ORDER: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W4A8 with an fp32 scale per group: Y[m, n] = XS[m] * sum_g WS[g, n] * (exact int32 dot over group g).

    WS [KP / GROUP, NP]. A step takes C bytes of every row: C channels in low nibbles, the C channels 64 further in high ones.
    A segment has `steps` of them. The int32 sum of a step starts at MAGIC and never leaves +-2**22, so its bits already are
    the float MAGIC_FLOAT + sum: one exact subtraction replaces a conversion, which runs at an eighth of that rate.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    C: tl.constexpr = 32 if GROUP == 32 else 64
    pid_n, pid_m = _tile(M, N, BN, BM, ORDER)
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0)
    j = tl.arange(0, C)
    total_steps = KP // (2 * C)
    first = 0
    last = total_steps
    if SPLIT > 1:
        first = tl.program_id(1) * steps
        last = min(first + steps, total_steps)
    w_pointer = W + n.to(tl.int64)[:, None] * (KP // 2) + (first * C + j)[None, :]
    x_row = X + row.to(tl.int64)[None, :] * K + j[:, None]
    base = tl.full((BN, BM), MAGIC, tl.int32)
    acc = tl.zeros((BN, BM), tl.float32)
    total = tl.zeros((BN, BM), tl.float32)
    channel = _channel(first, C)
    scale_lo = tl.load(WS + (channel // GROUP) * NP + n).to(tl.float32)
    scale_hi = scale_lo
    if GROUP < 128:
        scale_hi = tl.load(WS + ((channel + 64) // GROUP) * NP + n).to(tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        channel = _channel(step, C)
        w = tl.load(w_pointer)
        if EVEN:
            x_lo = tl.load(x_row + channel)
            x_hi = tl.load(x_row + channel + 64)
        else:
            x_lo = tl.load(x_row + channel, mask=(channel + j < K)[:, None], other=0)
            x_hi = tl.load(x_row + channel + 64, mask=(channel + j + 64 < K)[:, None], other=0)
        # the next step's scales, asked for a whole step ahead
        ahead = min(step + 1, last - 1)
        channel = _channel(ahead, C)
        next_lo = tl.load(WS + (channel // GROUP) * NP + n).to(tl.float32)
        lo, hi = _unpack_int8(w, ASM)
        part = tl.dot(lo, x_lo, base, out_dtype=tl.int32)
        if GROUP < 128:
            next_hi = tl.load(WS + ((channel + 64) // GROUP) * NP + n).to(tl.float32)
            acc = tl.fma(part.to(tl.float32, bitcast=True) - MAGIC_FLOAT, scale_lo[:, None], acc)
            part = tl.dot(hi, x_hi, base, out_dtype=tl.int32)
            acc = tl.fma(part.to(tl.float32, bitcast=True) - MAGIC_FLOAT, scale_hi[:, None], acc)
            scale_hi = next_hi
        else:
            part = tl.dot(hi, x_hi, part, out_dtype=tl.int32)
            acc = tl.fma(part.to(tl.float32, bitcast=True) - MAGIC_FLOAT, scale_lo[:, None], acc)
        scale_lo = next_lo
        w_pointer += C
        if SEGMENTS > 1 and SPLIT == 1:  # noqa: SIM102  (constant; the next line is not)
            if (step + 1) % steps == 0:
                total += acc
                acc = tl.zeros((BN, BM), tl.float32)
    finish = True
    if SPLIT > 1:
        acc, finish = _last_sum(acc, partials, arrivals, SPLIT, BN, BM)
    elif SEGMENTS > 1:
        acc = total + acc
    if finish:
        _store(acc * tl.load(XS + row)[None, :], Y, n, m, M, N)


@triton.jit(do_not_specialize=["M", "steps"])
def float_linear(
    X, W, WS, WZ, WR, Y, partials, arrivals, M, N, K, KP, NP, steps,
    GROUP: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr, SEGMENTS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, SPLIT: tl.constexpr, ORDER: tl.constexpr, STAGES: tl.constexpr, ASM_LO: tl.constexpr,
    ASM_HI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W4A16: Y[m, n] = sum_k X[m, k] * w[n, k], w = (q - WZ) * WS + WR in X's dtype, one rounding; fp32 sums in segments.

    WS, WZ, WR [KP / GROUP, NP]; without ZERO only WS is read. GROUP 0: one scale per row, applied to the fp32 sum.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    C: tl.constexpr = 32 if GROUP == 32 else 64
    base: tl.constexpr = 1024.0 if X.dtype.element_ty == tl.float16 else 128.0
    pid_n, pid_m = _tile(M, N, BN, BM, ORDER)
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0)
    j = tl.arange(0, C)
    total_steps = KP // (2 * C)
    first = 0
    last = total_steps
    if SPLIT > 1:
        first = tl.program_id(1) * steps
        last = min(first + steps, total_steps)
    w_pointer = W + n.to(tl.int64)[:, None] * (KP // 2) + (first * C + j)[None, :]
    x_row = X + row.to(tl.int64)[None, :] * K + j[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    total = tl.zeros((BN, BM), tl.float32)
    scale_lo = tl.full((BN,), 1.0, tl.float32).to(X.dtype.element_ty)
    zero_lo = tl.full((BN,), base + 8.0, tl.float32).to(X.dtype.element_ty)
    rest_lo = tl.full((BN,), 0.0, tl.float32).to(X.dtype.element_ty)
    for step in tl.range(first, last, num_stages=STAGES):
        channel = _channel(step, C)
        w = tl.load(w_pointer)
        if EVEN:
            x_lo = tl.load(x_row + channel)
            x_hi = tl.load(x_row + channel + 64)
        else:
            x_lo = tl.load(x_row + channel, mask=(channel + j < K)[:, None], other=0)
            x_hi = tl.load(x_row + channel + 64, mask=(channel + j + 64 < K)[:, None], other=0)
        if GROUP > 0:
            at = (channel // GROUP) * NP + n
            scale_lo = tl.load(WS + at)
            if ZERO:
                zero_lo = tl.load(WZ + at)
                rest_lo = tl.load(WR + at)
        scale_hi, zero_hi, rest_hi = scale_lo, zero_lo, rest_lo
        if GROUP > 0 and GROUP < 128:
            at = ((channel + 64) // GROUP) * NP + n
            scale_hi = tl.load(WS + at)
            if ZERO:
                zero_hi = tl.load(WZ + at)
                rest_hi = tl.load(WR + at)
        lo = _unpack_float(w, scale_lo[:, None], zero_lo[:, None], rest_lo[:, None], 0, ASM_LO)
        acc = tl.dot(lo, x_lo, acc)
        hi = _unpack_float(w, scale_hi[:, None], zero_hi[:, None], rest_hi[:, None], 4, ASM_HI)
        acc = tl.dot(hi, x_hi, acc)
        w_pointer += C
        if SEGMENTS > 1 and SPLIT == 1:  # noqa: SIM102  (constant; the next line is not)
            if (step + 1) % steps == 0:
                total += acc
                acc = tl.zeros((BN, BM), tl.float32)
    finish = True
    if SPLIT > 1:
        acc, finish = _last_sum(acc, partials, arrivals, SPLIT, BN, BM)
    elif SEGMENTS > 1:
        acc = total + acc
    if finish:
        if GROUP == 0:
            acc = acc * tl.load(WS + n).to(tl.float32)[:, None]
        _store(acc, Y, n, m, M, N)


@triton.jit(do_not_specialize=["M"])
def dense_linear(
    X, W, Y, M, N, K,
    EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ORDER: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Y[m, n] = sum_k X[m, k] W[n, k] in fp32, k in one fixed order whatever M. X [M, K], W [N, K] of one float dtype."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid_n, pid_m = _tile(M, N, BN, BM, ORDER)
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    w_pointer = W + tl.where(n < N, n, 0).to(tl.int64)[:, None] * K + k[None, :]
    x_pointer = X + tl.where(m < M, m, 0).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        if EVEN:
            w = tl.load(w_pointer)
            x = tl.load(x_pointer)
        else:
            w = tl.load(w_pointer, mask=(k0 + k < K)[None, :], other=0.0)
            x = tl.load(x_pointer, mask=(k0 + k < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_pointer += BK
        x_pointer += BK
    _store(acc, Y, n, m, M, N)


# ---- tiles --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """One launch: BN weight rows x BM tokens, BK input channels a step, the K axis over `split` programs (0: the segments).

    order: see `_tile`. overlap: let the launch start while the kernel before it drains, where the device can.
    """

    BN: int
    BM: int
    BK: int
    split: int
    stages: int
    warps: int
    order: int = 8
    overlap: bool = True


class Row(NamedTuple):
    """`tile` for `kind` when tokens, rows and input channels are at most these; the table's first match wins."""

    kind: str
    tokens: int
    rows: int
    channels: int
    tile: Tile


ANY = 1 << 30
TILES: dict[str, tuple[Row, ...]] = {
    "hopper": (
        Row("int4", 16, 6144, ANY, Tile(64, 16, 256, 4, 3, 4)),
        Row("int4", 16, 16384, ANY, Tile(64, 16, 256, 1, 4, 4)),
        Row("int4", 16, ANY, ANY, Tile(128, 16, 256, 1, 3, 8)),
        Row("int4", 32, 6144, ANY, Tile(64, 32, 256, 4, 3, 4)),
        Row("int4", 32, ANY, ANY, Tile(64, 32, 256, 1, 4, 4)),
        Row("int4", 64, 6144, 6144, Tile(64, 32, 256, 2, 3, 4)),
        Row("int4", 64, 6144, ANY, Tile(64, 32, 256, 4, 3, 4)),
        Row("int4", 64, ANY, ANY, Tile(128, 64, 256, 1, 3, 8)),
        Row("int4", 128, 6144, 6144, Tile(64, 64, 128, 2, 3, 4)),
        Row("int4", 128, 6144, ANY, Tile(128, 64, 256, 2, 3, 8)),
        Row("int4", 128, ANY, ANY, Tile(128, 64, 256, 1, 3, 8)),
        Row("int4", 256, 6144, ANY, Tile(128, 128, 128, 2, 3, 4)),
        Row("int4", 256, ANY, ANY, Tile(128, 128, 128, 1, 3, 4)),
        Row("int4", ANY, 6144, ANY, Tile(128, 128, 128, 1, 3, 8)),
        Row("int4", ANY, ANY, ANY, Tile(128, 128, 128, 1, 3, 4, 16)),
        Row("group", 16, ANY, ANY, Tile(64, 16, 128, 0, 3, 4)),
        Row("group", 64, 6144, ANY, Tile(128, 32, 128, 0, 3, 4)),
        Row("group", 64, 16384, ANY, Tile(64, 64, 128, 0, 3, 4)),
        Row("group", 64, ANY, ANY, Tile(128, 64, 128, 0, 3, 4)),
        Row("group", 128, 6144, ANY, Tile(64, 64, 128, 0, 3, 4)),
        Row("group", 128, ANY, ANY, Tile(128, 64, 128, 0, 3, 4)),
        Row("group", ANY, ANY, ANY, Tile(64, 128, 128, 0, 3, 4)),
        Row("int8", 16, 6144, ANY, Tile(64, 16, 256, 4, 4, 4)),
        Row("int8", 16, ANY, ANY, Tile(64, 16, 256, 2, 4, 4)),
        Row("int8", 64, ANY, ANY, Tile(64, 64, 128, 2, 5, 4)),
        Row("int8", 128, 6144, ANY, Tile(128, 128, 128, 2, 4, 8)),
        Row("int8", 256, ANY, ANY, Tile(128, 128, 128, 1, 4, 8)),
        Row("int8", ANY, ANY, ANY, Tile(128, 256, 128, 1, 3, 8)),
        Row("float4", 16, ANY, ANY, Tile(64, 16, 128, 0, 5, 4)),
        Row("float4", 32, ANY, ANY, Tile(64, 32, 128, 0, 5, 4)),
        Row("float4", 64, ANY, ANY, Tile(128, 64, 128, 0, 4, 8)),
        Row("float4", ANY, ANY, ANY, Tile(128, 128, 128, 1, 4, 8)),
        Row("dense", 16, ANY, ANY, Tile(64, 16, 128, 1, 4, 4)),
        Row("dense", 64, ANY, ANY, Tile(128, 64, 64, 1, 4, 4)),
        Row("dense", ANY, ANY, ANY, Tile(128, 128, 64, 1, 4, 8)),
    ),
    "": (  # anything else: small enough for 99 KiB of shared memory
        Row("dense", 32, ANY, ANY, Tile(64, 16, 64, 1, 3, 4)),
        Row("dense", ANY, ANY, ANY, Tile(64, 64, 32, 1, 3, 4)),
        Row("", 16, ANY, ANY, Tile(64, 16, 128, 0, 4, 4)),
        Row("", 64, ANY, ANY, Tile(64, 64, 128, 0, 3, 4)),
        Row("", ANY, ANY, ANY, Tile(128, 128, 128, 1, 3, 8)),
    ),
}


def tile_for(kind: str, tokens: int, rows: int, channels: int, capability: tuple[int, int] | None) -> Tile:
    """The table's choice. `capability` is CUDA's (major, minor), None for other devices."""
    table = TILES["hopper" if capability is not None and capability[0] == 9 else ""]
    for row in table:
        if row.kind in (kind, "") and tokens <= row.tokens and rows <= row.rows and channels <= row.channels:
            return row.tile
    raise LookupError(f"no tile for {kind} with {tokens} tokens on {capability}")  # unreachable: tables end in ANY


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors and without inline assembly."""
    return triton.knobs.runtime.interpret


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


# ---- packing ------------------------------------------------------------------------------------------------------


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 codes [N, K], K a multiple of 128 -> int8 [N, K / 2]: byte 64 b + j holds channel 128 b + j and (high) + 64."""
    n, k = codes.shape
    low, high = (codes.view(n, k // BLOCK, 2, BLOCK // 2) & 15).unbind(2)
    return (low | (high << 4)).reshape(n, k // 2)


def unpack_nibbles(packed: Tensor, signed: bool = True) -> Tensor:
    """The inverse of `pack_nibbles`. int8 [N, K / 2] -> int8 [N, K]."""
    n, half = packed.shape
    pairs = packed.view(n, half * 2 // BLOCK, 1, BLOCK // 2)
    codes = torch.cat((pairs & 15, (pairs >> 4) & 15), 2)
    if signed:
        codes = (codes ^ 8) - 8
    return codes.reshape(n, half * 2)


def _pad(t: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
    return torch.nn.functional.pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]), value=value)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Packed:
    """A weight in this file's layout. N and K are the layer's, the tensors are padded with codes of value zero.

    kind: row of the tile table. codes: int8 [N padded, K padded (/ 2)]. scale: [N padded] or [groups, N padded]. zero,
    rest: see `float_linear`. segments: how many fixed parts the fp32 sum over K has. arrivals: int32, zero between launches.
    """

    kind: str
    n: int
    k: int
    group: int
    segments: int
    dtype: torch.dtype
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    rest: Tensor | None
    arrivals: Tensor
    tile: Tile | None = None  # set: this tile whatever the batch (benchmarks, tests)

    @property
    def k_padded(self) -> int:
        return self.codes.shape[1] * (1 if self.kind == "int8" else 2)


def segments_for(n: int, k: int) -> int:
    """How many parts an fp32 sum over K has. A function of the shape, never of the batch: enough programs for a small batch
    on a big GPU when there are few rows, one long sum (cheaper for large batches) when there are many."""
    return 1 if n > 8192 or k < 2048 else 4


def _packed(kind: str, weight: QTensor, shape: LinearShape, codes: Tensor, scale: Tensor, group: int = 0,
            zero: Tensor | None = None, rest: Tensor | None = None) -> Packed:  # fmt: skip
    n, k = weight.shape
    arrivals = torch.zeros(4096, dtype=torch.int32, device=shape.device)
    segments = segments_for(n, k) if kind in ("group", "float4") else 1
    return Packed(kind, n, k, group, segments, shape.dtype, codes, scale, zero, rest, arrivals)


def _narrowest(scale: Tensor) -> Tensor:
    """fp32 scales as 16-bit ones where that loses nothing (checkpoints mostly hold 16-bit scales): fewer bytes to stream."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale


def _by_group(values: Tensor, group: int, n_padded: int, k_padded: int) -> Tensor:
    """[N, groups] -> [K padded / group, N padded], contiguous, padded with zeros."""
    return _pad(values, n_padded, k_padded // group).t().contiguous()


def _common_group(weight: QTensor) -> tuple[int, int]:
    """(group the kernels use, how often a stored scale repeats): groups above 128 repeat their scale."""
    group = weight.spec.group or weight.shape[1]
    return (BLOCK, group // BLOCK) if group > BLOCK else (group, 1)


def pack_int(weight: QTensor | Tensor, shape: LinearShape) -> Packed:
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    n, k = weight.shape
    n_padded, k_padded = _round_up(n, ROWS), _round_up(k, BLOCK)
    if weight.over is not None:
        codes, scale = _pad(inner_codes(weight), n_padded, k_padded), weight.over
    elif weight.spec.num.bits == 8:
        codes, scale = _pad(weight.codes, n_padded, k_padded), weight.scale
    else:
        codes, scale = pack_nibbles(_pad(weight.codes, n_padded, k_padded)), weight.scale / 16  # codes enter as 16 * code
    kind = "int8" if weight.over is not None or weight.spec.num.bits == 8 else "int4"
    return _packed(kind, weight, shape, codes, _pad(scale.expand(n, 1).contiguous(), n_padded, 1).view(-1))


def _pack_group(weight: QTensor | Tensor, shape: LinearShape) -> Packed:
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    n_padded, k_padded = _round_up(weight.shape[0], ROWS), _round_up(weight.shape[1], BLOCK)
    group, repeat = _common_group(weight)
    scale = _narrowest((weight.scale / 16).repeat_interleave(repeat, 1))
    codes = pack_nibbles(_pad(weight.codes, n_padded, k_padded))
    return _packed("group", weight, shape, codes, _by_group(scale, group, n_padded, k_padded), group)


def _pack_float(weight: QTensor | Tensor, shape: LinearShape) -> Packed:
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    n_padded, k_padded = _round_up(weight.shape[0], ROWS), _round_up(weight.shape[1], BLOCK)
    offset = 8 if weight.spec.num.qmin < 0 else 0  # the kernel reads unsigned nibbles
    codes = pack_nibbles(_pad(weight.codes + offset, n_padded, k_padded, 8))
    if weight.zero is None and weight.scale.shape[1] == 1:
        scale = _pad(weight.scale.expand(weight.shape[0], 1).contiguous(), n_padded, 1).view(-1)
        return _packed("float4", weight, shape, codes, scale)
    group, repeat = _common_group(weight)
    if weight.scale.shape[1] == 1:  # per channel with a zero: as groups
        group, repeat = BLOCK, k_padded // BLOCK
    scale = weight.scale.repeat_interleave(repeat, 1)
    zero = rest = None
    if weight.zero is not None:
        # Only whole numbers survive 16 bits beside 128 (1024): the fraction of a zero becomes an addend.
        exact = weight.zero.repeat_interleave(repeat, 1) + offset
        whole = exact.round().clamp(-64, 64)
        base = 1024 if shape.dtype == torch.float16 else 128
        zero = _by_group((whole + base).to(shape.dtype), group, n_padded, k_padded)
        rest = _by_group(((whole - exact) * scale).to(shape.dtype), group, n_padded, k_padded)
    scale = _by_group(scale.to(shape.dtype), group, n_padded, k_padded)
    return _packed("float4", weight, shape, codes, scale, group, zero, rest)


# ---- launching ----------------------------------------------------------------------------------------------------


def _plan(packed: Packed, tokens: int, device: torch.device) -> Tile:
    """The tile, cut to what this weight allows."""
    tile = packed.tile or tile_for(packed.kind, tokens, packed.n, packed.k, _capability(device))
    BK = tile.BK if packed.k_padded % tile.BK == 0 else BLOCK
    tiles = triton.cdiv(packed.n, tile.BN) * triton.cdiv(tokens, tile.BM)
    if packed.kind in ("group", "float4"):
        split = packed.segments if tile.split == 0 or tile.split > 1 else 1
    else:
        split = min(tile.split or 2, packed.k_padded // BK)
    if tiles > packed.arrivals.numel():
        split = 1
    return tile._replace(BK=BK, split=split)


def _launch(kernel: Callable, packed: Packed, tokens: int, device: torch.device, heads: tuple, **flags) -> Tensor:
    """Allocate output and partials and run `kernel(*heads, y, partials, arrivals, *middle, ...)`."""
    y = torch.empty((tokens, packed.n), dtype=packed.dtype, device=device)
    if tokens == 0:
        return y
    tile = _plan(packed, tokens, device)
    tiles = triton.cdiv(packed.n, tile.BN) * triton.cdiv(tokens, tile.BM)
    partials = y
    if tile.split > 1:
        wide = torch.float32 if packed.kind in ("group", "float4") else torch.int32
        partials = torch.empty(tiles * tile.split * tile.BN * tile.BM, dtype=wide, device=device)
    middle: tuple[int, ...] = ()
    if packed.kind in ("int4", "int8"):
        flags["BK"] = tile.BK
    else:
        flags["SEGMENTS"] = packed.segments
        step = 64 if packed.group == 32 else BLOCK
        middle = (packed.scale.shape[-1], triton.cdiv(packed.k_padded // step, packed.segments))
    launch = {"num_warps": tile.warps, "num_stages": tile.stages}
    overlap = tile.overlap and overlaps(device)
    if overlap:
        launch["launch_pdl"] = True
    kernel[(tiles, tile.split)](
        *heads, y, partials, packed.arrivals, tokens, packed.n, packed.k, packed.k_padded, *middle,
        EVEN=packed.k == packed.k_padded, BN=tile.BN, BM=tile.BM, SPLIT=tile.split, ORDER=tile.order, STAGES=tile.stages,
        PDL=overlap, **flags, **launch,
    )  # fmt: skip
    return y


def uses_assembly(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and not interpreting()


def overlaps(device: torch.device) -> bool:
    """Whether launches may start while the kernel before them drains (programmatic dependent launch)."""
    capability = _capability(device)
    return capability is not None and capability[0] >= 9 and not interpreting()


def run_int(packed: Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Rows)
    codes = x.codes.contiguous()
    heads = (codes, x.scale, packed.codes, packed.scale)
    bits, asm = (8 if packed.kind == "int8" else 4), uses_assembly(codes.device)
    return _launch(int_linear, packed, codes.shape[0], codes.device, heads, BITS=bits, ASM=asm)


def _run_group(packed: Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Rows)
    codes = x.codes.contiguous()
    heads, asm = (codes, x.scale, packed.codes, packed.scale), uses_assembly(codes.device)
    return _launch(group_linear, packed, codes.shape[0], codes.device, heads, GROUP=packed.group, ASM=asm)


def _run_float(packed: Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Tensor)
    x = x.contiguous()
    zero, rest = (packed.scale, packed.scale) if packed.zero is None else (packed.zero, packed.rest)
    heads = (x, packed.codes, packed.scale, zero, rest)
    asm = [float_assembly(x.dtype == torch.float16, high) if uses_assembly(x.device) else "" for high in (False, True)]
    flags = {"GROUP": packed.group, "ZERO": packed.zero is not None, "ASM_LO": asm[0], "ASM_HI": asm[1]}
    return _launch(float_linear, packed, x.shape[0], x.device, heads, **flags)


def with_tile(packed: Packed, tile: Tile) -> Packed:
    """The same weight run with one tile whatever the batch: what a sweep measures."""
    return replace(packed, tile=tile)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [S, H] x weight [V, H]^T -> float32 [S, V]; one order of sums over H, so a row's bits do not depend on S."""
    tokens, channels = hidden.shape
    hidden, weight = hidden.to(weight.dtype).contiguous(), weight.contiguous()
    y = torch.empty((tokens, weight.shape[0]), dtype=torch.float32, device=hidden.device)
    if tokens == 0:
        return y
    tile = tile_for("dense", tokens, weight.shape[0], channels, _capability(hidden.device))
    BK = min(tile.BK, 32) if weight.dtype == torch.float32 else tile.BK
    launch = {"launch_pdl": True} if overlaps(hidden.device) else {}
    tiles = triton.cdiv(weight.shape[0], tile.BN) * triton.cdiv(tokens, tile.BM)
    dense_linear[(tiles,)](
        hidden, weight, y, tokens, weight.shape[0], channels, EVEN=channels % BK == 0, BN=tile.BN, BM=tile.BM, BK=BK,
        ORDER=tile.order, STAGES=tile.stages, PDL=overlaps(hidden.device), num_warps=tile.warps, num_stages=tile.stages,
        **launch,
    )  # fmt: skip
    return y


# ---- what each accepts --------------------------------------------------------------------------------------------


def _refuse_device(shape: LinearShape) -> str | None:
    if shape.device.type != "cuda" and not interpreting():
        return "wants a GPU"
    if _capability(shape.device) is not None and _capability(shape.device) < (8, 0):
        return "wants compute capability 8.0 or later"
    return None


def _accepts_int(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num.kind != "int" or weight.num.qmin >= 0 or weight.zero:
        return "wants symmetric integer weights"
    if shape.has_order:
        return "wants contiguous groups, not GPTQ's g_idx"
    if weight.over is None and weight.group is not None and weight.group != shape.in_features:
        return "wants one scale per channel"
    if weight.over is None and weight.tile[0] not in (1, None):
        return f"wants one scale per channel, not a tile of {weight.tile[0]} rows"
    if shape.in_features > LARGEST_IN:
        return f"int32 may overflow beyond {LARGEST_IN} input channels"
    return _refuse_device(shape)


def _refuse_group(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    assert weight is not None
    if shape.has_order:
        return "wants contiguous groups, not GPTQ's g_idx"
    group = weight.group or shape.in_features
    if weight.tile[0] not in (1, None) or (group not in (32, 64) and group % BLOCK and group != shape.in_features):
        return f"wants groups of 32, 64 or multiples of 128 of one row, not a tile of {weight.tile}"
    if shape.in_features % group:
        return f"{shape.in_features} input channels are not whole groups of {group}"
    return None


def _accepts_group(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num != INT4 or weight.zero or weight.over or not weight.group:
        return "wants symmetric int4 weights with one scale per group"
    return _refuse_group(shape) or _refuse_device(shape)


def _accepts_float(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act is not None or weight.num.kind != "int" or weight.num.bits != 4 or weight.over:
        return "wants 4-bit integer weights with 16-bit activations"
    if weight.num.qmin >= 0 and not weight.zero:
        return "wants a zero beside unsigned codes"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"wants bfloat16 or float16 activations, not {shape.dtype}"
    return _refuse_group(shape) or _refuse_device(shape)


KERNELS = (
    LinearKernel("triton int8", _accepts_int, pack_int, run_int, PER_TOKEN_INT8),
    LinearKernel("triton int4 groups", _accepts_group, _pack_group, _run_group, PER_TOKEN_INT8),
    LinearKernel("triton w4a16", _accepts_float, _pack_float, _run_float, None),
)
