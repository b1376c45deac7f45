"""Rotary position embedding: which angle each position turns each channel pair by. The turning itself is a kernel.

One fp32 table of cosines and sines per model, made once: every scaling method is only another list of frequencies.
Methods: linear (position interpolation, arXiv 2306.15595), llama3 (Llama 3.1's bands), yarn (arXiv 2309.00071). "dynamic"
leaves frequencies as they are up to the length the model was made for, and this engine goes no further.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """base: theta. partial: share of the head's channels that turn. scaling: the method's own numbers."""

    base: float = 10000.0
    kind: str = "default"
    partial: float = 1.0
    scaling: Mapping[str, float | bool | None] = field(default_factory=dict)


# Per method: the numbers it needs, and those it may have.
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def cos_sin_table(rope: Rope, head_dim: int, max_position: int, device: torch.device | str) -> Tensor:
    """float32 [max_position, R]: cosines of R / 2 angles, then their sines; R = partial * head_dim channels turn.

    Angles are fp32 products of position and frequency, as the models were trained with.
    """
    frequencies, factor = _frequencies(rope, int(head_dim * rope.partial))
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (torch.cat((angles.cos(), angles.sin()), -1) * factor).to(device)


def _frequencies(rope: Rope, rotary: int) -> tuple[Tensor, float]:
    """float32 [R / 2] radians per position, and the factor on cosines and sines that yarn scales attention by."""
    inverse = 1.0 / rope.base ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
    s = rope.scaling
    if rope.kind == "linear":
        return inverse / s["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, s), 1.0
    if rope.kind == "yarn":
        return _yarn(inverse, s, rope.base, rotary), _yarn_attention_factor(s)
    assert rope.kind in ("default", "dynamic"), rope.kind
    return inverse, 1.0


def _llama3(inverse: Tensor, s: Mapping[str, float]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended."""
    turns = s["original_max_position_embeddings"] * inverse / (2 * math.pi)  # over the original context
    keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
    return (1 - keep) * inverse / s["factor"] + keep * inverse


def _yarn(inverse: Tensor, s: Mapping[str, float], base: float, rotary: int) -> Tensor:
    def channel(turns: float) -> float:  # the pair that makes this many turns over the original context
        return rotary * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(s.get("beta_fast") or 32), channel(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = (torch.arange(rotary // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return inverse / s["factor"] * stretched + inverse * (1 - stretched)


def _yarn_attention_factor(s: Mapping[str, float]) -> float:
    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])

    def grow(weight: float) -> float:
        return 0.1 * weight * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0

    if s.get("mscale") and s.get("mscale_all_dim"):
        return grow(s["mscale"]) / grow(s["mscale_all_dim"])
    return grow(1.0)
