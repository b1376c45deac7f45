"""From a checkpoint to a quantized one: layers are read, quantized and written one at a time, so memory holds one layer.

Not an algorithm (rtn, gptq, smooth, rotate) and not a file format (`nybble.checkpoint`): the loop that joins them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import KV, Scheme
from nybble.hardware import pick_device
from nybble.models import ModelConfig, read_config
from nybble.models.load import Source, default_dtype
from nybble.nn.linear import Part
from nybble.quantize.calibrate import (
    Quantized,
    Reference,
    build_layer,
    calibration_step,
    quantize_layer,
    quantize_parts,
    take_windows,
)
from nybble.quantize.recipe import Recipe, hash_text, shipped_text
from nybble.quantize.rotate import Rotated, can_rotate
from nybble.quantize.smooth import ALL_SITES, smooth_layer
from nybble.text import load_tokenizer, read_text

Progress = Callable[[str, float], None]

# Linears of a layer, grouped by the input that they share.
SITES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@dataclass(frozen=True)
class Report:
    """What a run did. errors: linear's name -> the share of its output's energy that rounding got wrong on calibration
    inputs (None without calibration). bytes_16bit: what the model takes in 16 bits; bytes_written: on disk, weights only."""

    output: str
    recipe: Recipe
    kv: str
    errors: dict[str, float | None]
    schemes: dict[str, str]
    notes: tuple[str, ...]
    bytes_16bit: int
    bytes_written: int
    bits_per_weight: float
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{self.output}: {self.recipe.describe()}, KV {self.kv}",
            f"{len(self.schemes)} linears at {self.bits_per_weight:.2f} bits per weight; weights on disk "
            f"{self.bytes_written / 1e6:.1f} MB, in 16 bits {self.bytes_16bit / 1e6:.1f} MB; {self.seconds:.0f} s",
        ]
        kinds: dict[str, list[float]] = {}
        for name, error in self.errors.items():
            if error is not None:
                kinds.setdefault(name.rpartition(".")[2], []).append(error)
        if kinds:
            lines.append("output error on calibration inputs, median over layers: "
                         + ", ".join(f"{kind} {statistics.median(found):.2%}" for kind, found in kinds.items()))
        return "\n".join((*lines, *self.notes))


def quantize_checkpoint(
    path: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    kv: str = "auto",
    calibration: str | Path | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the checkpoint at `path` (Hugging Face directory or .gguf) into the directory `out`.

    kv: a key of `formats.spec.KV` that the result asks for; "auto" keeps the source's, else int8. calibration: a text file;
    None is the text that comes with the package. Embeddings, norms, biases and the head stay as they are.

    Raises ValueError, FileNotFoundError or FileExistsError for bad input, before anything is written.
    """
    started = time.perf_counter()
    recipe = recipe or Recipe()
    checkpoint = open_checkpoint(path)
    kv = (checkpoint.kv or "int8") if kv == "auto" else kv
    if kv not in KV:
        raise ValueError(f"kv = {kv!r} is not a KV cache type; there are {', '.join(KV)}")
    config = read_config(checkpoint.config)
    target = pick_device(device) if not isinstance(device, torch.device) else device
    notes: list[str] = []
    tokens = None
    recipe = replace(recipe, transform=resolve_transform(recipe, config))
    if recipe.needs_calibration:
        text = shipped_text() if calibration is None else read_text(calibration)
        recipe = replace(recipe, sequence_length=min(recipe.sequence_length, config.max_position))
        tokens = take_windows(load_tokenizer(path).encode(text, add_special=False), recipe.samples, recipe.sequence_length)
        recipe = replace(recipe, calibration="shipped" if calibration is None else Path(calibration).name,
                         text_hash=hash_text(text))
        if len(tokens) < recipe.samples:
            notes.append(f"the calibration text gave {len(tokens)} sequences of the {recipe.samples} asked for")
    source: Source = checkpoint
    if recipe.transform == "rotate":
        reason = can_rotate(config)
        if reason is not None:
            raise ValueError(f"transform = rotate: {reason}; transform = smooth or none would do")
        source = Rotated(checkpoint, config, recipe.seed, target)
        config = read_config(source.config)
    schemes = linear_schemes(config, recipe)
    notes += group_notes(schemes, recipe)
    if checkpoint.scheme_name != "16bit":
        notes.append(f"the source was quantized already ({checkpoint.scheme_name}): what that lost is not undone; start from "
                     "16 bits if you can")
    tally = _Tally()
    tensors = _tensors(source, checkpoint, config, recipe, tokens, target, tally, progress)
    write_checkpoint(out, dict(source.config), tensors, schemes, kv, checkpoint, recipe.to_dict())
    return Report(
        str(out), recipe, kv, tally.errors, {name: s.name for name, s in schemes.items()}, tuple(notes), tally.bytes_16bit,
        sum(f.stat().st_size for f in Path(out).glob("*.safetensors")), tally.bits / max(tally.weights, 1),
        time.perf_counter() - started,
    )


def resolve_transform(recipe: Recipe, config: ModelConfig) -> str:
    """What "auto" means for a model."""
    if recipe.transform != "auto":
        return recipe.transform
    if not recipe.scheme.startswith("w4a8"):
        return "none"
    return "rotate" if can_rotate(config) is None else "smooth"


def linear_schemes(config: ModelConfig, recipe: Recipe) -> dict[str, Scheme]:
    """Module name of every linear in the layers -> its scheme."""
    wide = {"o_proj": config.num_heads * config.head_dim, "down_proj": config.intermediate_size}
    return {
        f"model.layers.{index}.{name}": recipe.scheme_for(wide.get(name.rpartition(".")[2], config.hidden_size))
        for index in range(config.num_layers)
        for site in SITES
        for name in site
    }


def group_notes(schemes: dict[str, Scheme], recipe: Recipe) -> list[str]:
    """One sentence for each group that had to give way."""
    if not recipe.spec.group:
        return []
    others: dict[int | None, set[str]] = {}
    for name, scheme in schemes.items():
        group = scheme.weight.group if scheme.weight is not None else None
        if group != recipe.group:
            others.setdefault(group, set()).add(name.rpartition(".")[2])
    return [
        f"groups of {recipe.group} do not divide the inputs of {', '.join(sorted(names))}: "
        + (f"groups of {group} there" if group else "one scale per channel there")
        for group, names in others.items()
    ]


@dataclass
class _Tally:
    """Sums over the tensors that went by."""

    bits: float = 0.0
    weights: int = 0
    bytes_16bit: int = 0

    def __post_init__(self) -> None:
        self.errors: dict[str, float | None] = {}


def _tensors(
    source: Source, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe, tokens: Tensor | None,
    device: torch.device, tally: _Tally, progress: Progress | None,
) -> Iterator[tuple[str, Tensor | QTensor]]:
    """Every tensor of the quantized checkpoint, in order, each made when it is asked for."""
    stored, names = checkpoint.dtype, checkpoint.names()
    dtype = default_dtype(config, device)
    hidden = reference = step = kv = None
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        if name in names or source.has(name):
            value = _dense(source.get(name), stored)
            tally.bytes_16bit += 2 * value.numel() if name in names else 0
            if name == "model.embed_tokens.weight" and tokens is not None:
                hidden = F.embedding(tokens.reshape(-1), value.cpu()).to(device, dtype)
                reference = hidden
                step, kv = calibration_step(config, tokens, device, dtype)
            yield name, value.cpu()
    for index in range(config.num_layers):
        if progress is not None:
            progress("quantizing", index / config.num_layers)
        at = f"model.layers.{index}."
        changed: dict[str, Tensor] = {}
        done: dict[str, Quantized] = {}
        if tokens is None:
            for site in SITES:
                parts = []
                for name in site:
                    weight = _dense(source.get(f"{at}{name}.weight"), torch.float32).to(device)
                    parts.append(Part(at + name, tuple(weight.shape), weight))  # type: ignore[arg-type]
                done.update(quantize_parts(parts, None, recipe, stored))
        else:
            assert hidden is not None
            assert step is not None
            assert kv is not None
            assert reference is not None
            length = tokens.shape[1]
            layer = build_layer(source, config, index, device, dtype, length)
            follow = Reference(layer, reference, kv, step) if recipe.drift else None
            if recipe.transform == "smooth":
                changed = smooth_layer(layer, hidden, kv, step, config, recipe, ALL_SITES)
                layer = build_layer(source, config, index, device, dtype, length, changed)
            hidden, done = quantize_layer(layer, hidden, kv, step, recipe, stored, follow)
            reference = reference if follow is None else follow.hidden
        for name, found in done.items():
            tally.errors[name] = found.error
            tally.weights += found.weight.codes.numel()
            tally.bits += found.weight.bits_per_weight * found.weight.codes.numel()
            tally.bytes_16bit += 2 * found.weight.codes.numel()
            yield f"{name}.weight", found.weight.to("cpu")
        quantized = {f"{name}.weight" for name in done}
        for name in names:
            if name.startswith(at) and name not in quantized:
                value = _dense(changed[name] if name in changed else source.get(name), stored)
                tally.bytes_16bit += 2 * value.numel()
                yield name, value.cpu()
    if progress is not None:
        progress("quantizing", 1.0)


def _dense(value: Tensor | QTensor, dtype: torch.dtype) -> Tensor:
    """A tensor that stays (or starts) in floating point."""
    return dequantize(value, dtype) if isinstance(value, QTensor) else value.to(dtype)

