"""Smoothing: move the range of outlier input channels from activations, which are rounded per token, into weights.

The same float model: x / s meets W * s, and s goes into what made x (a norm's weight, V's rows, the up projection's rows).
Follows QQQ's adaptive search (arXiv 2406.09904): one threshold per site, channels that exceed it are shrunk to it, all
others are left alone. Beyond it: at o_proj with grouped heads the heads that share a V channel share its factor, instead
of the site being skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.kernels.types import LayerKV, Step
from nybble.models.config import ModelConfig
from nybble.models.decoder import Layer
from nybble.quantize.calibrate import as_seen
from nybble.quantize.recipe import Recipe
from nybble.quantize.rtn import absmax_scale

ALL_SITES = ("qkv", "o", "gate_up", "down")
ROWS = 512  # calibration rows that a search looks at, spread over all
THRESHOLDS = tuple(0.85**step for step in range(40))  # of the largest input, down to 0.2 %


def smooth_layer(
    layer: Layer, hidden: Tensor, kv: LayerKV, step: Step, config: ModelConfig, recipe: Recipe, sites: tuple[str, ...]
) -> dict[str, Tensor]:
    """Search the factors of a float layer's sites ("qkv", "o", "gate_up", "down") on its input hidden [T, H].

    -> the layer's tensors that change, by checkpoint name, fp32: an exact rewriting of the layer.
    """
    every = max(1, hidden.shape[0] // ROWS)
    inputs: dict[str, Tensor] = {}
    layer.run(hidden, kv, step, lambda name, x: inputs.update({name.rpartition(".")[2]: x[::every].float()}))
    parts = {part.name.rpartition(".")[2]: part for projection in layer.projections for part in projection.parts}
    weights = {name: _dense(part.weight) for name, part in parts.items()}
    biases = {name: part.bias.to(hidden.device).float() for name, part in parts.items() if part.bias is not None}
    at = parts["q_proj"].name.removesuffix("self_attn.q_proj")
    changed: dict[str, Tensor] = {}

    def scale_columns(names: tuple[str, ...], factors: Tensor) -> None:
        for name in names:
            weights[name] = weights[name] * factors
            changed[f"{parts[name].name}.weight"] = weights[name]

    def shrink_rows(name: str, factors: Tensor) -> None:
        weights[name] = weights[name] / factors[:, None]
        changed[f"{parts[name].name}.weight"] = weights[name]
        if name in biases:
            changed[f"{parts[name].name}.bias"] = biases[name] / factors

    for site, names, norm in (
        ("qkv", ("q_proj", "k_proj", "v_proj"), "input_layernorm"),
        ("gate_up", ("gate_proj", "up_proj"), "post_attention_layernorm"),
    ):
        if site in sites:
            factors = search(inputs[names[0]], torch.cat([weights[name] for name in names]), recipe)
            scale_columns(names, factors)
            weight = (layer.input_norm if site == "qkv" else layer.post_norm).weight
            changed[f"{at}{norm}.weight"] = weight / factors
    if "o" in sites:
        shape = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        factors = search(inputs["o_proj"], weights["o_proj"], recipe, shape)
        scale_columns(("o_proj",), factors)
        shrink_rows("v_proj", factors.view(shape)[:, 0].flatten())
    if "down" in sites:
        factors = search(inputs["down_proj"], weights["down_proj"], recipe)
        scale_columns(("down_proj",), factors)
        shrink_rows("up_proj", factors)
    return changed


def search(x: Tensor, weight: Tensor, recipe: Recipe, shared: tuple[int, int, int] | None = None) -> Tensor:
    """The factors that lose least when input and weight are both rounded (weights to nearest, absmax scales).

    x float [M, K], weight float [N, K] -> float32 [K], at least 1. shared: (groups, heads of a group, channels) of K, where
    the heads of a group must agree.
    """
    largest = x.abs().amax(0)
    if shared is not None:
        largest = largest.view(shared).amax(1, keepdim=True).expand(shared).reshape(-1)
    scheme = recipe.scheme_for(weight.shape[1])
    spec = scheme.weight
    assert spec is not None
    wanted = x @ weight.t()
    best, best_loss = torch.ones_like(largest), torch.inf
    for share in THRESHOLDS:
        factors = (largest / (share * largest.amax()).clamp_min(1e-10)).clamp_min(1.0)
        scaled = weight * factors
        rounded = dequantize(quantize_weight(scaled, spec, absmax_scale(scaled, spec, torch.float32)))
        loss = float((as_seen(x / factors, scheme.act) @ rounded.t() - wanted).square().sum())
        if loss < best_loss:
            best, best_loss = factors, loss
    return best


def _dense(weight: QTensor | Tensor | None) -> Tensor:
    assert weight is not None
    return dequantize(weight) if isinstance(weight, QTensor) else weight.float()
