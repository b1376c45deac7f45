"""Tiny random checkpoints on disk, made by transformers: a model small enough to run in milliseconds, with every weight that
a fresh model leaves at zero or one (biases, norms) drawn at random, so that leaving one out shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

COMMON = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# name: (transformers' config class, what it is told beyond COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama_linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 48}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "smollm": ("LlamaConfig", {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1,
                               "tie_word_embeddings": True}),
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(path: Path, name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """Write a checkpoint (safetensors, config, byte-level tokenizer with a chat template) and return transformers' model.

    name: a key of TINY. overrides: keys of transformers' config.
    """
    import transformers

    kind, extra = TINY[name]
    config = getattr(transformers, kind)(**{**COMMON, **extra, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
    for parameter in model.parameters():  # not model.to, which would round the rotary frequencies as well
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.eval().save_pretrained(path)
    save_tokenizer(path)
    return model


def save_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer without merges: specials 0 to 2, then one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "add_bos_token": False, "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False, "model_max_length": 256,
    }))  # fmt: skip


def token_ids(rows: int, length: int, seed: int = 1, vocab_size: int = 259) -> torch.Tensor:
    """int64 [rows, length], no special tokens."""
    return torch.randint(3, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
