"""Portable Triton kernels for everything around the matrix products: norms, activations, row quantization, RoPE with the
cache write, and (from `attention_triton`) paged attention. `OPS` is what a CUDA or ROCm device runs, but for rows on Hopper
(`ops_hopper`); `kernels.reference` says what each op means.

One idea: a row is reduced by one program, whole, in an order fixed by its width alone, so no result depends on how many
other rows there are. Nothing here allocates workspaces, synchronises or looks at a tensor's values on the host, so every op
can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nybble.kernels import attention_triton
from nybble.kernels.linear_triton import generation_of, launch_options, logits
from nybble.kernels.registry import Ops
from nybble.kernels.types import LayerKV, Rows, Step, Turn

# Adding and subtracting 1.5 * 2^23 rounds an fp32 below 2^22 to the nearest integer, ties to even, on every device.
_ROUND = tl.constexpr(12582912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)
NORM_WARPS, SILU_WARPS = 8, 16  # of a row's program at most, from a chain with linears on an H200
TURNED_ROWS = 32  # of one program, whatever the batch: a row's bits must not depend on it
_SMALLEST_ABSMAX = tl.constexpr(1e-10)  # formats.numerics.SMALLEST_ABSMAX


@triton.jit
def _round(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def _integer(x):
    """int32 of `_round`, without the conversion unit, which gives one number where others give eight."""
    return (x + _ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS


@triton.jit
def _follow(PDL: tl.constexpr):
    """Started early, while the kernel before this one runs: let the next start as early, and wait for the one before, whole.
    Every kernel waits before it reads or writes what another one does, so the end of one is the end of all before it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _larger(a, b):
    """A NaN is larger than any number: it must reach the scale, not vanish in a code."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_int8_row(ys, absmax, codes_ptr, scale_ptr, row, lane, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Symmetric int8 of one fp32 row in chunks; the same bits as `formats.numerics.quantize_rows`."""
    absmax = _larger(absmax, _SMALLEST_ABSMAX)
    inverse = tl.math.div_rn(127.0, absmax)
    for i in tl.static_range(len(ys)):
        codes = _integer(ys[i] * inverse).to(tl.int8)  # none beyond 127: no value is larger than absmax
        tl.store(codes_ptr + row * WIDTH + i * CHUNK + lane, codes, mask=i * CHUNK + lane < WIDTH)
    tl.store(scale_ptr + row, tl.math.div_rn(absmax, 127.0))


@triton.jit
def _load_row(ptr, lane, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """A row in chunks, zeros behind its end."""
    chunks = ()
    for first in tl.static_range(0, WIDTH, CHUNK):
        chunks += (tl.load(ptr + first + lane, mask=first + lane < WIDTH, other=0.0),)
    return chunks


@triton.jit
def _sum_and_most(sum, most, other_sum, other_most):
    return sum + other_sum, tl.maximum(most, other_most)


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, h_ptr, y_ptr, scale_ptr, eps,
                     WIDTH: tl.constexpr, CHUNK: tl.constexpr, RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr,
                     PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    weights = _load_row(weight_ptr, lane, WIDTH, CHUNK)
    _follow(PDL)
    hs = _load_row(x_ptr + row * WIDTH, lane, WIDTH, CHUNK)
    if RESIDUAL:
        others = _load_row(residual_ptr + row * WIDTH, lane, WIDTH, CHUNK)
    # One reduction for both: 1 / rms is positive, so the largest product is the largest result too.
    squares, most, ys = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32), ()
    for i in tl.static_range(len(hs)):
        h = hs[i]
        if RESIDUAL:
            h = (h.to(tl.float32) + others[i].to(tl.float32)).to(x_ptr.dtype.element_ty)
            tl.store(h_ptr + row * WIDTH + i * CHUNK + lane, h, mask=i * CHUNK + lane < WIDTH)
        wide = h.to(tl.float32)
        y = wide * weights[i].to(tl.float32)
        squares += wide * wide
        most = tl.maximum(most, tl.abs(y))  # a NaN is in the sum too
        ys += (y,)
    total, absmax = tl.reduce((squares, most), 0, _sum_and_most)
    inverse = tl.rsqrt(total / WIDTH + eps)
    out = ()
    for i in tl.static_range(len(ys)):
        out += (ys[i] * inverse,)
    if QUANTIZE:
        _store_int8_row(out, absmax * inverse, y_ptr, scale_ptr, row, lane, WIDTH, CHUNK)
    else:
        for i in tl.static_range(len(out)):
            tl.store(y_ptr + row * WIDTH + i * CHUNK + lane, out[i].to(y_ptr.dtype.element_ty),
                     mask=i * CHUNK + lane < WIDTH)


@triton.jit
def _signs(BLOCK: tl.constexpr):
    """Hadamard's matrices of BLOCK (at most 16, Sylvester's order) along the diagonal of [16, 16]: 1, -1, else 0. fp32."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    both = row & column & (BLOCK - 1)
    both ^= both >> 2
    both ^= both >> 1
    return tl.where(row // BLOCK == column // BLOCK, 1.0 - 2.0 * (both & 1).to(tl.float32), 0.0)


@triton.jit
def _hadamard(y, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """PART neighbours of y [CHUNK] times Hadamard's matrix of PART (at most 16), not scaled. Then the bits of a place in BLOCK
    that are done go to the top: once all have been there, all lies as before."""
    y = tl.dot(y.reshape(CHUNK // 16, 16), _signs(PART), input_precision=PRECISION)
    return y.reshape(CHUNK // BLOCK, BLOCK // PART, PART).permute(0, 2, 1).reshape(CHUNK)


@triton.jit
def _silu(x, ASM: tl.constexpr):
    if ASM:  # the approximations that tl.exp and / use too, less their care for results below 2^-126
        return tl.inline_asm_elementwise("""{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }""", "=f,f", [x], tl.float32, True, 1)
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, scale_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, QUANTIZE: tl.constexpr,
                     HADAMARD: tl.constexpr, ROOT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):
    """ROOT: 1 / sqrt(HADAMARD). Without QUANTIZE a program has one chunk of the row."""
    _follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    gate_ptr = x_ptr + row * 2 * WIDTH
    if QUANTIZE:
        gates, ups = _load_row(gate_ptr, lane, WIDTH, CHUNK), _load_row(gate_ptr + WIDTH, lane, WIDTH, CHUNK)
    else:
        column = tl.program_id(1) * CHUNK + lane
        gates = (tl.load(gate_ptr + column, mask=column < WIDTH, other=0.0),)
        ups = (tl.load(gate_ptr + WIDTH + column, mask=column < WIDTH, other=0.0),)
    most, ys = tl.zeros((CHUNK,), tl.float32), ()
    for i in tl.static_range(len(gates)):
        y = _silu(gates[i].to(tl.float32), ASM) * ups[i].to(tl.float32)
        if HADAMARD:
            for done in tl.static_range(0, 16, 4):
                if HADAMARD >> done > 1:
                    y = _hadamard(y, CHUNK, HADAMARD, min(16, HADAMARD >> done), "tf32x3" if ASM else "ieee")
            y *= ROOT
        most = _larger(most, tl.abs(y))
        ys += (y,)
    if QUANTIZE:
        _store_int8_row(ys, tl.reduce(most, 0, _larger), y_ptr, scale_ptr, row, lane, WIDTH, CHUNK)
    else:
        tl.store(y_ptr + row * WIDTH + column, ys[0].to(y_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _quantize_rows_kernel(x_ptr, codes_ptr, scale_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    xs = _load_row(x_ptr + row * WIDTH, lane, WIDTH, CHUNK)
    most, ys = tl.zeros((CHUNK,), tl.float32), ()
    for i in tl.static_range(len(xs)):
        ys += (xs[i].to(tl.float32),)
        most = _larger(most, tl.abs(ys[i]))
    _store_int8_row(ys, tl.reduce(most, 0, _larger), codes_ptr, scale_ptr, row, lane, WIDTH, CHUNK)


def _row_shape(width: int, most_warps: int) -> tuple[int, int]:
    """(chunk, warps) of a whole-row program: 4 values of a chunk a thread, at most 64 of the row. A function of width alone."""
    block = triton.next_power_of_2(width)
    warps = max(min(most_warps, max(1, block // 512)), block // 2048)
    return min(block, 128 * warps), warps


def _rows_like(x: Tensor, width: int) -> Rows:
    rows = x.shape[0]
    return Rows(torch.empty((rows, width), dtype=torch.int8, device=x.device),
                torch.empty(rows, dtype=torch.float32, device=x.device))


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: bool
             ) -> tuple[Tensor | Rows, Tensor]:
    """`reference.rms_norm` in one kernel: reads x (and residual), writes h and y, touches nothing twice."""
    rows, width = x.shape
    x = x.contiguous()
    h = x if residual is None else torch.empty_like(x)
    out = _rows_like(x, width) if quantize else torch.empty_like(x)
    if rows:
        chunk, warps = _row_shape(width, NORM_WARPS)
        codes, scale = out if quantize else (out, out)
        _rms_norm_kernel[(rows,)](x, x if residual is None else residual.contiguous(), weight, h, codes, scale, eps,
                                  width, chunk, residual is not None, quantize, **launch_options(x.device, warps))
    return out, h


def silu_mul(gate_up: Tensor, quantize: bool, hadamard: int = 0) -> Tensor | Rows:
    """`reference.silu_mul` in one kernel; with `hadamard` (a power of two that divides the width, at most 16384) every so many
    neighbours are turned by Hadamard's orthonormal matrix in fp32 before they are rounded. Without quantization a row needs no
    reduction and is spread over programs. ValueError for a block that does not fit."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if hadamard and (hadamard & (hadamard - 1) or width % hadamard or hadamard > 16384):
        raise ValueError(f"a Hadamard block of {hadamard} for {width} channels: want a power of two up to 16384, of which they"
                         " are a multiple")
    gate_up = gate_up.contiguous()
    out = _rows_like(gate_up, width) if quantize else torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        chunk, warps = _row_shape(width, SILU_WARPS) if quantize else (1024, 4)
        if hadamard:
            chunk = max(chunk, 256, hadamard)  # products of at least 16 rows
            warps = max(warps, chunk // 1024)
        codes, scale = out if quantize else (out, out)
        _silu_mul_kernel[(rows, 1 if quantize else triton.cdiv(width, chunk))](
            gate_up, codes, scale, width, chunk, quantize, hadamard, hadamard**-0.5 if hadamard else 1.0,
            generation_of(gate_up.device) > 0, **launch_options(gate_up.device, warps))
    return out


def quantize_rows(x: Tensor) -> Rows:
    """`reference.quantize_rows`, bit for bit."""
    rows, width = x.shape
    out = _rows_like(x, width)
    if rows:
        chunk, warps = _row_shape(width, NORM_WARPS)
        # Not fused, so that the product is rounded before the sum that makes it whole: else a tie may fall to the other side.
        _quantize_rows_kernel[(rows,)](x.contiguous(), out.codes, out.scale, width, chunk, enable_fp_fusion=False,
                                       **launch_options(x.device, warps))
    return out


# ---- RoPE, KV quantization, paged write ---------------------------------------------------------------------------


@triton.jit
def _float8_bits(x, scale, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint8 bits of the nearest (ties to even) float8 of x / scale, at most LARGEST, by integer arithmetic: the same bytes on
    devices with and without float8 instructions. Normal numbers round their fp32 mantissa; below them the codes are multiples
    of 2^(1 - BIAS - MANTISSA)."""
    shift: tl.constexpr = 23 - MANTISSA
    x = tl.math.div_rn(x, scale)
    number = x == x
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift
    normal = rounded - ((127 - BIAS) << MANTISSA)
    tiny = _round(tl.abs(x) * (2.0 ** (BIAS - 1 + MANTISSA))).to(tl.int32)
    code = tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), tiny, normal)
    return tl.where(number, code | ((bits >> 24) & 0x80), 0x7F).to(tl.uint8)


@triton.jit
def _rotated_half(x_ptr, base, column, kept, norm_ptr, inverse_rms, cos_sin_ptr, NORM: tl.constexpr, ROTARY: tl.constexpr):
    """Channels `column` of heads that start at `base` after norm and rotation, rounded to x's dtype. fp32 [heads, channels]."""
    dtype = x_ptr.dtype.element_ty
    half: tl.constexpr = ROTARY // 2
    turns = column < ROTARY
    partner = tl.where(column < half, column + half, column - half)
    x = tl.load(x_ptr + base + column, mask=kept, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + base + partner, mask=kept & turns, other=0.0).to(tl.float32)
    if NORM:
        x = (x * inverse_rms * tl.load(norm_ptr + column, mask=kept, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + partner, mask=kept & turns, other=0.0).to(tl.float32)
        other = (other * inverse_rms * weight).to(dtype).to(tl.float32)
    angle = tl.where(column < half, column, partner)
    cos = tl.load(cos_sin_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(cos_sin_ptr + half + angle, mask=turns, other=0.0)
    out = x * cos + other * tl.where(column < half, -sin, sin)
    return out.to(dtype).to(tl.float32)


@triton.jit
def _rotated_pair(x_ptr, base, column, kept, norm_ptr, inverse_rms, cos_sin_ptr, NORM: tl.constexpr, ROTARY: tl.constexpr,
                  DIM: tl.constexpr):
    """`_rotated_half` of channels `column` of the first half and of the same of the second, each read once if they pair up."""
    if ROTARY == DIM:
        dtype = x_ptr.dtype.element_ty
        low, high = _plain_pieces(x_ptr, base, column, kept, DIM, 2)
        if NORM:
            inside = column < DIM // 2
            weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
            low = (low * inverse_rms * weight).to(dtype).to(tl.float32)
            weight = tl.load(norm_ptr + DIM // 2 + column, mask=inside, other=0.0).to(tl.float32)
            high = (high * inverse_rms * weight).to(dtype).to(tl.float32)
        cos = tl.load(cos_sin_ptr + column, mask=kept, other=1.0)
        sin = tl.load(cos_sin_ptr + DIM // 2 + column, mask=kept, other=0.0)
        first, second = low * cos - high * sin, high * cos + low * sin
        return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    else:
        return (_rotated_half(x_ptr, base, column, kept, norm_ptr, inverse_rms, cos_sin_ptr, NORM, ROTARY),
                _rotated_half(x_ptr, base, column + DIM // 2, kept, norm_ptr, inverse_rms, cos_sin_ptr, NORM, ROTARY))


@triton.jit
def _plain(x_ptr, base, column, kept):
    return tl.load(x_ptr + base + column, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _codes(low, high, kept, LEVELS: tl.constexpr, COUNT: tl.constexpr, CENTRED: tl.constexpr):
    """`formats.numerics.quantize_min_max` of COUNT values a row, in two pieces -> uint8 codes of both, scale, minimum."""
    least = tl.min(tl.where(kept, tl.minimum(low, high), float("inf")), 1)[:, None]
    most = tl.max(tl.where(kept, tl.maximum(low, high), float("-inf")), 1)[:, None]
    step = tl.math.div_rn(most - least, LEVELS).to(tl.float16)
    minimum = least.to(tl.float16)
    wide = step.to(tl.float32)
    inverse = tl.where(wide > 0, tl.math.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)
    # The minimum may be rounded to either side, so both ends are clamped.
    low_codes = _integer(tl.minimum(tl.maximum((low - minimum.to(tl.float32)) * inverse, 0.0), LEVELS))
    high_codes = _integer(tl.minimum(tl.maximum((high - minimum.to(tl.float32)) * inverse, 0.0), LEVELS))
    if CENTRED:
        error = tl.where(kept, (low - low_codes.to(tl.float32) * wide) + (high - high_codes.to(tl.float32) * wide), 0.0)
        minimum = (tl.sum(error, 1)[:, None] / COUNT).to(tl.float16)
    return low_codes.to(tl.uint8), high_codes.to(tl.uint8), step, minimum


@triton.jit
def _write(ptr, params_ptr, token, offset, head_kept, pieces, column, piece_kept, scale,
           DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr):
    """Quantize heads, given as halves or quarters of their channels (int4: quarters), and store them at `token` [heads, 1], a
    row of the cache, `offset` in its block. ptr of int4: 16-bit units of a nibble of each quarter."""
    width: tl.constexpr = DIM // len(pieces)
    kept = head_kept & piece_kept
    if KIND == "int4":
        a, b, step, minimum = _codes(pieces[0], pieces[1], piece_kept, 15.0, DIM // 2, True)
        c, d, second_step, second_minimum = _codes(pieces[2], pieces[3], piece_kept, 15.0, DIM // 2, True)
        unit = a.to(tl.int32) | (b.to(tl.int32) << 4) | (c.to(tl.int32) << 8) | (d.to(tl.int32) << 12)
        tl.store(ptr + token * (DIM // 4) + column, unit.to(tl.int16), mask=kept)
        pair = params_ptr + 2 * (2 * token - offset)
        tl.store(pair, step, mask=head_kept)
        tl.store(pair + 1, minimum, mask=head_kept)
        tl.store(pair + 2 * BLOCK_SIZE, second_step, mask=head_kept)
        tl.store(pair + 2 * BLOCK_SIZE + 1, second_minimum, mask=head_kept)
    elif KIND == "int8":
        if len(pieces) == 2:
            low, high, step, minimum = _codes(pieces[0], pieces[1], piece_kept, 255.0, DIM, False)
            codes = (low, high)
        else:  # two halves of pieces, so that one reduction finds the range of all four
            rows: tl.constexpr = pieces[0].shape[0]
            wide: tl.constexpr = 2 * pieces[0].shape[1]
            low, high, step, minimum = _codes(tl.join(pieces[0], pieces[1]).reshape(rows, wide),
                                              tl.join(pieces[2], pieces[3]).reshape(rows, wide),
                                              tl.join(piece_kept, piece_kept).reshape(1, wide), 255.0, DIM, False)
            codes = low.reshape(rows, wide // 2, 2).split() + high.reshape(rows, wide // 2, 2).split()
        _store_pieces(ptr + token * DIM + column, codes, kept, DIM)
        tl.store(params_ptr + token * 2, step, mask=head_kept)
        tl.store(params_ptr + token * 2 + 1, minimum, mask=head_kept)
    else:
        for i in tl.static_range(len(pieces)):
            if KIND == "fp8":
                code = _float8_bits(pieces[i], scale, 448.0, 3, 7)
            elif KIND == "fp8_e5m2":
                code = _float8_bits(pieces[i], scale, 57344.0, 2, 15)
            else:
                code = pieces[i].to(ptr.dtype.element_ty)
            tl.store(ptr + token * DIM + i * width + column, code, mask=kept)


@triton.jit
def _store_pieces(ptr, pieces, kept, DIM: tl.constexpr):
    """Halves or quarters of heads' channels, side by side from `ptr` on."""
    for i in tl.static_range(len(pieces)):
        tl.store(ptr + i * (DIM // len(pieces)), pieces[i].to(ptr.dtype.element_ty), mask=kept)


@triton.jit
def _plain_pieces(x_ptr, base, column, kept, DIM: tl.constexpr, PIECES: tl.constexpr):
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces += (_plain(x_ptr, base, column + i * (DIM // PIECES), kept),)
    return pieces


@triton.jit
def _rope_write_kernel(qkv_ptr, q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, position_ptr, slot_ptr, cos_sin_ptr,
                       q_norm_ptr, k_norm_ptr, eps, k_scale, v_scale,
                       HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
                       QUARTER: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
                       KIND: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, PDL: tl.constexpr):
    """One program: GROUP heads of one kind (Q, K or V by program_id(1)) of one token, as two halves of their channels (what
    int4 stores: quarters). Positions and slots are read early: they must not come from the kernel right before."""
    PIECES: tl.constexpr = 4 if KIND == "int4" else 2
    token = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(position_ptr + token).to(tl.int64), tl.load(slot_ptr + token)
    _follow(PDL)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    kv_parts: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    column = tl.arange(0, HALF)[None, :]
    half_kept = column < DIM // 2
    index = tl.arange(0, GROUP)[:, None]
    row = qkv_ptr + token * (HEADS + 2 * KV_HEADS) * DIM
    cos_sin = cos_sin_ptr + position * ROTARY
    if part < q_parts:
        head = part * GROUP + index
        head_kept = head < HEADS
        kept = head_kept & half_kept
        inverse_rms = _inverse_rms(row, head * DIM, column, kept, eps, DIM, Q_NORM)
        halves = _rotated_pair(row, head * DIM, column, kept, q_norm_ptr, inverse_rms, cos_sin, Q_NORM, ROTARY, DIM)
        _store_pieces(q_ptr + (token * HEADS + head) * DIM + column, halves, kept, DIM)
    else:
        if slot >= 0:
            is_k = part < q_parts + kv_parts
            head = (part - q_parts - tl.where(is_k, 0, kv_parts)) * GROUP + index
            head_kept = head < KV_HEADS
            kept = head_kept & half_kept
            offset = slot % BLOCK_SIZE
            target = ((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + offset
            base = (HEADS + head + tl.where(is_k, 0, KV_HEADS)) * DIM
            short = tl.arange(0, QUARTER if KIND == "int4" else HALF)[None, :]
            short_kept = short < DIM // PIECES
            every = head_kept & short_kept
            if is_k:
                inverse_rms = _inverse_rms(row, base, column, kept, eps, DIM, K_NORM)
                halves = _rotated_pair(row, base, short, every, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY, DIM)
                if KIND == "int4":
                    b, d = _rotated_pair(row, base, short + DIM // 4, every, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY,
                                         DIM)
                    _write(k_ptr, k_params_ptr, target, offset, head_kept, (halves[0], b, halves[1], d), short, short_kept,
                           k_scale, DIM, BLOCK_SIZE, KIND)
                else:
                    _write(k_ptr, k_params_ptr, target, offset, head_kept, halves, short, short_kept, k_scale, DIM, BLOCK_SIZE,
                           KIND)
            else:
                plain = _plain_pieces(row, base, short, every, DIM, PIECES)
                _write(v_ptr, v_params_ptr, target, offset, head_kept, plain, short, short_kept, v_scale, DIM, BLOCK_SIZE, KIND)


@triton.jit
def _turned(low, high, matrix_ptr, DIM: tl.constexpr, HALF: tl.constexpr, QUARTER: tl.constexpr):
    """Rows [rows, DIM], given as halves, times a matrix [DIM, DIM], as quarters of the channels. fp32 [rows, QUARTER] each."""
    inner = tl.arange(0, HALF)[:, None]
    column = tl.arange(0, QUARTER)[None, :]
    kept = (inner < DIM // 2) & (column < DIM // 4)
    dtype: tl.constexpr = matrix_ptr.dtype.element_ty  # fp16 beside 16-bit activations, which it holds exactly but for range
    low, high = low.to(dtype), high.to(dtype)
    quarters = ()
    for i in tl.static_range(4):
        at = matrix_ptr + inner * DIM + i * (DIM // 4) + column
        upper = tl.load(at, mask=kept, other=0.0)
        lower = tl.load(at + DIM // 2 * DIM, mask=kept, other=0.0)
        out = tl.dot(low, upper, input_precision="ieee")
        quarters += (tl.dot(high, lower, out, input_precision="ieee"),)
    return quarters


@triton.jit
def _turn_write_kernel(qkv_ptr, q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, position_ptr, slot_ptr, cos_sin_ptr,
                       q_norm_ptr, k_norm_ptr, eps, k_scale, v_scale, q_turn_ptr, k_turn_ptr, v_turn_ptr, shift_ptr, tokens,
                       HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
                       QUARTER: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
                       KIND: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_TURN: tl.constexpr,
                       PDL: tl.constexpr):
    """`_rope_write_kernel` with a turn. One program: ROWS rows that share a matrix, Q, K or V of one KV head (program_id(1))
    of some tokens; of Q those of all heads that read the KV head."""
    _follow(PDL)
    group: tl.constexpr = HEADS // KV_HEADS
    kind = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token = tl.where(kind == 0, index // group, index)
    live = token < tokens
    column = tl.arange(0, HALF)[None, :]
    half_kept = column < DIM // 2
    short = tl.arange(0, QUARTER)[None, :]
    short_kept = short < DIM // 4
    head = tl.where(kind == 0, kv_head * group + index % group, HEADS + (kind - 1) * KV_HEADS + kv_head)
    base = (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    kept = live & half_kept
    cos_sin = cos_sin_ptr + tl.load(position_ptr + token, mask=live, other=0).to(tl.int64) * ROTARY
    matrix = kv_head * DIM * DIM
    if kind == 0:
        inverse_rms = _inverse_rms(qkv_ptr, base, column, kept, eps, DIM, Q_NORM)
        low, high = _rotated_pair(qkv_ptr, base, column, kept, q_norm_ptr, inverse_rms, cos_sin, Q_NORM, ROTARY, DIM)
        quarters = _turned(low, high, q_turn_ptr + matrix, DIM, HALF, QUARTER)
        _store_pieces(q_ptr + (token * HEADS + head) * DIM + short, quarters, live & short_kept, DIM)
    elif tl.program_id(0) * ROWS < tokens:
        slot = tl.load(slot_ptr + token, mask=live, other=-1)
        written = slot >= 0
        slot = tl.where(written, slot, 0)
        offset = slot % BLOCK_SIZE
        target = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + offset
        if kind == 1:
            inverse_rms = _inverse_rms(qkv_ptr, base, column, kept, eps, DIM, K_NORM)
            low, high = _rotated_pair(qkv_ptr, base, column, kept, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY, DIM)
            shift = shift_ptr + kv_head * DIM + column
            low -= tl.load(shift, mask=half_kept, other=0.0)
            high -= tl.load(shift + DIM // 2, mask=half_kept, other=0.0)
            quarters = _turned(low, high, k_turn_ptr + matrix, DIM, HALF, QUARTER)
            _write(k_ptr, k_params_ptr, target, offset, written, quarters, short, short_kept, k_scale, DIM, BLOCK_SIZE, KIND)
        else:
            if V_TURN:
                low, high = _plain_pieces(qkv_ptr, base, column, kept, DIM, 2)
                quarters = _turned(low, high, v_turn_ptr + matrix, DIM, HALF, QUARTER)
            else:
                quarters = _plain_pieces(qkv_ptr, base, short, live & short_kept, DIM, 4)
            _write(v_ptr, v_params_ptr, target, offset, written, quarters, short, short_kept, v_scale, DIM, BLOCK_SIZE, KIND)


@triton.jit
def _turn_heads_kernel(x_ptr, matrix_ptr, out_ptr, rows, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                       HALF: tl.constexpr, QUARTER: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    live = index < rows
    base = ((index // group) * HEADS + kv_head * group + index % group) * DIM
    column = tl.arange(0, HALF)[None, :]
    kept = live & (column < DIM // 2)
    low, high = _plain_pieces(x_ptr, base, column, kept, DIM, 2)
    short = tl.arange(0, QUARTER)[None, :]
    quarters = _turned(low, high, matrix_ptr + kv_head * DIM * DIM, DIM, HALF, QUARTER)
    _store_pieces(out_ptr + base + short, quarters, live & (short < DIM // 4), DIM)


@triton.jit
def _inverse_rms(x_ptr, base, column, kept, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """1 / rms over each head's channels [heads, 1]; 1 when heads are not normed."""
    if NORM:
        low, high = _plain_pieces(x_ptr, base, column, kept, DIM, 2)
        return tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + eps)[:, None]
    else:
        return 1.0


def rope_write(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, q_norm: Tensor | None,
               k_norm: Tensor | None, eps: float, turn: Turn | None = None) -> Tensor:
    """`reference.rope_write` in one kernel. Raises ValueError for an odd head_dim, which has no halves to pair, and for one of
    no quarters where those are stored or turned."""
    qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    head_dim = kv.head_dim
    if head_dim % 2:
        raise ValueError(f"rotary embedding pairs channels: head_dim {head_dim} is odd")
    if head_dim % 4 and (turn is not None or kv.name == "int4"):
        raise ValueError(f"int4 and turned K are written in quarters of a head: head_dim {head_dim} is no multiple of 4")
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    k, v = (x.view(torch.int16) if kv.name == "int4" else attention_triton.storage(x) for x in (kv.k, kv.v))
    operands = (qkv, q, k, v, k if kv.k_params is None else kv.k_params, v if kv.v_params is None else kv.v_params,
                step.positions, step.slots, cos_sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
                eps, kv.k_scale, kv.v_scale)
    half, quarter = triton.next_power_of_2(head_dim // 2), triton.next_power_of_2(max(1, head_dim // 4))
    if turn is not None:
        group = heads // kv_heads
        turns = (x.contiguous() for x in (turn.q, turn.k, turn.k if turn.v is None else turn.v, turn.shift))
        _turn_write_kernel[(triton.cdiv(tokens * group, TURNED_ROWS), 3 * kv_heads)](
            *operands, *turns, tokens, heads, kv_heads, head_dim, max(16, half), max(16, quarter), cos_sin.shape[1],
            kv.block_size, TURNED_ROWS, kv.codec, q_norm is not None, k_norm is not None, turn.v is not None,
            **launch_options(qkv.device, 4))
        return q
    group = min(8, triton.next_power_of_2(max(heads, kv_heads)))
    parts = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    _rope_write_kernel[(tokens, parts)](
        *operands, heads, kv_heads, head_dim, half, quarter, cos_sin.shape[1], kv.block_size, group, kv.codec,
        q_norm is not None, k_norm is not None, **launch_options(qkv.device, 2 if group * head_dim < 1024 else 4))
    return q


def turn_heads(x: Tensor, matrix: Tensor) -> Tensor:
    """`reference.turn_heads`, to a new tensor."""
    tokens, heads, head_dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens:
        rows = tokens * (heads // matrix.shape[0])
        half, quarter = triton.next_power_of_2(head_dim // 2), triton.next_power_of_2(head_dim // 4)
        _turn_heads_kernel[(triton.cdiv(rows, TURNED_ROWS), matrix.shape[0])](
            x.contiguous(), matrix.contiguous(), out, rows, heads, matrix.shape[0], head_dim, max(16, half), max(16, quarter),
            TURNED_ROWS, **launch_options(x.device, 4))
    return out


OPS = Ops("triton", rms_norm, silu_mul, quantize_rows, rope_write, attention_triton.attention, logits,
          turn_heads)
