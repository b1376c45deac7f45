"""From one format to another, tensor by tensor: the same integers and scales, or a refusal that says what does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nybble.checkpoint.checkpoint import Checkpoint, open_checkpoint
from nybble.checkpoint.compressed import whole_steps
from nybble.checkpoint.kv import Scale
from nybble.checkpoint.write import write_checkpoint
from nybble.checkpoint.writers import WRITERS
from nybble.formats.qtensor import QTensor, inner_codes
from nybble.formats.spec import INT8_CHANNEL
from nybble.text.errors import held

FORMATS = (*WRITERS, "tgi")


def convert_checkpoint(path: str | Path, out: str | Path, format: str, activations: str | None = None,
                       weights_only: bool = False, kv_format: str | None = None,
                       scales: Mapping[int, tuple[Scale, Scale]] | None = None) -> tuple[str, ...]:
    """Write the checkpoint at `path` into the directory `out` in another format. Returns notes on what a user should know.

    format: "compressed-tensors", "qqq", "gptq" or "awq"; "tgi" is compressed-tensors (or 16-bit) weights with KV scales under
    TGI's names. activations: "int8" for weight-only sources, as in `open_checkpoint`. weights_only: drop what the source says
    about activations where the format cannot say it. kv_format: "tgi" or None.
    scales: FP8 KV scales (K, V) by layer instead of the source's.

    Raises ValueError naming the linear and the reason when the format cannot hold the source exactly.
    """
    if format not in FORMATS or kv_format not in (None, "tgi"):
        raise ValueError(f"format = {format!r} with KV scales as {kv_format!r}: there are {', '.join(FORMATS)}, and KV scales "
                         "as tgi or None")
    if weights_only and format not in ("gptq", "awq"):
        raise ValueError(f"--weights-only is for gptq and awq, which cannot say what activations are; {format} "
                         "can: leave it out")
    if format == "tgi":
        format, kv_format = "compressed-tensors", "tgi"
    source = open_checkpoint(path, activations)
    notes: list[str] = []
    linears = source.linears()
    schemes = {module: linear.scheme for module, linear in linears.items()}
    if weights_only and any(linear.scheme.act for linear in linears.values()):
        schemes = {module: replace(scheme, act=None) for module, scheme in schemes.items()}
        notes.append("activations were quantized in the source; others will run these weights with 16-bit activations")
    layers = source.num_layers
    if scales is None:
        scales = {layer: pair for layer in range(layers) if (pair := source.kv_scales(layer)) is not None}
    if kv_format == "tgi" and len(scales) < layers:
        raise ValueError(f"{path} has KV scales for {len(scales)} of {layers} layers: TGI's format is for FP8 KV scales; "
                         "nybble quantize --kv fp8 calibrates them")
    if kv_format == "tgi" and any(isinstance(s, Tensor) or s != pair[0] for pair in scales.values() for s in pair):
        notes.append("TGI's kv_scale is one number for K and V of a layer: the larger is written, so the "
                     "cache rounds otherwise than here and tokens may change")
    if scales and kv_format is None and format != "compressed-tensors":
        raise ValueError(f"{format} has no place for this checkpoint's KV scales: --kv-format tgi writes them as TGI does")
    if source.hadamard and (format != "compressed-tensors" or kv_format):
        raise ValueError(f"{kv_format or format} cannot say that down_proj's inputs are turned at run time, without which "
                         "these weights are useless: quantize without online_hadamard")
    recipe = held(held(source.config, "nybble", dict) or {}, "recipe", dict, where="config.json: nybble") or {}
    if format in ("qqq", "awq") and source.dtype != torch.float16:
        notes.append(f"{format}'s own loader runs in float16; what is not quantized here stays {source.config_dtype}")
    if format == "gptq" and any(linear.scheme.weight.zero for linear in linears.values()):
        notes.append("vLLM reads asymmetric weights as awq or compressed-tensors, not as gptq")
    tensors = itertools.chain(_weights(source, format, notes), _kv_tensors(scales, kv_format == "tgi"))
    write_checkpoint(out, dict(source.config), tensors, schemes, "fp8" if scales else source.kv, source,
                     recipe | {"converted_from": Path(path).name}, format=format, hadamard=source.hadamard)
    if unread := source.unread():
        notes.append(f"left out, because nothing says what they are: {', '.join(unread[:8])}")
    return tuple(dict.fromkeys(notes))


def _weights(source: Checkpoint, format: str, notes: list[str]) -> Iterator[tuple[str, Tensor | QTensor]]:
    wide = format == "compressed-tensors"
    for name in source.names():
        value = source.get(name)
        if isinstance(value, QTensor):
            if value.order is not None:
                notes.append("vLLM 0.33 no longer runs weights whose groups follow GPTQ's channel order")
            if wide and value.over is None and not torch.equal(value.scale.to(source.dtype).float(), value.scale):
                notes.append(f"scales that {source.config_dtype} cannot hold are written in float32: readers "
                             "that round them to the model's dtype change the weights a little")
            if wide and value.over is not None and not whole_steps(value):
                notes.append("QQQ's groups round to an int8 grid, which compressed-tensors says as 8-bit weights: same "
                             "values, twice the bytes")
                value = QTensor(INT8_CHANNEL, inner_codes(value), value.over)
        yield name, value
        act, scale = source.act(name), source.act_scale(name)
        if act is not None and not act.dynamic and scale is not None:
            yield f"{name.removesuffix('.weight')}.input_scale", torch.tensor([scale])


def _kv_tensors(scales: Mapping[int, tuple[Scale, Scale]], tgi: bool) -> Iterator[tuple[str, Tensor]]:
    per_head = [s.numel() for pair in scales.values() for s in pair if isinstance(s, Tensor)]
    for layer, pair in scales.items():
        at, values = f"model.layers.{layer}.self_attn", [torch.as_tensor(scale, dtype=torch.float32) for scale in pair]
        if tgi:
            yield f"{at}.kv_scale", torch.maximum(*(value.max() for value in values))
            continue
        for side, value in zip("kv", values):
            yield f"{at}.{side}_scale", value.expand(per_head[0]).clone() if per_head else value
