"""What is inside a checkpoint: bits, the error of every linear, outliers in what flows through, ranges of K and V.

One pass of the checkpoint's own kernels over one window of text, a layer at a time; each linear is laid beside the weight it
came from, brought into the same basis first (a rotation is made again from the recorded seed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nybble.checkpoint import Checkpoint
from nybble.engine.kvcache import bytes_per_token
from nybble.evals.likelihood import Progress, Subject, tracked
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import scheme_of
from nybble.models import read_config
from nybble.models.load import Source
from nybble.models.window import prepare_window
from nybble.quantize.calibrate import as_seen
from nybble.quantize.rotate import OnlineHadamard, Rotated


@dataclass(frozen=True)
class LinearFacts:
    """One linear. bits: stored per weight. weight_error: |W - W'| / |W|; output_error: |x W - x' W'|^2 / |x W|^2 with the
    text's inputs x, and x' as the activations' rounding leaves them; None without the source. outlier: the largest input
    channel's absmax over the median channel's. parameters: of the weight."""

    layer: int
    kind: str
    scheme: str
    parameters: int
    bits: float
    weight_error: float | None
    output_error: float | None
    outlier: float


@dataclass(frozen=True)
class CacheFacts:
    """One layer's K (after RoPE) or V, per KV head: absmax, and the largest channel over the median one."""

    layer: int
    which: str
    absmax: tuple[float, ...]
    outlier: tuple[float, ...]


@dataclass(frozen=True)
class Anatomy:
    """bytes_linear, bytes_other: as stored, embeddings, head and norms in the latter; bytes_before: the source's, or of as many
    16-bit values. notes: what could not be had."""

    linears: tuple[LinearFacts, ...]
    cache: tuple[CacheFacts, ...]
    bytes_linear: float
    bytes_other: float
    bytes_before: float
    kv_bytes_per_token: int
    kv_bytes_per_token_16bit: int
    recipe: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Over the linears, scales included."""
        return sum(f.bits * f.parameters for f in self.linears) / max(sum(f.parameters for f in self.linears), 1)


def stored_bits(value: QTensor | Tensor, checkpoint: Checkpoint) -> float:
    """Per value, as the checkpoint stores it; a GGUF that decodes to float32 counts its 16-bit type."""
    return value.bits_per_weight if isinstance(value, QTensor) else 8.0 * min(value.element_size(), checkpoint.dtype.itemsize)


def sizes(checkpoint: Checkpoint) -> list[tuple[float, int]]:
    """(bits per value, values) of every parameter."""
    values = map(checkpoint.get, checkpoint.names())
    return [(stored_bits(v, checkpoint), (v.codes if isinstance(v, QTensor) else v).numel()) for v in values]


@torch.inference_mode()
def examine(subject: Subject, token_ids: list[int], source: Checkpoint | None, progress: Progress | None = None) -> Anatomy:
    """token_ids: one window. source: the checkpoint that this one was made from. Raises ValueError when the two do not fit."""
    model, checkpoint, config = subject.model, subject.checkpoint, subject.model.config
    recipe: dict[str, Any] = dict((checkpoint.config.get("nybble") or {}).get("recipe") or {})
    notes: list[str] = []
    basis = None if source is None else _basis(source, recipe, model.device, notes)
    if basis is not None and checkpoint.hadamard:
        basis = OnlineHadamard(basis, checkpoint.hadamard)
    layers = config.num_layers if source is None else read_config(source.config).num_layers
    if source is not None and layers != config.num_layers:
        raise ValueError(f"{source.path} has {layers} layers, {subject.path} has {config.num_layers}: it was not made from it")
    step, kv = prepare_window(model, torch.tensor(token_ids)[None])
    linears: list[LinearFacts] = []
    cache: list[CacheFacts] = []

    def observe(name: str, x: Tensor) -> None:
        stored = checkpoint.get(f"{name}.weight")
        weight = _float(stored, model.device)
        act = checkpoint.act(f"{name}.weight")
        weight_error = output_error = None
        if basis is not None:
            original = _float(basis.get(f"{name}.weight"), model.device)
            if "smooth" in recipe.get("transform", ""):
                original = _rescaled(original, weight)
            weight_error = _share(original - weight, original) ** 0.5
            right = x.float() @ original.t()
            output_error = _share(right - as_seen(x, act, checkpoint.act_scale(f"{name}.weight")) @ weight.t(), right)
        channels = x.float().abs().amax(0)
        scheme = scheme_of(stored.spec if isinstance(stored, QTensor) else None, act).name
        outlier = float(channels.max() / channels.median().clamp_min(1e-9))
        linears.append(LinearFacts(int(name.split(".")[2]), name.rpartition(".")[2], scheme, weight.numel(),
                                   stored_bits(stored, checkpoint), weight_error, output_error, outlier))

    x, residual = model.embedding(step.token_ids), None
    for index, (layer, layer_kv) in enumerate(tracked(list(zip(model.layers, kv)), "examining", progress)):
        x, residual = layer(x, residual, layer_kv, step, observe)
        for which, store in (("K", layer_kv.k), ("V", layer_kv.v)):
            channels = store.float().transpose(1, 2).flatten(0, 1)[: len(token_ids)].abs().amax(0)  # [heads, D]
            ratio = channels.amax(-1) / channels.median(-1).values.clamp_min(1e-9)
            cache.append(CacheFacts(index, which, tuple(channels.amax(-1).tolist()), tuple(ratio.tolist())))
    in_linears = sum(f.bits * f.parameters for f in linears) / 8
    own = sizes(checkpoint)
    before = sizes(source) if source is not None else [(16.0, n) for _, n in own]
    now, then = (sum(bits * n for bits, n in some) / 8 for some in (own, before))
    return Anatomy(
        tuple(linears), tuple(cache), in_linears, now - in_linears, then,
        bytes_per_token(config, subject.kv_name), bytes_per_token(config, "bf16"), recipe, tuple(notes),
    )


def _basis(source: Checkpoint, recipe: dict[str, Any], device: torch.device, notes: list[str]) -> Source | None:
    """The source as the quantizer saw it before rounding."""
    transform = recipe.get("transform", "none")
    if "smooth" in transform:
        notes.append("Smoothing moved scales between activations and weights; errors are after fitting those scales again, "
                     "which makes them a little too small.")
    if "rotate" in transform:
        return Rotated(source, read_config(source.config), int(recipe.get("seed", 0)), device)
    return source


def _float(weight: QTensor | Tensor, device: torch.device) -> Tensor:
    return dequantize(weight.to(device)) if isinstance(weight, QTensor) else weight.to(device).float()


def _share(error: Tensor, whole: Tensor) -> float:
    return float(error.double().square().sum() / whole.double().square().sum().clamp_min(1e-30))


def _rescaled(original: Tensor, weight: Tensor) -> Tensor:
    """`original` times the factor per output and per input channel that brings it closest to `weight` (least squares)."""
    for _ in range(12):
        for axis in (0, 1):
            fit = (original * weight).sum(axis, keepdim=True) / original.square().sum(axis, keepdim=True).clamp_min(1e-30)
            original = original * fit
    return original
