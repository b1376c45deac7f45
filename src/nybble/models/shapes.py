"""Shapes of well-known models for benchmarks that need no checkpoint, and weights made up on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nybble.formats.numerics import random_qtensor
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import SCHEMES, Scheme, Spec
from nybble.models.config import ModelConfig, read_config
from nybble.models.decoder import Decoder
from nybble.models.load import Progress, build, default_dtype
from nybble.nn.parallel import ALONE, Group


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, positions: int, theta: float) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": positions, "rope_theta": theta, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096, 1e4),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096, 1e4),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, 8192, 5e5),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192, 5e5),
}


def shape(name: str) -> ModelConfig:
    """Raises ValueError listing the shapes there are."""
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return read_config(SHAPES[name])


def dummy_model(config: ModelConfig | Mapping[str, Any] | str, scheme: Scheme | str = "w4a8",
                device: torch.device | str = "cpu", dtype: torch.dtype | None = None, seed: int = 0,
                progress: Progress | None = None, editable: bool = False, group: Group = ALONE) -> Decoder:
    """A decoder with random weights of `scheme`, made on the device. config: or config.json as a dict, or a name in `SHAPES`.

    Codes are uniform and scales such that every linear keeps its input's variance: activations stay in range through any
    depth. Embedding and logits stay 16-bit, but for a scheme such as "w4a8+w8a8": W8A8 logits. Raises ValueError for an unknown
    shape or scheme.
    """
    if not isinstance(config, ModelConfig):
        config = shape(config) if isinstance(config, str) else read_config(config)
    names = scheme.split("+") if isinstance(scheme, str) else []
    if not set(names) <= set(SCHEMES) or names[1:] not in ([], ["w8a8"]):
        raise ValueError(f"no scheme {scheme!r}; there are {', '.join(SCHEMES)}, and each with +w8a8 for W8A8 logits")
    scheme, head = [SCHEMES[name] for name in [*names, "16bit"][:2]] if isinstance(scheme, str) else (scheme, None)
    device = torch.device(device)
    dtype = dtype or default_dtype(config, device)
    return build(config, DummySource(config, scheme, head, device, seed), device, dtype, progress, editable, group)


class DummySource:
    """Random weights under a checkpoint's names."""

    def __init__(self, config: ModelConfig, scheme: Scheme, head: Scheme | None, device: torch.device, seed: int) -> None:
        self.config: Mapping[str, Any] = {}
        self._schemes = {"_proj": scheme, "lm_head": head}
        self._model, self._device, self._dtype = config, device, getattr(torch, config.dtype)
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return not name.endswith(".bias") and not (name.startswith("lm_head") and self._model.tie_embeddings)

    def act(self, name: str) -> Spec | None:
        scheme = self._scheme(name)
        return None if scheme is None else scheme.act

    def unread(self) -> list[str]:
        return []

    def get(self, name: str) -> Tensor | QTensor:
        c, last = self._model, name.split(".")[-2]
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        if last.endswith("norm"):
            return torch.ones(c.head_dim if last in ("q_norm", "k_norm") else c.hidden_size, device=self._device)
        shape = {
            "embed_tokens": (c.vocab_size, c.hidden_size), "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (heads, c.hidden_size), "k_proj": (kv_heads, c.hidden_size), "v_proj": (kv_heads, c.hidden_size),
            "o_proj": (c.hidden_size, heads), "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size), "down_proj": (c.hidden_size, c.intermediate_size),
        }[last]  # fmt: skip
        if name.endswith(".bias"):
            return self._normal((shape[0],), 0.1)
        if (scheme := self._scheme(name)) is not None:
            assert scheme.weight is not None
            return random_qtensor(scheme.weight, shape, self._generator, self._dtype)
        return self._normal(shape, 1.0 if last == "embed_tokens" else shape[1] ** -0.5)

    def _scheme(self, name: str) -> Scheme | None:
        """None: 16 bits."""
        scheme = next((scheme for part, scheme in self._schemes.items() if f"{part}." in name), None)
        return None if scheme is None or scheme.weight is None else scheme

    def _normal(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, deviation, generator=self._generator)
