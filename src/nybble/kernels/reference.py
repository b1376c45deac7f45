"""Torch references: the meaning of every op, and what a device without better kernels runs.

Not fast, and not promised to be bit-identical across batch sizes; every other kernel is tested against this file. Float
arithmetic is fp32 unless said otherwise; the integer part of quantized products is exact int32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.formats.numerics import FLOAT8, SMALLEST_ABSMAX, quantize_min_max, to_float8
from nybble.formats.numerics import quantize_rows as quantize_row_codes
from nybble.formats.qtensor import QTensor, dequantize, expand, inner_codes
from nybble.formats.spec import FP8, INT4, INT4_KV_GROUPS, INT8, KV, PER_TOKEN_INT8, SCHEMES, UINT4, Spec, scheme_of
from nybble.kernels.registry import LinearKernel, LinearShape, Ops
from nybble.kernels.types import LayerKV, Rows, Step, Turn

# ---- element-wise -------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> Rows:
    """[M, K] float -> per-token symmetric int8 (`formats.numerics.quantize_rows`)."""
    return Rows(*quantize_row_codes(x))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: bool
) -> tuple[Tensor | Rows, Tensor]:
    """h = x + residual (rounded to x's dtype); y = h / rms(h) * weight. [M, H] -> (y or its int8 rows, h).

    With `quantize` the rows are quantized from the fp32 y, before any rounding to 16 bits.
    """
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = h.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (quantize_rows(y) if quantize else y.to(x.dtype)), h


def silu_mul(gate_up: Tensor, quantize: bool, hadamard: int = 0) -> Tensor | Rows:
    """silu(gate) * up, gate the first half of the last axis. [M, 2 I] -> [M, I] or its int8 rows (from fp32).

    hadamard: above 0, a power of two that divides I; each run of as many channels is turned (`hadamard_blocks`) before it is
    rounded.
    """
    gate, up = gate_up.float().chunk(2, -1)
    y = F.silu(gate) * up
    if hadamard:
        y = hadamard_blocks(y, hadamard)
    return quantize_rows(y) if quantize else y.to(gate_up.dtype)


def hadamard_blocks(x: Tensor, size: int) -> Tensor:
    """Each run of `size` channels times Sylvester's Hadamard matrix / sqrt(size), which is symmetric and its own inverse.
    float [..., K] -> the same, in x's dtype; size a power of two that divides K.

    Sums and differences of pairs 1, 2, 4 ... apart, in this order, then one product: kernels that do the same agree to the bit.
    """
    shape, stride = x.shape, 1
    while stride < size:
        a, b = x.reshape(-1, 2, stride).unbind(1)
        x, stride = torch.stack((a + b, a - b), 1), 2 * stride
    return x.reshape(shape) * size**-0.5


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [S, H] x weight [V, H]^T -> float32 [S, V]. Kernels that promise batch invariance override this."""
    return F.linear(hidden.float(), weight.float())


# ---- attention ----------------------------------------------------------------------------------------------------


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding, half-split pairing (x[i], x[i + R/2]). x [T, heads, D]; cos_sin float32 [P, R]: cos | sin halves.
    R < D rotates the first R channels only."""
    rotary = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()][:, None, :].chunk(2, -1)
    a, b = x[..., : rotary // 2].float(), x[..., rotary // 2 : rotary].float()
    out = torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary:].float()), -1)
    return out.to(x.dtype)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head's channels (Qwen3). x [T, heads, D]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_write(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, q_norm: Tensor | None,
               k_norm: Tensor | None, eps: float, turn: Turn | None = None) -> Tensor:
    """Split the fused projection, norm heads if asked, rotate Q and K, turn both if asked, quantize K and V and write them to
    their slots.

    qkv [T, (Hq + 2 Hkv) * D] -> Q [T, Hq, D] in qkv's dtype. Slots < 0 are skipped.
    """
    q, k, v = qkv.unflatten(1, (-1, kv.head_dim)).tensor_split((-2 * kv_heads, -kv_heads), 1)
    if q_norm is not None:
        q = head_norm(q, q_norm, eps)
    if k_norm is not None:
        k = head_norm(k, k_norm, eps)
    q, k = rotate(q, step.positions, cos_sin), rotate(k, step.positions, cos_sin)
    if turn is not None:
        q, k = turn_heads(q, turn.q), turn_heads(k.float() - turn.shift, turn.k)
        v = v if turn.v is None else turn_heads(v.float(), turn.v)
    kept = step.slots >= 0
    block = (step.slots[kept] // kv.block_size)[:, None]
    offset = (step.slots[kept] % kv.block_size)[:, None]
    head = torch.arange(kv_heads, device=qkv.device)[None, :]
    for values, codes, params, scale in (
        (k[kept], kv.k, kv.k_params, kv.k_scale),
        (v[kept], kv.v, kv.v_params, kv.v_scale),
    ):
        stored, scale_min = encode_kv(values, kv.name, scale)
        # as bytes, because torch does not index float8
        codes.view(torch.uint8)[block, head, offset] = stored.to(codes.dtype).view(torch.uint8)
        if params is not None:
            _by_token(params)[block, head, offset] = scale_min
    return q


def _by_token(params: Tensor) -> Tensor:
    """[blocks, heads, block, .., 2]: int4 has an axis of channel halves, and stores it before the tokens."""
    return params.movedim(-2, 2)


def turn_heads(x: Tensor, matrix: Tensor) -> Tensor:
    """x [T, heads, D] times its KV head's matrix, [kv_heads, D, D], in fp32; -> x's dtype."""
    grouped = x.float().unflatten(1, (matrix.shape[0], -1))
    return torch.einsum("thgd,hde->thge", grouped, matrix.float()).flatten(1, 2).to(x.dtype)


def encode_kv(x: Tensor, name: str, scale: float) -> tuple[Tensor, Tensor | None]:
    """[.., D] float -> what the cache stores and, for integers, float16 (scale, minimum): int8 [.., 2], int4 [.., 2, 2]."""
    if name == "int8":
        codes, step, minimum = quantize_min_max(x, 255)
        return codes, torch.stack((step, minimum), -1)
    if name == "int4":
        codes, step, minimum = quantize_min_max(x.unflatten(-1, (INT4_KV_GROUPS, -1)), 15, centred=True)
        a, b, c, d = codes.flatten(-2).chunk(4, -1)
        return torch.stack((a | b << 4, c | d << 4), -1).flatten(-2), torch.stack((step, minimum), -1)
    return (to_float8(x, scale, KV[name].num) if KV[name].num.name in FLOAT8 else x), None


def decode_kv(codes: Tensor, params: Tensor | None, name: str, scale: float) -> Tensor:
    """The inverse of `encode_kv`, in fp32."""
    if name == "int4":
        assert params is not None
        low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
        halves = torch.stack((torch.cat((low & 15, low >> 4), -1), torch.cat((high & 15, high >> 4), -1)), -2)
        return (halves.float() * params[..., :1].float() + params[..., 1:].float()).flatten(-2)
    if params is not None:
        return codes.float() * params[..., :1].float() + params[..., 1:].float()
    return codes.float() * scale


def gather_kv(kv: LayerKV, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` tokens of one row's K and V, dequantized. -> float32 [Hkv, length, D] each."""
    out = []
    for codes, params, scale in ((kv.k, kv.k_params, kv.k_scale), (kv.v, kv.v_params, kv.v_scale)):
        picked = codes.view(torch.uint8)[blocks].view(codes.dtype)
        values = decode_kv(picked, None if params is None else _by_token(params)[blocks], kv.name, scale)
        out.append(values.transpose(0, 1).flatten(1, 2)[:, :length])
    return out[0], out[1]


def attention(q: Tensor, kv: LayerKV, step: Step, scale: float, window: int) -> Tensor:
    """Causal attention of each row's tokens over its paged cache. q [T, Hq, D] -> [T, Hq, D] in q's dtype.

    The row's last token sees `context_len` tokens, the one before it one fewer, and so on; `window` > 0 limits each to the
    last `window` of them, itself included. K and V, the row's own tokens too, are read back from the cache.
    """
    out = torch.empty_like(q)
    starts = step.query_start.tolist()
    for row, context in enumerate(step.context_len.tolist()):
        first, last = starts[row], starts[row + 1]
        blocks = step.block_table[row, : -(-context // kv.block_size)].long()
        k, v = gather_kv(kv, blocks, context)
        repeat = q.shape[1] // k.shape[0]
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = q[first:last].float().transpose(0, 1) @ k.transpose(1, 2) * scale  # [Hq, L, context]
        seen = torch.arange(context - (last - first), context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)[None, :]
        hidden = key > seen
        if window:
            hidden |= key <= seen - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out


# ---- linear -------------------------------------------------------------------------------------------------------


def int_product(codes: Tensor, weight: Tensor) -> Tensor:
    """Exact int8 [M, K] x int8 [N, K]^T -> int32 [M, N]."""
    if codes.device.type == "cpu" and codes.shape[1] > 1:  # of one channel torch 2.13 returns nonsense
        return torch._int_mm(codes, weight.t())
    return (codes.double() @ weight.double().t()).to(torch.int32)


def _accepts_int8_act(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num.kind != "int" or weight.zero or shape.has_order:
        return "wants symmetric integer weights in contiguous groups"
    return None


def _pack_int8_act(weight: QTensor | Tensor, shape: LinearShape) -> tuple[QTensor, torch.dtype]:
    assert isinstance(weight, QTensor)
    return weight.to(shape.device), shape.dtype


def _run_int8_act(packed: tuple[QTensor, torch.dtype], x: Rows | Tensor) -> Tensor:
    """y = act_scale * sum over groups of weight_scale * (exact int32 dot); one group per channel or on the int8 grid."""
    weight, dtype = packed
    assert isinstance(x, Rows)
    if weight.over is not None:
        out = int_product(x.codes, inner_codes(weight)).float() * weight.over.t()
    else:
        n, k = weight.shape
        scales = expand(weight.scale, (n, weight.scale.shape[1]), tile=(weight.spec.tile[0], 1)).t()
        out = torch.zeros(x.codes.shape[0], n, device=x.codes.device)
        for codes, of_group, scale in zip(*(c.split(weight.spec.group or k, 1) for c in (x.codes, weight.codes)), scales):
            out += int_product(codes.contiguous(), of_group.contiguous()).float() * scale
    return (out * x.scale[:, None]).to(dtype)


def _accepts_float(shape: LinearShape) -> str | None:
    if shape.scheme.act is not None:
        return f"leaves activations as they are; the scheme wants them in {shape.scheme.act.num.name}"
    return None


def _pack_float(weight: QTensor | Tensor, shape: LinearShape) -> Tensor:
    dense = dequantize(weight) if isinstance(weight, QTensor) else weight
    return dense.to(shape.device, shape.dtype)


def _run_float(packed: Tensor, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Tensor)
    return F.linear(x, packed)


# ---- linear with fp8 activations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float8Linear:
    """A packed weight and how its inputs become fp8. act_scale: float32 [1, 1] on the device, None when dynamic."""

    act: Spec
    act_scale: Tensor | None
    dtype: torch.dtype
    weight: Any


def quantize_float8(x: Tensor, act: Spec, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """[M, K] float -> (float8 [M, K], float32 [M, groups of `act`]): value = code * scale of its token and group.

    scale: the static one, [1, 1]; None computes max(absmax, eps) / largest finite code. A tensor, and tensors are divided by
    tensors, because CUDA multiplies by the reciprocal of a Python number and then some codes differ from a CPU's.
    """
    rows, k = x.shape
    if scale is not None:
        return to_float8(x, scale, act.num), scale.expand(rows, 1)
    group = act.group or k
    tiles = F.pad(x.float(), (0, -k % group)).view(rows, -(-k // group), group)
    absmax = tiles.abs().amax(-1).clamp_min(SMALLEST_ABSMAX)
    scale = absmax / torch.full_like(absmax, act.num.qmax)
    return to_float8(tiles, scale[..., None], act.num).flatten(1)[:, :k], scale


def refuse_float8(shape: LinearShape) -> str | None:
    act = shape.scheme.act
    if act is None or act.num.name not in FLOAT8 or act.zero:
        return "wants fp8 activations"
    if act.dynamic and act.tile[0] != 1:
        return "wants dynamic scales per token: one for a whole batch would let requests change each other"
    if not act.dynamic and (act.tile != (None, None) or shape.act_scale is None):
        return "wants the one scale of static activations (input_scale)"
    return None


def _float8_linear(weight: Any, shape: LinearShape) -> Float8Linear:
    assert shape.scheme.act is not None
    scale = None if shape.act_scale is None else torch.tensor([[shape.act_scale]], device=shape.device)
    return Float8Linear(shape.scheme.act, scale, shape.dtype, weight)


def after_float8(kernel: LinearKernel, name: str) -> LinearKernel:
    """A kernel for fp8 activations from one that multiplies float32: it is given the values of the fp8 codes."""

    def wide(shape: LinearShape) -> LinearShape:
        return replace(shape, scheme=SCHEMES["16bit"], dtype=torch.float32, has_order=False, act_scale=None)

    def pack(weight: QTensor | Tensor, shape: LinearShape) -> Float8Linear:
        return _float8_linear(kernel.pack(weight, wide(shape)), shape)

    def run(packed: Float8Linear, x: Rows | Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        codes, scale = quantize_float8(x, packed.act, packed.act_scale)
        values = codes.float() * expand(scale, tuple(x.shape), tile=packed.act.tile)
        return kernel.run(packed.weight, values).to(packed.dtype)

    return LinearKernel(name, lambda shape: refuse_float8(shape) or kernel.accepts(wide(shape)), pack, run, None)


def _pack_codes(weight: QTensor | Tensor, shape: LinearShape) -> QTensor | Tensor:
    """fp32 values on a CPU, where decoding costs more than the product; elsewhere the codes, a quarter of that."""
    return _pack_float(weight, shape) if shape.device.type == "cpu" else weight.to(shape.device)


def _run_codes(packed: QTensor | Tensor, x: Rows | Tensor) -> Tensor:
    return _run_float(dequantize(packed) if isinstance(packed, QTensor) else packed.float(), x)


def _accepts_scaled_mm(shape: LinearShape) -> str | None:
    weight, act = shape.scheme.weight, shape.scheme.act
    refusal = refuse_float8(shape)
    if refusal is not None:
        return refusal
    assert act is not None
    if weight is None or (weight.num, act.num) != (FP8, FP8):
        return "wants weights and activations in fp8_e4m3"
    if weight.group not in (None, shape.in_features) or act.group not in (None, shape.in_features):
        return "wants one scale per token or tensor and per channel or tensor, not per group"
    if shape.out_features % 16 or shape.in_features % 16:
        return f"wants multiples of 16 channels, not {shape.out_features} x {shape.in_features}"
    if shape.dtype != torch.bfloat16:
        return f"returns bfloat16, not {shape.dtype}"
    if shape.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(shape.device) < (8, 9):
        return "wants an NVIDIA GPU of compute capability 8.9 or later"
    return None


def _pack_scaled_mm(weight: QTensor | Tensor, shape: LinearShape) -> Float8Linear:
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    scale = expand(weight.scale, (weight.shape[0], 1), tile=weight.spec.tile)
    return _float8_linear((weight.codes.contiguous().t(), scale.t().contiguous()), shape)


def _run_scaled_mm(packed: Float8Linear, x: Rows | Tensor) -> Tensor:
    """fp8 products, summed in fp32 (`use_fast_accum` would keep fewer bits), scaled per token and channel, to bfloat16."""
    assert isinstance(x, Tensor)
    codes, scale = quantize_float8(x, packed.act, packed.act_scale)
    weight, weight_scale = packed.weight
    if not len(x):
        return x.new_empty((0, weight.shape[1]), dtype=packed.dtype)
    return torch._scaled_mm(codes, weight, scale.contiguous(), weight_scale, out_dtype=packed.dtype, use_fast_accum=False)


# ---- weights with zero points under int8 activations --------------------------------------------------------------


@dataclass(frozen=True)
class Zeroed:
    """A weight packed without its zero points, and what they add per group sum of activations: float32 [groups, N]."""

    weight: Any
    order: Tensor | None
    correction: Tensor
    dtype: torch.dtype


def subtract_zeros(y: Tensor, x: Rows, correction: Tensor, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
    """y float32 [M, N] minus (group sums of x) @ correction [groups, N], in `dtype`. order: [K] group of each channel."""
    rows, groups = x.codes.shape[0], correction.shape[0]
    if order is None:
        sums = x.codes.view(rows, groups, x.codes.shape[1] // groups).sum(-1, dtype=torch.int32)
    else:
        sums = torch.zeros(rows, groups, dtype=torch.int32, device=x.codes.device)
        sums.index_add_(1, order, x.codes.to(torch.int32))
    return (y.double() - (sums.double() @ correction.double()) * x.scale[:, None]).to(dtype)


def after_zero_points(kernel: LinearKernel, subtract: Callable[..., Tensor] = subtract_zeros) -> LinearKernel:
    """A kernel for zero points from one for int8 activations that has none: (code - zero) * scale is code * scale, whose
    product it computes, and -zero * scale times the sum of the group's activations, which `subtract` takes off."""

    def plain(shape: LinearShape) -> LinearShape:
        weight = shape.scheme.weight
        assert weight is not None
        signed = replace(weight, num=INT4 if weight.num == UINT4 else weight.num, zero=False)
        return replace(shape, scheme=scheme_of(signed, shape.scheme.act), dtype=torch.float32)

    def accepts(shape: LinearShape) -> str | None:
        weight = shape.scheme.weight
        if weight is None or not weight.zero or weight.num not in (UINT4, INT8) or weight.tile[0] != 1:
            return "wants 4- or 8-bit weights with zero points"
        if weight.group is not None and shape.in_features % weight.group:
            return f"{shape.in_features} input channels are not whole groups of {weight.group}"
        return kernel.accepts(plain(shape))

    def pack(weight: QTensor | Tensor, shape: LinearShape) -> Zeroed:
        assert isinstance(weight, QTensor)
        assert weight.zero is not None
        offset = 8 if weight.spec.num == UINT4 else 0
        inner = plain(shape)
        assert inner.scheme.weight is not None
        codes = QTensor(inner.scheme.weight, (weight.codes.to(torch.int16) - offset).to(torch.int8), weight.scale,
                        order=weight.order)
        correction = ((weight.zero - offset) * weight.scale).t().contiguous().to(shape.device)
        order = None if weight.order is None else weight.order.to(shape.device)
        return Zeroed(kernel.pack(codes, inner), order, correction, shape.dtype)

    def run(packed: Zeroed, x: Rows | Tensor) -> Tensor:
        assert isinstance(x, Rows)
        more = () if packed.order is None else (packed.order,)
        return subtract(kernel.run(packed.weight, x), x, packed.correction, packed.dtype, *more)

    return LinearKernel(f"{kernel.name} + zero points", accepts, pack, run, kernel.takes)


SCALED_MM = LinearKernel("torch scaled_mm fp8", _accepts_scaled_mm, _pack_scaled_mm, _run_scaled_mm, None)

TORCH_INT8 = LinearKernel("torch int8", _accepts_int8_act, _pack_int8_act, _run_int8_act, PER_TOKEN_INT8)

KERNELS = (
    TORCH_INT8,
    after_zero_points(TORCH_INT8),
    after_float8(LinearKernel("torch codes", lambda shape: None, _pack_codes, _run_codes, None), "torch fp8"),
    LinearKernel("torch", _accepts_float, _pack_float, _run_float, None),
)

OPS = Ops("torch", rms_norm, silu_mul, quantize_rows, rope_write, attention, logits, turn_heads)
