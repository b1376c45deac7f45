"""CPU kernels: `cpu.c`, compiled on first use by the system's C compiler, kept in the user's cache and called through ctypes.

Not a build step and not a requirement: without a compiler `kernels()` is empty, `ops()` is None, one warning says so and the
torch references run. Importing this module compiles nothing. The one idea: all checks of shapes and types happen here, so that
the C file is arithmetic alone and a call costs two microseconds. Inputs a function does not take go to the reference.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nybble.config import cache_dir
from nybble.formats.qtensor import QTensor, dequantize, inner_codes
from nybble.formats.spec import INT4, INT8, PER_TOKEN_INT8
from nybble.kernels import reference
from nybble.kernels.registry import LinearKernel, LinearShape, Ops
from nybble.kernels.types import LayerKV, Rows, Step, Turn

SOURCE = Path(__file__).with_name("cpu.c")
# Fused multiply-adds are written out in the source: the compiler may not choose them, or bits would depend on inlining.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread")
NATIVE = (("-march=native",), ("-mcpu=native",), ())  # the first the compiler knows
INT8_OFFSET, INT4_OFFSET, PANEL = 128, 8, 32
KINDS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4}
FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_p, _i, _f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
SIGNATURES = {
    "nybble_threads": (_p, _i),
    "nybble_linear": (_p, _p, _p, _p, _i),
    "nybble_dense": (_p, _p, _p, _i, _i, _i, _i),
    "nybble_quantize_rows": (_p, _p, _p, _i, _i),
    "nybble_rms_norm": (_p, _p, _p, _p, _p, _p, _p, _i, _i, _f),
    "nybble_silu_mul": (_p, _p, _p, _p, _i, _i, _i),
    "nybble_turn_heads": (*(_p,) * 3, *(_i,) * 4),
    "nybble_rope_write": (*(_p,) * 15, *(_i,) * 7, _f),
    "nybble_attention": (*(_p,) * 9, *(_i,) * 8, _f),
}


# ---- building and loading -----------------------------------------------------------------------------------------


@functools.cache
def library(*defines: str) -> ctypes.CDLL | None:
    """The compiled `cpu.c`, built if the cache lacks it; None, after one warning, when it cannot be built or loaded.

    `defines` are extra compiler flags (tests pass -DNYBBLE_PORTABLE for the loops that need no special instructions).
    """
    try:
        if sys.byteorder != "little":
            raise OSError("the kernels are written for little-endian machines")
        loaded = ctypes.CDLL(str(_built(defines)))
        for name, arguments in SIGNATURES.items():
            getattr(loaded, name).argtypes = arguments
            getattr(loaded, name).restype = None
        loaded.nybble_instructions.restype = ctypes.c_char_p
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(f"the fast CPU kernels are off, the slower torch kernels run instead: {error}", stacklevel=2)
        return None
    loaded.nybble_threads(_team_size(), torch.get_num_threads())
    return loaded


def _compiler() -> str | None:
    named = (os.environ.get("CC", ""), "gcc", "cc", "clang")
    return next((found for name in named if name and (found := shutil.which(name))), None)


def _built(defines: tuple[str, ...]) -> Path:
    """Path of the shared library for this source, these flags and this processor."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join((source, repr((FLAGS, NATIVE, defines)).encode(), _processor().encode()))).hexdigest()
    home = cache_dir()
    target = home / f"cpu-{key[:24]}.so"
    if target.exists():
        return target
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C compiler was found; install one (Debian, Ubuntu: apt install gcc; macOS: xcode-select --install)")
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(suffix=".so", prefix="partial-", dir=home)
    except OSError:  # a home that cannot be written: build for this process alone
        target = Path(tempfile.mkdtemp(prefix="nybble-")) / target.name
        descriptor, partial = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    for native in NATIVE:
        command = [compiler, *FLAGS, *native, *defines, str(SOURCE), "-o", partial, "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if result.returncode == 0:
            os.replace(partial, target)  # atomic: a second process sees all of it or nothing
            return target
    os.unlink(partial)
    tail = " / ".join(result.stderr.strip().splitlines()[-3:])
    raise RuntimeError(f"{compiler} could not build {SOURCE.name} (apt install gcc libc6-dev gives one that can): {tail}")


def _processor() -> str:
    """What -march=native looks at, so that a cache shared between machines never hands one the other's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        return platform.machine() + "".join(line for line in lines if line.startswith(wanted))
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"


def _team_size() -> int | None:
    """Address of omp_get_max_threads in the OpenMP runtime that torch has loaded: what torch.set_num_threads sets."""
    for name in (None, *map(str, sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*")))):
        try:
            return ctypes.cast(ctypes.CDLL(name).omp_get_max_threads, _p).value
        except (OSError, AttributeError):
            continue
    return None


# ---- linear -------------------------------------------------------------------------------------------------------


class _Weight(ctypes.Structure):
    _fields_ = [("codes", _p), ("scale", _p), ("outputs", _i), ("width", _i), ("groups", _i), ("four_bits", _i)]


@dataclass(frozen=True)
class PackedLinear:
    """A weight in panels of 32 output channels (layout: `cpu.c`), with the C structure that points into it."""

    codes: Tensor  # uint8, code + offset; padding is 0
    scale: Tensor  # float32 [panels, groups, 32]
    order: Tensor | None  # int64 [K]: input channels sorted by group, for GPTQ g_idx
    pad: int  # zero channels appended to each row of activations
    outputs: int
    inputs: int
    dtype: torch.dtype
    header: _Weight
    address: int


def _has_groups_of_eights(group: int | None, inputs: int) -> bool:
    """Whether the C code can walk groups of so many channels; one alone is padded."""
    return group is None or group >= inputs or (group % 8 == 0 and inputs % group == 0)


def _accepts_int8(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if shape.device.type != "cpu":
        return "runs on the CPU"
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num not in (INT4, INT8) or weight.zero:
        return f"wants symmetric int4 or int8 weights, not {weight.num.name}" + (" with zero points" if weight.zero else "")
    if weight.over is None and not _has_groups_of_eights(weight.group, shape.in_features):
        return f"wants groups that are a multiple of 8 and divide {shape.in_features} input channels, not {weight.group}"
    return None


def _pack_int8(weight: QTensor | Tensor, shape: LinearShape) -> PackedLinear:
    assert isinstance(weight, QTensor)
    n, k = weight.shape
    whole = weight.over is not None and torch.equal(weight.scale, weight.scale.round()) and float(weight.scale.max()) <= 16
    if whole and weight.over is not None and _has_groups_of_eights(weight.spec.group, k):
        # the same numbers as ordinary groups, which take half the bytes of the int8 grid
        weight = replace(weight, spec=replace(weight.spec, over=None), scale=weight.scale * weight.over, over=None)
    four_bits = weight.over is None and weight.spec.num == INT4
    codes, scale, order = weight.codes, weight.scale, None
    if weight.over is not None:
        codes, scale = inner_codes(weight), weight.over
    elif weight.order is not None and scale.shape[1] > 1:
        order = torch.argsort(weight.order, stable=True)
        if not torch.equal(weight.order[order], torch.arange(k) // (k // scale.shape[1])):
            raise ValueError("groups of different sizes (GPTQ g_idx) have no int8 kernel; use a 16-bit activation scheme")
        codes = codes[:, order]
    if scale.shape[0] != n:
        scale = scale.repeat_interleave(weight.spec.tile[0] or n, 0)[:n]
    groups, panels, pad = scale.shape[1], -(-n // PANEL), -k % 8
    offset = INT4_OFFSET if four_bits else INT8_OFFSET
    stored = torch.zeros(panels * PANEL, k + pad, dtype=torch.uint8)
    stored[:n, :k] = (codes.to(torch.int16) + offset).to(torch.uint8)
    if four_bits:
        eights = stored.view(panels, PANEL, -1, 2, 4)
        stored = (eights[..., 0, :] | (eights[..., 1, :] << 4)).transpose(1, 2).contiguous()
    else:
        stored = stored.view(panels, PANEL, -1, 4).transpose(1, 2).contiguous()
    scales = torch.zeros(panels * PANEL, groups)
    scales[:n] = scale
    scales = scales.view(panels, PANEL, groups).transpose(1, 2).contiguous()
    header = _Weight(stored.data_ptr(), scales.data_ptr(), n, (k + pad) // groups, groups, four_bits)
    return PackedLinear(stored, scales, order, pad, n, k, shape.dtype, header, ctypes.addressof(header))


def _run_int8(loaded: ctypes.CDLL, packed: PackedLinear, x: Rows | Tensor) -> Tensor:
    codes, scale = x
    if codes.shape[1] != packed.inputs or codes.dtype is not torch.int8 or scale.dtype is not torch.float32:
        raise ValueError(f"this weight takes int8 codes [M, {packed.inputs}] with float32 scales, not {codes.dtype} "
                         f"{tuple(codes.shape)} with {scale.dtype}")
    if packed.order is not None:
        codes = codes[:, packed.order]
    if packed.pad:
        codes = torch.nn.functional.pad(codes, (0, packed.pad))
    codes, scale = codes.contiguous(), scale.contiguous()
    rows = codes.shape[0]
    out = torch.empty(rows, packed.outputs)
    loaded.nybble_linear(packed.address, codes.data_ptr(), scale.data_ptr(), out.data_ptr(), rows)
    return out if packed.dtype is torch.float32 else out.to(packed.dtype)


def _accepts_float(shape: LinearShape) -> str | None:
    if shape.device.type != "cpu" or shape.dtype != torch.float32:
        return "multiplies float32 activations on the CPU"
    if shape.scheme.act is not None:
        return f"leaves activations as they are; the scheme wants them in {shape.scheme.act.num.name}"
    return None


def _pack_float(weight: QTensor | Tensor, shape: LinearShape) -> Tensor:
    dense = dequantize(weight) if isinstance(weight, QTensor) else weight
    return dense.contiguous() if dense.dtype in FLOAT_KINDS else dense.float().contiguous()


def _dense(loaded: ctypes.CDLL, weight: Tensor, x: Rows | Tensor) -> Tensor:
    """x float32 [M, K] x weight [N, K] in fp32, bf16 or fp16 -> float32 [M, N], summed in fp32 in one fixed order."""
    assert isinstance(x, Tensor)
    x = x.contiguous()
    rows, (outputs, k) = x.shape[0], weight.shape
    if x.shape[1] != k or x.dtype is not torch.float32:
        raise ValueError(f"this weight takes float32 [M, {k}], not {x.dtype} {tuple(x.shape)}")
    out = torch.empty(rows, outputs)
    loaded.nybble_dense(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, outputs, k, FLOAT_KINDS[weight.dtype])
    return out


def kernels(*defines: str) -> tuple[LinearKernel, ...]:
    """Linear kernels of this machine in order of preference; empty when `cpu.c` could not be built."""
    loaded = library(*defines)
    if loaded is None:
        return ()
    name = loaded.nybble_instructions().decode()
    return (
        LinearKernel(f"cpu int8 ({name})", _accepts_int8, _pack_int8, functools.partial(_run_int8, loaded), PER_TOKEN_INT8),
        LinearKernel(f"cpu float ({name})", _accepts_float, _pack_float, functools.partial(_dense, loaded), None),
    )


# ---- ops ----------------------------------------------------------------------------------------------------------


def _wide(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.dtype is torch.float32 and t.is_contiguous()) for t in tensors)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _result(rows: int, width: int, quantize: bool) -> tuple[Tensor | Rows, tuple[int | None, ...]]:
    """What a row kernel fills, and its pointers to floats, codes and scales, of which it wants the first or the others."""
    if not quantize:
        out = torch.empty(rows, width)
        return out, (out.data_ptr(), None, None)
    out = Rows(torch.empty(rows, width, dtype=torch.int8), torch.empty(rows))
    return out, (None, out.codes.data_ptr(), out.scale.data_ptr())


def _quantize_rows(loaded: ctypes.CDLL, x: Tensor) -> Rows:
    if not _wide(x) or x.dim() != 2:
        return reference.quantize_rows(x)
    out, (_, codes, scale) = _result(*x.shape, True)
    loaded.nybble_quantize_rows(x.data_ptr(), codes, scale, *x.shape)
    return out


def _rms_norm(
    loaded: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantize: bool
) -> tuple[Tensor | Rows, Tensor]:
    if not _wide(x, weight, residual) or x.dim() != 2:
        return reference.rms_norm(x, weight, eps, residual, quantize)
    hidden = x if residual is None else torch.empty_like(x)
    out, pointers = _result(*x.shape, quantize)
    loaded.nybble_rms_norm(x.data_ptr(), _pointer(residual), hidden.data_ptr(), weight.data_ptr(), *pointers, *x.shape, eps)
    return out, hidden


def _silu_mul(loaded: ctypes.CDLL, gate_up: Tensor, quantize: bool, hadamard: int = 0) -> Tensor | Rows:
    if not _wide(gate_up) or gate_up.dim() != 2:
        return reference.silu_mul(gate_up, quantize, hadamard)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if hadamard and (hadamard & (hadamard - 1) or width % hadamard):
        raise ValueError(f"a Hadamard block of {hadamard} for {width} channels: want a power of two that divides them")
    out, pointers = _result(rows, width, quantize)
    loaded.nybble_silu_mul(gate_up.data_ptr(), *pointers, rows, width, hadamard)
    return out


def _takes(kv: LayerKV, step: Step) -> bool:
    """Whether the C code reads this cache and these addresses; if not, the reference does."""
    for cache in (kv.k, kv.v, kv.k_params, kv.v_params):
        if cache is not None and not cache.is_contiguous():
            return False
    for address in (step.positions, step.query_start, step.context_len, step.block_table):
        if address.dtype is not torch.int32 or address.stride(-1) != 1:
            return False
    scaled = kv.k_params is None and (kv.k_scale != 1.0 or kv.v_scale != 1.0)
    return kv.name in KINDS and not scaled and step.slots.dtype is torch.int64


def _rope_write(
    loaded: ctypes.CDLL, qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, turn: Turn | None = None,
) -> Tensor:
    turns = (None,) * 4 if turn is None else (turn.q, turn.k, turn.shift, turn.v)
    if not _takes(kv, step) or not _wide(qkv, cos_sin, q_norm, k_norm, *turns):
        return reference.rope_write(qkv, kv, step, cos_sin, kv_heads, q_norm, k_norm, eps, turn)
    tokens, dim = qkv.shape[0], kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty(tokens, heads, dim)
    positions, slots = step.positions, step.slots  # kept in locals while their pointers are in use
    loaded.nybble_rope_write(
        qkv.data_ptr(), q.data_ptr(), cos_sin.data_ptr(), _pointer(q_norm), _pointer(k_norm),
        *map(_pointer, turns), kv.k.data_ptr(), kv.v.data_ptr(), _pointer(kv.k_params), _pointer(kv.v_params),
        positions.data_ptr(), slots.data_ptr(), KINDS[kv.name], tokens, heads, kv_heads, kv.block_size, dim, cos_sin.shape[1],
        eps,
    )
    return q


def _attention(loaded: ctypes.CDLL, q: Tensor, kv: LayerKV, step: Step, scale: float, window: int) -> Tensor:
    if not _takes(kv, step) or not _wide(q):
        return reference.attention(q, kv, step, scale, window)
    out = torch.empty_like(q)
    table, start, context = step.block_table, step.query_start, step.context_len
    loaded.nybble_attention(
        q.data_ptr(), out.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr(), _pointer(kv.k_params), _pointer(kv.v_params),
        table.data_ptr(), start.data_ptr(), context.data_ptr(), context.shape[0], table.stride(0), KINDS[kv.name],
        q.shape[1], kv.k.shape[1], kv.block_size, q.shape[2], window, scale,
    )
    return out


def _turn_heads(loaded: ctypes.CDLL, x: Tensor, matrix: Tensor) -> Tensor:
    if not _wide(x, matrix):
        return reference.turn_heads(x, matrix)
    out = torch.empty_like(x)
    loaded.nybble_turn_heads(x.data_ptr(), matrix.data_ptr(), out.data_ptr(), *x.shape[:2], matrix.shape[0], x.shape[2])
    return out


def _logits(loaded: ctypes.CDLL, hidden: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype not in FLOAT_KINDS or not weight.is_contiguous():
        return reference.logits(hidden, weight)
    return _dense(loaded, weight, hidden.float())


def ops(*defines: str) -> Ops | None:
    """The fused ops of this machine, None when `cpu.c` could not be built."""
    loaded = library(*defines)
    if loaded is None:
        return None
    bound = (functools.partial(f, loaded)
             for f in (_rms_norm, _silu_mul, _quantize_rows, _rope_write, _attention, _logits, _turn_heads))
    return Ops(f"cpu ({loaded.nybble_instructions().decode()})", *bound)
