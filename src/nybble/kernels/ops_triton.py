"""Portable Triton kernels for everything around the matrix products: norms, activations, row quantization, RoPE with the
cache write, and (from `attention_triton`) paged attention. `OPS` is what a CUDA or ROCm device runs; `kernels.reference` says
what each op means.

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

from nybble.formats.spec import KV
from nybble.kernels import attention_triton, linear_triton
from nybble.kernels.registry import Ops
from nybble.kernels.types import LayerKV, Rows, Step, Turn

# Adding and subtracting 1.5 * 2^23 rounds an fp32 below 2^22 to the nearest integer, ties to even, on every device.
_ROUND = tl.constexpr(12582912.0)
TURNED_ROWS = 32  # of one program, whatever the batch: a row's bits must not depend on it
_SMALLEST_ABSMAX = tl.constexpr(1e-10)  # formats.numerics.SMALLEST_ABSMAX


@triton.jit
def _round(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def _follow(PDL: tl.constexpr):
    """Started early, while the kernel before this one drains: wait for its results, and let the next one start early too."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _store_int8_row(y, codes_ptr, scale_ptr, row, column, kept, width):
    """Symmetric int8 of one fp32 row whose masked tail is zero; the same bits as `formats.numerics.quantize_rows`."""
    absmax = tl.maximum(tl.max(tl.abs(y), 0), _SMALLEST_ABSMAX)
    codes = _round(y * tl.math.div_rn(127.0, absmax))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
    tl.store(codes_ptr + row * width + column, codes, mask=kept)
    tl.store(scale_ptr + row, tl.math.div_rn(absmax, 127.0))


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, h_ptr, y_ptr, scale_ptr, eps,
                     WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr,
                     PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kept = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=kept, other=0.0).to(tl.float32)
    _follow(PDL)
    h = tl.load(x_ptr + row * WIDTH + column, mask=kept, other=0.0)
    if RESIDUAL:
        other = tl.load(residual_ptr + row * WIDTH + column, mask=kept, other=0.0)
        h = (h.to(tl.float32) + other.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(h_ptr + row * WIDTH + column, h, mask=kept)
    wide = h.to(tl.float32)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps) * weight
    if QUANTIZE:
        _store_int8_row(y, y_ptr, scale_ptr, row, column, kept, WIDTH)
    else:
        tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUANTIZE: tl.constexpr,
                     PDL: tl.constexpr):
    _follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + column, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + column, mask=kept, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    if QUANTIZE:
        _store_int8_row(y, y_ptr, scale_ptr, row, column, kept, WIDTH)
    else:
        tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _quantize_rows_kernel(x_ptr, codes_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    _follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kept = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=kept, other=0.0).to(tl.float32)
    _store_int8_row(x, codes_ptr, scale_ptr, row, column, kept, WIDTH)


def _row_shape(width: int, most_warps: int) -> tuple[int, int]:
    """(block, warps) of a whole-row program, at least 16 and at most 64 values a thread. A function of width alone.

    Measured on an H200: 4 warps for norms, 16 for the wider rows that need no sum (`python -m nybble.bench.attention`).
    """
    block = triton.next_power_of_2(width)
    return block, max(min(most_warps, max(1, block // 512)), block // 2048)


def _launch_options(x: Tensor, warps: int) -> dict:
    """Keywords of a launch; on devices that can, with an early start (see `_follow`)."""
    early = linear_triton.overlaps(x.device)
    return {"PDL": early, "num_warps": warps} | ({"launch_pdl": True} if early else {})


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
        block, warps = _row_shape(width, 4)
        codes, scale = out if quantize else (out, out)
        _rms_norm_kernel[(rows,)](x, x if residual is None else residual.contiguous(), weight, h, codes, scale, eps,
                                  width, block, residual is not None, quantize, **_launch_options(x, warps))
    return out, h


def silu_mul(gate_up: Tensor, quantize: bool) -> Tensor | Rows:
    """`reference.silu_mul` in one kernel. Without quantization a row needs no reduction and is spread over programs."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = _rows_like(gate_up, width) if quantize else torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block, warps = _row_shape(width, 16) if quantize else (1024, 4)
        codes, scale = out if quantize else (out, out)
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](gate_up, codes, scale, width, block, quantize,
                                                            **_launch_options(gate_up, warps))
    return out


def quantize_rows(x: Tensor) -> Rows:
    """`reference.quantize_rows`, bit for bit."""
    rows, width = x.shape
    out = _rows_like(x, width)
    if rows:
        block, warps = _row_shape(width, 4)
        _quantize_rows_kernel[(rows,)](x.contiguous(), out.codes, out.scale, width, block, **_launch_options(x, warps))
    return out


# ---- RoPE, KV quantization, paged write ---------------------------------------------------------------------------


@triton.jit
def _float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint8 bits of the nearest (ties to even) float8 of a clamped fp32, by integer arithmetic: the same bytes on devices
    with and without float8 instructions. Normal numbers round their fp32 mantissa; below them the codes are multiples of
    2^(1 - BIAS - MANTISSA)."""
    shift: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift
    normal = rounded - ((127 - BIAS) << MANTISSA)
    tiny = _round(tl.abs(x) * (2.0 ** (BIAS - 1 + MANTISSA))).to(tl.int32)
    code = tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), tiny, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


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
def _plain_half(x_ptr, base, column, kept):
    return tl.load(x_ptr + base + column, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _write_half(ptr, token, column, kept, x, WIDTH: tl.constexpr, KIND: tl.constexpr, scale):
    if KIND == "fp8":
        code = _float8_bits(tl.minimum(tl.maximum(tl.math.div_rn(x, scale), -448.0), 448.0), 3, 7)
    elif KIND == "fp8_e5m2":
        code = _float8_bits(tl.minimum(tl.maximum(tl.math.div_rn(x, scale), -57344.0), 57344.0), 2, 15)
    else:
        code = x.to(ptr.dtype.element_ty)
    tl.store(ptr + token * WIDTH + column, code, mask=kept)


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
    low_codes = tl.minimum(tl.maximum(_round((low - minimum.to(tl.float32)) * inverse), 0.0), LEVELS)
    high_codes = tl.minimum(tl.maximum(_round((high - minimum.to(tl.float32)) * inverse), 0.0), LEVELS)
    if CENTRED:
        error = tl.where(kept, (low - low_codes * wide) + (high - high_codes * wide), 0.0)
        minimum = (tl.sum(error, 1)[:, None] / COUNT).to(tl.float16)
    return low_codes.to(tl.uint8), high_codes.to(tl.uint8), step, minimum


@triton.jit
def _write_heads(ptr, params_ptr, token, head_kept, low, high, column, half_kept, scale,
                 DIM: tl.constexpr, KIND: tl.constexpr):
    """Quantize heads given as two halves of their channels and store them at `token` (a row of the cache) [heads, 1]."""
    half: tl.constexpr = DIM // 2
    kept = head_kept & half_kept
    if KIND == "int8":
        low, high, step, minimum = _codes(low, high, half_kept, 255.0, DIM, False)
        tl.store(ptr + token * DIM + column, low, mask=kept)
        tl.store(ptr + token * DIM + half + column, high, mask=kept)
        tl.store(params_ptr + token * 2, step, mask=head_kept)
        tl.store(params_ptr + token * 2 + 1, minimum, mask=head_kept)
    else:
        _write_half(ptr, token, column, kept, low, DIM, KIND, scale)
        _write_half(ptr, token, half + column, kept, high, DIM, KIND, scale)


@triton.jit
def _write_int4(ptr, params_ptr, token, offset, head_kept, a, b, c, d, column, quarter_kept,
                DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Heads given as quarters of their channels. ptr: 16-bit units of a nibble of each. offset: of `token` in its block."""
    a, b, step, minimum = _codes(a, b, quarter_kept, 15.0, DIM // 2, True)
    c, d, second_step, second_minimum = _codes(c, d, quarter_kept, 15.0, DIM // 2, True)
    unit = a.to(tl.int32) | (b.to(tl.int32) << 4) | (c.to(tl.int32) << 8) | (d.to(tl.int32) << 12)
    tl.store(ptr + token * (DIM // 4) + column, unit.to(tl.int16), mask=head_kept & quarter_kept)
    pair = params_ptr + 2 * (2 * token - offset)
    tl.store(pair, step, mask=head_kept)
    tl.store(pair + 1, minimum, mask=head_kept)
    tl.store(pair + 2 * BLOCK_SIZE, second_step, mask=head_kept)
    tl.store(pair + 2 * BLOCK_SIZE + 1, second_minimum, mask=head_kept)


@triton.jit
def _rope_write_kernel(qkv_ptr, q_ptr, k_ptr, v_ptr, k_params_ptr, v_params_ptr, position_ptr, slot_ptr, cos_sin_ptr,
                       q_norm_ptr, k_norm_ptr, eps, k_scale, v_scale,
                       HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
                       QUARTER: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
                       KIND: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, PDL: tl.constexpr):
    """One program: GROUP heads of one kind (Q, K or V by program_id(1)) of one token, as two halves of their channels (what
    int4 stores: quarters)."""
    _follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    kv_parts: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    column = tl.arange(0, HALF)[None, :]
    half_kept = column < DIM // 2
    index = tl.arange(0, GROUP)[:, None]
    row = qkv_ptr + token * (HEADS + 2 * KV_HEADS) * DIM
    cos_sin = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * ROTARY
    if part < q_parts:
        head = part * GROUP + index
        head_kept = head < HEADS
        kept = head_kept & half_kept
        inverse_rms = _inverse_rms(row, head * DIM, column, kept, eps, DIM, Q_NORM)
        low = _rotated_half(row, head * DIM, column, kept, q_norm_ptr, inverse_rms, cos_sin, Q_NORM, ROTARY)
        high = _rotated_half(row, head * DIM, column + DIM // 2, kept, q_norm_ptr, inverse_rms, cos_sin, Q_NORM, ROTARY)
        out = q_ptr + (token * HEADS + head) * DIM + column
        tl.store(out, low.to(q_ptr.dtype.element_ty), mask=kept)
        tl.store(out + DIM // 2, high.to(q_ptr.dtype.element_ty), mask=kept)
    else:
        slot = tl.load(slot_ptr + token)
        if slot >= 0:
            is_k = part < q_parts + kv_parts
            head = (part - q_parts - tl.where(is_k, 0, kv_parts)) * GROUP + index
            head_kept = head < KV_HEADS
            kept = head_kept & half_kept
            target = ((slot // BLOCK_SIZE) * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            base = (HEADS + head + tl.where(is_k, 0, KV_HEADS)) * DIM
            if KIND == "int4":
                short = tl.arange(0, QUARTER)[None, :]
                short_kept = short < DIM // 4
                if is_k:
                    inverse_rms = _inverse_rms(row, base, column, kept, eps, DIM, K_NORM)
                    every = head_kept & short_kept
                    a = _rotated_half(row, base, short, every, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
                    b = _rotated_half(row, base, short + DIM // 4, every, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
                    c = _rotated_half(row, base, short + DIM // 2, every, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
                    d = _rotated_half(row, base, short + 3 * (DIM // 4), every, k_norm_ptr, inverse_rms, cos_sin, K_NORM,
                                      ROTARY)
                    _write_int4(k_ptr, k_params_ptr, target, slot % BLOCK_SIZE, head_kept, a, b, c, d, short, short_kept,
                                DIM, BLOCK_SIZE)
                else:
                    a, b, c, d = _plain_quarters(row, base, short, head_kept & short_kept, DIM)
                    _write_int4(v_ptr, v_params_ptr, target, slot % BLOCK_SIZE, head_kept, a, b, c, d, short, short_kept,
                                DIM, BLOCK_SIZE)
            elif is_k:
                inverse_rms = _inverse_rms(row, base, column, kept, eps, DIM, K_NORM)
                low = _rotated_half(row, base, column, kept, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
                high = _rotated_half(row, base, column + DIM // 2, kept, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
                _write_heads(k_ptr, k_params_ptr, target, head_kept, low, high, column, half_kept, k_scale, DIM, KIND)
            else:
                low = _plain_half(row, base, column, kept)
                high = _plain_half(row, base, column + DIM // 2, kept)
                _write_heads(v_ptr, v_params_ptr, target, head_kept, low, high, column, half_kept, v_scale, DIM, KIND)


@triton.jit
def _plain_quarters(x_ptr, base, column, kept, DIM: tl.constexpr):
    return (_plain_half(x_ptr, base, column, kept), _plain_half(x_ptr, base, column + DIM // 4, kept),
            _plain_half(x_ptr, base, column + DIM // 2, kept), _plain_half(x_ptr, base, column + 3 * (DIM // 4), kept))


@triton.jit
def _turned_quarter(low, high, matrix_ptr, QUARTER_INDEX: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
                    QUARTER: tl.constexpr):
    """One quarter of the channels of rows [rows, DIM], given as halves, times a matrix [DIM, DIM]. fp32 [rows, QUARTER]."""
    inner = tl.arange(0, HALF)[:, None]
    column = tl.arange(0, QUARTER)[None, :]
    kept = (inner < DIM // 2) & (column < DIM // 4)
    at = matrix_ptr + inner * DIM + QUARTER_INDEX * (DIM // 4) + column
    upper = tl.load(at, mask=kept, other=0.0)
    lower = tl.load(at + DIM // 2 * DIM, mask=kept, other=0.0)
    dtype: tl.constexpr = matrix_ptr.dtype.element_ty  # fp16 beside 16-bit activations, which it holds exactly but for range
    out = tl.dot(low.to(dtype), upper, input_precision="ieee")
    return tl.dot(high.to(dtype), lower, out, input_precision="ieee")


@triton.jit
def _turned(low, high, matrix_ptr, DIM: tl.constexpr, HALF: tl.constexpr, QUARTER: tl.constexpr):
    return (_turned_quarter(low, high, matrix_ptr, 0, DIM, HALF, QUARTER),
            _turned_quarter(low, high, matrix_ptr, 1, DIM, HALF, QUARTER),
            _turned_quarter(low, high, matrix_ptr, 2, DIM, HALF, QUARTER),
            _turned_quarter(low, high, matrix_ptr, 3, DIM, HALF, QUARTER))


@triton.jit
def _store_quarters(ptr, a, b, c, d, kept, DIM: tl.constexpr):
    dtype = ptr.dtype.element_ty
    tl.store(ptr, a.to(dtype), mask=kept)
    tl.store(ptr + DIM // 4, b.to(dtype), mask=kept)
    tl.store(ptr + DIM // 2, c.to(dtype), mask=kept)
    tl.store(ptr + 3 * (DIM // 4), d.to(dtype), mask=kept)


@triton.jit
def _write_quarters(ptr, params_ptr, target, offset, kept, a, b, c, d, column, quarter_kept, scale,
                    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr):
    if KIND == "int4":
        _write_int4(ptr, params_ptr, target, offset, kept, a, b, c, d, column, quarter_kept, DIM, BLOCK_SIZE)
    elif KIND == "int8":
        # Two halves of pieces, so that one reduction finds the range of all four.
        low, high, step, minimum = _codes(tl.join(a, b).reshape(a.shape[0], 2 * a.shape[1]),
                                          tl.join(c, d).reshape(a.shape[0], 2 * a.shape[1]),
                                          tl.join(quarter_kept, quarter_kept).reshape(1, 2 * a.shape[1]), 255.0, DIM, False)
        a, b = low.reshape(a.shape[0], a.shape[1], 2).split()
        c, d = high.reshape(a.shape[0], a.shape[1], 2).split()
        _store_quarters(ptr + target * DIM + column, a, b, c, d, kept & quarter_kept, DIM)
        tl.store(params_ptr + target * 2, step, mask=kept)
        tl.store(params_ptr + target * 2 + 1, minimum, mask=kept)
    else:
        every = kept & quarter_kept
        _write_half(ptr, target, column, every, a, DIM, KIND, scale)
        _write_half(ptr, target, column + DIM // 4, every, b, DIM, KIND, scale)
        _write_half(ptr, target, column + DIM // 2, every, c, DIM, KIND, scale)
        _write_half(ptr, target, column + 3 * (DIM // 4), every, d, DIM, KIND, scale)


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
        low = _rotated_half(qkv_ptr, base, column, kept, q_norm_ptr, inverse_rms, cos_sin, Q_NORM, ROTARY)
        high = _rotated_half(qkv_ptr, base, column + DIM // 2, kept, q_norm_ptr, inverse_rms, cos_sin, Q_NORM, ROTARY)
        a, b, c, d = _turned(low, high, q_turn_ptr + matrix, DIM, HALF, QUARTER)
        _store_quarters(q_ptr + (token * HEADS + head) * DIM + short, a, b, c, d, live & short_kept, DIM)
    elif tl.program_id(0) * ROWS < tokens:
        slot = tl.load(slot_ptr + token, mask=live, other=-1)
        written = slot >= 0
        slot = tl.where(written, slot, 0)
        target = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        if kind == 1:
            inverse_rms = _inverse_rms(qkv_ptr, base, column, kept, eps, DIM, K_NORM)
            low = _rotated_half(qkv_ptr, base, column, kept, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
            high = _rotated_half(qkv_ptr, base, column + DIM // 2, kept, k_norm_ptr, inverse_rms, cos_sin, K_NORM, ROTARY)
            shift = shift_ptr + kv_head * DIM + column
            low -= tl.load(shift, mask=half_kept, other=0.0)
            high -= tl.load(shift + DIM // 2, mask=half_kept, other=0.0)
            a, b, c, d = _turned(low, high, k_turn_ptr + matrix, DIM, HALF, QUARTER)
            _write_quarters(k_ptr, k_params_ptr, target, slot % BLOCK_SIZE, written, a, b, c, d, short, short_kept, k_scale,
                            DIM, BLOCK_SIZE, KIND)
        else:
            if V_TURN:
                low = _plain_half(qkv_ptr, base, column, kept)
                high = _plain_half(qkv_ptr, base, column + DIM // 2, kept)
                a, b, c, d = _turned(low, high, v_turn_ptr + matrix, DIM, HALF, QUARTER)
            else:
                a, b, c, d = _plain_quarters(qkv_ptr, base, short, live & short_kept, DIM)
            _write_quarters(v_ptr, v_params_ptr, target, slot % BLOCK_SIZE, written, a, b, c, d, short, short_kept, v_scale,
                            DIM, BLOCK_SIZE, KIND)


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
    low = _plain_half(x_ptr, base, column, kept)
    high = _plain_half(x_ptr, base, column + DIM // 2, kept)
    a, b, c, d = _turned(low, high, matrix_ptr + kv_head * DIM * DIM, DIM, HALF, QUARTER)
    short = tl.arange(0, QUARTER)[None, :]
    _store_quarters(out_ptr + base + short, a, b, c, d, live & (short < DIM // 4), DIM)


@triton.jit
def _inverse_rms(x_ptr, base, column, kept, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """1 / rms over each head's channels [heads, 1]; 1 when heads are not normed."""
    if NORM:
        low = _plain_half(x_ptr, base, column, kept)
        high = _plain_half(x_ptr, base, column + DIM // 2, kept)
        return tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + eps)[:, None]
    else:
        return 1.0


def rope_write(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, q_norm: Tensor | None,
               k_norm: Tensor | None, eps: float, turn: Turn | None = None) -> Tensor:
    """`reference.rope_write` in one kernel. Raises ValueError for an odd head_dim, which has no halves to pair, and for one of
    no quarters where those are stored or turned."""
    qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    head_dim = kv.v.shape[-1] * (2 if kv.name == "int4" else 1)
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
    kind = kv.name if KV[kv.name].num.bits <= 8 else "copy"
    half, quarter = triton.next_power_of_2(head_dim // 2), triton.next_power_of_2(max(1, head_dim // 4))
    if turn is not None:
        group = heads // kv_heads
        turns = (x.contiguous() for x in (turn.q, turn.k, turn.k if turn.v is None else turn.v, turn.shift))
        _turn_write_kernel[(triton.cdiv(tokens * group, TURNED_ROWS), 3 * kv_heads)](
            *operands, *turns, tokens, heads, kv_heads, head_dim, max(16, half), max(16, quarter), cos_sin.shape[1],
            kv.block_size, TURNED_ROWS, kind, q_norm is not None, k_norm is not None, turn.v is not None,
            **_launch_options(qkv, 4))
        return q
    group = min(8, triton.next_power_of_2(max(heads, kv_heads)))
    parts = triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group)
    _rope_write_kernel[(tokens, parts)](
        *operands, heads, kv_heads, head_dim, half, quarter, cos_sin.shape[1], kv.block_size, group, kind,
        q_norm is not None, k_norm is not None, **_launch_options(qkv, 2 if group * head_dim <= 1024 else 4))
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
            TURNED_ROWS, **_launch_options(x, 4))
    return out


OPS = Ops("triton", rms_norm, silu_mul, quantize_rows, rope_write, attention_triton.attention, linear_triton.logits,
          turn_heads)
