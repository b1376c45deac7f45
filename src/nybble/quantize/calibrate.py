"""A layer at a time: run the calibration tokens through it, and quantize each linear the moment its input is there.

Not a quantization method and not about files. The one idea: the pass that collects a linear's inputs is the pass that
goes on with its quantized weight, so within and across layers everything is calibrated on what it will really see
("sequential"), and each layer runs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nybble.formats.numerics import quantize_rows, to_float8
from nybble.formats.qtensor import QTensor, cut, dequantize
from nybble.formats.spec import FP8, INT8, Scheme, Spec
from nybble.kernels.types import LayerKV, Step
from nybble.models.config import ModelConfig
from nybble.models.decoder import Layer
from nybble.models.load import Source, build
from nybble.models.window import FLOAT_KV, scratch_kv, window_step
from nybble.nn.linear import Part
from nybble.quantize.gptq import GptqOptions, SecondMoment, follow, output_error, quantize_gptq
from nybble.quantize.recipe import Recipe
from nybble.quantize.rtn import quantize_rtn

ROWS = 4096  # of calibration inputs turned to fp32 at a time
FP8_LARGEST = 448.0


@dataclass(frozen=True)
class Quantized:
    """One linear's result. error: tr(E H E^T) / tr(W H W^T), the share of its output's energy that is wrong; None without
    calibration."""

    weight: QTensor
    scheme: Scheme
    error: float | None


def as_seen(x: Tensor, act: Spec | None) -> Tensor:
    """What a linear multiplies with: [M, K] float rounded to its activation spec and back, fp32."""
    if act is None:
        return x.float()
    if act.num == INT8:
        codes, scale = quantize_rows(x)
        return codes.float() * scale[:, None]
    if act.num == FP8:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-10) / FP8_LARGEST
        return to_float8(x, scale, act.num).float() * scale
    raise ValueError(f"cannot imitate activations of {act}")


def quantize_parts(
    parts: Sequence[Part], x: Tensor | None, recipe: Recipe, scale_dtype: torch.dtype, clean: Tensor | None = None
) -> dict[str, Quantized]:
    """Quantize linears that share an input. x: float [M, K] calibration inputs, None for methods that need none. clean: the
    float model's inputs at the same place, of which the share `recipe.drift` takes the place of `x` in the outputs aimed at.
    """
    weight = torch.cat([_float(part.weight) for part in parts])
    scheme = recipe.scheme_for(weight.shape[1])
    assert scheme.weight is not None
    if x is None:
        found = quantize_rtn(weight, scheme.weight, scale_dtype, recipe.mse)
        return {part.name: Quantized(q, scheme, None) for part, q in zip(parts, _split(found, parts))}
    name = parts[0].name if len(parts) == 1 else f"{parts[0].name} (and those beside it)"
    act = scheme.act if recipe.true_activations else None
    moment = SecondMoment(weight.shape[1], x.device)
    cross = None if clean is None else torch.zeros_like(moment.total)
    for start in range(0, x.shape[0], ROWS):
        rows = x[start : start + ROWS].float()
        seen = as_seen(rows, act)
        moment.add(seen)
        if clean is not None:
            cross += (torch.lerp(rows, clean[start : start + ROWS].float(), recipe.drift) - seen).t() @ seen
    h = moment.mean()
    target = weight if cross is None else follow(weight, h, cross / moment.rows, recipe.damping, name)
    if recipe.method == "rtn" or scheme.weight.num.kind != "int":
        found = quantize_rtn(target, scheme.weight, scale_dtype, recipe.mse)
    else:
        options = GptqOptions(recipe.damping, recipe.act_order, recipe.mse, recipe.sweeps)
        found = quantize_gptq(target, h, scheme.weight, scale_dtype, options, name)
    return {
        part.name: Quantized(q, scheme, output_error(_float(part.weight), q, h))
        for part, q in zip(parts, _split(found, parts))
    }


def quantize_layer(
    layer: Layer, hidden: Tensor, kv: LayerKV, step: Step, recipe: Recipe, scale_dtype: torch.dtype,
    reference: Reference | None = None,
) -> tuple[Tensor, dict[str, Quantized]]:
    """Quantize an editable layer in place. hidden [T, H], as the quantized layers before it produce it -> (the layer's own
    quantized output, what each linear became). `reference` carries the float model's pass along when `recipe.drift`."""
    done: dict[str, Quantized] = {}

    def observe(name: str, x: Tensor) -> None:
        if name in done:
            return
        projection = layer.projection(name)
        clean = None if reference is None else reference.take(projection.names)
        done.update(quantize_parts(projection.parts, x, recipe, scale_dtype, clean))
        for part in projection.names:
            layer.replace(part, done[part].weight, done[part].scheme.act)

    return layer.run(hidden, kv, step, observe), done


class Reference:
    """The unquantized model's pass through one layer: its input at every linear, kept until the quantized pass gets there."""

    def __init__(self, layer: Layer, hidden: Tensor, kv: LayerKV, step: Step) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.hidden = layer.run(hidden, kv, step, lambda name, x: self.inputs.update({name: x}))

    def take(self, names: Sequence[str]) -> Tensor:
        """The input [M, K] that these linears share; forgotten afterwards."""
        return [self.inputs.pop(name) for name in names][0]


class OneLayer:
    """Layer `index` of a source, shown as a source of a one-layer model: how layers are streamed from disk."""

    def __init__(self, source: Source, index: int, hidden_size: int, changed: Mapping[str, Tensor] | None = None) -> None:
        self.source, self.config, self.changed = source, source.config, changed or {}
        self.prefix = f"model.layers.{index}."
        self.ends = {"model.embed_tokens.weight": torch.zeros(1, hidden_size), "model.norm.weight": torch.ones(hidden_size)}

    def _name(self, name: str) -> str:
        return self.prefix + name.removeprefix("model.layers.0.")

    def has(self, name: str) -> bool:
        return name in self.ends or (name.startswith("model.layers.0.") and self.source.has(self._name(name)))

    def get(self, name: str) -> Tensor | QTensor:
        if name in self.ends:
            return self.ends[name]
        there = self._name(name)
        value = self.changed.get(there)
        value = self.source.get(there) if value is None else value
        return dequantize(value) if isinstance(value, QTensor) else value

    def act(self, name: str) -> Spec | None:
        return None

    def unread(self) -> list[str]:
        return []


def build_layer(
    source: Source, config: ModelConfig, index: int, device: torch.device, dtype: torch.dtype, length: int,
    changed: Mapping[str, Tensor] | None = None,
) -> Layer:
    """One editable layer with float weights, its linears named as in the whole model. length: longest sequence it will run.
    changed: tensors, by their name in the whole model, that take the place of the source's."""
    alone = replace(config, num_layers=1, windows=config.windows[index : index + 1], vocab_size=1, tie_embeddings=True,
                    max_position=min(config.max_position, length))
    layer = build(alone, OneLayer(source, index, config.hidden_size, changed), device, dtype, editable=True).layers[0]
    for projection in layer.projections:
        projection.parts = tuple(
            replace(part, name=part.name.replace("layers.0.", f"layers.{index}.", 1)) for part in projection.parts
        )
    return layer


def calibration_step(config: ModelConfig, tokens: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Step, LayerKV]:
    """Addresses and a float cache for int64 [samples, L] tokens run in one step."""
    step = window_step(tokens.to(device))
    kv = scratch_kv(replace(config, num_layers=1), FLOAT_KV[dtype], step.block_table.numel(), device, dtype)[0]
    return step, kv


def take_windows(token_ids: Sequence[int], samples: int, length: int) -> Tensor:
    """int64 [up to `samples`, length]: windows spread evenly over a text, overlapping only if it is too short for that.

    Raises ValueError when not even one window fits.
    """
    spare = len(token_ids) - length
    if spare < 0:
        raise ValueError(f"the calibration text has {len(token_ids)} tokens, a sequence takes {length}: "
                         "use more text or shorter sequences")
    starts = [round(spare * i / max(samples - 1, 1)) for i in range(samples)]
    return torch.tensor([list(token_ids[start : start + length]) for start in dict.fromkeys(starts)])


def _float(weight: Any) -> Tensor:
    return dequantize(weight) if isinstance(weight, QTensor) else weight.float()


def _split(q: QTensor, parts: Sequence[Part]) -> list[QTensor]:
    pieces, start = [], 0
    for part in parts:
        pieces.append(cut(q, 0, start, start + part.shape[0]))
        start += part.shape[0]
    return pieces
