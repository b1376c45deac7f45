"""A checkpoint as the rest of Nybble sees it: parameters by Hugging Face name, each a tensor or a canonical `QTensor`.

It hides where they come from (safetensors, GGUF) and in which format they were. Nothing is read before it is asked for, and
what nobody asked for is known at the end: `unread`.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nybble.checkpoint import foreign
from nybble.checkpoint.compressed import TURNED, on_integer_grid, read_compressed
from nybble.checkpoint.gguf import open_gguf
from nybble.checkpoint.kv import FNUZ_FACTORS, Scale, kv_of_config, pair, read_scales, role_of
from nybble.checkpoint.reading import LinearSource, Reading, with_int8_activations
from nybble.checkpoint.store import Store, open_safetensors, stamp
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import KV, PER_TOKEN_INT8, SCHEMES, Spec, describe
from nybble.text.errors import held, present, read_json
from nybble.text.gguf import find_gguf

READERS: dict[str, Callable[[Store, dict[str, Any]], Reading]] = {
    "compressed-tensors": read_compressed,
    "qqq": foreign.read_qqq,
    "awq": foreign.read_awq,
    "gptq": foreign.read_gptq,
    "fp8": foreign.read_fp8,
    "fbgemm_fp8": foreign.read_fbgemm_fp8,
    "modelopt": foreign.read_modelopt,
    "quark": foreign.read_quark,
}
# Where older tools left what is now config.json's quantization_config, and the method such a file without a name means.
SIDE_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# Buffers that some checkpoints carry and every implementation computes.
BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
Result = TypeVar("Result")
# What arithmetic raises for values of a kind or tensors of a shape that a format never has.
DOES_NOT_FIT = (TypeError, AttributeError, IndexError, RuntimeError, ArithmeticError)


class Checkpoint:
    """path: as given. config: config.json (made up for a GGUF). Not for construction: see `open_checkpoint`."""

    def __init__(self, path: Path, config: dict[str, Any], store: Store, reading: Reading) -> None:
        self.path, self.config = path, config
        self._store, self._reading = store, reading
        self._module_of = {f"{module}.weight": module for module in reading.linears}
        consumed = {name for source in reading.linears.values() for name in source.tensors}
        self._ignored = dict(reading.ignored)
        for name in store.names():
            if BUFFERS.search(name):
                self._ignored[name] = "computed, not loaded"
            elif name not in consumed and (role := role_of(name)) is not None:
                self._ignored[name] = {"q": "scale of 8-bit queries or probabilities, which attention does not round",
                                       "zero": "zero points that are zero"}.get(role, "KV cache scale")
        hidden = consumed | self._ignored.keys()
        self._plain = dict.fromkeys(name for name in store.names() if name not in hidden)
        self._unread = dict.fromkeys([*self._module_of, *self._plain])
        fnuz = "fnuz" in f"{config.get('kv_cache_torch_dtype')}{config.get('kv_cache_dtype')}"
        heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
        self._scales = read_scales(path, store, heads, FNUZ_FACTORS["e4m3fnuz", "e4m3fn"] if fnuz else 1.0)

    @property
    def kv(self) -> str | None:
        """The KV type that the checkpoint asks for, a key of `formats.spec.KV`; None: it does not say.

        Raises ValueError when it asks for one that cannot be had."""
        own = held(held(self.config, "nybble", dict) or {}, "kv_cache", str, where="config.json: nybble")
        wanted = own or self._reading.kv or kv_of_config(self.config)
        if wanted is None and self._reading.kv_refusal:
            raise ValueError(f"{self.path}: {self._reading.kv_refusal}")
        if wanted is not None and wanted not in KV:
            raise ValueError(f"{self.path} asks for KV cache {wanted!r}; known are {', '.join(KV)}")
        return wanted

    @property
    def num_layers(self) -> int:
        return held(self.config, "num_hidden_layers", int) or 0

    @property
    def hadamard(self) -> int:
        """Channels of down_proj's input that are turned together before they are multiplied; 0: none are."""
        return self._reading.hadamard

    @property
    def decoded(self) -> str:
        """What a GGUF's weights were quantized as before they were decoded to 16 bits: "Q4_K, Q6_K"; empty for others."""
        return ", ".join(self._reading.decoded)

    @property
    def scheme_name(self) -> str:
        """"16bit", the name of the one scheme that all quantized linears share, "w4a8 in several groups", or "mixed"."""
        names = {source.scheme.name for source in self._reading.linears.values()}
        kinds = {name.partition("_")[0] for name in names}
        mixed = f"{min(kinds)} in several groups" if len(kinds) == 1 and min(kinds) in SCHEMES else "mixed"
        return mixed if len(names) > 1 else names.pop() if names else "16bit"

    @property
    def precision(self) -> tuple[str, str]:
        """What weights and activations of the linears are in, in words: ("int4[1x128]", "int8[1x*]"), ("16bit", "16bit")."""
        kinds = {(describe(s.scheme.weight), describe(s.scheme.act)) for s in self._reading.linears.values()}
        weights, acts = zip(*sorted(kinds)) if kinds else (("16bit",), ("16bit",))
        turned = f" (down_proj's turned {self.hadamard} at a time by a Hadamard matrix)" if self.hadamard else ""
        return ", ".join(dict.fromkeys(weights)), ", ".join(dict.fromkeys(acts)) + turned

    @property
    def config_dtype(self) -> str:
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype config.json names for what is not quantized; float32 when it names none."""
        named = self.config_dtype
        kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
        if named not in kinds:
            raise ValueError(f"{self.path}: config.json names dtype {named!r}; float32, float16 and bfloat16 are supported")
        return kinds[named]

    def names(self) -> list[str]:
        """Parameters: "model.layers.0.self_attn.q_proj.weight", "....bias", "model.norm.weight", ..."""
        return [*self._module_of, *self._plain]

    def has(self, name: str) -> bool:
        return name in self._module_of or name in self._plain

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it. Raises KeyError."""
        source = self._source(name)
        return source.shape if source else self._store.shape(name)

    def get(self, name: str) -> Tensor | QTensor:
        """A quantized linear's weight as a canonical `QTensor`, all else as stored. Raises KeyError naming what is missing,
        ValueError for bytes that are not what the config says."""
        source = self._source(name)
        value = self._decoded(source, name) if source else self._store.tensor(name)
        if source and value.spec == SCHEMES["w4a8_g128"].weight and source.scheme.act == PER_TOKEN_INT8 and value.order is None:
            value = on_integer_grid(value)
        self._unread.pop(name, None)
        return value

    def act(self, name: str) -> Spec | None:
        """How the inputs of the linear with this weight are quantized, None for 16 bits."""
        source = self._source(name)
        return source.scheme.act if source else None

    def act_scale(self, name: str) -> float | None:
        """The static activation scale (a multiplier) of the linear with this weight; None where it is computed at run time."""
        source = self._source(name)
        if source is None or source.input_scale is None:
            return None
        values = self._store.tensor(source.input_scale).float().flatten().tolist()
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(f"{source.input_scale} is {values[:8]}: no scale of activations")
        return max(values)

    def kv_scales(self, layer: int) -> tuple[Scale, Scale] | None:
        """(K, V) multipliers of a layer's fp8 cache, each a float or float32 [kv_heads]; None when the checkpoint has none.

        Raises ValueError for 0, < 0, NaN."""
        return pair(self._scales[layer], layer) if layer in self._scales else None

    def scales_for(self, kv: str | None) -> list[tuple[Scale, Scale] | None] | None:
        """What a cache of this type multiplies by, per layer; None for types that take no scales. Warns of layers that have
        none, where 1.0 is used, or one that serves both, and of scales that the type does not use. Raises as
        `kv_scales`."""
        layers = range(self.num_layers)
        if kv != "fp8":
            if kv == "fp8_e5m2" and self._scales:
                warnings.warn("the checkpoint's KV scales are for fp8 (e4m3): fp8_e5m2 does not use them", stacklevel=2)
            return None
        scales = [self.kv_scales(layer) for layer in layers]
        if single := [layer for layer in layers if len(self._scales.get(layer, "kv")) == 1]:
            warnings.warn(f"layers {ranges(single)} have only one of the K and V scales: it serves both", stacklevel=2)
        if missing := [layer for layer in layers if scales[layer] is None]:
            warnings.warn(f"no KV scales for layers {ranges(missing)}: 1.0 is used there; `nybble convert --kv fp8` "
                          "measures them", stacklevel=2)
        elif len(layers) > 1 and all(not isinstance(s, Tensor) and s == 1.0 for pair in scales for s in pair):
            warnings.warn("every KV scale is 1.0: whoever made the checkpoint did not calibrate", stacklevel=2)
        return scales

    def linears(self) -> dict[str, LinearSource]:
        """What each quantized linear is, by module name."""
        return dict(self._reading.linears)

    def unread(self) -> list[str]:
        """Tensors that nobody asked for. Left out are those with a reason: `ignored`."""
        head, embedding, store = "lm_head.weight", "model.embed_tokens.weight", self._store
        tied = self.config.get("tie_word_embeddings") and head in self._unread and store.has(head) and store.has(embedding)
        if tied and torch.equal(store.tensor(head), store.tensor(embedding)):
            del self._unread[head]
            self._ignored[head] = "equal to the embedding, to which it is tied"
        return list(self._unread)

    def ignored(self) -> dict[str, str]:
        """Tensors that are rightly not loaded as parameters, with the reason."""
        return dict(self._ignored)

    def _decoded(self, source: LinearSource, name: str) -> QTensor:
        stored = ", ".join(f"{part} {list(self._store.shape(part))}" for part in source.tensors)
        return _fitting(f"{self.path}: {name} cannot be made of {stored}", partial(_decode, source))

    def _source(self, name: str) -> LinearSource | None:
        if name in self._module_of:
            return self._reading.linears[self._module_of[name]]
        if not self._store.has(name):
            self._store.shape(name)  # raises KeyError with what is near
        return None


def open_checkpoint(path: str | Path, activations: str | None = None) -> Checkpoint:
    """path: a Hugging Face directory (16-bit, or quantized in one of `READERS`), or a .gguf. activations: "int8" runs weights
    that were made for 16-bit activations (AWQ, GPTQ, W4A16) with int8 ones, which rounds every linear's input; None: as the
    checkpoint says.

    Reads headers and configs only. Raises FileNotFoundError, BrokenFile (a ValueError) for damaged files, ValueError with the
    reason for a format or scheme that is not supported.
    """
    path = Path(path)
    if activations not in (None, "int8"):
        raise ValueError(f"activations = {activations!r}: wants int8, or nothing for what the checkpoint says")
    if file := find_gguf(present(path)):
        config, store, reading = _fitting(f"{path}: it is not what llama.cpp writes", partial(open_gguf, file))
    elif (path / "config.json").is_file():
        before = stamp(path / "config.json")
        config = read_json(path / "config.json")
        try:
            store, reading = _read(path, find_quantization(path, config))
        finally:  # whatever else is wrong then
            if stamp(path / "config.json") != before:
                raise ValueError(f"{path} has changed while it was being read: start again")
    else:
        raise FileNotFoundError(f"{path} is neither a .gguf file nor a directory with a config.json")
    if str(config.get("model_type")).endswith(TURNED) and not reading.hadamard:
        raise ValueError(f"model_type {config['model_type']} wants a transform_config of compressed-tensors that says how "
                         "down_proj's inputs are turned: copy config.json from where the checkpoint was made")
    if activations is not None:
        reading = replace(reading, linears=with_int8_activations(reading.linears))
    return Checkpoint(path, config, store, reading)


def _read(path: Path, quantization: dict[str, Any] | None) -> tuple[Store, Reading]:
    if not quantization:
        return open_safetensors(path), Reading()
    method = str(quantization.get("quant_method") or quantization.get("method") or "").lower()
    method = {"sparseml": "compressed-tensors"}.get(method, method)
    if method not in READERS:
        raise ValueError(f"{path}: quantization method {method!r} is not supported; {', '.join(READERS)} and 16 bits are")
    store = open_safetensors(path)
    reading = _fitting(f"{path}: its config and tensors are not what {method} writes",
                       partial(READERS[method], store, quantization))
    if not reading.linears and not (method == "compressed-tensors" and quantization.get("kv_cache_scheme")):
        raise ValueError(f"{path} says it is quantized with {method} but holds no linear in that format")
    return store, reading


def _fitting(otherwise: str, read: Callable[[], Result]) -> Result:
    try:
        return read()
    except DOES_NOT_FIT as error:
        raise ValueError(f"{otherwise}: {error}") from error


def _decode(source: LinearSource) -> QTensor:
    value = source.read()
    wanted = value.spec.num_scales(source.shape)
    for what, part in (("scales", value.scale), ("zero points", value.zero)):
        if part is not None and part.shape != wanted:
            raise IndexError(f"{list(part.shape)} {what} where {list(wanted)} belong")
    order, width = value.order, source.shape[1]
    if order is not None and (order.shape != (width,) or int(order.min()) < 0 or int(order.max()) >= wanted[1]):
        raise IndexError(f"g_idx does not name one of {wanted[1]} groups for each of {width} input channels")
    return value


def find_quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization block, from config.json or from the file of its own that older tools wrote."""
    block = held(config, "quantization_config", dict) or held(config, "compression_config", dict)
    side = {name: read_json(path / name) for name in SIDE_CONFIGS if (path / name).is_file()}
    if block:
        if "hf_quant_config.json" in side and "modelopt" in str(block.get("quant_method") or "modelopt"):
            block = {**(held(side["hf_quant_config.json"], "quantization", dict, where="hf_quant_config.json") or {}), **block}
        if not block.get("quant_method") and not block.get("method"):
            method = "modelopt" if "quant_algo" in block else "compressed-tensors" if "config_groups" in block else None
            block = {**block, "quant_method": method}
        return block
    for name, content in side.items():
        if name == "hf_quant_config.json":
            return {"quant_method": "modelopt", **(held(content, "quantization", dict, where=name) or {})}
        if content.get("quant_method"):
            return content
        for key, method in (("desc_act", "gptq"), ("wbits", "qqq"), ("w_bit", "awq"), ("zero_point", "awq")):
            if key in content:
                return {"quant_method": method, **content}
        raise ValueError(f"{path / name} does not say which quantization method it is for (quant_method)")
    return None


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)
