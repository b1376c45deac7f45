"""What a format's reader returns: for every quantized linear, what it is and how to get it.

Made when a checkpoint is opened, before any weight is read, so that what cannot be served is refused at once and by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.checkpoint.store import Store
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import FP8, FP8_E5M2, INT4, INT8, PER_TOKEN_INT8, UINT4, Num, Scheme, Spec, scheme_of


@dataclass(frozen=True)
class LinearSource:
    """tensors: the names in the file that it is made of. read: those bytes as a canonical `QTensor`.
    input_scale: name of the static activation scale's tensor, if there is one."""

    shape: tuple[int, int]
    scheme: Scheme
    tensors: tuple[str, ...]
    read: Callable[[], QTensor]
    input_scale: str | None = None


@dataclass(frozen=True)
class Reading:
    """linears: by module name. kv: what the checkpoint's KV cache wants, a key of formats.spec.KV, or None. kv_refusal: why the
    KV type it asks for cannot be had. ignored: tensors that are rightly left unread, with the reason. hadamard, decoded: see
    `Checkpoint`."""

    linears: dict[str, LinearSource] = field(default_factory=dict)
    kv: str | None = None
    kv_refusal: str | None = None
    ignored: dict[str, str] = field(default_factory=dict)
    hadamard: int = 0
    decoded: tuple[str, ...] = ()


class Part(NamedTuple):
    """The tensors of one module."""

    store: Store
    module: str

    def has(self, last: str) -> bool:
        return self.store.has(f"{self.module}.{last}")

    def shape(self, last: str) -> tuple[int, ...]:
        return self.store.shape(f"{self.module}.{last}")

    def sides(self, last: str) -> tuple[int, int]:
        """Of a matrix. Raises TypeError for another tensor."""
        if len(shape := self.shape(last)) != 2:
            raise TypeError(f"{self.module}.{last} {list(shape)} is no matrix")
        return shape

    def dtype(self, last: str) -> torch.dtype | None:
        return self.store.dtype(f"{self.module}.{last}")

    def tensor(self, last: str) -> Tensor:
        return self.store.tensor(f"{self.module}.{last}")

    def scale(self, last: str, rows: int | None = None, columns: int | None = None) -> Tensor:
        """float32, of a matrix perhaps only the first rows and columns. Raises ValueError for NaN and infinity."""
        values = self.tensor(last).float()
        values = values if rows is None else values[:rows]
        return check_scale(values if columns is None else values[:, :columns], f"{self.module}.{last}")

    def names(self, *lasts: str) -> tuple[str, ...]:
        """In full, of those that there are."""
        return tuple(f"{self.module}.{last}" for last in lasts if self.has(last))

    def static_scale(self, act: Spec | None) -> str | None:
        """The name of the scale that static activations are multiplied by, None for others. Raises ValueError when it is
        missing."""
        if act is None or act.dynamic:
            return None
        if not self.has("input_scale"):
            raise ValueError(f"{self.module} has static activations but no {self.module}.input_scale")
        return f"{self.module}.input_scale"


def modules_with(store: Store, *suffixes: str) -> list[str]:
    """Modules that own a tensor of one of these names, in file order."""
    ends = tuple("." + suffix for suffix in suffixes)
    found = (name.rsplit(".", 1)[0] for name in store.names() if name.endswith(ends))
    return list(dict.fromkeys(found))


def integer_spec(bits: int, group: int | None, zero: bool) -> Spec:
    """Where codes of `bits` live without change: 2..4 bits in int4 (uint4 with zero points), 5..8 in int8 (always signed).
    group: input channels per scale, None = all."""
    num: Num = (UINT4 if zero else INT4) if bits <= 4 else INT8
    return Spec(num, (1, group), zero=zero)


def from_unsigned(codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group: int | None,
                  order: Tensor | None = None) -> QTensor:
    """Canonical weight from unsigned codes. codes: uint8 [N, K] in 0 .. 2^bits - 1. scale: float [N, S]. zero: integers
    [N, S], unsigned as the codes, or None for the symmetric 2^(bits - 1). group: input channels per scale, None = all.
    order: [K] group of each input channel, dropped when it is k // group."""
    middle = 1 << (bits - 1)
    k = codes.shape[1]
    spec = integer_spec(bits, group, zero is not None)
    shift = middle if zero is None or bits > 4 else 0
    if order is not None and (scale.shape[1] == 1 or torch.equal(order.long(), torch.arange(k) // (group or k))):
        order = None
    signed = (codes + -shift % 256).view(torch.int8)  # bytes wrap
    return QTensor(spec, signed, scale.float().contiguous(),
                   None if zero is None else (zero.float() - shift).contiguous(), order=None if order is None else order.long())


def float_weight(part: Part, last: str, act: Spec | None, block: tuple[int, int] | None = None, divide: bool = False,
                 spare: bool = False) -> LinearSource:
    """An FP8 weight `module.weight` with its scale tensor: one for all ([], [1], [1, 1]), one per row ([N], [N, 1]) or one per
    block. last: the scale's name in the module. divide: it is a divisor. spare: an input_scale that dynamic activations do not
    use is part of the linear, too. Raises ValueError when weight and scale do not belong together, or a static activation
    scale is missing."""
    module, shape, dtype, found = part.module, part.shape("weight"), part.dtype("weight"), part.shape(last)
    nums = {torch.float8_e4m3fn: FP8, torch.float8_e5m2: FP8_E5M2}
    if dtype not in nums or len(shape) != 2:
        raise ValueError(f"{module}.weight is {dtype} {list(shape)}; its scale {last} is for a matrix of float8_e4m3fn or "
                         "float8_e5m2")
    if block is not None and found == Spec(FP8, block).num_scales(shape):
        tile = block
    elif all(d == 1 for d in found):
        tile = (None, None)
    elif found in (shape[:1], (shape[0], 1)):
        tile = (1, None)
    else:
        raise ValueError(f"{module}.{last} has shape {list(found)}, which fits no scale of {module}.weight {list(shape)}")
    spec, input_scale = Spec(nums[dtype], tile), part.static_scale(act)

    def read() -> QTensor:
        scale = part.tensor(last).float().reshape(spec.num_scales(shape))
        return QTensor(spec, part.tensor("weight"), check_scale(1 / scale if divide else scale, f"{module}.{last}"))

    names = part.names("weight", last, *(["input_scale"] if spare or input_scale else []))
    return LinearSource(shape, scheme_of(spec, act), names, read, input_scale)


def with_int8_activations(sources: dict[str, LinearSource]) -> dict[str, LinearSource]:
    """Weight-only integer linears with int8 activations per token: same weights, bit for bit, rounded inputs.

    Raises ValueError for what this does not fit, warns of what it costs."""
    changed = {}
    for module, source in sources.items():
        weight, act = source.scheme.weight, source.scheme.act
        if act != PER_TOKEN_INT8 and (act is not None or weight is None or weight.num.kind != "int"):
            raise ValueError(f"{module} is {source.scheme.name}: int8 activations fit integer weights with 16-bit activations; "
                             "leave --activations out")
        changed[module] = replace(source, scheme=scheme_of(weight, PER_TOKEN_INT8))
    if not changed:
        raise ValueError("int8 activations are for quantized weights and this checkpoint's have 16 bits: quantize it first "
                         "(nybble quantize), or leave --activations out")
    if all(source.scheme.act == PER_TOKEN_INT8 for source in sources.values()):
        return changed
    warnings.warn("activations = int8: the weights were made for 16-bit activations, and now every linear's input is rounded "
                  "to 127 steps of its token's largest value (0.7 % of a smooth input, more where single channels stand out). "
                  "nybble eval says what that costs here", stacklevel=2)
    return changed


def check_scale(scale: Tensor, name: str) -> Tensor:
    if not torch.isfinite(scale).all():
        raise ValueError(f"{name} holds NaN or infinity: the checkpoint is damaged")
    return scale
