"""Smoothing: move the range of outlier input channels from activations, which are rounded per token, into weights.

The same float model: x / s meets W * s, and s goes into what made x (a norm's weight, V's rows, the up projection's rows).
Follows QQQ's adaptive search (arXiv 2406.09904): one threshold per site, channels that exceed it are shrunk to it, all
others are left alone; SmoothQuant's and AWQ's factors compete with it. Beyond them: at o_proj with grouped heads the
heads that share a V channel share its factor, instead of the site being skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nybble.formats.qtensor import dense, dequantize
from nybble.formats.spec import Scheme
from nybble.kernels.types import LayerKV, Step
from nybble.models.config import ModelConfig
from nybble.models.decoder import Layer
from nybble.quantize.calibrate import as_seen
from nybble.quantize.rtn import quantize_rtn

# What makes a site's input, and takes the factors' inverse: a norm, or rows of a linear.
MAKERS = {"qkv": "input_layernorm", "o": "v_proj", "gate_up": "post_attention_layernorm", "down": "up_proj"}
ROWS = 512  # calibration rows that a search looks at, spread over all
POWERS = (0.2, 0.35, 0.5, 0.65, 0.8)
THRESHOLDS = tuple(0.7**step for step in range(18))  # of the largest input, down to 0.2 %


def smooth_layer(layer: Layer, hidden: Tensor, kv: LayerKV, step: Step, config: ModelConfig, schemes: Mapping[str, Scheme]
                 ) -> dict[str, Tensor]:
    """Search the factors of a float layer's sites on its input hidden [T, H], but of down's where its input is turned at run
    time. schemes: by module, what its linears will be rounded to.

    -> the layer's tensors that change, by checkpoint name, fp32: an exact rewriting of the layer.
    """
    every = max(1, hidden.shape[0] // ROWS)
    inputs: dict[str, Tensor] = {}
    layer.run(hidden, kv, step, lambda name, x: inputs.update({name.rpartition(".")[2]: x[::every].float()}))
    parts = {part.name.rpartition(".")[2]: part for projection in layer.projections for part in projection.parts}
    weights = {name: dense(part.weight) for name, part in parts.items()}
    biases = {name: part.bias.to(hidden.device).float() for name, part in parts.items() if part.bias is not None}
    at = parts["q_proj"].name.removesuffix("self_attn.q_proj")
    changed: dict[str, Tensor] = {}

    norms = {"input_layernorm": layer.input_norm.weight, "post_attention_layernorm": layer.post_norm.weight}
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    for (site, before), projection in zip(MAKERS.items(), layer.projections):
        if site == "down" and config.hadamard:
            continue
        names, shared = [part.name.rpartition(".")[2] for part in projection.parts], heads if site == "o" else None
        stacked = torch.cat([weights[name] for name in names])
        factors = search(inputs[names[0]], stacked, schemes[parts[names[0]].name], shared)
        for name in names:
            changed[f"{parts[name].name}.weight"] = weights[name] = weights[name] * factors
        if shared is not None:
            factors = factors.view(shared)[:, 0].flatten()
        if before in norms:
            changed[f"{at}{before}.weight"] = norms[before] / factors
            continue
        changed[f"{parts[before].name}.weight"] = weights[before] = weights[before] / factors[:, None]
        if before in biases:
            changed[f"{parts[before].name}.bias"] = biases[before] / factors
    return changed


def search(x: Tensor, weight: Tensor, scheme: Scheme, shared: tuple[int, int, int] | None = None) -> Tensor:
    """The factors that lose least when input and weight are both rounded (weights to nearest, absmax scales).

    Candidates: every threshold (QQQ); max|x|^a / max|w|^(1-a) (SmoothQuant, arXiv 2211.10438); mean|x|^a (AWQ, arXiv
    2306.00978). x float [M, K], weight float [N, K] -> float32 [K], at least 1. shared: (groups, heads of a group, channels)
    of K, where the heads of a group must agree.
    """
    def agree(values: Tensor) -> Tensor:
        return values if shared is None else values.view(shared).amax(1, keepdim=True).expand(shared).reshape(-1)

    largest, usual = agree(x.abs().amax(0)), agree(x.abs().mean(0)).clamp_min(1e-8)
    heaviest = agree(weight.abs().amax(0)).clamp_min(1e-8)
    trials = [(largest / (part * largest.amax()).clamp_min(1e-10)).clamp_min(1.0) for part in THRESHOLDS]
    for power in POWERS:
        trials += [largest.clamp_min(1e-6) ** power / heaviest ** (1 - power), usual**power]
    wanted = x @ weight.t()
    share = 1.0 / wanted.square().sum(1, keepdim=True).clamp_min(1e-20)  # every token counts alike, massive ones included
    best, best_loss = torch.ones_like(largest), torch.inf
    for factors in trials:
        factors = (factors / factors.amin()).clamp_max(1e4)
        scaled = weight * factors
        rounded = dequantize(quantize_rtn(scaled, scheme.weight, torch.float32))
        loss = float((as_seen(x / factors, scheme.act) @ rounded.t() - wanted).square().mul_(share).sum())
        if loss < best_loss:
            best, best_loss = factors, loss
    return best
