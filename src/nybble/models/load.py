"""From a source of named tensors to a decoder: streamed layer by layer, checked against the config, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import Spec
from nybble.kernels.registry import ops_for
from nybble.models.config import ModelConfig, read_config
from nybble.models.decoder import Decoder, Layer
from nybble.nn.attention import Attention
from nybble.nn.embed import Embedding, Head
from nybble.nn.linear import Part, Projection
from nybble.nn.mlp import Mlp
from nybble.nn.norm import RmsNorm
from nybble.nn.parallel import ALONE, Group, take_rows
from nybble.nn.rope import cos_sin_table

Progress = Callable[[str, float], None]  # what is being done, and how much of it in [0, 1]


class Source(Protocol):
    """Where weights come from; `checkpoint.Checkpoint` is one. Names are Hugging Face's."""

    config: Mapping[str, Any]
    hadamard: int  # channels of down_proj's input that are to be turned together, 0: none

    def has(self, name: str) -> bool: ...
    def get(self, name: str) -> Tensor | QTensor: ...
    def act(self, name: str) -> Spec | None: ...
    def act_scale(self, name: str) -> float | None: ...  # asked only where `act` is static
    def unread(self) -> list[str]: ...


def load_model(checkpoint: Source, device: torch.device | str, dtype: torch.dtype | None = None,
               progress: Progress | None = None, editable: bool = False, group: Group = ALONE) -> Decoder:
    """Read every weight of a checkpoint onto a device, or of the weights that are cut this rank's rows.

    dtype: of activations; None is float32 on a CPU, elsewhere the checkpoint's 16-bit type (bfloat16 for a float32 one).
    editable: keep canonical weights, so that `Layer.replace` works; quantizers want this, engines do not.

    Raises ValueError for a config that is not honoured, a weight of the wrong shape, and tensors nobody asked for.
    """
    device = torch.device(device)
    config = replace(read_config(checkpoint.config), hadamard=checkpoint.hadamard)
    model = build(config, checkpoint, device, dtype or default_dtype(config, device), progress, editable, group)
    refuse_left(config, checkpoint.unread())
    return model


def refuse_left(config: ModelConfig, left: list[str]) -> None:
    """Raises ValueError naming tensors that nobody asked for, if there are any."""
    if config.tie_embeddings and "lm_head.weight" in left:
        raise ValueError("tie_word_embeddings = True, but lm_head.weight differs from model.embed_tokens.weight")
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise ValueError(f"{config.family.architecture} has no place for tensors of this checkpoint: {shown}")


def default_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def build(config: ModelConfig, source: Source, device: torch.device, dtype: torch.dtype, progress: Progress | None = None,
          editable: bool = False, group: Group = ALONE) -> Decoder:
    """A decoder from any source."""
    c, ops, own = config, ops_for(device), share_of(config, group.size)
    tell = progress or (lambda what, share: None)
    tell("loading", 0.0)
    embedding = source.get("model.embed_tokens.weight")
    _check_shape("model.embed_tokens.weight", embedding.shape, (c.vocab_size, c.hidden_size))
    table = _table(embedding, device, dtype)
    cos_sin = cos_sin_table(c.rope, c.head_dim, c.max_position, device)
    layers = []
    for index in range(c.num_layers):
        layers.append(read_layer(c, source, index, cos_sin, device, dtype, editable, group))
        tell("loading", (index + 1) / c.num_layers)
    norm = RmsNorm(_read_vector(source, "model.norm.weight", c.hidden_size, device), c.rms_eps, ops)
    cut = group if c.vocab_size % group.size == 0 else ALONE
    head = Head(_read_head(c, source, table, device, dtype, editable, cut), ops, cut)
    return Decoder(own, Embedding(table, dtype), layers, norm, head, device, dtype, group)


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """The config of one of `size` ranks: its heads. Raises ValueError for numbers that have no equal ones."""
    c = config
    counts = {"attention heads": c.num_heads, "feed-forward channels": c.intermediate_size, "hidden channels": c.hidden_size}

    def fits(n: int) -> bool:
        heads = c.num_kv_heads % n == 0 or n % c.num_kv_heads == 0
        return heads and all(count % n == 0 for count in counts.values())

    if not fits(size):
        held = ", ".join(f"{count} {what}" for what, count in counts.items())
        would = ", ".join(str(n) for n in range(1, 17) if fits(n))
        raise ValueError(f"tensor_parallel = {size} does not divide the model's {held} and {c.num_kv_heads} KV heads (of "
                         f"which it may be a multiple); {would} would do")
    twins = max(1, size // c.num_kv_heads)
    return replace(c, num_heads=c.num_heads // size, num_kv_heads=max(1, c.num_kv_heads // size), twins=twins)


def read_layer(config: ModelConfig, source: Source, index: int, cos_sin: Tensor, device: torch.device, dtype: torch.dtype,
               editable: bool = False, group: Group = ALONE) -> Layer:
    """One layer alone, for those who stream: its linears are packed on first use when `editable`, else at once. A rank has
    heads of q, k, v, rows of gate, up and down; o, small and fed by all heads, is every rank's.

    cos_sin: `nn.rope.cos_sin_table`, as long as the longest sequence that the layer will see.
    """
    c, at, ops = config, f"model.layers.{index}", ops_for(device)
    q, k = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def vector(name: str, width: int) -> Tensor:
        return _read_vector(source, f"{at}.{name}.weight", width, device)

    def project(block: str, in_features: int, bias: bool, shares: tuple[slice | None, ...], inputs: Group = ALONE,
                outputs: Group = ALONE, **outs: int) -> Projection:
        parts = [_read_part(source, f"{at}.{block}.{name}", n, in_features, bias, rows)
                 for (name, n), rows in zip(outs.items(), shares, strict=True)]
        projection = Projection(parts, device, dtype, ops, editable, inputs, outputs)
        return projection if editable else projection.pack()

    shares = ((c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim), (c.intermediate_size, 1), (c.hidden_size, 1))
    heads, kv_heads, inner, hidden = (None if group.size == 1 else group.share(count, unit) for count, unit in shares)

    attention = Attention(
        qkv=project("self_attn", c.hidden_size, c.qkv_bias, (heads, kv_heads, kv_heads), q_proj=q, k_proj=k, v_proj=k),
        o=project("self_attn", q, c.o_bias, (None,), group, o_proj=c.hidden_size),
        q_norm=vector("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=vector("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
        cos_sin=cos_sin,
        kv_heads=max(1, c.num_kv_heads // group.size),
        head_dim=c.head_dim,
        eps=c.rms_eps,
        window=c.windows[index],
        ops=ops,
    )
    mlp = Mlp(
        gate_up=project("mlp", c.hidden_size, c.mlp_bias, (inner, inner), outputs=group, gate_proj=c.intermediate_size,
                        up_proj=c.intermediate_size),
        down=project("mlp", c.intermediate_size, c.mlp_bias, (hidden,), outputs=group, down_proj=c.hidden_size),
        ops=ops,
        hadamard=c.hadamard,
    )
    input_norm, post_norm = (
        RmsNorm(vector(name, c.hidden_size), c.rms_eps, ops) for name in ("input_layernorm", "post_attention_layernorm")
    )
    return Layer(input_norm, attention, post_norm, mlp)


def _read_vector(source: Source, name: str, width: int, device: torch.device) -> Tensor:
    value = source.get(name)
    assert isinstance(value, Tensor)
    _check_shape(name, value.shape, (width,))
    return value.to(device, torch.float32)


def _read_part(source: Source, module: str, out_features: int, in_features: int, bias: bool, rows: slice | None = None) -> Part:
    name = f"{module}.weight"
    weight = source.get(name)
    _check_shape(name, weight.shape, (out_features, in_features))
    found = source.get(f"{module}.bias") if bias or source.has(f"{module}.bias") else None
    if found is not None:
        assert isinstance(found, Tensor)
        _check_shape(f"{module}.bias", found.shape, (out_features,))
        if not bias and not bool((found == 0).all()):
            raise ValueError(f"{module}.bias: the checkpoint has one, its config.json says that there is none; correct that")
    act = source.act(name)
    scale = source.act_scale(name) if act is not None and not act.dynamic else None
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"{module}: the scale of its static activations is {scale}; it has to be positive and finite")
    if rows is not None:
        weight, found = take_rows(weight, rows), None if found is None else found[rows]
    return Part(module, tuple(weight.shape), weight, act, found if bias else None, scale)


def _read_head(config: ModelConfig, source: Source, table: Tensor, device: torch.device, dtype: torch.dtype,
               editable: bool, group: Group) -> Tensor | Projection:
    rows = None if group.size == 1 else group.share(config.vocab_size)
    if config.tie_embeddings:
        return table if rows is None else table[rows]
    part = _read_part(source, "lm_head", config.vocab_size, config.hidden_size, False, rows)
    if isinstance(part.weight, QTensor):
        return Projection([part], device, dtype, ops_for(device), editable).pack()
    assert isinstance(part.weight, Tensor)
    return _table(part.weight, device, dtype)


def _table(weight: Tensor | QTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A vocabulary table as the device reads it best: 16 bits as stored on a CPU, the activations' type on a GPU."""
    dense = dequantize(weight, torch.float16) if isinstance(weight, QTensor) else weight
    return dense.to(device, dense.dtype if device.type == "cpu" else dtype)


def _check_shape(name: str, found: Any, wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise ValueError(f"{name} has shape {list(found)}; config.json says {list(wanted)}")
