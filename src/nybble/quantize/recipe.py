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
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from nybble.formats.spec import SCHEMES, Scheme, Spec, fit_group, scheme_of
from nybble.text import read_text

METHODS = ("rtn", "gptq")
TRANSFORMS = ("auto", "none", "smooth", "rotate")


@dataclass(frozen=True)
class Recipe:
    """scheme: "w4a8", "w4a16", "w8a8", "w8a16" or "fp8". group: input channels per scale of 4-bit weights, 0 is one scale
    per channel; a layer that it does not divide takes `formats.spec.fit_group`. 8-bit weights are always per channel.
    method: "rtn" (no calibration) or "gptq".

    mse: search scales instead of absmax. damping, act_order, sweeps: see `gptq.GptqOptions`. true_activations: Hessians of
    the inputs as the quantized model rounds them. drift: 0 to 1, how much of the error that quantized layers before
    brought in a layer's weights are moved to undo (0.5 fits calibration text less closely than 1 and does better on others).
    transform: change of basis before rounding; "auto" rotates 4-bit weights with 8-bit activations where a rotation of the
    model's size is known, smooths them where not, and leaves everything else alone.

    samples x sequence_length: calibration tokens, taken from `calibration` (a description) with hash `text_hash`, in order.
    seed: the random signs of a rotation.
    """

    scheme: str = "w4a8"
    group: int = 128
    method: str = "gptq"
    mse: bool = True
    damping: float = 0.01
    act_order: bool = True
    sweeps: int = 2
    true_activations: bool = True
    drift: float = 0.5
    transform: str = "auto"
    samples: int = 16
    sequence_length: int = 1024
    seed: int = 0
    calibration: str = "shipped"
    text_hash: str = ""

    def __post_init__(self) -> None:
        schemes = sorted({name.split("_")[0] for name, s in SCHEMES.items() if s.weight is not None})
        for name, ok, wanted in (
            ("scheme", self.scheme in schemes, f"one of {', '.join(schemes)}"),
            ("group", self.group == 0 or self.group >= 32, "0 (per channel) or 32 and more"),
            ("method", self.method in METHODS, f"one of {', '.join(METHODS)}"),
            ("damping", 0.0 < self.damping <= 1.0, "above 0, up to 1"),
            ("sweeps", 0 <= self.sweeps <= 100, "0 to 100"),
            ("drift", 0.0 <= self.drift <= 1.0, "0 to 1"),
            ("transform", self.transform in TRANSFORMS, f"one of {', '.join(TRANSFORMS)}"),
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

    def scheme_for(self, in_features: int) -> Scheme:
        """What a linear of this width gets."""
        spec = self.spec
        return scheme_of(spec.with_group(fit_group(spec.group, in_features)), SCHEMES[self.scheme].act)

    @property
    def needs_calibration(self) -> bool:
        return self.method != "rtn" or self.transform == "smooth"

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def with_options(self, **options: object) -> Recipe:
        """The recipe with the options that are not None in place of its own. Raises ValueError as `from_dict`."""
        return from_dict({**self.to_dict(), **{key: value for key, value in options.items() if value is not None}})

    def describe(self) -> str:
        """In a few words."""
        steps = [] if self.transform == "none" else [self.transform]
        steps.append(self.method + (f" on {self.samples} x {self.sequence_length} tokens" if self.needs_calibration else ""))
        group = self.spec.group
        return f"{self.scheme}, {f'groups of {group}' if group else 'per channel'}, {' + '.join(steps)}"

    @staticmethod
    def load(path: str | Path) -> Recipe:
        """From a TOML file. Raises FileNotFoundError, and ValueError as `from_toml`."""
        return from_toml(read_text(path))

    def to_toml(self) -> str:
        """One `key = value` a line. JSON's scalars are TOML's."""
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.to_dict().items())


def from_dict(values: dict[str, object]) -> Recipe:
    """Raises ValueError naming a key that is unknown, of the wrong type, or out of range."""
    types = typing.get_type_hints(Recipe)
    known = {field.name for field in dataclasses.fields(Recipe)}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"recipe: unknown key {key!r}; knows {', '.join(sorted(known))}")
        kind = types[key]
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
