"""A .gguf as a source of 16-bit weights under Hugging Face names, with the config.json it would have had.

Quantized blocks are decoded by the `gguf` package and come out as float32; F32, F16 and BF16 tensors keep their dtype. Two
things llama.cpp's converter did are undone: the rows of Q and K that it interleaves for its RoPE ("llama" only), and Llama
3's RoPE scaling that it stores as a tensor of factors.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.checkpoint.reading import Reading
from nybble.checkpoint.store import Place, Store
from nybble.text.errors import BrokenFile
from nybble.text.gguf import GGUF, TensorInfo, read_gguf

# ggml architecture -> (architectures entry, model_type); all dense decoders whose block tensors are named as in BLOCK.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml type -> dtype stored as is
NEEDED = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count",
          "attention.layer_norm_rms_epsilon", "context_length")
# Metadata of the architecture that is read, or says nothing about the numbers. Any other changes them unless it is 0 or 1.
KNOWN = {*NEEDED, "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
         "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "expert_count",
         "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
         "rope.scaling.finetuned", "vocab_size", "expert_used_count", "tensor_data_layout", "pooling_type"}
ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> tuple[dict[str, Any], Store, Reading]:
    """Its config, its tensors, and what these were decoded from. Raises BrokenFile for a file cut short, ValueError for what
    cannot be read."""
    from gguf import GGMLQuantizationType

    file, size = read_gguf(path), path.stat().st_size
    for info in file.tensors.values():
        if info.offset + _bytes(info) > size:
            raise BrokenFile(path, f"it ends before tensor {info.name!r} does")
    infos = {_hf_name(info.name, path): info for info in file.tensors.values() if info.name != ROPE_FACTORS}
    config, data = synthesize_config(file), np.memmap(path, np.uint8, "r")

    def read(name: str, info: TensorInfo) -> Tensor:
        values = decode(data, info)
        if config["model_type"] == "llama" and (which := re.search(r"\.(q|k)_proj\.", name)):
            values = _half_split(values, config["num_attention_heads" if which[1] == "q" else "num_key_value_heads"])
        return values

    places = {name: Place(info.shape, PLAIN.get(info.kind, torch.float32), "", partial(read, name, info))
              for name, info in infos.items()}
    kinds = sorted({GGMLQuantizationType(info.kind).name for info in infos.values() if info.kind not in PLAIN})
    return config, Store(path, places), Reading(decoded=tuple(kinds))


def decode(data: np.ndarray, info: TensorInfo) -> Tensor:
    """Values of one tensor, rows as ggml has them: float32 for quantized types, else the stored dtype."""
    raw = data[info.offset:info.offset + _bytes(info)]
    if info.kind in PLAIN:
        return torch.from_numpy(raw.copy()).view(PLAIN[info.kind]).view(info.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(info.kind)
    try:
        values = dequantize(raw.reshape(*info.shape[:-1], -1), kind)
    except NotImplementedError as error:
        raise ValueError(f"tensor {info.name!r}: the gguf package cannot decode {kind.name}; "
                         "use a file in Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, a K-quant, F16, BF16 or F32") from error
    return torch.from_numpy(values).view(info.shape)


def _bytes(info: TensorInfo) -> int:
    """Raises ValueError for a ggml type nobody knows."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {info.name!r} has ggml type {info.kind}, which the gguf package does not know") from error
    return math.prod(info.shape) // values_per_block * bytes_per_block


def _hf_name(name: str, path: Path) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    if (block := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and block[2] in BLOCK:
        return f"model.layers.{block[1]}.{BLOCK[block[2]]}.{kind}"
    raise ValueError(f"{path}: tensor {name!r} belongs to no dense Llama, Mistral, Qwen2 or Qwen3 decoder")


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Undo the converter's interleaving: per head, rows (pair, half) back to (half, pair). [N, K] or [N]."""
    n = rows.shape[0]
    return rows.view(heads, n // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()


def synthesize_config(file: GGUF) -> dict[str, Any]:
    """The config.json of a GGUF. Raises ValueError for architectures and RoPE variants whose numbers would come out wrong."""
    meta, path = file.metadata, file.path
    name = meta.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {name!r} is not supported ({', '.join(ARCHITECTURES)} are)")
    get = lambda key, default=None: meta.get(f"{name}.{key}", default)  # noqa: E731
    if missing := [key for key in NEEDED if get(key) is None]:
        raise BrokenFile(path, f"its metadata lacks {', '.join(missing)}")
    if "token_embd.weight" not in file.tensors:
        raise BrokenFile(path, "it has no tensor 'token_embd.weight'")
    if get("expert_count", 0):
        raise ValueError(f"{path} is a mixture of experts, which is not supported from GGUF")
    if strange := [f"{key} = {value!r}" for key, value in meta.items() if key.startswith(f"{name}.")
                   and key.removeprefix(f"{name}.") not in KNOWN and value not in (0, 1)]:
        raise ValueError(f"{path}: {', '.join(strange)} may change the numbers and is not supported; use the model's Hugging "
                         "Face directory")
    architecture, model_type = ARCHITECTURES[name]
    heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path}: value heads or RoPE narrower than key heads ({head_dim}) are not supported")
    kinds = [info.kind for info in file.tensors.values() if len(info.shape) == 2]
    dtype = "float32" if all(k == 0 for k in kinds) else "bfloat16" if kinds.count(30) * 2 > len(kinds) else "float16"
    config = {
        "architectures": [architecture], "model_type": model_type, "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": get("embedding_length"), "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads), "head_dim": head_dim, "hidden_act": "silu",
        # Written as the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "max_position_embeddings": get("context_length"), "rope_theta": float(get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors, "torch_dtype": dtype,
        "attention_bias": name == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    for key, role in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token := meta.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[key] = token
    if window := get("attention.sliding_window"):
        config["sliding_window"] = window
    if scaling := _rope_scaling(file, get, head_dim, config):
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(file: GGUF, get: Any, head_dim: int, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        factors = decode(np.memmap(file.path, np.uint8, "r"), file.tensors[ROPE_FACTORS]).double()
        return _llama3_scaling(factors, head_dim, config["rope_theta"], file.path)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path}: RoPE scaling {kind!r} is not supported (none, linear, yarn and Llama 3's are)")
    if (factor := get("rope.scaling.factor")) is None:
        raise BrokenFile(file.path, "its metadata lacks rope.scaling.factor")
    scaling = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        scaling |= {key: value for key in ("beta_fast", "beta_slow") if (value := get(f"rope.scaling.yarn_{key}")) is not None}
        original = get("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(factors: Tensor, head_dim: int, theta: float, path: Path) -> dict[str, Any]:
    """Llama 3.x publishes one set of parameters beside the factor; the stored divisors [head_dim / 2] must agree with them."""
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors.max())
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original * inverse / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{path}: its RoPE factors (rope_freqs) are not Llama 3's; use the Hugging Face directory")
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}
