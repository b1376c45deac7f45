"""Linears: a weight in whatever format, multiplied by whichever kernel accepts it. No scheme and no kernel is named here.

A `Linear` is one packed weight. A `Projection` is the named linears that share an input (q, k, v; gate, up; or one alone):
joined into as few `Linear`s as their formats allow, and replaceable one name at a time, which is what a quantizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor, join
from nybble.formats.spec import Spec, scheme_of
from nybble.kernels.registry import LinearShape, Ops, choose
from nybble.kernels.types import Rows
from nybble.nn.parallel import ALONE, Group

Observe = Callable[[str, Tensor], None]  # (linear's name, its float input [M, K] before any quantization)


class Linear:
    """y = x W^T + b with the packed weight of the first kernel that accepts it.

    weight: `QTensor` or float Tensor [N, K]; act: what its inputs are quantized to at run time (None: not at all); bias:
    float [N] or None; act_scale: the multiplier of static activations. `takes`: the activation spec the kernel wants (None:
    a float tensor), so that the op before can emit `Rows`. Raises ValueError naming every kernel's refusal when none runs it.
    """

    def __init__(self, weight: QTensor | Tensor, act: Spec | None, bias: Tensor | None, device: torch.device,
                 dtype: torch.dtype, ops: Ops, act_scale: float | None = None) -> None:
        quantized = isinstance(weight, QTensor)
        scheme = scheme_of(weight.spec if quantized else None, act)
        self.shape = LinearShape(scheme, *weight.shape, device, dtype, quantized and weight.order is not None,
                                 act_scale)
        self.choice = choose(self.shape)
        self.bits_per_weight = weight.bits_per_weight if quantized else 8.0 * weight.dtype.itemsize
        self.takes = self.choice.kernel.takes
        self._run, self._quantize_rows = self.choice.kernel.run, ops.quantize_rows
        self._packed: Any = self.choice.kernel.pack(weight, self.shape)
        self._bias = None if bias is None else bias.to(device, dtype)

    def __call__(self, x: Rows | Tensor) -> Tensor:
        """[M, K] float, or its int8 rows when the kernel takes them -> [M, N] in the layer's dtype."""
        if self.takes is not None and not isinstance(x, Rows):
            x = self._quantize_rows(x)
        out = self._run(self._packed, x)
        return out if self._bias is None else out + self._bias


@dataclass(frozen=True)
class Part:
    """One named linear of a projection. `weight` is None once packed, unless the projection keeps weights."""

    name: str
    shape: tuple[int, int]
    weight: QTensor | Tensor | None
    act: Spec | None = None
    bias: Tensor | None = None
    act_scale: float | None = None  # static `act` only


class Projection:
    """Named linears of one input, concatenated along the output. Packed on first use (or by `pack`).

    keep: hold on to the canonical weights so that single linears can be replaced; costs their memory a second time where
    packing copies. inputs: ranks that have columns of x each; outputs: ranks that have rows of every part each, as many.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device, dtype: torch.dtype, ops: Ops, keep: bool = False,
                 inputs: Group = ALONE, outputs: Group = ALONE) -> None:
        self.parts, self.device, self.dtype, self.ops, self.keep = tuple(parts), device, dtype, ops, keep
        self.inputs, self.outputs = inputs, outputs
        self._linears: tuple[Linear, ...] = ()
        self._groups: tuple[tuple[str, ...], ...] = ()  # the names each of them runs
        self._takes: Spec | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.pack()._linears

    @property
    def takes(self) -> Spec | None:
        """What every linear of it takes; None (float) also when they differ, and where a row's scale is over all ranks."""
        return self.pack()._takes if self.inputs.size == 1 else None

    def pack(self) -> Projection:
        if not self._linears:
            groups = _joinable(self.parts)
            self._groups = tuple(tuple(part.name for part in group) for group in groups)
            self._linears = tuple(
                Linear(*_join(group), self.device, self.dtype, self.ops, group[0].act_scale) for group in groups
            )
            first = self._linears[0].takes
            self._takes = first if all(linear.takes == first for linear in self._linears) else None
            if not self.keep:
                self.parts = tuple(replace(part, weight=None, bias=None) for part in self.parts)
        return self

    def __call__(self, x: Rows | Tensor, observe: Observe | None = None) -> Tensor:
        """[M, K] float, or rows when `takes` says so -> [M, sum of N].

        `observe` needs x as float, is called once per name before anything is multiplied, and may replace the weights.
        """
        return self.outputs.columns(self.own(x, observe), len(self.parts))

    def own(self, x: Rows | Tensor, observe: Observe | None = None) -> Tensor:
        """This rank's part of the result."""
        if observe is not None:
            assert isinstance(x, Tensor)
            for name in self.names:
                observe(name, x)
        linears = self.linears
        if not isinstance(x, Rows):
            x = self.inputs.columns(x)
            x = x if self._takes is None else self.ops.quantize_rows(x)
        return linears[0](x) if len(linears) == 1 else torch.cat([linear(x) for linear in linears], -1)

    def part(self, name: str) -> Part:
        """By full name or its last component. Raises KeyError saying which there are."""
        for part in self.parts:
            if name in (part.name, part.name.rpartition(".")[2]):
                return part
        raise KeyError(f"no linear {name!r} here; there are {', '.join(self.names)}")

    def replace(self, name: str, weight: QTensor | Tensor, act: Spec | None, act_scale: float | None = None) -> None:
        """Put another weight [N, K] in place of one linear's; its bias stays. Raises ValueError for another shape, or when
        the weights it would be joined with again were not kept."""
        old = self.part(name)
        if tuple(weight.shape) != old.shape:
            raise ValueError(f"{old.name}: cannot replace a weight of shape {old.shape} with {tuple(weight.shape)}")
        if not self.keep:
            raise ValueError(f"{old.name}: its weights were given up when packed; load the model with editable=True")
        new = replace(old, weight=weight, act=act, act_scale=act_scale)
        self.parts = tuple(new if part is old else part for part in self.parts)
        self._linears = ()

    def explain(self) -> list[dict[str, Any]]:
        """Per packed linear: name, scheme, kernel, refusals ((kernel, reason), ...), bits_per_weight."""
        return [
            {
                "name": ",".join((names[0], *(name.rpartition(".")[2] for name in names[1:]))),
                "scheme": linear.shape.scheme.name,
                "kernel": linear.choice.kernel.name,
                "refusals": linear.choice.refusals,
                "bits_per_weight": linear.bits_per_weight,
            }
            for linear, names in zip(self.linears, self._groups)
        ]


def _joinable(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that mean the same by their codes and quantize their input the same way, together."""
    groups: list[list[Part]] = [[parts[0]]]
    for part in parts[1:]:
        if _alike(groups[-1][0], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _alike(a: Part, b: Part) -> bool:
    if (a.act, a.act_scale) != (b.act, b.act_scale):
        return False
    if isinstance(a.weight, QTensor) and isinstance(b.weight, QTensor):
        one, other = a.weight.order, b.weight.order
        same_order = one is other if one is None or other is None else torch.equal(one, other)
        return a.weight.spec == b.weight.spec and same_order
    return isinstance(a.weight, Tensor) and isinstance(b.weight, Tensor) and a.weight.dtype == b.weight.dtype


def _join(parts: list[Part]) -> tuple[QTensor | Tensor, Spec | None, Tensor | None]:
    weights: list[Any] = [part.weight for part in parts]
    if len(parts) == 1:
        return weights[0], parts[0].act, parts[0].bias
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([torch.zeros(part.shape[0]) if part.bias is None else part.bias.float().cpu() for part in parts])
    weight = torch.cat(weights) if isinstance(weights[0], Tensor) else join(weights)
    return weight, parts[0].act, bias
