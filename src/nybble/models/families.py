"""Model families as data: what distinguishes them on the one decoder. A new dense family is one entry here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What an architecture's name says that its config.json does not.

    Biases: True, False, or the config key that says. qk_norm: RMSNorm over each head of Q and K before rotation. window:
    which layers attend to a sliding window: "none", "all", or "layers" (`use_sliding_window`, `max_window_layers`,
    `layer_types`). default_*: what an absent key means; None: no window, as many KV heads as heads, hidden_size / heads.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: str = "none"
    default_window: int | None = None
    default_kv_heads: int | None = None
    default_head_dim: int | None = None


FAMILIES = (
    Family("LlamaForCausalLM", "llama", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    Family("MistralForCausalLM", "mistral", window="all", default_window=4096, default_kv_heads=8),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, window="layers", default_window=4096, default_kv_heads=32),
    Family("Qwen3ForCausalLM", "qwen3", qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="layers",
           default_window=4096, default_kv_heads=32, default_head_dim=128),
)


def family_of(architectures: list[str], model_type: str | None, families: tuple[Family, ...] = FAMILIES) -> Family:
    """By architecture, or by model_type when the config names none. Raises ValueError listing what there is."""
    for family in families:
        if family.architecture in architectures or (not architectures and family.model_type == model_type):
            return family
    asked = ", ".join(architectures) or f"model_type {model_type!r}"
    raise ValueError(f"{asked} is not supported; there are {', '.join(f.architecture for f in families)}")
