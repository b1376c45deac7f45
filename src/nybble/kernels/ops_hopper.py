"""Rows between linears on Hopper (sm_90a), in CUDA (`rows_sm90.cu`): norm, SiLU(gate) * up, and plain rows, to int8.

Not portable, and for 16-bit rows only: all else is `ops_triton`'s. A row is one cluster's, in an order that its width fixes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.kernels import attention_triton, cache_hopper, decode_hopper, linear_hopper_16, nvrtc, ops_triton
from nybble.kernels.types import LayerKV, Rows, Step, Turn

PLAIN, NORM, SILU = 0, 1, 2  # OP of the .cu
OUT = {torch.bfloat16: 0, torch.float16: 1}
MOST_VECTORS = 6  # of a thread: more do not fit its registers
FEW_ROWS = 4  # up to so many, SiLU(gate) * up has a cluster for each: no bit depends on it, the largest is that of any order


class Shape(NamedTuple):
    """A row's programs: threads of each, `vectors` times eight values of a thread, programs of a cluster."""

    threads: int
    vectors: int
    cluster: int = 1


def shape_for(op: int, width: int, hadamard: int, rows: int) -> Shape:
    """From an H200 in a chain with the linears of Llama-2-13B."""
    octets, unit = width // 8, max(32, hadamard // 8)
    if op == SILU and not hadamard and rows <= FEW_ROWS:
        vectors = -(-octets // 1024)
        return Shape(-(-octets // (vectors * 128)) * 32, vectors, 4)
    vectors = max(2 if op == SILU else 1, -(-octets // 1024))
    threads = -(-octets // (vectors * unit)) * unit
    return Shape(threads, -(-octets // threads))


class Arguments(ctypes.Structure):
    """`Arguments` of the .cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "h", "codes", "scale", "most")),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


def source_and_defines(op: int, width: int, shape: Shape, hadamard: int, residual: bool, out: int, wide: bool = False,
                       share: int = 0) -> tuple[str, dict[str, int]]:
    """wide: the norm's weights are float32, not of the rows' type. share: SHARE of the .cu."""
    root = f"constexpr float ROOT = {hadamard**-0.5 if hadamard else 1.0:.9e}f;\n"
    defines = {"OP": op, "WIDTH": width, "THREADS": shape.threads, "VECTORS": shape.vectors, "CLUSTER": shape.cluster,
               "HADAMARD": hadamard, "RESIDUAL": int(residual), "WIDE": int(wide), "OUT": out, "SHARE": share}  # fmt: skip
    return root + nvrtc.source("rows_sm90.cu"), defines


@functools.cache
def kernel(op: int, width: int, shape: Shape, hadamard: int, residual: bool, out: int, wide: bool, share: int, device: int
           ) -> ctypes.c_void_p:
    code = nvrtc.machine_code(*source_and_defines(op, width, shape, hadamard, residual, out, wide, share))
    return nvrtc.load(code, "rows", 0, device)


def fits(op: int, x: Tensor, width: int, hadamard: int = 0, *others: Tensor | None) -> bool:
    if x.dtype not in OUT or len(x) == 0 or width == 0 or width % 8:
        return False
    if any(t is not None and t.data_ptr() % 16 for t in (x, *others)):
        return False
    shape = shape_for(op, width, hadamard, FEW_ROWS + 1)  # whatever the batch: bits are this file's or the other's
    return shape.vectors <= MOST_VECTORS and shape.threads <= 1024


def _run(op: int, x: Tensor, width: int, hadamard: int = 0, residual: Tensor | None = None, weight: Tensor | None = None,
         eps: float = 0.0, h: Tensor | None = None, share: int = 0, most: Tensor | None = None) -> Rows:
    rows, device = len(x), x.device
    codes = torch.empty((rows, width), dtype=torch.int8, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    tensors = (x, residual, weight, h, codes, scale, most)
    arguments = Arguments(*(None if t is None else t.data_ptr() for t in tensors), eps)
    shape = shape_for(op, width, hadamard, rows)
    wide = weight is not None and weight.dtype == torch.float32
    nvrtc.launch(kernel(op, width, shape, hadamard, residual is not None, OUT[x.dtype], wide, share,
                        device.index),
                 rows * shape.cluster, shape.threads, 0, shape.cluster, (arguments,), device)  # fmt: skip
    return Rows(codes, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: bool
             ) -> tuple[Tensor | Rows, Tensor]:
    """`reference.rms_norm`."""
    width = x.shape[1]
    if not quantize or weight.dtype not in (x.dtype, torch.float32) or not fits(NORM, x, width, 0, residual, weight):
        return ops_triton.rms_norm(x, weight, eps, residual, quantize)
    x = x.contiguous()
    h = x if residual is None else torch.empty_like(x)
    residual = None if residual is None else residual.contiguous()
    return _run(NORM, x, width, 0, residual, weight.contiguous(), eps, h), h


def silu_mul(gate_up: Tensor, quantize: bool, hadamard: int = 0) -> Tensor | Rows:
    """`reference.silu_mul`; the butterflies add in its order."""
    width = gate_up.shape[1] // 2
    turns = hadamard & (hadamard - 1) == 0 and width % max(1, hadamard) == 0
    if not quantize or not turns or not fits(SILU, gate_up, width, hadamard):
        return ops_triton.silu_mul(gate_up, quantize, hadamard)
    return _run(SILU, gate_up.contiguous(), width, hadamard)


def silu_mul_part(gate_up: Tensor, hadamard: int, largest: Callable[[Tensor], Tensor], ranks: int = 1) -> Rows | None:
    """This rank's columns of `silu_mul`'s int8 rows, whose parts so many ranks have: the bits and scales of the whole rows.
    largest: float32 [M] magnitudes of the part -> those of the rows. None where either does not fit here."""
    width = gate_up.shape[1] // 2
    here = all(fits(SILU, gate_up, each, hadamard) for each in (width, width * ranks))
    if width % max(1, hadamard) or hadamard & (hadamard - 1) or not here:
        return None
    gate_up = gate_up.contiguous()
    most = largest(_run(SILU, gate_up, width, hadamard, share=1).scale)
    return _run(SILU, gate_up, width, hadamard, share=2, most=most.contiguous())


def quantize_rows(x: Tensor) -> Rows:
    """`reference.quantize_rows`, bit for bit."""
    return _run(PLAIN, x.contiguous(), x.shape[1]) if fits(PLAIN, x, x.shape[1]) else ops_triton.quantize_rows(x)


def rope_write(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, q_norm: Tensor | None,
               k_norm: Tensor | None, eps: float, turn: Turn | None = None) -> Tensor:
    """`reference.rope_write`; norms and turns are `ops_triton`'s."""
    qkv, head_dim = qkv.contiguous(), kv.v.shape[-1] * (2 if kv.name == "int4" else 1)
    plain = q_norm is None and k_norm is None and turn is None
    if not plain or not cache_hopper.fits(qkv, kv, head_dim, cos_sin.shape[1]):
        return ops_triton.rope_write(qkv, kv, step, cos_sin, kv_heads, q_norm, k_norm, eps, turn)
    return cache_hopper.rope_write(qkv, kv, step, cos_sin, kv_heads, head_dim)


def decode(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, scale: float, window: int, quantize: bool
           ) -> Tensor | Rows:
    """`rope_write`, attention and, with `quantize`, `quantize_rows` of a step of generated tokens, one each row; the same
    bits in one kernel where it fits. qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq, D] or int8 rows."""
    head_dim = kv.v.shape[-1] * (2 if kv.name == "int4" else 1)
    heads, qkv = qkv.shape[1] // head_dim - 2 * kv_heads, qkv.contiguous()
    if decode_hopper.fits(qkv, heads, kv, step, cos_sin.shape[1], window):
        return decode_hopper.run(qkv, heads, kv, step, scale, cos_sin, quantize)
    q = rope_write(qkv, kv, step, cos_sin, kv_heads, None, None, 0.0)
    seen = attention_triton.attention(q, kv, step, scale, window)
    return quantize_rows(seen.flatten(1)) if quantize else seen


def compile_decode(kv: LayerKV, heads: int, dtype: torch.dtype, rows: int, quantize: bool | None) -> None:
    """Start compiling what steps over a cache like `kv` will ask for, of up to so many generated tokens. quantize: see
    `decode_hopper.compile_ahead`."""
    decode_hopper.compile_ahead(kv, heads, dtype, rows, quantize)
    cache_hopper.compile_ahead(kv, heads, dtype, attention_triton.GATHER_TILE)


OPS = replace(ops_triton.OPS, name="hopper", rms_norm=rms_norm, silu_mul=silu_mul, quantize_rows=quantize_rows,
              rope_write=rope_write, decode=decode, compile_decode=compile_decode, silu_mul_part=silu_mul_part,
              logits=linear_hopper_16.logits)
