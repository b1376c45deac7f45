"""A layer at a time: run the calibration tokens through it, and quantize each linear the moment its input is there.

Not a quantization method and not about files. The one idea: the pass that collects a linear's inputs is the pass that
goes on with its quantized weight, so within and across layers everything is calibrated on what it will really see
("sequential"), and each layer runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat, zip_longest

import torch
from torch import Tensor

from nybble.formats.numerics import quantize_rows
from nybble.formats.qtensor import QTensor, cut, dense, dequantize, expand
from nybble.formats.spec import FP8, INT8, Scheme, Spec
from nybble.kernels.reference import quantize_float8
from nybble.kernels.types import LayerKV, Step
from nybble.models.config import ModelConfig
from nybble.models.decoder import Layer
from nybble.models.load import Source, read_layer
from nybble.models.window import FLOAT_KV, scratch_kv, window_step
from nybble.nn.linear import Part, Projection
from nybble.nn.rope import cos_sin_table
from nybble.quantize.gptq import follow, outer, output_error, quantize_gptq
from nybble.quantize.recipe import Recipe
from nybble.quantize.rtn import covering, quantize_rtn

ROWS = 4096  # of calibration inputs turned to fp32 at a time
KEPT = 4  # chunks of a layer's widest inputs that are kept between two uses; more are made again
Inputs = Callable[[], Iterable[Tensor]]  # [tokens, K] float, by chunk, again at every call


@dataclass(frozen=True)
class Quantized:
    """One linear's result. error: tr(E H E^T) / tr(W H W^T), the share of its output's energy that is wrong; None without
    calibration. act_scale: the multiplier of static activations."""

    weight: QTensor
    error: float | None
    act_scale: float | None = None


def as_seen(x: Tensor, act: Spec | None, act_scale: float | None = None) -> Tensor:
    """What a linear multiplies with: [M, K] float rounded to its activation spec and back, fp32."""
    if act is None:
        return x.float()
    if act.num == INT8:
        codes, scale = quantize_rows(x)
        return codes.float() * scale[:, None]
    if act.num == FP8:
        static = None if act_scale is None else torch.full((1, 1), act_scale, device=x.device)
        codes, scale = quantize_float8(x, act, static)
        return codes.float() * expand(scale, x.shape, tile=act.tile)
    raise ValueError(f"cannot imitate activations of {act}")


class Stats:
    """What a linear's rounding has to know of its inputs x, as it sees them: the second moment, the mean of x x^T, and, when
    the float model's inputs c come along, that of (c - x) x^T, its error's share to be made up for.

    Sums as `outer` per call and in fp64 across calls (fp32 beyond 8192 inputs, where fp64 would not fit beside the weights).
    """

    def __init__(self, in_features: int, device: torch.device, act: Spec | None, drift: float,
                 act_scale: float | None = None) -> None:
        self.act, self.act_scale, self.drift, self.rows = act, act_scale, drift, 0
        dtype = torch.float64 if in_features <= 8192 else torch.float32
        self.total = torch.zeros(in_features, in_features, dtype=dtype, device=device)
        self.cross = torch.zeros_like(self.total) if drift else None

    def add(self, x: Tensor, clean: Tensor | None) -> None:
        """x, clean: float [M, K]."""
        for start in range(0, x.shape[0], ROWS):
            rows = x[start : start + ROWS].float()
            seen = as_seen(rows, self.act, self.act_scale)
            self.total += outer(seen, seen)
            self.rows += len(seen)
            if self.cross is not None and clean is not None:
                wanted = torch.lerp(rows, clean[start : start + ROWS].float(), self.drift)
                self.cross += outer(wanted - seen, seen)

    @property
    def moment(self) -> Tensor:
        return self.total / self.rows


def quantize_parts(parts: Sequence[Part], stats: Stats | None, scheme: Scheme, recipe: Recipe,
                   scale_dtype: torch.dtype) -> dict[str, Quantized]:
    """Quantize linears that share an input to `scheme`. stats: of that input, None for methods that need none."""
    weight, h = torch.cat([dense(part.weight) for part in parts]), None if stats is None else stats.moment
    name = parts[0].name if len(parts) == 1 else f"{parts[0].name} (and those beside it)"
    if h is not None and stats.cross is not None:
        weight = follow(weight, h, stats.cross / stats.rows, recipe.damping, name)
    if h is None or recipe.method == "rtn":
        found = quantize_rtn(weight, scheme.weight, scale_dtype, recipe.mse, name)
    else:
        found = quantize_gptq(weight, h, scheme.weight, scale_dtype, name, damping=recipe.damping, act_order=recipe.act_order,
                              mse=recipe.mse, sweeps=recipe.sweeps)
    return {part.name: Quantized(q, None if h is None else output_error(dense(part.weight), q, h))
            for part, q in zip(parts, split(found, parts))}


class Stream:
    """The calibration tokens as they are between two layers: hidden [tokens, H] in chunks of whole sequences, so that a pass
    needs the room of one chunk beyond what it keeps. steps: addresses and a cache for each chunk."""

    def __init__(self, config: ModelConfig, tokens: Tensor, hidden: Sequence[Tensor]) -> None:
        self.hidden = list(hidden)
        self.device, dtype = self.hidden[0].device, self.hidden[0].dtype
        self.length = tokens.shape[1]
        counts = [chunk.shape[0] // self.length for chunk in self.hidden]
        made: dict[int, tuple[Step, LayerKV]] = {}
        for count in set(counts):
            step = window_step(tokens[:count].to(self.device))
            made[count] = step, scratch_kv(config, FLOAT_KV[dtype], step.block_table.numel(), self.device)[0]
        self.steps = [made[count] for count in counts]

    def beside(self, hidden: Sequence[Tensor]) -> Stream:
        """The same tokens with other values."""
        other = copy(self)
        other.hidden = list(hidden)
        return other

    def walk(self, layer: Layer) -> Iterator[tuple[Projection, Inputs]]:
        """Carry the stream through a layer: each projection with its inputs, in the order they run. Asked for the next, it goes
        on with the weights that the projection has then. Many of the widest inputs, down's, are made at every call."""
        a, m = layer.attention, layer.mlp
        dtype = self.hidden[0].dtype
        x = [layer.input_norm(h, None, False)[0] for h in self.hidden]
        yield a.qkv, lambda: x
        for i, (step, kv) in enumerate(self.steps):
            x[i] = a.attend(a.project(x[i], kv, step), kv, step).flatten(1)
        yield a.o, lambda: x
        for i, h in enumerate(self.hidden):
            x[i], self.hidden[i] = layer.post_norm(a.o(x[i]), h, False)
        yield m.gate_up, lambda: x
        inner = lambda: (m.inner(rows, False) for rows in x)  # noqa: E731
        kept = list(inner()) if len(x) <= KEPT else None
        yield m.down, lambda: kept or inner()
        for i, rows in enumerate(kept or inner()):
            self.hidden[i] = (m.down(rows).float() + self.hidden[i].float()).to(dtype)


def quantize_layer(layer: Layer, stream: Stream, reference: Stream | None, schemes: Mapping[str, Scheme], recipe: Recipe,
                   scale_dtype: torch.dtype) -> dict[str, Quantized]:
    """Quantize an editable layer in place and carry the stream through it, each linear's input as those before it, already
    quantized, produce it. reference: the float model's stream, carried along when `recipe.drift`."""
    done: dict[str, Quantized] = {}
    floats = () if reference is None else reference.walk(twin(layer))
    for (projection, x), clean in zip_longest(stream.walk(layer), floats):
        scheme, stats, act_scale = schemes[projection.names[0]], None, None
        if scheme.act is not None and not scheme.act.dynamic:
            largest = torch.stack([rows.abs().max().float() for rows in x()]).max()
            if not torch.isfinite(largest):
                raise ValueError(f"{projection.names[0]}: its calibration inputs hold NaN or infinity: no FP8 scale fits")
            act_scale = float(covering(largest / FP8.qmax, scale_dtype).clamp_min(2.0**-24))
        if recipe.needs_calibration:
            act = scheme.act if recipe.true_activations else None
            drift = 0.0 if clean is None else recipe.drift
            stats = Stats(projection.parts[0].shape[1], stream.device, act, drift, act_scale)
            for rows, wanted in zip(x(), repeat(None) if clean is None else clean[1]()):
                stats.add(rows, wanted)
        for name, result in quantize_parts(projection.parts, stats, scheme, recipe, scale_dtype).items():
            projection.replace(name, result.weight, scheme.act, act_scale)
            done[name] = replace(result, act_scale=act_scale)
    return done


def twin(layer: Layer) -> Layer:
    """The same weights, to be replaced apart."""
    a, m = layer.attention, layer.mlp
    return replace(layer, attention=replace(a, qkv=copy(a.qkv), o=copy(a.o)),
                   mlp=replace(m, gate_up=copy(m.gate_up), down=copy(m.down)))


class Floats:
    """A source of float tensors on a device, some of them, by name, in the place of the source's."""

    def __init__(self, source: Source, device: torch.device, changed: Mapping[str, Tensor]) -> None:
        self.source, self.device, self.changed = source, device, changed
        self.config, self.has, self.unread = source.config, source.has, source.unread

    def get(self, name: str) -> Tensor:
        value = self.changed[name] if name in self.changed else self.source.get(name)
        return (dequantize(value) if isinstance(value, QTensor) else value).to(self.device)

    def act(self, name: str) -> Spec | None:
        return None


def build_layer(source: Source, config: ModelConfig, index: int, device: torch.device, dtype: torch.dtype, length: int,
                changed: Mapping[str, Tensor] | None = None) -> Layer:
    """One editable layer with float weights. length: longest sequence it will run. changed: tensors that take the place of the
    source's."""
    cos_sin = cos_sin_table(config.rope, config.head_dim, min(config.max_position, length), device)
    return read_layer(config, Floats(source, device, changed or {}), index, cos_sin, device, dtype, editable=True)


def take_windows(token_ids: Sequence[int], samples: int, length: int, vocab_size: int) -> Tensor:
    """int64 [up to `samples`, length]: windows spread evenly over a text, overlapping only if it is too short for that.

    Raises ValueError when not even one window fits, or a token is none of the model's.
    """
    spare = len(token_ids) - length
    if spare < 0:
        raise ValueError(f"the calibration text has {len(token_ids)} tokens, a sequence takes {length}: "
                         "use more text or shorter sequences")
    starts = [round(spare * i / max(samples - 1, 1)) for i in range(samples)]
    windows = torch.tensor([list(token_ids[start : start + length]) for start in dict.fromkeys(starts)])
    if (largest := int(windows.max())) >= vocab_size:
        raise ValueError(f"the tokenizer makes token {largest} of the calibration text, its model has {vocab_size}: the two do "
                         "not belong together")
    return windows


def split(q: QTensor, parts: Sequence[Part]) -> list[QTensor]:
    pieces, start = [], 0
    for part in parts:
        pieces.append(cut(q, 0, start, start + part.shape[0]))
        start += part.shape[0]
    return pieces
