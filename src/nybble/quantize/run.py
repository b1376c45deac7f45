"""From a checkpoint to a quantized one: layers are read, quantized and written one at a time, so memory holds one layer.

Not an algorithm (rtn, gptq, smooth, rotate) and not a file format (`nybble.checkpoint`): the loop that joins them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from nybble.checkpoint.write import check_target
from nybble.formats.qtensor import QTensor, dense
from nybble.formats.spec import INT8_CHANNEL, KV, SCHEMES, Scheme
from nybble.hardware import pick_device
from nybble.models import ModelConfig, read_config
from nybble.models.decoder import Decoder, Layer
from nybble.models.load import Progress, Source, build, default_dtype, refuse_left
from nybble.quantize import auto
from nybble.quantize.calibrate import Quantized, Stream, build_layer, quantize_layer, quantize_parts, take_windows
from nybble.quantize.learn import learn_scales
from nybble.quantize.recipe import SITES, Recipe, hash_text, shipped_text
from nybble.quantize.resume import Saved, Tensors
from nybble.quantize.rotate import OnlineHadamard, Rotated, can_rotate
from nybble.quantize.rtn import quantize_rtn
from nybble.quantize.smooth import smooth_layer
from nybble.text import load_tokenizer, read_text

CHUNK = 16384  # calibration tokens that go through a layer at once
NORMS = ("input_layernorm", "post_attention_layernorm")
MEASURED = 2048  # tokens whose predictions `auto` looks at


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
            f"{len(self.schemes) - ('lm_head' in self.schemes)} linears at {self.bits_per_weight:.2f} bits per weight; weights "
            f"on disk {self.bytes_written / 1e6:.1f} MB, in 16 bits {self.bytes_16bit / 1e6:.1f} MB; {self.seconds:.0f} s",
        ]
        known = {name: error for name, error in self.errors.items() if error is not None}
        kinds: dict[str, list[float]] = {}
        for name, error in known.items():
            kinds.setdefault(name.rpartition(".")[2], []).append(error)
        if kinds:
            worst = max(known, key=known.__getitem__)
            lines.append("output error on calibration inputs, median over layers: "
                         + ", ".join(f"{kind} {statistics.median(found):.2%}" for kind, found in kinds.items())
                         + f"; largest {known[worst]:.2%}, {worst}")
        return "\n".join((*lines, *self.notes))


def quantize_checkpoint(path: str | Path, out: str | Path, recipe: Recipe | None = None, kv: str = "auto",
                        calibration: str | Path | None = None, device: str | torch.device | None = None,
                        progress: Progress | None = None) -> Report:
    """Quantize the checkpoint at `path` (Hugging Face directory or .gguf) into the directory `out`.

    kv: a key of `formats.spec.KV` that the result asks for; "auto" keeps the source's, else int8, also for fp8, whose scales
    are the source's own. calibration: a text file; None is the text that comes with the package. Embeddings, norms, biases
    and (see `Recipe.head`) the head stay.

    Raises ValueError, FileNotFoundError or FileExistsError for bad input, before anything is written.
    """
    started = time.perf_counter()
    recipe = recipe or Recipe()
    checkpoint = open_checkpoint(path)
    if kv != "auto" and kv not in KV:
        raise ValueError(f"kv = {kv!r} is not a KV cache type; there are {', '.join(KV)}")
    if checkpoint.hadamard:
        raise ValueError(f"{path} turns the inputs of its down projections at run time: quantize the model it was made from")
    config = read_config(checkpoint.config)
    target = pick_device(device)
    refuse_strangers(checkpoint, config, target)
    notes: list[str] = []
    if kv == "auto" and (kv := checkpoint.kv or "int8") == "fp8":
        kv = "int8"
        notes.append("the source's FP8 KV scales are of its own weights, so KV becomes int8; --kv fp8 measures new ones")
    recipe = replace(recipe, transform=resolve_transform(recipe, config),
                     made_with=f"nybble {sys.modules['nybble'].__version__}, torch {torch.__version__}, {target.type}")
    tokens = None
    if recipe.needs_calibration:
        recipe, tokens = calibration_tokens(path, calibration, recipe, config, notes)
    source, config = turned(checkpoint, config, recipe, target)
    if recipe.head != "16bit" and config.tie_embeddings:
        raise ValueError(f"head = {recipe.head}: this model's head is its embedding, which stays in 16 bits; rotation gives it "
                         "one of its own")
    linear_schemes(config, recipe)
    check_target(Path(out), checkpoint.path)
    with closing(Saved(Path(f"{os.path.abspath(out)}.resume"), _key(recipe, kv, checkpoint, tokens))) as saved:
        run = _Run(source, checkpoint, config, recipe, tokens, target, saved, progress or (lambda what, done: None))
        if recipe.bits and not recipe.layers:
            recipe, lines = run.choose()
            notes += lines
        schemes = linear_schemes(config, recipe)
        notes += group_notes(schemes, recipe)
        if recipe.head != "16bit":
            schemes["lm_head"] = SCHEMES[recipe.head]
        if saved.finished:
            notes.append(f"went on after layer {saved.finished - 1}, which an earlier run had finished")
        if (before := checkpoint.decoded or checkpoint.scheme_name) != "16bit":
            notes.append(f"the source was quantized already ({before}): what that lost is not undone, and errors are against "
                         "its decoded weights; start from 16 bits if you can")
        write_checkpoint(out, dict(source.config), run.tensors(schemes), schemes, kv, checkpoint, recipe.to_dict(),
                         hadamard=config.hadamard)
        if unlearned := saved.noted("unlearned"):
            layers = ", ".join(map(str, sorted(set(unlearned))))
            notes.append(f"what was learned for the scales of layers {layers} was worse on the sequence held out: left out")
        saved.remove()
    written = sum(file.stat().st_size for file in Path(out).glob("model*.safetensors"))
    return Report(str(out), recipe, kv, run.errors, {name: s.name for name, s in schemes.items()}, tuple(notes),
                  run.bytes_16bit, written, run.bits / max(run.weights, 1), time.perf_counter() - started)


def _key(recipe: Recipe, kv: str, checkpoint: Checkpoint, tokens: Tensor | None) -> str:
    """What decides the bytes of a run, for telling whether another may go on with its layers."""
    path = checkpoint.path
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".gguf", ".json"))
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = None if tokens is None else hash_text(str(tokens.tolist()))
    return json.dumps([recipe.to_dict(), kv, str(path.resolve()), stamps, text])


def calibration_tokens(path: str | Path, calibration: str | Path | None, recipe: Recipe, config: ModelConfig,
                       notes: list[str]) -> tuple[Recipe, Tensor]:
    """The recipe with what it was calibrated on, and int64 [samples, sequence_length]. notes: gets what to tell people."""
    text = shipped_text() if calibration is None else read_text(calibration)
    if recipe.sequence_length > config.max_position:
        notes.append(f"sequence_length = {recipe.sequence_length}: the model was made for {config.max_position} positions, "
                     "so calibration sequences are that long")
        recipe = replace(recipe, sequence_length=config.max_position)
    ids = load_tokenizer(path).encode(text, add_special=False)
    tokens = take_windows(ids, recipe.samples, recipe.sequence_length, config.vocab_size)
    if recipe.learn_scales and len(tokens) < 2:
        raise ValueError(f"learn_scales = {recipe.learn_scales}: wants 2 calibration sequences or more, one to judge by "
                         f"what was learned from the rest; samples = {recipe.samples} on this text gives {len(tokens)}")
    if len(tokens) < recipe.samples:
        notes.append(f"the calibration text gave {len(tokens)} sequences of the {recipe.samples} asked for")
    name, found = "shipped" if calibration is None else Path(calibration).name, hash_text(text)
    if recipe.text_hash not in ("", found) or (not recipe.text_hash and recipe.calibration not in ("shipped", name)):
        notes.append(f"the recipe was made with another calibration text ({recipe.calibration}) than was used now ({name}): "
                     "--calibration says which file to read")
    return replace(recipe, calibration=name, text_hash=found), tokens


def turned(source: Source, config: ModelConfig, recipe: Recipe, device: torch.device) -> tuple[Source, ModelConfig]:
    """The same model in the basis that the recipe asks for. Raises ValueError where there is none."""
    if "rotate" in recipe.transform:
        source = Rotated(source, config, recipe.seed, device)
        config = read_config(source.config)
    if recipe.online_hadamard:
        config = replace(config, hadamard=min(config.intermediate_size & -config.intermediate_size, 16384))
        if config.hadamard == 1:
            raise ValueError(f"online_hadamard: down_proj has {config.intermediate_size} inputs, an odd number; it wants "
                             "blocks of 2, 4, 8, ...")
        source = OnlineHadamard(source, config.hadamard)
    return source, config


def refuse_strangers(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> None:
    """Raises ValueError for what loading would refuse of the tensors around the layers, before hours are spent on these."""
    around(config, checkpoint, device)
    layers = tuple(f"model.layers.{index}." for index in range(config.num_layers))
    refuse_left(config, [name for name in checkpoint.unread() if not name.startswith(layers)])


def around(config: ModelConfig, source: Source, device: torch.device) -> Decoder:
    """The model without its layers: embedding, last norm, head."""
    return build(replace(config, num_layers=0, windows=()), source, device, default_dtype(config, device))


def resolve_transform(recipe: Recipe, config: ModelConfig) -> str:
    """What "auto" means for a model."""
    if recipe.transform != "auto":
        return recipe.transform
    if recipe.scheme not in ("w4a8", "w8a8"):
        return "none"
    rotation = "rotate" if recipe.scheme == "w4a8" or recipe.online_hadamard else "rotate+smooth"
    return rotation if can_rotate(config) is None else "smooth"


def linear_schemes(config: ModelConfig, recipe: Recipe) -> dict[str, Scheme]:
    """Module name of every linear in the layers -> its scheme."""
    places = {f"{index}.{site}" for index in range(config.num_layers) for site in SITES}
    if unknown := sorted(recipe.layers.keys() - places):
        raise ValueError(f"the recipe's layers name {', '.join(unknown)}; this model has 0 to {config.num_layers - 1}, each "
                         f"with {', '.join(SITES)}, as in \"0.{next(iter(SITES))}\"")
    wide = {"o": config.num_heads * config.head_dim, "down": config.intermediate_size}
    return {f"model.layers.{index}.{name}": recipe.scheme_for(wide.get(site, config.hidden_size), f"{index}.{site}")
            for index in range(config.num_layers) for site, names in SITES.items() for name in names}


def group_notes(schemes: dict[str, Scheme], recipe: Recipe) -> list[str]:
    """One sentence for each group that had to give way."""
    if not recipe.spec.group or recipe.layers:
        return []
    others: dict[int | None, set[str]] = {}
    for name, scheme in schemes.items():
        if scheme.weight.group != recipe.group:
            others.setdefault(scheme.weight.group, set()).add(name.rpartition(".")[2])
    return [f"groups of {recipe.group} do not divide the inputs of {', '.join(sorted(names))}: "
            + (f"groups of {group} there" if group else "one scale per channel there") for group, names in others.items()]


class _Run:
    """One run over the layers, and the sums over what went by."""

    def __init__(self, source: Source, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe, tokens: Tensor | None,
                 device: torch.device, saved: Saved, progress: Progress) -> None:
        self.source, self.checkpoint, self.config, self.recipe, self.tokens = source, checkpoint, config, recipe, tokens
        self.device, self.saved, self.progress = device, saved, progress
        self.dtype, self.names = default_dtype(config, device), checkpoint.names()
        self.bits, self.weights, self.bytes_16bit = 0.0, 0, 0
        self.errors: dict[str, float | None] = {}

    def embed(self, tokens: Tensor, chunk: int) -> Stream:
        """The calibration tokens before the first layer, in chunks of up to `chunk`."""
        table = dense(self.source.get("model.embed_tokens.weight"), self.checkpoint.dtype).cpu()
        chunks = tokens.split(max(1, chunk // tokens.shape[1]))
        hidden = [F.embedding(ids.reshape(-1), table).to(self.device, self.dtype) for ids in chunks]
        return Stream(self.config, tokens, hidden)

    def layer(self, index: int, changed: Mapping[str, Tensor] | None = None) -> Layer:
        length = 1 if self.tokens is None else self.tokens.shape[1]
        return build_layer(self.source, self.config, index, self.device, self.dtype, length, changed)

    def choose(self) -> tuple[Recipe, list[str]]:
        """`auto`: the recipe with its layers' schemes, and what to tell people."""
        noted = self.saved.noted("measured")
        if noted is None:
            stream = self.embed(auto.first_rows(self.tokens), MEASURED)
            ends = around(self.config, self.source, self.device)

            def layers() -> Iterator[Layer]:
                for index in range(self.config.num_layers):
                    self.progress("measuring", index / self.config.num_layers)
                    yield self.layer(index)

            def logits(hidden: Tensor) -> Tensor:
                return ends.logits(ends.final(hidden, None))

            measured = auto.measure(layers(), stream, logits, self.recipe, self.checkpoint.dtype)
            self.saved.note("measured", [dataclasses.astuple(c) for c in measured])
        else:
            measured = [auto.Candidate(*c) for c in noted]
        chosen = auto.allocate(measured, self.recipe.bits)
        self.recipe = replace(self.recipe, layers={place: c.scheme for place, c in chosen.items()},
                              measured=auto.record(measured))
        return self.recipe, auto.explain(measured, chosen)

    def tensors(self, schemes: Mapping[str, Scheme]) -> Iterator[tuple[str, Tensor | QTensor]]:
        """Every tensor of the quantized checkpoint, in order, each made when it is asked for."""
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            if name in self.names or self.source.has(name):
                value = dense(self.source.get(name), self.checkpoint.dtype).cpu()
                self.bytes_16bit += 2 * value.numel() if name in self.names else 0
                if name == "lm_head.weight" and self.recipe.head != "16bit":
                    yield name, quantize_rtn(value.float(), INT8_CHANNEL, value.dtype, name=name)
                else:
                    yield name, value
        stream = reference = None
        if self.tokens is not None:
            stream = self.embed(self.tokens, CHUNK)
            if self.saved.finished:
                hidden, *others = self.saved.load_stream()
                stream.hidden = [chunk.to(self.device) for chunk in hidden]
                reference = None if not others else stream.beside([chunk.to(self.device) for chunk in others[0]])
            elif self.recipe.drift or self.recipe.learn_scales:
                reference = stream.beside(stream.hidden)
        for index in range(self.config.num_layers):
            self.progress("quantizing", index / self.config.num_layers)
            if index < self.saved.finished:
                tensors, errors = self.saved.load_layer(index, schemes)
            else:
                tensors, errors = self.quantized(index, schemes, stream, reference)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # the next layer asks for its sizes in another order: leave no holes
                self.saved.save(index, tensors, errors, [each.hidden for each in (stream, reference) if each is not None])
            self.errors |= errors
            for name, value in tensors:
                count = value.codes.numel() if isinstance(value, QTensor) else value.numel()
                self.bytes_16bit += 2 * count
                if isinstance(value, QTensor):
                    self.weights += count
                    self.bits += value.bits_per_weight * count
                yield name, value
        self.progress("quantizing", 1.0)

    def quantized(self, index: int, schemes: Mapping[str, Scheme], stream: Stream | None,
                  reference: Stream | None) -> tuple[Tensors, dict[str, float | None]]:
        """One layer's tensors, and its linears' errors."""
        at, stored = f"model.layers.{index}.", self.checkpoint.dtype
        changed: dict[str, Tensor] = {}
        done: dict[str, Quantized] = {}
        layer = self.layer(index)
        refuse_left(self.config, [name for name in self.checkpoint.unread() if name.startswith(at)])
        if stream is None:
            for projection in layer.projections:
                done |= quantize_parts(projection.parts, None, schemes[projection.names[0]], self.recipe, stored)
        else:
            if "smooth" in self.recipe.transform:
                step, kv = stream.steps[0]
                changed = smooth_layer(layer, stream.hidden[0], kv, step, self.config, schemes)
                layer = self.layer(index, changed)
            before = list(stream.hidden) if self.recipe.learn_scales else []
            done = quantize_layer(layer, stream, reference, schemes, self.recipe, stored)
            if self.recipe.learn_scales:
                learned = learn_scales(layer, [one for chunk in before for one in chunk.split(stream.length)],
                                       [one for chunk in reference.hidden for one in chunk.split(stream.length)],
                                       self.recipe.learn_scales, self.recipe.seed, stored)
                if not learned.weights:
                    self.saved.note("unlearned", [*(self.saved.noted("unlearned") or ()), index])
                done |= {name: replace(done[name], weight=weight) for name, weight in learned.weights.items()}
                changed |= {f"{at}{norm}.weight": value for norm, value in zip(NORMS, learned.norms)}
                stream.hidden = [learned.layer.run(x, kv, step) for x, (step, kv) in zip(before, stream.steps)]
        tensors: Tensors = [(f"{name}.weight", found.weight.to("cpu")) for name, found in done.items()]
        tensors += [(f"{name}.input_scale", torch.tensor([found.act_scale], dtype=stored)) for name, found in done.items()
                    if found.act_scale is not None]
        quantized = {name for name, _ in tensors}
        for name in self.names:
            if name.startswith(at) and name not in quantized:
                tensors.append((name, dense(changed[name] if name in changed else self.source.get(name), stored).cpu()))
        return tensors, {name: found.error for name, found in done.items()}
