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

from nybble.formats.spec import (
    FP8,
    INT4,
    INT8_CHANNEL,
    PER_TOKEN_FP8,
    PER_TOKEN_INT8,
    SCHEMES,
    Scheme,
    Spec,
    fit_group,
    scheme_of,
)
from nybble.text import read_text

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
    """scheme: "w4a8", "w4a16", "w8a8", "w8a16" or "fp8". group: input channels per scale of 4-bit weights, 0 is one scale
    per channel; a layer that it does not divide takes `formats.spec.fit_group`. 8-bit weights are always per channel.
    method: "rtn" (no calibration) or "gptq".

    group_scales: "float", or "int": in groups of 128 the scales are whole multiples (0 to 16) of one per channel, which the
    integer kernel multiplies in before the sum; others read the same checkpoint as ordinary groups.
    bits: above 0, schemes are chosen layer by layer (see `auto`) within this average of bits per weight over the linears.
    layers: what was chosen, "3.down" -> name of a scheme; when given, nothing is measured. measured: why, in words.

    mse: search scales instead of absmax. damping, act_order, sweeps: see `gptq.GptqOptions`. true_activations: Hessians of
    the inputs as the quantized model rounds them. static_activations: FP8 inputs share one scale per linear, the largest on
    calibration text / 448, instead of one per token. drift: 0 to 1, how much of the error that quantized layers before
    brought in a layer's weights are moved to undo (0.5 fits calibration text less closely than 1 and does better on others).
    learn_scales: passes over the calibration tokens that tune each layer's scales and norm weights, codes as they are, towards
    the float layer's output (see `learn`).
    transform: change of basis before rounding, "rotate+smooth" one after the other; "auto" rotates where inputs are
    int8 and a rotation of the model's size is known (smooths where not, and w8a8 without online_hadamard in both cases), else
    leaves all alone. online_hadamard: the input of down_proj, where outliers are largest, is turned at run time too, in the
    kernel that makes it; only Nybble runs such a checkpoint.

    head: "16bit", or "w8a8" for the logits, rounded to nearest. A head that is the embedding stays as it is.

    samples x sequence_length: calibration tokens, taken from `calibration` (a description) with hash `text_hash`, in order.
    seed: the random signs of a rotation. made_with: versions, for the record.
    """

    scheme: str = "w4a8"
    group: int = 128
    group_scales: str = "int"
    bits: float = 0.0
    method: str = "gptq"
    mse: bool = True
    damping: float = 0.01
    act_order: bool = True
    sweeps: int = 2
    true_activations: bool = True
    static_activations: bool = False
    drift: float = 0.5
    learn_scales: int = 0
    transform: str = "auto"
    online_hadamard: bool = False
    head: str = "16bit"
    samples: int = 16
    sequence_length: int = 1024
    seed: int = 0
    calibration: str = "shipped"
    text_hash: str = ""
    made_with: str = ""
    layers: dict[str, str] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schemes = sorted({name.split("_")[0] for name, s in SCHEMES.items() if s.weight is not None})
        for name, ok, wanted in (
            ("scheme", self.scheme in schemes, f"one of {', '.join(schemes)}"),
            ("group", self.group == 0 or self.group >= 32, "0 (per channel) or 32 and more"),
            ("group_scales", self.group_scales in ("float", "int"), "float or int"),
            ("bits", self.bits == 0 or (4 <= self.bits <= 9 and self.scheme.startswith("w4")),
             "0 (every layer alike), or 4 to 9 with a scheme of 4-bit weights"),
            ("layers", all(name in SCHEMES for name in self.layers.values()), f"schemes out of {', '.join(SCHEMES)}"),
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
        assert weight is not None
        return weight.with_group(self.group or None) if weight.num.bits == 4 else weight

    def scheme_for(self, in_features: int, place: str = "") -> Scheme:
        """What a linear of this width gets. place: "3.down" for layer 3's down projection."""
        chosen = SCHEMES.get(self.layers.get(place, ""))
        spec, act = (self.spec, SCHEMES[self.scheme].act) if chosen is None else (chosen.weight, chosen.act)
        assert spec is not None
        if self.static_activations and act == PER_TOKEN_FP8:
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
        """The recipe with the options that are not None in place of its own. Raises ValueError as `from_dict`."""
        return from_dict({**self.to_dict(), **{key: value for key, value in options.items() if value is not None}})

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
        """From a TOML file. Raises FileNotFoundError, and ValueError as `from_toml`."""
        return from_toml(read_text(path))

    def to_toml(self) -> str:
        """One `key = value` a line, tables last. JSON's scalars are TOML's."""
        values = self.to_dict()
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in tables]
        for key, table in tables.items():
            lines += [f"[{key}]", *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in table.items())]
        return "\n".join(lines) + "\n"


def from_dict(values: dict[str, object]) -> Recipe:
    """Raises ValueError naming a key that is unknown, of the wrong type, or out of range."""
    types = typing.get_type_hints(Recipe)
    known = {field.name for field in dataclasses.fields(Recipe)}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"recipe: unknown key {key!r}; knows {', '.join(sorted(known))}")
        kind = typing.get_origin(types[key]) or types[key]
        if kind is float and type(value) is int:
            continue
        if type(value) is not kind:
            raise ValueError(f"recipe: {key} = {value!r} is a {type(value).__name__}; wants {kind.__name__}")
    return Recipe(**{k: float(v) if types[k] is float else v for k, v in values.items()})  # type: ignore[arg-type]


def from_toml(text: str) -> Recipe:
    """Raises ValueError for TOML that does not parse and for what `from_dict` refuses."""
    try:
        return from_dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe: not TOML: {error}") from error


def shipped_text() -> str:
    """The calibration text that comes with the package (see data/README.md)."""
    return (files("nybble.quantize") / "data" / "calibration.txt").read_text(encoding="utf-8")


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
