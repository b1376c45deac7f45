"""Learned scales: once a layer's codes are fixed, its scales and norms are tuned so that the whole layer's output is the float
layer's again, through attention and SiLU, activations rounded as they will be.

Not a rounding method: no code changes, and no backward pass is longer than one layer. The one idea: rounding was chosen
linear by linear, and what is left over can be made up for where errors meet, by numbers the checkpoint stores anyway. After
OmniQuant (arXiv 2308.13137) and the scale training of EfficientQAT (arXiv 2407.11062).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nybble.formats.qtensor import QTensor, expand, join
from nybble.kernels.reference import hadamard_blocks, head_norm, rotate
from nybble.models.decoder import Layer
from nybble.nn.linear import Projection
from nybble.quantize.calibrate import as_seen, split
from nybble.quantize.rtn import settle, storable, with_scale

RATE = 1e-3  # of Adam, on numbers that multiply what they start from
WORSE = 1.1  # times the loss: more than rounding's having seen the last sequence explains


@dataclass(frozen=True)
class Learned:
    """layer: with what was learned in it. weights: by linear. norms: the layer's two, fp32."""

    layer: Layer
    weights: dict[str, QTensor]
    norms: tuple[Tensor, Tensor]


class _Scales:
    """A projection as a function of its scales' factors [N, G]."""

    def __init__(self, projection: Projection, stored: torch.dtype) -> None:
        self.parts, self.stored = projection.parts, stored
        self.q = join([part.weight for part in self.parts])
        self.codes = self.q.codes.float()
        self.scale = self.q.scale if self.q.over is None else self.q.scale * self.q.over
        biases = [part.bias for part in self.parts if part.bias is not None]
        self.bias = torch.cat([bias.float().to(self.codes.device) for bias in biases]) if biases else None
        self.factors = torch.zeros_like(self.scale).requires_grad_()

    def settled(self) -> Tensor:
        return settle(self.scale * (1 + self.factors.detach()), self.q.spec, self.stored)

    def __call__(self, x: Tensor) -> Tensor:
        part = self.parts[0]
        seen = x + (as_seen(x.detach(), part.act, part.act_scale) - x.detach())
        wanted = self.scale * (1 + self.factors)
        scale = wanted + (self.settled() - wanted).detach()
        if scale.shape[1] == 1:
            out = F.linear(seen, self.codes) * scale[:, 0]
        else:
            out = F.linear(seen, self.codes * expand(scale, self.q.shape))
        return out if self.bias is None else out + self.bias

    def weights(self) -> dict[str, QTensor]:
        q = with_scale(self.q.spec, self.q.codes, self.settled(), self.stored)
        return {part.name: piece for part, piece in zip(self.parts, split(q, self.parts))}


class TrainedLayer:
    """A quantized layer as a differentiable function of one sequence."""

    def __init__(self, layer: Layer, length: int, stored: torch.dtype) -> None:
        self.layer, self.stored = layer, stored
        self.linears = [_Scales(projection, stored) for projection in layer.projections]
        self.norms = [torch.zeros_like(norm.weight).requires_grad_() for norm in (layer.input_norm, layer.post_norm)]
        device = layer.input_norm.weight.device
        self.positions = torch.arange(length, device=device)
        window = layer.attention.window
        far = self.positions[:, None] - self.positions[None, :]
        self.mask = (far >= 0) & (far < window) if 0 < window < length else None

    @property
    def learned(self) -> list[Tensor]:
        return [*self.norms, *(linear.factors for linear in self.linears)]

    def norm_weights(self) -> tuple[Tensor, Tensor]:
        a, b = (storable(norm.weight * (1 + factor.detach()), self.stored)
                for norm, factor in zip((self.layer.input_norm, self.layer.post_norm), self.norms))
        return a, b

    def _norm(self, x: Tensor, which: int) -> Tensor:
        norm = (self.layer.input_norm, self.layer.post_norm)[which]
        wanted = norm.weight * (1 + self.norms[which])
        weight = wanted + (self.norm_weights()[which] - wanted).detach()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * weight

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 [L, H] -> the same after the layer."""
        a, (qkv, o, gate_up, down) = self.layer.attention, self.linears
        heads = qkv(self._norm(x, 0)).view(x.shape[0], -1, a.head_dim)
        q, k, v = heads.split((heads.shape[1] - 2 * a.kv_heads, a.kv_heads, a.kv_heads), 1)
        q = q if a.q_norm is None else head_norm(q, a.q_norm, a.eps)
        k = k if a.k_norm is None else head_norm(k, a.k_norm, a.eps)
        q, k = (rotate(each, self.positions, a.cos_sin) for each in (q, k))
        k, v = (each.repeat_interleave(q.shape[1] // a.kv_heads, 1) for each in (k, v))
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        # The fused backward passes on a GPU add in no fixed order.
        with sdpa_kernel(SDPBackend.MATH) if x.is_cuda else nullcontext():
            seen = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.mask is None)
        x = x + o(seen[0].transpose(0, 1).flatten(1))
        gate, up = gate_up(self._norm(x, 1)).chunk(2, -1)
        inner = F.silu(gate) * up
        if self.layer.mlp.hadamard:
            inner = hadamard_blocks(inner, self.layer.mlp.hadamard)
        return x + down(inner)


def learn_scales(layer: Layer, inputs: Sequence[Tensor], wanted: Sequence[Tensor], passes: int, seed: int,
                 stored: torch.dtype, rate: float = RATE) -> Learned:
    """Tune a quantized, editable layer's scales and norm weights. inputs, wanted: a sequence's residual stream [L, H] each,
    before the layer as the quantized model has it, and after it as the float model has it.

    The loss is the error's share of each token's energy, mean over tokens. Adam, one sequence a step, `passes` over all but
    the last, rates falling to zero. Nothing is kept if the last sequence, which is not learned from, comes out far worse or
    NaN. On a GPU products are TF32.
    """
    model = TrainedLayer(layer, inputs[0].shape[0], stored)

    def loss(i: int) -> Tensor:
        x, y = inputs[i].float(), wanted[i].float()
        return ((model(x) - y).square().sum(-1) / y.square().sum(-1).clamp_min(1e-20)).mean()

    judge = len(inputs) - 1
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad():
            first = float(loss(judge))
        adam = torch.optim.Adam(model.learned, lr=rate, betas=(0.9, 0.95), foreach=False)
        order = torch.cat([torch.randperm(judge, generator=torch.Generator().manual_seed(seed + p))
                           for p in range(passes)]).tolist()
        with torch.enable_grad():
            for step, i in enumerate(order):
                adam.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 4) * (1 - step / len(order))
                adam.zero_grad()
                loss(i).backward()
                adam.step()
        with torch.no_grad():
            last = float(loss(judge))
    finally:
        torch.set_float32_matmul_precision(before)
    weights = {name: q for linear in model.linears for name, q in linear.weights().items()}
    norms = model.norm_weights()
    if not last < WORSE * first:
        return Learned(layer, {}, (layer.input_norm.weight, layer.post_norm.weight))
    for name, q in weights.items():
        part = layer.part(name)
        layer.projection(name).replace(name, q, part.act, part.act_scale)
    tuned = replace(layer, input_norm=replace(layer.input_norm, weight=norms[0]),
                    post_norm=replace(layer.post_norm, weight=norms[1]))
    return Learned(tuned, weights, norms)
