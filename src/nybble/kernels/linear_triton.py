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
from dataclasses import dataclass
from functools import cache, partial
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
def _begin(M, N, BN: tl.constexpr, BM: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr):
    """This program's rows n, tokens m, and the tokens to read. ORDER token tiles share each row tile before the next, so both
    stay in L2."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles_n = tl.cdiv(N, BN)
    band = tl.program_id(0) // (ORDER * tiles_n)
    height = min(tl.cdiv(M, BM) - band * ORDER, ORDER)
    inside = tl.program_id(0) - band * ORDER * tiles_n
    m = (band * ORDER + inside % height) * BM + tl.arange(0, BM)
    return inside // height * BN + tl.arange(0, BN), m, tl.where(m < M, m, 0)


@triton.jit
def _inputs(pointer, k, K, EVEN: tl.constexpr):
    """Activations [channels, tokens] at channels k; beyond K they are zeros."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=(k < K)[:, None], other=0)


@triton.jit
def _of_groups(values, channel, n, NP, GROUP: tl.constexpr):
    """Of rows n, what [groups, NP] values hold for a channel and the one 64 further on."""
    low = tl.load(values + channel // GROUP * NP + n)
    high = low
    if GROUP < 128:
        high = tl.load(values + (channel + 64) // GROUP * NP + n)
    return low, high


@triton.jit
def _channel(step, C: tl.constexpr):
    """First input channel of a step that takes C bytes of each row: 64 bytes are a whole block, 32 half of one."""
    return step * 128 if C == 64 else step // 2 * 128 + step % 2 * 32


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
def plain_linear(
    X, XS, W, WS, Y, partials, arrivals, M, N, K, KP,
    BITS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ORDER: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Y[m, n] = (sum_k X[m, k] W[n, k]) * WS[n] * XS[m], X int8 [M, K], W packed [N padded, KP], KP = K padded to BLOCK.

    BITS 16: X [M, K] and W [N, KP = K] of one float dtype, no scales, fp32 sums over k in one fixed order whatever M.
    """
    n, m, row = _begin(M, N, BN, BM, ORDER, PDL)
    steps = tl.cdiv(tl.cdiv(KP, BK), SPLIT)
    first = tl.program_id(1) * steps * BK
    last = min(first + steps * BK, KP)
    acc = tl.zeros((BN, BM), tl.float32 if BITS == 16 else tl.int32)
    IN_BYTE: tl.constexpr = 2 if BITS == 4 else 1
    j = tl.arange(0, BK // IN_BYTE)
    k = (j // 64) * 128 + j % 64 if BITS == 4 else j
    w_pointer = W + tl.where(n < N, n, 0).to(tl.int64)[:, None] * (KP // IN_BYTE) + (first // IN_BYTE + j)[None, :]
    x_pointer = X + row.to(tl.int64)[None, :] * K + (first + k)[:, None]
    for k0 in tl.range(first, last, BK, num_stages=STAGES):
        x = _inputs(x_pointer, k0 + k, K, EVEN)
        if BITS == 16:
            w = tl.load(w_pointer) if EVEN else tl.load(w_pointer, mask=(k0 + k < K)[None, :], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        elif BITS == 8:
            acc = tl.dot(tl.load(w_pointer), x, acc, out_dtype=tl.int32)
        else:
            x_hi = _inputs(x_pointer + 64, k0 + k + 64, K, EVEN)
            lo, hi = _unpack_int8(tl.load(w_pointer), ASM)
            acc = tl.dot(lo, x, acc, out_dtype=tl.int32)
            acc = tl.dot(hi, x_hi, acc, out_dtype=tl.int32)
        w_pointer += BK // IN_BYTE
        x_pointer += BK
    finish = True
    if SPLIT > 1:
        acc, finish = _last_sum(acc, partials, arrivals, SPLIT, BN, BM)
    if finish and BITS == 16:
        _store(acc, Y, n, m, M, N)
    elif finish:
        _store(acc.to(tl.float32) * tl.load(WS + n)[:, None] * tl.load(XS + row)[None, :], Y, n, m, M, N)


@triton.jit(do_not_specialize=["M", "steps"])
def group_linear(
    X, XS, W, WS, WZ, WR, Y, partials, arrivals, M, N, K, KP, NP, steps,
    GROUP: tl.constexpr, ZERO: tl.constexpr, EVEN: tl.constexpr, SEGMENTS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, SPLIT: tl.constexpr, ORDER: tl.constexpr, STAGES: tl.constexpr, ASM_LO: tl.constexpr,
    ASM_HI: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """fp32 sums in segments of `steps`; WS, WZ, WR [KP / GROUP, NP], without ZERO only WS is read.

    A step takes C bytes of every row: C channels in low nibbles, the C channels 64 further in high ones.
    X int8: Y[m, n] = XS[m] * sum_g WS[g, n] * (exact int32 dot over group g). The int32 sum of a step starts at MAGIC and never
    leaves +-2**22, so its bits already are the float MAGIC_FLOAT + sum: one exact subtraction replaces a conversion, which runs
    at an eighth of that rate.
    X 16 bits: Y[m, n] = sum_k X[m, k] * w[n, k], w = (q - WZ) * WS + WR in X's dtype, one rounding. GROUP 0: one scale per row,
    applied to the fp32 sum.
    """
    C: tl.constexpr = 32 if GROUP == 32 else 64
    INTEGER: tl.constexpr = X.dtype.element_ty == tl.int8
    n, m, row = _begin(M, N, BN, BM, ORDER, PDL)
    j = tl.arange(0, C)
    first = 0
    last = KP // (2 * C)
    if SPLIT > 1:
        first = tl.program_id(1) * steps
        last = min(first + steps, last)
    w_pointer = W + n.to(tl.int64)[:, None] * (KP // 2) + (first * C + j)[None, :]
    x_row = X + row.to(tl.int64)[None, :] * K + j[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    total = tl.zeros((BN, BM), tl.float32)
    if INTEGER:
        base = tl.full((BN, BM), MAGIC, tl.int32)
        scale_lo, scale_hi = _of_groups(WS, _channel(first, C), n, NP, GROUP)
    else:
        one: tl.constexpr = 1024.0 if X.dtype.element_ty == tl.float16 else 128.0
        scale_lo = tl.full((BN,), 1.0, tl.float32).to(X.dtype.element_ty)
        zero_lo = tl.full((BN,), one + 8.0, tl.float32).to(X.dtype.element_ty)
        rest_lo = tl.full((BN,), 0.0, tl.float32).to(X.dtype.element_ty)
        scale_hi, zero_hi, rest_hi = scale_lo, zero_lo, rest_lo
    for step in tl.range(first, last, num_stages=STAGES):
        channel = _channel(step, C)
        w = tl.load(w_pointer)
        x_lo = _inputs(x_row + channel, channel + j, K, EVEN)
        x_hi = _inputs(x_row + channel + 64, channel + j + 64, K, EVEN)
        if INTEGER:  # the next step's scales, asked for a whole step ahead
            next_lo, next_hi = _of_groups(WS, _channel(min(step + 1, last - 1), C), n, NP, GROUP)
            lo, hi = _unpack_int8(w, ASM_LO != "")
            part = tl.dot(lo, x_lo, base, out_dtype=tl.int32)
            if GROUP < 128:
                by = scale_lo.to(tl.float32)[:, None]
                acc = tl.fma(part.to(tl.float32, bitcast=True) - MAGIC_FLOAT, by, acc)
                part = tl.dot(hi, x_hi, base, out_dtype=tl.int32)
            else:
                part = tl.dot(hi, x_hi, part, out_dtype=tl.int32)
            acc = tl.fma(part.to(tl.float32, bitcast=True) - MAGIC_FLOAT, scale_hi.to(tl.float32)[:, None], acc)
            scale_lo, scale_hi = next_lo, next_hi
        else:
            if GROUP > 0:
                scale_lo, scale_hi = _of_groups(WS, channel, n, NP, GROUP)
            if ZERO:
                zero_lo, zero_hi = _of_groups(WZ, channel, n, NP, GROUP)
                rest_lo, rest_hi = _of_groups(WR, channel, n, NP, GROUP)
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
        if INTEGER:
            acc = acc * tl.load(XS + row)[None, :]
        elif GROUP == 0:
            acc = acc * tl.load(WS + n).to(tl.float32)[:, None]
        _store(acc, Y, n, m, M, N)


# ---- tiles --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """One launch: BN weight rows x BM tokens, BK input channels a step, the K axis over `split` programs (0: the segments).
    order: see `_begin`."""

    BN: int
    BM: int
    BK: int
    split: int
    stages: int
    warps: int
    order: int = 8


class Row(NamedTuple):
    """`tile` for `kind` when tokens and rows are at most these; the table's first match wins."""

    kind: str
    tokens: int
    rows: int
    tile: Tile


ANY = 1 << 30
TILES: dict[str, tuple[Row, ...]] = {
    "hopper": (
        Row("int4", 16, ANY, Tile(64, 16, 256, 1, 4, 4)),
        Row("int4", 64, ANY, Tile(128, 64, 256, 1, 3, 8)),
        Row("int4", ANY, ANY, Tile(128, 128, 128, 1, 3, 4, 16)),
        Row("group", 16, ANY, Tile(64, 16, 128, 0, 3, 4)),
        Row("group", 64, 6144, Tile(128, 32, 128, 0, 3, 4)),
        Row("group", 128, 6144, Tile(64, 64, 128, 0, 3, 4)),
        Row("group", 128, ANY, Tile(128, 64, 128, 0, 3, 4)),
        Row("group", ANY, ANY, Tile(64, 128, 128, 0, 3, 4)),
        Row("int8", 16, ANY, Tile(64, 16, 256, 2, 4, 4)),
        Row("int8", 64, ANY, Tile(64, 64, 128, 2, 5, 4)),
        Row("int8", 128, 6144, Tile(128, 128, 128, 2, 4, 8)),
        Row("int8", ANY, ANY, Tile(128, 256, 128, 1, 3, 8)),
        Row("float4", 16, ANY, Tile(64, 16, 128, 0, 5, 4)),
        Row("float4", 64, ANY, Tile(128, 64, 128, 0, 4, 8)),
        Row("float4", ANY, ANY, Tile(128, 128, 128, 1, 4, 8)),
        Row("dense", 16, ANY, Tile(64, 16, 128, 1, 4, 4)),
        Row("dense", 64, ANY, Tile(128, 64, 64, 1, 4, 4)),
        Row("dense", ANY, ANY, Tile(128, 128, 64, 1, 4, 8)),
    ),
    "": (  # anything else: small enough for 99 KiB of shared memory
        Row("dense", 32, ANY, Tile(64, 16, 64, 1, 3, 4)),
        Row("dense", ANY, ANY, Tile(64, 64, 32, 1, 3, 4)),
        Row("", 16, ANY, Tile(64, 16, 128, 0, 4, 4)),
        Row("", 64, ANY, Tile(64, 64, 128, 0, 3, 4)),
        Row("", ANY, ANY, Tile(128, 128, 128, 1, 3, 8)),
    ),
}


def tile_for(kind: str, tokens: int, rows: int, generation: int) -> Tile:
    """The table's choice. generation: see `generation_of`."""
    table = TILES["hopper" if generation == 9 else ""]
    return next(row.tile for row in table if row.kind in (kind, "") and tokens <= row.tokens and rows <= row.rows)


@cache
def generation_of(device: torch.device) -> int:
    """The first number of CUDA's compute capability; 0 where PTX does not run: other vendors, and Triton's interpreter."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return 0
    return torch.cuda.get_device_capability(device)[0]


# ---- packing ------------------------------------------------------------------------------------------------------


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 codes [N, K], K a multiple of 128 -> int8 [N, K / 2]: byte 64 b + j holds channel 128 b + j and (high) + 64."""
    n, k = codes.shape
    low, high = (codes.view(n, k // BLOCK, 2, BLOCK // 2) & 15).unbind(2)
    return (low | (high << 4)).reshape(n, k // 2)


def _pad(t: Tensor, rows: int, columns: int, value: int = 0) -> Tensor:
    return torch.nn.functional.pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]), value=value)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Packed:
    """A weight in this file's layout. N and K are the layer's, the tensors are padded with codes of value zero.

    kind: row of the tile table. codes: int8 [N padded, K padded (/ 2)], "dense": float [N, K]. scale: [N padded] or
    [groups, N padded]. zero, rest: see `group_linear`. segments: how many fixed parts the fp32 sum over K has. arrivals: int32,
    zero between launches. Fields without a meaning hold any tensor.
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
        return self.codes.shape[1] * (1 if self.kind in ("int8", "dense") else 2)


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


def by_group(weight: QTensor, k_padded: int) -> tuple[int, Tensor, Tensor | None]:
    """(channels of a group: 32, 64 or 128, scales, zeros [N, groups] each): wider groups and a whole tensor repeat theirs."""
    group = k_padded if weight.scale.shape[1] == 1 else weight.spec.group
    of_groups = lambda x: x.expand(weight.shape[0], -1).repeat_interleave(max(1, group // BLOCK), 1)  # noqa: E731
    return min(group, BLOCK), of_groups(weight.scale), None if weight.zero is None else of_groups(weight.zero)


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
    floats = shape.scheme.act is None
    offset = 8 if floats and weight.spec.num.qmin < 0 else 0  # unsigned nibbles
    codes = pack_nibbles(_pad(weight.codes + offset, n_padded, k_padded, 8 if floats else 0))
    if floats and weight.zero is None and weight.scale.shape[1] == 1:
        scale = _pad(weight.scale.expand(weight.shape[0], 1).contiguous(), n_padded, 1).view(-1)
        return _packed("float4", weight, shape, codes, scale)
    group, scale, zeros = by_group(weight, k_padded)
    whole = lambda values: _pad(values, n_padded, k_padded // group).t().contiguous()  # noqa: E731
    if not floats:
        return _packed("group", weight, shape, codes, whole(_narrowest(scale / 16)), group)
    zero = rest = None
    if zeros is not None:
        # Only whole numbers survive 16 bits beside 128 (1024): the fraction of a zero becomes an addend.
        exact = zeros + offset
        near = exact.round().clamp(-64, 64)
        zero = whole((near + (1024 if shape.dtype == torch.float16 else 128)).to(shape.dtype))
        rest = whole(((near - exact) * scale).to(shape.dtype))
    return _packed("float4", weight, shape, codes, whole(scale.to(shape.dtype)), group, zero, rest)


# ---- launching ----------------------------------------------------------------------------------------------------


def _launch(kernel: Callable, packed: Packed, x: Tensor, heads: tuple, **flags) -> Tensor:
    """Allocate output and partials and run `kernel(x, *heads, y, partials, arrivals, sizes, ...)` with a tile cut to what this
    weight allows."""
    tokens, device = x.shape[0], x.device
    y = torch.empty((tokens, packed.n), dtype=packed.dtype, device=device)
    if tokens == 0:
        return y
    tile = packed.tile or tile_for(packed.kind, tokens, packed.n, generation_of(device))
    BK = tile.BK if packed.k_padded % tile.BK == 0 else BLOCK
    if packed.kind == "dense":
        BK = min(tile.BK, 32) if x.dtype == torch.float32 else tile.BK
    tiles = triton.cdiv(packed.n, tile.BN) * triton.cdiv(tokens, tile.BM)
    sizes: tuple[int, ...] = (tokens, packed.n, packed.k, packed.k_padded)
    if packed.kind in ("group", "float4"):
        split, wide = packed.segments if tile.split != 1 else 1, torch.float32
        flags["SEGMENTS"] = packed.segments
        step = 64 if packed.group == 32 else BLOCK
        sizes += (packed.scale.shape[-1], triton.cdiv(packed.k_padded // step, packed.segments))
    else:
        split, wide = min(tile.split or 2, packed.k_padded // BK) if tile.split != 1 else 1, torch.int32
        flags["BK"] = BK
    split = 1 if tiles > packed.arrivals.numel() else split
    partials = y if split == 1 else torch.empty(tiles * split * tile.BN * tile.BM, dtype=wide, device=device)
    kernel[(tiles, split)](
        x, *heads, y, partials, packed.arrivals, *sizes, EVEN=packed.k % BK == 0, BN=tile.BN, BM=tile.BM, SPLIT=split,
        ORDER=tile.order, STAGES=tile.stages, num_stages=tile.stages, **flags, **launch_options(device, tile.warps),
    )  # fmt: skip
    return y


def launch_options(device: torch.device, warps: int) -> dict:
    """Keywords of a launch of a kernel that has PDL: it starts while the kernel before it drains (programmatic dependent
    launch, from Hopper on), and has to wait itself."""
    early = generation_of(device) >= 9
    return {"PDL": early, "num_warps": warps} | ({"launch_pdl": True} if early else {})


def run_int(packed: Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Rows)
    heads, bits = (x.scale.contiguous(), packed.codes, packed.scale), 8 if packed.kind == "int8" else 4
    return _launch(plain_linear, packed, x.codes.contiguous(), heads, BITS=bits, ASM=generation_of(x.codes.device) > 0)


def _run_group(packed: Packed, x: Rows | Tensor) -> Tensor:
    codes, x_scale = (x.codes, x.scale.contiguous()) if isinstance(x, Rows) else (x, packed.scale)
    zero, rest = (packed.scale, packed.scale) if packed.zero is None else (packed.zero, packed.rest)
    heads = (x_scale, packed.codes, packed.scale, zero, rest)
    half, assembly = codes.dtype == torch.float16, generation_of(codes.device) > 0
    low, high = (float_assembly(half, high) if assembly else "" for high in (False, True))
    flags = {"GROUP": packed.group, "ZERO": packed.zero is not None, "ASM_LO": low, "ASM_HI": high}
    return _launch(group_linear, packed, codes.contiguous(), heads, **flags)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [S, H] x weight [V, H]^T -> float32 [S, V]; one order of sums over H, so a row's bits do not depend on S."""
    hidden, weight = hidden.to(weight.dtype).contiguous(), weight.contiguous()
    packed = Packed("dense", *weight.shape, 0, 1, torch.float32, weight, weight, None, None, weight)
    return _launch(plain_linear, packed, hidden, (hidden, weight, weight), BITS=16, ASM=False)


# ---- what each accepts --------------------------------------------------------------------------------------------


def _refuse(shape: LinearShape, group: int) -> str | None:
    """What no kernel here takes: weights not in contiguous groups of one row, of a size it can, and devices."""
    weight, device = shape.scheme.weight, shape.device
    assert weight is not None
    if shape.has_order:
        return "wants contiguous groups, not GPTQ's g_idx"
    if weight.tile[0] not in (1, None) or (group not in (32, 64) and group % BLOCK and group != shape.in_features):
        return f"wants groups of 32, 64 or multiples of 128 of one row, not a tile of {weight.tile}"
    if shape.in_features % group:
        return f"{shape.in_features} input channels are not whole groups of {group}"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return "wants a GPU"
    return "wants compute capability 8.0 or later" if 0 < generation_of(device) < 8 else None


def _accepts_int8(shape: LinearShape, groups: bool = False) -> str | None:
    """Per channel, or groups on an int8 grid; `groups`: int4 in groups with scales of their own."""
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num.kind != "int" or weight.num.qmin >= 0 or weight.zero:
        return "wants symmetric integer weights"
    if groups and (weight.num != INT4 or weight.over or not weight.group):
        return "wants int4 weights with one scale per group"
    if not groups and weight.over is None and weight.group not in (None, shape.in_features):
        return "wants one scale per channel"
    if shape.in_features > LARGEST_IN:
        return f"int32 may overflow beyond {LARGEST_IN} input channels"
    return _refuse(shape, (weight.group if groups else None) or shape.in_features)


def accepts_float(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act is not None or weight.num.kind != "int" or weight.num.bits != 4 or weight.over:
        return "wants 4-bit integer weights with 16-bit activations"
    if weight.num.qmin >= 0 and not weight.zero:
        return "wants a zero beside unsigned codes"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"wants bfloat16 or float16 activations, not {shape.dtype}"
    return _refuse(shape, weight.group or shape.in_features)


KERNELS = (
    LinearKernel("triton int8", _accepts_int8, pack_int, run_int, PER_TOKEN_INT8),
    LinearKernel("triton int4 groups", partial(_accepts_int8, groups=True), _pack_group, _run_group, PER_TOKEN_INT8),
    LinearKernel("triton w4a16", accepts_float, _pack_group, _run_group, None),
)
