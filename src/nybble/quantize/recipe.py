"""Everything that decides a quantized checkpoint's bytes, in one frozen record, read from and written as flat TOML.

Not how it is carried out. The one idea: a recipe is recorded in the checkpoint it made, and making it again from there
gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import typing
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from nybble.formats.spec import FP8, INT4, INT8_CHANNEL, PER_TOKEN_INT8, SCHEMES, Scheme, Spec, fit_group, scheme_of
from nybble.text.errors import held, read_json, read_text

METHODS = ("rtn", "gptq")
TRANSFORMS = ("auto", "none", "smooth", "rotate", "rotate+smooth")
# Linears of a layer that share an input, and so a scheme: they run as one.
SITES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Recipe:
    """The keys of a recipe file, each with its default. `key_table` lists them for people."""

    scheme: Annotated[str, "w4a8, w4a16, w8a8, w8a16 or fp8: the bits of weights and activations."] = "w4a8"
    group: Annotated[int, """Input channels per scale of 4-bit weights; 0 is one scale per channel. A layer that it does not
        divide takes the largest power of two from 32 up that does, else one per channel. 8-bit weights are always per
        channel."""] = 128
    group_scales: Annotated[str, """int: in groups of 128 under int8 activations the scales are whole multiples (0 to 16) of one
        per channel, which the integer kernel multiplies in before the sum; others read the same checkpoint as ordinary groups.
        float: they are free."""] = "int"
    bits: Annotated[float, """Above 0, schemes are chosen layer by layer, within this average of bits per weight over the
        linears, scales included, by how far each moves the model's predictions."""] = 0.0
    method: Annotated[str, "gptq, or rtn: round to nearest, without calibration."] = "gptq"
    mse: Annotated[bool, "Search the scales that lose least, instead of the largest weight's."] = True
    damping: Annotated[float, """GPTQ: share of the mean diagonal that is added to the Hessian, tenfold as long as it does not
        factor."""] = 0.01
    act_order: Annotated[bool, "GPTQ: the heaviest input channels first."] = True
    sweeps: Annotated[int, "GPTQ: refinement passes after the greedy one, with the scales refitted in between."] = 2
    true_activations: Annotated[bool, "Hessians of the inputs as the quantized model rounds them."] = True
    static_activations: Annotated[bool, """FP8 inputs share one scale per linear, the largest on calibration text / 448, instead
        of one per token."""] = False
    drift: Annotated[float, """0 to 1: how much of the error that quantized layers before brought in a layer's weights are moved
        to undo. 0.5 fits calibration text less closely than 1 and does better on others."""] = 0.5
    learn_scales: Annotated[int, """Passes over the calibration tokens that tune each layer's scales and norm weights, codes as
        they are, towards the float layer's output."""] = 0
    transform: Annotated[str, """Change of basis before rounding: none, smooth, rotate, or rotate+smooth, one after the other.
        auto rotates where inputs are int8 and a rotation of the model's size is known (smooths where not, and w8a8 without
        online_hadamard in both cases), else is none."""] = "auto"
    online_hadamard: Annotated[bool, """The input of down_proj, where outliers are largest, is turned at run time too, in the
        kernel that makes it; only Nybble runs such a checkpoint."""] = False
    head: Annotated[str, """16bit, or w8a8 for the logits, rounded to nearest. A head that is the embedding stays as it
        is."""] = "16bit"
    samples: Annotated[int, "Calibration sequences."] = 16
    sequence_length: Annotated[int, "Tokens of each."] = 1024
    seed: Annotated[int, "Of the random signs of a rotation, and the order that scales are learned in."] = 0
    calibration: Annotated[str, "For the record: the calibration text's name."] = "shipped"
    text_hash: Annotated[str, "For the record: its hash."] = ""
    made_with: Annotated[str, "For the record: versions."] = ""
    layers: Annotated[dict[str, str], """Schemes by place, as in "3.down" = "w8a8" for layer 3's down projection; the places are
        qkv, o, gate_up and down, and names like w4a8_g64 say the group. With it nothing is measured for bits."""] = field(
            default_factory=dict)
    measured: Annotated[dict[str, str], "For the record: the errors that bits was spent by."] = field(default_factory=dict)

    def __post_init__(self) -> None:
        writable = [name for name, s in SCHEMES.items() if s.weight is not None and not s.weight.zero]
        schemes = sorted({name.split("_")[0] for name in writable})
        for name, ok, wanted in (
            ("scheme", self.scheme in schemes, f"one of {', '.join(schemes)}"),
            ("group", self.group in (0, 32, 64) or (self.group > 0 and self.group % 128 == 0),
             "0 (per channel), 32, 64 or a multiple of 128: what the GPU kernels take"),
            ("group_scales", self.group_scales in ("float", "int"), "float or int"),
            ("bits", self.bits == 0 or (4 <= self.bits <= 9 and self.scheme.startswith("w4")),
             "0 (every layer alike), or 4 to 9 with a scheme of 4-bit weights"),
            ("layers", all(name in writable for name in self.layers.values()), f"schemes out of {', '.join(writable)}"),
            ("method", self.method in METHODS, f"one of {', '.join(METHODS)}"),
            ("static_activations", self.scheme == "fp8" or not self.static_activations, "false with a scheme other than fp8"),
            ("damping", 0.0 < self.damping <= 1.0, "above 0, up to 1"),
            ("sweeps", 0 <= self.sweeps <= 100, "0 to 100"),
            ("drift", 0.0 <= self.drift <= 1.0, "0 to 1"),
            ("learn_scales", 0 <= self.learn_scales <= 100, "0 to 100 passes over the calibration text"),
            ("transform", self.transform in TRANSFORMS, f"one of {', '.join(TRANSFORMS)}"),
            ("head", self.head in ("16bit", "w8a8"), "16bit or w8a8"),
            ("samples", self.samples >= 1, "1 or more"),
            ("sequence_length", self.sequence_length >= 8, "8 or more"),
        ):
            if not ok:
                raise ValueError(f"recipe: {name} = {getattr(self, name)!r}; wants {wanted}")

    @property
    def spec(self) -> Spec:
        """The weight spec asked for, before a layer's width has its say."""
        weight = SCHEMES[self.scheme].weight
        return weight.with_group(self.group or None) if weight.num.bits == 4 else weight

    def scheme_for(self, in_features: int, place: str = "") -> Scheme:
        """What a linear of this width gets. place: "3.down" for layer 3's down projection."""
        chosen = SCHEMES.get(self.layers.get(place, ""))
        spec, act = (self.spec, SCHEMES[self.scheme].act) if chosen is None else (chosen.weight, chosen.act)
        if self.static_activations and act is not None and act.num == FP8:
            act = Spec(FP8, (None, None))
        spec = spec.with_group(fit_group(spec.group, in_features))
        whole = self.group_scales == "int" and (spec.group, spec.num, act) == (128, INT4, PER_TOKEN_INT8)
        return scheme_of(dataclasses.replace(spec, over=INT8_CHANNEL) if whole else spec, act)

    @property
    def needs_calibration(self) -> bool:
        asked = self.bits > 0 or self.static_activations or self.learn_scales > 0
        return asked or self.method != "rtn" or "smooth" in self.transform

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def with_options(self, **options: object) -> Recipe:
        """The recipe with the options that are not None in place of its own; what they decide of layers that were chosen by
        measuring is measured again. Raises ValueError as `from_dict`."""
        given = {key: value for key, value in options.items() if value is not None}
        again = self.measured and given.keys() & {"scheme", "group", "group_scales", "bits"}
        return from_dict({**self.to_dict(), **({"layers": {}, "measured": {}} if again else {}), **given})

    def describe(self) -> str:
        """In a few words."""
        steps = [*([] if self.transform == "none" else [self.transform]), *["online Hadamard"] * self.online_hadamard]
        steps.append(self.method + (f" on {self.samples} x {self.sequence_length} tokens" if self.needs_calibration else ""))
        steps += ["learned scales"] * (self.learn_scales > 0)
        steps += ["head w8a8"] * (self.head != "16bit")
        group = self.spec.group
        tile = f"chosen per layer within {self.bits:g} bits" if self.bits else f"groups of {group}" if group else "per channel"
        return f"{self.scheme}{' static' * self.static_activations}, {tile}, {' + '.join(steps)}"

    @staticmethod
    def load(path: str | Path) -> Recipe:
        """From a TOML file, or of the checkpoint in a directory. Raises FileNotFoundError, and ValueError as `from_toml` or
        where no recipe is recorded."""
        if not Path(path).is_dir():
            try:
                text = read_text(path)
            except ValueError:
                raise ValueError(f"{path} is no recipe: give a TOML file, or a directory that nybble quantize wrote") from None
            return from_toml(text)
        ours = held(read_json(Path(path) / "config.json"), "nybble", dict, where=f"{path}/config.json") or {}
        recorded = dict(held(ours, "recipe", dict, where=f"{path}/config.json: nybble") or {})
        recorded.pop("converted_from", None)  # what came after it was made
        if not recorded:
            raise ValueError(f"{path}: its config.json records no recipe; nybble quantize makes checkpoints that do")
        return from_dict(recorded)


def from_dict(values: dict[str, object]) -> Recipe:
    """Raises ValueError naming a key that is unknown, of the wrong type, or out of range."""
    types, said = typing.get_type_hints(Recipe), meanings()
    for key, value in values.items():
        if key not in types:
            raise ValueError(f"recipe: unknown key {key!r}; knows {', '.join(sorted(types))}")
        kind = typing.get_origin(types[key]) or types[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"recipe: {key} = {value!r} is a {type(value).__name__}; wants {kind.__name__}. {said[key]}")
    return Recipe(**{k: float(v) if types[k] is float else v for k, v in values.items()})


def from_toml(text: str) -> Recipe:
    """Raises ValueError for TOML that does not parse and for what `from_dict` refuses."""
    try:
        return from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe: not TOML: {error}") from error


def meanings() -> dict[str, str]:
    """What `Recipe` says of each key."""
    hints = typing.get_type_hints(Recipe, include_extras=True)
    return {key: " ".join(kind.__metadata__[0].split()) for key, kind in hints.items()}


def key_table() -> str:
    """The keys of a recipe file, as a table in Markdown."""
    blank, rows = Recipe(), ["| key | default | meaning |", "|---|---|---|"]
    for key, meaning in meanings().items():
        default = getattr(blank, key)
        shown = "none" if isinstance(default, dict) else f"`{json.dumps(default)}`"
        rows.append(f"| `{key}` | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"


def shipped_text() -> str:
    """The calibration text that comes with the package (see data/README.md)."""
    return (files("nybble.quantize") / "data" / "calibration.txt").read_text(encoding="utf-8")


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
