"""KV cache scales: every name that tools have given them, and what a config says the cache should be.

A scale is a multiplier, x = code * scale, per layer, K and V apart. Found when the checkpoint is opened; a value that cannot be
a scale (zero, negative, NaN) is an error when it is asked for.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from nybble.checkpoint.store import Store
from nybble.text.errors import BrokenFile, held, read_json

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# (end of the tensor's name, what it is), first match wins. "kv": one scale for both. "q": for 8-bit attention arithmetic only.
NAMES = tuple((re.compile(pattern + "$"), role) for pattern, role in (
    (r"\.kv_scale|\.kv_cache_scaling_factor", "kv"),
    (r"\.k_scale|\.k_proj\.output_scale|\.k_cache\.scale", "k"),
    (r"\.v_scale|\.v_proj\.output_scale|\.v_cache\.scale", "v"),
    (r"\.q_scale|\.q_proj\.output_scale|\.prob_output_scale|\.prob_scale|\.self_attn\.q\.scale", "q"),
    (r"\.(self_attn|attn|attention)\.[kvq]_zero_point", "zero"),
    (r"\.[kv]_proj\.[kv]_bias", "bias"),
))
SIDE_FILE = "kv_cache_scales.json"  # legacy vLLM and SGLang
# (encoding a scale was made for, encoding it is used on) -> factor. A scale made so that the largest value lands on fnuz's 240
# is widened to e4m3fn's 448 and never clips, whoever made it. The other way, the same byte means half as much on fnuz: doubled.
FNUZ_FACTORS = {("e4m3fnuz", "e4m3fn"): 240.0 / 448.0, ("e4m3fn", "e4m3fnuz"): 2.0}
TORCH_NAMES = {"float8_e4m3fn": "fp8", "float8_e4m3fnuz": "fp8", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8",
               "float8_e5m2": "fp8_e5m2", "fp8_e5m2": "fp8_e5m2"}


def role_of(name: str) -> str | None:
    """"kv", "k", "v", "q", "zero", "bias", or None for a tensor that is no part of the KV cache."""
    if not LAYER.search(name) and not name.startswith("transformer."):
        return None
    return next((role for pattern, role in NAMES if pattern.search(name)), None)


Scale = float | Tensor  # one for all heads, or float32 [kv_heads]


def read_scales(path: Path, store: Store, heads: int | None, factor: float = 1.0) -> dict[int, dict[str, Scale]]:
    """{layer: {"k": scale, "v": scale}} with what there is. heads: of K and V (None: not known).

    Raises ValueError for affine KV, which nothing here can serve, and for scales of another shape."""
    found: dict[int, dict[str, Scale]] = {}
    for name in store.names():
        role = role_of(name)
        if role == "bias" or (role == "zero" and bool(store.tensor(name).count_nonzero())):
            raise ValueError(f"{name}: an affine (biased) KV cache is not supported; re-export without it, "
                             "or delete these tensors and serve with --kv int8")
        layer = LAYER.search(name)
        if role not in ("k", "v", "kv") or layer is None:
            continue
        values, shape = store.tensor(name).float().flatten() * factor, store.shape(name)
        if values.numel() != 1 and (values.numel() != max(shape) or heads not in (None, values.numel())):
            raise ValueError(f"{name} has shape {list(shape)}: wants one scale, or one per KV head ({heads})")
        value = float(values[0]) if bool((values == values[0]).all()) else values
        for side in role:
            # The specific name wins over the shared one, in whatever order they come.
            if role != "kv" or side not in found.get(int(layer[1]), {}):
                found.setdefault(int(layer[1]), {})[side] = value
    for layer, scale in _side_file(path).items():
        found.setdefault(layer, {"k": scale, "v": scale})
    return found


def pair(scales: dict[str, Scale], layer: int) -> tuple[Scale, Scale]:
    """(K, V). Only one of the two serves both. Raises ValueError for a value that is no scale."""
    k, v = (scales[side] if side in scales else scales[other] for side, other in ("kv", "vk"))
    for side, scale in (("K", k), ("V", v)):
        for value in scale.tolist() if isinstance(scale, Tensor) else [scale]:
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"layer {layer} has {side} scale {value}: its calibration is broken (a layer that was never "
                                 "run); calibrate again, or serve with --kv int8")
    return k, v


def kv_of_config(config: dict[str, Any]) -> str | None:
    """What TGI's keys `kv_cache_torch_dtype` and `kv_cache_dtype` (its tool wrote one, its loader read the other) ask for."""
    named = {key: config[key] for key in ("kv_cache_torch_dtype", "kv_cache_dtype") if held(config, key, str)}
    kinds = {TORCH_NAMES.get(str(value).removeprefix("torch.")) for value in named.values()}
    if not named or set(named.values()) == {"auto"}:
        return None
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"config.json asks for KV cache {named}: {', '.join(TORCH_NAMES)} are supported; both keys must agree")
    return kinds.pop()


def _side_file(path: Path) -> dict[int, float]:
    file = path / SIDE_FILE
    if not file.is_file():
        return {}
    try:
        ranks = read_json(file)["kv_cache"]["scaling_factor"]
        merged: dict[int, float] = {}
        for layers in ranks.values():
            for layer, scale in layers.items():
                merged[int(layer)] = max(float(scale), merged.get(int(layer), -math.inf))
        return merged
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenFile(file, f"it is no scale file: {error!r}") from error
