"""How a layer finds its kernel: an ordered tuple, the first that accepts wins, and every refusal has a reason.

A linear kernel is three functions. `accepts` looks at a `LinearShape` and returns why not (or None); `pack` turns the
canonical weight into that kernel's layout, once, at load; `run` multiplies. Fused element-wise and attention ops are an `Ops`
per device. No registration on import: adding a kernel is adding it to the tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor
from nybble.formats.spec import Scheme, Spec
from nybble.kernels.types import LayerKV, Rows, Step


@dataclass(frozen=True)
class LinearShape:
    """What a linear kernel is asked for."""

    scheme: Scheme
    out_features: int
    in_features: int
    device: torch.device
    dtype: torch.dtype  # of activations in 16-bit paths and of the output
    has_order: bool = False
    act_scale: float | None = None  # multiplier of static activations, None where it is computed at run time


@dataclass(frozen=True)
class LinearKernel:
    """name: shown by `nybble explain`. takes: the activation spec `run` wants (None: a float tensor, else `Rows`).

    pack(weight: QTensor | Tensor, shape) -> packed (any object, tensors on `shape.device`)
    run(packed, x: Rows | Tensor [M, K]) -> Tensor [M, N] in `shape.dtype`; bias is added by the layer unless `pack` took it.
    """

    name: str
    accepts: Callable[[LinearShape], str | None]
    pack: Callable[[QTensor | Tensor, LinearShape], Any]
    run: Callable[[Any, Rows | Tensor], Tensor]
    takes: Spec | None


@dataclass(frozen=True)
class Ops:
    """The ops of one device, same signatures as `kernels.reference`, whose docstrings are the contract."""

    name: str
    rms_norm: Callable[..., tuple[Tensor | Rows, Tensor]]
    silu_mul: Callable[..., Tensor | Rows]
    quantize_rows: Callable[[Tensor], Rows]
    rope_write: Callable[..., Tensor]
    attention: Callable[[Tensor, LayerKV, Step, float, int], Tensor]
    logits: Callable[[Tensor, Tensor], Tensor]
    turn_heads: Callable[[Tensor, Tensor], Tensor]
    silu_mul_part: Callable[..., Rows | None] | None = None  # see `ops_hopper`; not every device has it
    decode: Callable[..., Tensor | Rows] | None = None  # rope_write, attention and quantize_rows of generated tokens, at once
    compile_decode: Callable[[LayerKV, int, torch.dtype, int, bool | None], None] | None = None  # starts on what steps need


@dataclass(frozen=True)
class Choice:
    """A chosen kernel and the reasons the ones before it refused."""

    kernel: LinearKernel
    refusals: tuple[tuple[str, str], ...]


def choose(shape: LinearShape, kernels: tuple[LinearKernel, ...] | None = None) -> Choice:
    """The first kernel in preference order that accepts and, on a GPU, passes its start-up test. Raises ValueError naming
    every refusal when none does."""
    from nybble.kernels import selftest

    tried = kernels is None and shape.device.type == "cuda"
    refusals = []
    for kernel in kernels if kernels is not None else linear_kernels(shape.device):
        reason = kernel.accepts(shape)
        if reason is None and tried:
            reason = selftest.failure(kernel, shape)
        if reason is None:
            return Choice(kernel, tuple(refusals))
        refusals.append((kernel.name, reason))
    listing = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise ValueError(
        f"no kernel runs {shape.scheme.name} for [{shape.out_features}, {shape.in_features}] on {shape.device}: {listing}"
    )


@cache
def _with_zeros() -> tuple[LinearKernel, ...]:
    """Made once, so that a kernel is the same object whenever it is asked for: its start-up test is remembered by it."""
    from nybble.kernels import linear_triton, reference, zeros_triton

    kernels = (kernel for kernel in linear_triton.KERNELS if kernel.takes is not None)
    return tuple(reference.after_zero_points(kernel, zeros_triton.subtract) for kernel in kernels)


def linear_kernels(device: torch.device) -> tuple[LinearKernel, ...]:
    """Preference order for a device. Imported here so that a CPU never loads Triton and a GPU never compiles C."""
    from nybble.kernels import reference

    if device.type == "cuda":
        from nybble.kernels import linear_hopper, linear_hopper_16, linear_hopper_w4a16, linear_hopper_w8, linear_triton

        files = (linear_hopper, linear_hopper_w8, linear_hopper_w4a16, linear_hopper_16)
        hopper = (kernel for file in files for kernel in file.KERNELS)
        return (*hopper, *linear_triton.KERNELS, *_with_zeros(), reference.SCALED_MM, *reference.KERNELS)
    from nybble.kernels import cpu

    compiled = cpu.kernels()
    float8 = [reference.after_float8(k, k.name.replace("float", "fp8")) for k in compiled if k.takes is None]
    zeros = [reference.after_zero_points(k) for k in compiled if k.takes is not None]
    return (*compiled, *zeros, *float8, *reference.KERNELS)


def ops_for(device: torch.device) -> Ops:
    if device.type == "cuda":
        from nybble.kernels import nvrtc, ops_hopper, ops_triton, selftest

        hopper = nvrtc.refusal(device) is None
        return ops_hopper.OPS if hopper and selftest.rows_failure(ops_hopper.OPS, device) is None else ops_triton.OPS
    from nybble.kernels import cpu, reference

    return cpu.ops() or reference.OPS
