"""Offline rotation: the same float model in a basis where no channel is an outlier (QuaRot, arXiv 2404.00456, stages 1a, 1b).

Not an op at run time, but for one that is asked for: the result is an ordinary checkpoint of the same architecture with norms
of 1 and its own lm_head.
The one idea: RMSNorm commutes with an orthogonal matrix once its weight is folded into the linears behind it, so the whole
residual stream may be turned by a randomized Hadamard matrix, which spreads an outlier channel over all channels.

Values are rotated within each head too (V's rows and o_proj's columns). Q and K are not. The input of down_proj is when the
recipe says online_hadamard: down_proj's columns are turned here, its input in the kernel that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor, dense, dequantize
from nybble.formats.spec import Spec
from nybble.kernels.reference import hadamard_blocks
from nybble.models.config import ModelConfig
from nybble.models.load import Source


def can_rotate(config: ModelConfig) -> str | None:
    """Why a model cannot be rotated, or None."""
    for what, size in (("hidden size", config.hidden_size), ("head size", config.head_dim)):
        if hadamard(size) is None:
            return f"no Hadamard matrix of the {what} {size} is known here"
    return None


@lru_cache(maxsize=8)
def hadamard(size: int) -> Tensor | None:
    """A symmetric or skew Hadamard matrix / sqrt(size): orthogonal, float64 [size, size]; None where no construction is known.

    Built as Sylvester's doubling of a Paley matrix: type I of order q + 1 (prime q = 3 mod 4), type II of order 2 (q + 1)
    (prime q = 1 mod 4), as few doublings as possible. 576 = 16 * 36, 1536 = 128 * 12, 3584 = 128 * 28, 5120 = 256 * 20.
    """
    base, doublings = size, 0
    while base > 2 and _paley(base) is None and base % 2 == 0:
        base, doublings = base // 2, doublings + 1
    if (matrix := _paley(base)) is None:
        return None
    for _ in range(doublings):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def _paley(order: int) -> Tensor | None:
    """A Hadamard matrix of small order from the quadratic residues of a prime field (Paley 1933), float64, entries +-1."""
    if order in (1, 2):
        return torch.ones(1, 1, dtype=torch.float64) if order == 1 else torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64)
    if order % 4:
        return None
    if order <= 256 and _is_prime(order - 1):  # type I: order - 1 = 3 mod 4
        core = _bordered(order - 1, -1.0)
        return core + torch.eye(order, dtype=torch.float64)
    q = order // 2 - 1
    if order <= 256 and q % 4 == 1 and _is_prime(q):  # type II
        core = _bordered(q, 1.0)
        plus = torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1], [-1, -1]], dtype=torch.float64)
        return torch.kron(core, plus) + torch.kron(torch.eye(q + 1, dtype=torch.float64), minus)
    return None


def _bordered(q: int, sign: float) -> Tensor:
    """Jacobsthal's matrix of the prime q with a border: row of ones, column of `sign`, zero diagonal. [q + 1, q + 1]."""
    residues = {(x * x) % q for x in range(1, q)}
    chi = torch.tensor([0.0] + [1.0 if x in residues else -1.0 for x in range(1, q)], dtype=torch.float64)
    index = torch.arange(q)
    out = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    out[0, 1:] = 1.0
    out[1:, 0] = sign
    out[1:, 1:] = chi[(index[None, :] - index[:, None]) % q]
    return out


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


class OnlineHadamard:
    """A source of tensors whose down projections expect an input turned in runs of `size` channels (`nn.mlp.Mlp.hadamard`)."""

    def __init__(self, source: Source, size: int) -> None:
        self.source, self.size, self.config = source, size, source.config
        self.has, self.act, self.unread = source.has, source.act, source.unread

    def get(self, name: str) -> Tensor | QTensor:
        value = self.source.get(name)
        if not name.endswith(".down_proj.weight"):
            return value
        return hadamard_blocks(dense(value, torch.float64), self.size).float()


class Rotated:
    """A source of tensors whose residual stream is turned: every tensor is rotated in fp64 when it is asked for.

    Linears come in fp32 (they are rounded next); embeddings and the head keep the dtype they are stored in. Tied
    embeddings are untied first, because the last norm's weight is folded into the head alone.
    """

    def __init__(self, source: Source, config: ModelConfig, seed: int, device: torch.device) -> None:
        if (reason := can_rotate(config)) is not None:
            raise ValueError(f"transform = rotate: {reason}; transform = smooth or none would do")
        matrix, head = hadamard(config.hidden_size), hadamard(config.head_dim)
        signs = torch.randint(0, 2, (config.hidden_size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.turn = (signs.double()[:, None] * matrix).to(device)  # x -> x @ turn
        self.turn_head = head.to(device)
        self.source, self.model, self.device, self.unread = source, config, device, source.unread
        self.config: Mapping[str, Any] = {**source.config, "tie_word_embeddings": False}

    def has(self, name: str) -> bool:
        return name == "lm_head.weight" or self.source.has(name)

    def act(self, name: str) -> Spec | None:
        return None

    def get(self, name: str) -> Tensor:
        """One rotated tensor, on the device that the source was made with."""
        if name == "lm_head.weight":
            stored = self._read(name if self.source.has(name) else "model.embed_tokens.weight")
            return ((stored.double() * self._read("model.norm.weight").double()) @ self.turn).to(stored.dtype)
        value = self._read(name)
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if kind == "embed_tokens":
            return (value.double() @ self.turn).to(value.dtype)
        if kind in ("norm", "input_layernorm", "post_attention_layernorm"):
            return torch.ones_like(value)
        layer = ".".join(name.split(".")[:3])
        wide = value.double()
        if name.endswith(".weight") and kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            norm = "post_attention_layernorm" if kind in ("gate_proj", "up_proj") else "input_layernorm"
            wide = (wide * self._read(f"{layer}.{norm}.weight").double()) @ self.turn
        if kind == "v_proj":
            wide = self._heads(wide)
        if kind == "o_proj" and name.endswith(".weight"):
            wide = self._heads(wide.t()).t()
        if kind in ("o_proj", "down_proj"):
            wide = self.turn.t() @ wide
        return wide.float()

    def _heads(self, rows: Tensor) -> Tensor:
        """Turn the rows of each head. [heads * D, ...] -> the same shape."""
        heads = rows.reshape(-1, self.model.head_dim, *rows.shape[1:])
        return torch.einsum("de,hd...->he...", self.turn_head, heads).reshape(rows.shape)

    def _read(self, name: str) -> Tensor:
        value = self.source.get(name)
        return (dequantize(value) if isinstance(value, QTensor) else value).to(self.device)
