"""A typed reader of config.json. Its one idea: a key that changes the numbers is honoured or refused, never skipped.

Every key is one of four: read here; neutral (listed with the only values that mean "not used"); harmless (listed); or
unknown, which is an error unless its value is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nybble.models.families import FAMILIES, Family, family_of
from nybble.nn.rope import METHODS, Rope
from nybble.text.errors import held


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder, as numbers. `windows`: per layer, the tokens a token attends to, itself included; 0 is all.
    `dtype`: "float32" | "float16" | "bfloat16", what the checkpoint was made in."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    dtype: str
    twins: int = 1  # ranks that have the same KV heads, each for queries of its own
    hadamard: int = 0  # channels of down_proj's input that are turned together at run time; checkpoint's, not config.json's


# Keys that may be there with a value that means "not used"; any other value would change the numbers.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (True,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "sliding_window": (0,),
    "use_sliding_window": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "use_mrope": (False,),
    "use_bfloat16": (False, True),
    "pruned_heads": ({},),
    "auto_map": ({},),
}

# Keys that say nothing about the forward pass of a checkpoint that is only run.
HARMLESS = frozenset(
    """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache initializer_range bos_token_id
    eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    attention_dropout hidden_dropout resid_dropout resid_pdrop embd_pdrop attn_pdrop dropout classifier_dropout
    pretraining_tp output_attentions output_hidden_states output_scores output_router_logits return_dict
    return_dict_in_generate torchscript chunk_size_feed_forward id2label label2id num_labels problem_type
    finetuning_task task_specific_params tokenizer_class prefix cross_attention_hidden_size
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    remove_invalid_values tf_legacy_loss attn_implementation _attn_implementation _attn_implementation_autoset
    _flash_attn_2_enabled use_flash_attn unsloth_version unsloth_fixed unsloth_tracked max_sequence_length
    model_max_length tokenizer_model_max_length tokenizer_padding_side transformers.js_config is_llama_config
    gradient_checkpointing quantization_config compression_config nybble kv_cache_torch_dtype kv_cache_dtype
    """.split()  # noqa: SIM905
)

REQUIRED = object()
DTYPES = ("float32", "float16", "bfloat16")


def read_config(config: Mapping[str, Any], families: tuple[Family, ...] = FAMILIES) -> ModelConfig:
    """config.json of any transformers version -> `ModelConfig`.

    Raises ValueError naming the key, its value and what would do: unsupported architectures and rope methods, missing or
    mistyped keys, and every key that would change the numbers and is not honoured.
    """
    family = family_of(held(config, "architectures", list[str]) or [], config.get("model_type"), families)
    read = _Reader(config)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    layers = read.count("num_hidden_layers")
    kv_heads = read.count("num_key_value_heads", family.default_kv_heads or heads)
    if heads % kv_heads:
        raise ValueError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    head_dim = read.count("head_dim", family.default_head_dim or hidden // heads)
    act = read.value("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act = {act!r} is not supported; wants silu")
    max_position = read.count("max_position_embeddings")
    rope, max_position = _read_rope(read, max_position, head_dim)
    model = ModelConfig(
        family=family,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=max_position,
        tie_embeddings=read.held("tie_word_embeddings", bool, default=False),
        qkv_bias=read.choice(family.qkv_bias),
        o_bias=read.choice(family.o_bias),
        mlp_bias=read.choice(family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_read_windows(read, family, layers),
        dtype=_read_dtype(config),
    )
    read.refuse_the_rest(family)
    return model


class _Reader:
    """Reads keys, checks their type, and remembers which were read."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config, self.where, self.seen = config, where, set[str]()

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        self.seen.add(key)
        found = self.config.get(key)
        if found is None:
            if default is REQUIRED:
                raise ValueError(f"{self.where}: {key} is missing")
            return default
        return found

    def held(self, key: str, *kinds: Any, default: Any = None) -> Any:
        self.seen.add(key)
        found = held(self.config, key, *kinds, where=self.where)
        return default if found is None else found

    def count(self, key: str, default: Any = REQUIRED) -> int:
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ValueError(f"{self.where}: {key} = {found!r}; wants a whole number above 0")
        return found

    def number(self, key: str, default: Any = REQUIRED) -> float:
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
            raise ValueError(f"{self.where}: {key} = {found!r}; wants a number above 0")
        return float(found)

    def choice(self, says: bool | str) -> bool:
        """A family's fixed answer, or the config key that holds it."""
        return says if isinstance(says, bool) else self.held(says, bool, default=False)

    def refuse_the_rest(self, family: Family) -> None:
        problems = []
        for key, found in self.config.items():
            if key in self.seen or key in HARMLESS or found is None:
                continue
            if key not in NEUTRAL:
                problems.append(f"{key} = {found!r} is not known")
            elif found not in NEUTRAL[key]:
                wanted = " or ".join(repr(value) for value in NEUTRAL[key]) or "null"
                problems.append(f"{key} = {found!r} is not supported for {family.architecture}, wants {wanted}")
        if problems:
            raise ValueError(
                f"{self.where}: {'; '.join(problems)}. A key that may change the numbers is not skipped: remove it if it does "
                "not matter to this model"
            )


def _read_rope(read: _Reader, max_position: int, head_dim: int) -> tuple[Rope, int]:
    """From `rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` beside it. -> the rope, max_position."""
    old, new = read.held("rope_scaling", dict), read.held("rope_parameters", dict)
    if old and new and old != new:
        raise ValueError(f"config.json: rope_scaling = {old!r} and rope_parameters = {new!r} disagree; keep one")
    where = "rope_parameters" if new else "rope_scaling"
    parameters = _Reader(new or old or {}, f"config.json: {where}")
    base = parameters.number("rope_theta", read.number("rope_theta", 10000.0))
    partial = parameters.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    if partial > 1 or int(head_dim * partial) % 2:
        raise ValueError(f"config.json: partial_rotary_factor = {partial} of {head_dim} channels; wants an even number of them")
    named = [parameters.held(key, str) for key in ("rope_type", "type")]
    kind = named[0] or named[1] or "default"
    if kind not in METHODS:
        raise ValueError(f"{parameters.where}: rope_type = {kind!r} is not supported; there are {', '.join(METHODS)}")
    needed, optional = METHODS[kind]
    elsewhere = {"original_max_position_embeddings": read.value("original_max_position_embeddings", max_position)}
    scaling: dict[str, Any] = {key: parameters.number(key, elsewhere.get(key, REQUIRED)) for key in needed}
    for key in optional:
        found = parameters.held(key, bool) if key == "truncate" else parameters.value(key, elsewhere.get(key))
        if found is None:
            continue
        if not isinstance(found, int | float) or found < 0:
            raise ValueError(f"{parameters.where}: {key} = {found!r}; wants a number, 0 or more")
        scaling[key] = found
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ValueError(f"{parameters.where}: high_freq_factor = {scaling['high_freq_factor']} is not above low_freq_factor")
    extra = {key: value for key, value in parameters.config.items() if key not in parameters.seen and value is not None}
    if extra:
        raise ValueError(f"{parameters.where}: {extra} is not known for rope_type {kind!r}")
    if kind == "yarn":  # checkpoints often leave max_position_embeddings at the length before stretching
        max_position = max(max_position, round(scaling["factor"] * scaling["original_max_position_embeddings"]))
    return Rope(base, kind, partial, scaling), max_position


def _read_windows(read: _Reader, family: Family, layers: int) -> tuple[int, ...]:
    if family.window == "none":
        return (0,) * layers
    # An absent key means the family's default, null means no window.
    window = read.value("sliding_window", None if "sliding_window" in read.config else family.default_window)
    if family.window == "layers":
        first = read.held("max_window_layers", int, default=28)
        if not read.held("use_sliding_window", bool, default=False):
            window = None
        slides = [window is not None and layer >= first for layer in range(layers)]
    else:
        slides = [window is not None] * layers
    types = read.held("layer_types", list[str])
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if len(types) != layers or any(kind not in known for kind in types):
            raise ValueError(f"config.json: layer_types = {types!r}; wants {layers} of {', '.join(known)}")
        asked = [known[kind] for kind in types]
        if (any(asked) and window is None) or (family.window == "all" and asked != slides):
            raise ValueError(f"config.json: layer_types = {types!r} does not agree with sliding_window = {window!r}")
        slides = asked
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"config.json: sliding_window = {window!r}; wants a whole number above 0, or null")
    return tuple(int(window) if slide and window else 0 for slide in slides)


def _read_dtype(config: Mapping[str, Any]) -> str:
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if found not in DTYPES:
        raise ValueError(f"config.json: dtype = {found!r} is not supported; wants {', '.join(DTYPES)}")
    return found
