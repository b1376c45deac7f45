"""One decoder for every dense family: embedding, layers, norm, logits. It knows shapes, not schemes, kernels or requests.

The residual stream travels as a pair (x, residual) whose sum the next norm takes, so that addition, norm and quantization
are one op. Calibration runs the same code a layer at a time, with `observe` told the float input of every linear.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor
from nybble.formats.spec import Spec
from nybble.kernels.types import LayerKV, Rows, Step
from nybble.models.config import ModelConfig
from nybble.nn.attention import Attention
from nybble.nn.embed import Embedding, Head
from nybble.nn.linear import Observe, Part, Projection
from nybble.nn.mlp import Mlp
from nybble.nn.norm import RmsNorm
from nybble.nn.parallel import ALONE, Group

# A forward pass that stops at each attention: yields (attention, queries, cache), is sent what the queries see, and ends with
# (x, residual). Between two stops nothing depends on how the step's tokens are divided into rows.
Pieces = Generator[tuple[Attention, Tensor, LayerKV], Tensor | Rows, tuple[Tensor, Tensor | None]]


def attend(pieces: Pieces, step: Step) -> tuple[Tensor, Tensor | None]:
    """Run pieces to their end, attention included."""
    try:
        attention, q, kv = next(pieces)
        while True:
            attention, q, kv = pieces.send(attention.attend(q, kv, step))
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class Layer:
    """One block of the decoder. `projections` are its linears, grouped by shared input, in the order they run."""

    input_norm: RmsNorm
    attention: Attention
    post_norm: RmsNorm
    mlp: Mlp

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.attention.qkv, self.attention.o, self.mlp.gate_up, self.mlp.down

    def __call__(
        self, x: Tensor, residual: Tensor | None, kv: LayerKV, step: Step, observe: Observe | None = None
    ) -> tuple[Tensor, Tensor]:
        """[T, H] and what is still to be added to it -> the same pair after the layer."""
        return attend(self.pieces(x, residual, kv, step, observe), step)

    def pieces(self, x: Tensor, residual: Tensor | None, kv: LayerKV, step: Step, observe: Observe | None = None,
               rows: Tensor | None = None) -> Pieces:
        """rows: int64 [S], tokens that go on behind the attention; None: all."""
        quantize = observe is None
        normed, residual = self.input_norm(x, residual, quantize and self.attention.qkv.takes is not None)
        attended = yield self.attention, self.attention.project(normed, kv, step, observe), kv
        if rows is not None:
            attended = Rows(*(part[rows] for part in attended)) if isinstance(attended, Rows) else attended[rows]
            residual = residual[rows]
            if not len(rows):
                return residual, residual
        x = self.attention.o(attended if isinstance(attended, Rows) else attended.flatten(1), observe)
        normed, residual = self.post_norm(x, residual, quantize and self.mlp.gate_up.takes is not None)
        return self.mlp(normed, observe), residual

    def run(self, hidden: Tensor, kv: LayerKV, step: Step, observe: Observe | None = None) -> Tensor:
        """The layer as a function of the residual stream: [T, H] -> [T, H]."""
        x, residual = self(hidden, None, kv, step, observe)
        return (x.float() + residual.float()).to(hidden.dtype)

    def projection(self, name: str) -> Projection:
        """Of a linear, by full name or its last component ("q_proj"). Raises KeyError saying which there are."""
        last = name.rpartition(".")[2]
        for projection in self.projections:
            if last in (n.rpartition(".")[2] for n in projection.names):
                return projection
        raise KeyError(f"no linear {name!r}; there are {', '.join(n for p in self.projections for n in p.names)}")

    def part(self, name: str) -> Part:
        """One linear's name, shape and, in an editable model, canonical weight."""
        return self.projection(name).part(name)

    def replace(self, name: str, weight: QTensor | Tensor, act: Spec | None) -> None:
        """Swap one linear's weight [N, K], also where it is fused; joined and packed again on next use. The model must have
        been loaded with editable=True (ValueError)."""
        self.projection(name).replace(name, weight, act)


class Decoder:
    """Owns the weights on their device.

    config (with this rank's heads), device, dtype (of activations), layers, embedding, norm, head, group (of ranks that run the
    same steps). Raises nothing of its own: what can be wrong was found at load.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding, layers: Sequence[Layer], norm: RmsNorm, head: Head,
                 device: torch.device, dtype: torch.dtype, group: Group = ALONE) -> None:
        self.config, self.device, self.dtype, self.group = config, device, dtype, group
        self.embedding, self.layers, self.norm, self.head = embedding, tuple(layers), norm, head

    def hidden(self, step: Step, kv: Sequence[LayerKV]) -> Tensor:
        """The normed hidden states that logits are made of: [S, H] for `step.logit_rows`, [T, H] when that is None.

        Writes K and V of the step's tokens to `kv`, one per layer.
        """
        return self.final(*attend(self.pieces(step, kv), step))

    def pieces(self, step: Step, kv: Sequence[LayerKV]) -> Pieces:
        """Embedding and layers; what they end with, of `step.logit_rows` alone, is for `final`."""
        x, residual = self.embedding(step.token_ids), None
        for layer, cache in zip(self.layers, kv, strict=True):
            rows = step.logit_rows if layer is self.layers[-1] else None
            x, residual = yield from layer.pieces(x, residual, cache, step, rows=rows)
        return x, residual

    def final(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The last norm."""
        return x if x.shape[0] == 0 else self.norm(x, residual, False)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [S, H] -> float32 [S, V]."""
        return self.head(hidden)

    def forward(self, step: Step, kv: Sequence[LayerKV]) -> Tensor:
        """-> float32 logits [S, V] of `step.logit_rows`, of all T tokens when that is None."""
        return self.head(self.hidden(step, kv))

    def linears(self) -> Iterator[Projection]:
        """Every projection in the order of the forward pass, the head's last when it is quantized."""
        for layer in self.layers:
            yield from layer.projections
        if isinstance(self.head.weight, Projection):
            yield self.head.weight

    def explain(self) -> list[dict[str, Any]]:
        """Per packed linear: name, scheme, kernel, refusals ((kernel, reason), ...), bits_per_weight. Linears that run as
        one share a row: "model.layers.0.self_attn.q_proj,k_proj,v_proj"."""
        return [row for projection in self.linears() for row in projection.explain()]
