"""Other tools' checkpoints, one function per format: QQQ, AWQ, GPTQ, FP8 in its dialects. Codes and scales are as they are.

Each takes the store and the quantization block and says what every linear is (`Reading`), or why it cannot be served.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nybble.checkpoint.compressed import kv_of_scheme, patterns, regex
from nybble.checkpoint.pack import unpack_nibbles, unpack_rows
from nybble.checkpoint.reading import LinearSource, Part, Reading, float_weight, from_unsigned, integer_spec, modules_with
from nybble.checkpoint.store import Store
from nybble.formats.numerics import FLOAT8
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import FP8, INT4, INT8_CHANNEL, PER_TOKEN_FP8, PER_TOKEN_INT8, Spec, scheme_of
from nybble.text.errors import held


def read_qqq(store: Store, quantization: dict[str, Any]) -> Reading:
    """QQQ (Zhang et al. 2024, HandH1998/QQQ): W4A8 per channel, or groups of 128 whose scales live on an int8 grid."""
    bits, symmetric = _one(quantization, ("wbits", "bits", "w_bit"), 4), quantization.get("sym", True)
    group = _one(quantization, ("group_size", "q_group_size"), -1)
    if bits != 4 or group not in (-1, 128) or not symmetric:
        raise ValueError(f"QQQ with {bits} bits, group size {group}, sym {symmetric} is not supported: 4 bits, symmetric, "
                         "group -1 or 128 is")
    _warn_unknown("QQQ", quantization, f"wbits w_bit q_group_size {GPTQ_KEYS}")
    linears = {}
    for module in modules_with(store, "B"):
        _refuse_rules(quantization, module)
        part = Part(store, module)
        (rows, words), channels = part.sides("B"), part.shape("s_channel")
        n, k = words // 2, rows * 16
        groups = part.shape("s_group") if part.has("s_group") else (0,)
        per_channel = 0 in groups
        if per_channel != (group in (-1, k)):
            raise ValueError(f"{module}: the config says group size {group}, but s_group is {list(groups)}: "
                             "one of them is wrong, and the nibbles of B lie in another order for each")
        if n % 64 or words % 2 or channels not in ((1, n), (n,)) or not (per_channel or groups == (k / 128, n)):
            raise ValueError(f"{module}: B {[rows, words]} with s_channel {list(channels)} and s_group {list(groups)} is not a "
                             "QQQ weight")
        spec = Spec(INT4, (1, None)) if per_channel else Spec(INT4, (1, 128), over=INT8_CHANNEL)
        linears[module] = LinearSource((n, k), scheme_of(spec, PER_TOKEN_INT8), part.names("B", "s_channel", "s_group"),
                                       partial(_qqq, part, spec))
    return Reading(linears)


def _qqq(part: Part, spec: Spec) -> QTensor:
    over = part.scale("s_channel").view(-1, 4, 4, 2).transpose(1, 2).reshape(-1, 1)
    nibbles = qqq_nibbles(part.tensor("B"), grouped=spec.over is not None).view(torch.int8)
    if spec.over is None:
        # Two's complement; the stored scale is for codes in the high half of a byte, which the kernel multiplies by 16.
        return QTensor(spec, (nibbles ^ 8) - 8, over * 16)
    scale = part.scale("s_group")
    scale = scale.view(scale.shape[0], -1, 8, 8).transpose(2, 3).reshape(scale.shape[0], -1).t().contiguous()
    return QTensor(spec, nibbles - 8, scale, over=over)


# [grouped][4 b + t] -> nibble, as said below
QQQ_PLACE = ([1, 3, 5, 7, 0, 2, 4, 6], [0, 4, 1, 5, 2, 6, 3, 7])


def qqq_nibbles(words: Tensor, grouped: bool) -> Tensor:
    """B int32 [K / 16, 2 N] -> uint8 [N, K].

    Element (k, n) sits in row k / 16, word 128 (n / 64) + 16 (n % 8) + 4 (k % 16 / 4) + n / 16 % 4. Its nibble depends on
    t = k % 4 and b = n % 16 / 8: 2 t + 1 - b per channel; e / 2 + 4 (e % 2) with e = 4 b + t for groups.
    """
    rows, width = words.shape
    # axes: row, n / 64, n % 8, k % 16 / 4, n / 16 % 4, b, t
    nibbles = unpack_nibbles(words, QQQ_PLACE[grouped]).view(rows, width // 128, 8, 4, 4, 2, 4)
    # n = 64 a1 + 16 a4 + 8 b + a2; k = 16 a0 + 4 a3 + t
    return nibbles.permute(1, 4, 5, 2, 0, 3, 6).reshape(width // 2, rows * 16)


# The order in which AutoAWQ's gemm layout puts eight columns into the nibbles of a word.
AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def read_awq(store: Store, quantization: dict[str, Any]) -> Reading:
    """AutoAWQ 4-bit, versions gemm, gemv and gemv_fast (llm-awq's): unsigned codes and zero points, value = (q - z) * s."""
    bits = _one(quantization, ("bits", "w_bit"), 4)
    group = _group_size(quantization)
    version = str(_one(quantization, ("version", "format", "checkpoint_format"), "gemm")).lower()
    version = {"llm-awq": "gemv_fast", "exllama": "gemm", "ipex": "gemm", "awq": "gemm"}.get(version, version)
    if bits != 4 or version not in AWQ_READERS:
        raise ValueError(f"AWQ with {bits} bits, version {version!r} is not supported: 4 bits, {', '.join(AWQ_READERS)} are")
    _warn_unknown("AWQ", quantization, f"""w_bit q_group_size zero_point modules_to_not_convert do_fuse fuse_max_seq_len
        modules_to_fuse {GPTQ_KEYS}""")
    zero_point = quantization.get("zero_point", True)
    skipped = patterns(quantization, "modules_to_not_convert")
    linears = {}
    for module in modules_with(store, "qweight"):
        _refuse_rules(quantization, module)
        part = Part(store, module)
        if _excluded(module, skipped):
            raise ValueError(f"{module} is quantized but modules_to_not_convert {skipped} says it is not")
        height, width = part.sides("qweight")
        n, k = {"gemm": (width * 8, height), "gemv": (height, width * 8), "gemv_fast": (height * 4, width)}[version]
        if part.dtype("qweight") != (torch.int16 if version == "gemv_fast" else torch.int32):
            raise ValueError(f"{module}.qweight is {part.dtype('qweight')}, which AWQ version {version!r} is not")
        size, groups = _groups(group, k)
        spec = integer_spec(4, size, zero_point or part.has("qzeros"))
        if zero_point and not part.has("qzeros"):
            raise ValueError(f"{module} has no qzeros, but the config says zero_point")
        rows, columns = part.sides("scales") if version == "gemv" else part.sides("scales")[::-1]
        if rows != n or columns < groups or (version == "gemm" and columns > groups):  # gemv's may be padded
            raise ValueError(f"{module}.scales has shape {list(part.shape('scales'))}, which fits no AWQ {version} weight "
                             f"[{n}, {k}] in groups of {size}")
        linears[module] = LinearSource((n, k), scheme_of(spec, None), part.names("qweight", "scales", "qzeros"),
                                       partial(AWQ_READERS[version], part, spec, n, k, groups))
    return Reading(linears)


def _awq_gemm(part: Part, spec: Spec, n: int, k: int, groups: int) -> QTensor:
    order = [AWQ_COLUMN_OF_NIBBLE.index(column) for column in range(8)]
    codes = unpack_nibbles(part.tensor("qweight"), order).t().contiguous()
    zero = unpack_nibbles(part.tensor("qzeros"), order).t() if spec.zero else None
    return from_unsigned(codes, 4, part.scale("scales").t(), zero, spec.group)


def _awq_gemv(part: Part, spec: Spec, n: int, k: int, groups: int) -> QTensor:
    zeros = part.tensor("qzeros") if spec.zero else None
    zero = None if zeros is None else unpack_rows(zeros, 4, zeros.shape[1] * 8)[:, :groups]
    return from_unsigned(unpack_rows(part.tensor("qweight"), 4, k), 4, part.scale("scales", columns=groups), zero, spec.group)


def _awq_gemv_fast(part: Part, spec: Spec, n: int, k: int, groups: int) -> QTensor:
    """Four rows interleaved in int16 words, 64 input channels at a time: word w, nibble i holds position p = 4 w + i of row
    p / 64, and position p % 32 = 8 b + 4 c + a there is input channel 8 a + 2 b + c. Zeros are stored as -zero * scale."""
    words = part.tensor("qweight").view(n // 4, k // 64, 64, 1)
    nibbles = ((words >> torch.arange(0, 16, 4, dtype=torch.int16)) & 15).to(torch.uint8)
    rows = nibbles.view(n // 4, k // 64, 4, 64).transpose(1, 2).reshape(n, k // 32, 4, 2, 4)
    codes = rows.permute(0, 1, 4, 2, 3).reshape(n, k)
    scale, zero = part.scale("scales", rows=groups).t(), None
    if spec.zero:
        offset = part.tensor("qzeros")[:groups].t()
        zero = torch.where(scale > 0, torch.round(-offset.float() / scale), 0)
        if not torch.equal((-(zero * scale)).to(offset.dtype), offset) or bool(((zero < 0) | (zero > 15)).any()):
            raise ValueError(f"{part.module}.qzeros are no whole zero points times its scales")
    return from_unsigned(codes, 4, scale, zero, spec.group)


AWQ_READERS = {"gemm": _awq_gemm, "gemv": _awq_gemv, "gemv_fast": _awq_gemv_fast}


def read_gptq(store: Store, quantization: dict[str, Any]) -> Reading:
    """GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: 2, 3, 4 or 8 bits, v1 (zeros minus one) or v2.

    A symmetric checkpoint labelled with the wrong version is read by what it holds, with a warning.
    """
    named = held(quantization, "checkpoint_format", str) or held(quantization, "format", str) or "gptq"
    if named not in GPTQ_VERSIONS:
        raise ValueError(f"GPTQ checkpoint_format {named!r} is a kernel's layout, not supported; gptq and gptq_v2 are")
    if quantization.get("is_marlin_format") or quantization.get("pack_dtype") not in (None, "int32"):
        raise ValueError("GPTQ in a kernel's own layout (is_marlin_format, pack_dtype) is not supported; int32 v1 and v2 are")
    _warn_unknown("GPTQ", quantization, GPTQ_KEYS)
    labelled = IN_WORDS if named == "gptq" and _by_gptqmodel(quantization) else GPTQ_VERSIONS[named]
    linears = {}
    for module in modules_with(store, "qweight"):
        own, part = _gptq_rules(quantization, module), Part(store, module)
        bits, symmetric, group = own.get("bits", 4), own.get("sym", True), _group_size(own)
        if bits not in (2, 3, 4, 8):
            raise ValueError(f"{module}: GPTQ with {bits} bits is not supported (2, 3, 4 and 8 are)")
        if part.dtype("qweight") != torch.int32:
            raise ValueError(f"{module}.qweight is {part.dtype('qweight')}; GPTQ packs into int32 words")
        rows, n = part.sides("qweight")
        k = rows * 32 // bits
        size, groups = _groups(group, k)
        if part.shape("scales") != (groups, n):
            raise ValueError(f"{module}.scales has shape {list(part.shape('scales'))}; {bits}-bit weights [{n}, {k}] in groups "
                             f"of {size} want [{groups}, {n}]")
        spec = integer_spec(bits, size, not symmetric)
        if own.get("desc_act") and groups > 1 and not part.has("g_idx"):
            raise ValueError(f"{module} has no g_idx, but the config says desc_act: which channel is in which group is unknown")
        linears[module] = LinearSource((n, k), scheme_of(spec, None), part.names("qweight", "qzeros", "scales", "g_idx"),
                                       partial(_gptq, part, spec, bits, labelled, n, k))
    return Reading(linears)


GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}
IN_WORDS = "1 (of whole words)"  # GPTQModel's version 1


def _gptq(part: Part, spec: Spec, bits: int, labelled: int | str, n: int, k: int) -> QTensor:
    module, middle = part.module, 1 << (bits - 1)
    codes = unpack_rows(part.tensor("qweight").t().contiguous(), bits, k)
    scale = part.scale("scales").t()
    order = part.tensor("g_idx") if part.has("g_idx") else None
    if order is not None and not bool(order.any()):
        order = None  # all zeros: written by tools that do not reorder
    words = part.tensor("qzeros")
    zero = gptq_zeros(words, bits, n, labelled)
    if spec.zero:
        return from_unsigned(codes, bits, scale, zero.t(), spec.group, order)
    fits = [v for v in (labelled, 1, 2, IN_WORDS) if bool((gptq_zeros(words, bits, n, v) == middle).all())]
    if not fits:
        raise ValueError(f"{module}: the config says symmetric, but its zero points are {zero.unique().tolist()[:8]}, not all "
                         f"{middle}")
    if fits[0] != labelled and 2 in (fits[0], labelled):
        warnings.warn(f"{module}: labelled GPTQ v{labelled}, but its zero points are v{fits[0]}'s: read as these", stacklevel=2)
    return from_unsigned(codes, bits, scale, None, spec.group, order)


# What GPTQModel subtracts from whole words of v1 zero points, with borrows across fields; its three for 3 bits meet the fields
# at other places than at their ones. Only adding them back undoes it.
GPTQMODEL_OFFSETS = {2: (0x55555555,), 3: (0x24924924, 0x92492492, 0x49249249), 4: (0x11111111,), 8: (0x01010101,)}


def gptq_zeros(words: Tensor, bits: int, n: int, version: int | str) -> Tensor:
    """qzeros int32 [groups, words] -> uint8 [groups, N]. version: 2 stores them, 1 stores one less in each field, the other is
    GPTQModel's 1."""
    if version != IN_WORDS:
        return (unpack_rows(words, bits, n) + (2 - int(version))) & ((1 << bits) - 1)
    offsets = GPTQMODEL_OFFSETS[bits]
    added = words.to(torch.int64) + torch.tensor(offsets)[torch.arange(words.shape[1]) % len(offsets)]
    return unpack_rows(added.to(torch.uint32).view(torch.int32), bits, n)


def _by_gptqmodel(quantization: dict[str, Any]) -> bool:
    makers = held(held(quantization, "meta", dict) or {}, "quantizer", str, list[str], where="config.json: meta") or []
    return any("gptqmodel" in str(maker).lower() for maker in ([makers] if isinstance(makers, str) else makers))


GPTQ_KEYS = """bits group_size desc_act sym checkpoint_format format lm_head true_sequential static_groups damp_percent
    damp_auto_increment pack_dtype dynamic modules_in_block_to_quantize meta is_marlin_format model_name_or_path
    model_file_base_name model_name model_seqlen
    block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id
    use_cuda_fp16 use_exllama exllama_config disable_exllama max_input_length cache_block_outputs tokenizer dataset mse
    act_group_aware hyb_act backend quant_linear_cls parallel_packing offload_to_disk offload_to_disk_path adapter v2 gptaq
    rotation process mock_quantization failsafe compute_device_filter modules_to_not_convert"""


def _refuse_rules(quantization: dict[str, Any], module: str) -> None:
    if _gptq_rules(quantization, module) is not quantization:
        raise ValueError(f"{module}: settings for single modules (dynamic) are honoured for GPTQ only")


def _gptq_rules(quantization: dict[str, Any], module: str) -> dict[str, Any]:
    """The settings of one module: GPTQModel's `dynamic` maps "+:regex" (or "regex") to overrides, "-:regex" to not at all."""
    for rule, changes in (held(quantization, "dynamic", dict) or {}).items():
        if regex(rule.removeprefix("+:").removeprefix("-:"), "config.json: dynamic").match(module):
            if rule.startswith("-:"):
                raise ValueError(f"{module} is quantized, but the config's dynamic rule {rule!r} says it is not")
            return {**quantization, **(changes or {})}
    return quantization


def read_fp8(store: Store, quantization: dict[str, Any]) -> Reading:
    """quant_method "fp8": AutoFP8 (one scale per tensor) and DeepSeek or Qwen blocks (`weight_scale_inv`, a multiplier)."""
    scheme, kv = quantization.get("activation_scheme", "dynamic"), quantization.get("kv_cache_scheme")
    block = held(quantization, "weight_block_size", list[int])
    if block and len(block) != 2:
        raise ValueError(f"config.json: weight_block_size = {block}; wants two numbers, rows and columns")
    if scheme not in ("static", "dynamic") or str(quantization.get("fmt") or "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"FP8 with activation_scheme {scheme!r}, fmt {quantization.get('fmt')!r} is not supported")
    if quantization.get("scale_fmt"):
        raise ValueError(f"FP8 with scale_fmt {quantization['scale_fmt']!r}: rounding activation scales is not supported")
    _warn_unknown("FP8", quantization, f"""activation_scheme weight_block_size fmt scale_fmt weight_scale_semantics
        ignored_layers kv_cache_scheme is_checkpoint_fp8_serialized weight_scale_method {GPTQ_KEYS}""")
    last = "weight_scale_inv" if modules_with(store, "weight_scale_inv") else "weight_scale"
    means = quantization.get("weight_scale_semantics") or (held(quantization, "meta", dict) or {}).get("weight_scale_semantics")
    divide = last == "weight_scale_inv" and ("inverse" in str(means) if means else _by_gptqmodel(quantization))
    act = PER_TENSOR_FP8 if scheme == "static" else Spec(FP8, (1, block[1]), dynamic=True) if block else PER_TOKEN_FP8
    if "activation_scheme" not in quantization and "weight_scale_method" in quantization:
        act = None  # GPTQModel's FP8 is weights only
    linears = _fp8_linears(store, quantization, act, last, tuple(block) if block else None, divide)
    return Reading(linears, *_kv(kv, "static"))


def read_fbgemm_fp8(store: Store, quantization: dict[str, Any]) -> Reading:
    """fbgemm_fp8: one scale per row; activations per token, whose absmax is clipped at `activation_scale_ub` first."""
    bound = quantization.get("activation_scale_ub")
    if bound is not None and bound < 1200.0:
        raise ValueError(f"fbgemm_fp8 with activation_scale_ub {bound}: clipping activations is not supported")
    spare = {}
    for name in (f"{module}.input_scale_ub" for module in modules_with(store, "input_scale_ub")):
        if float(store.tensor(name).float().min()) < 1200.0:
            raise ValueError(f"{name} is {store.tensor(name).tolist()}: clipping activations there is not supported")
        spare[name] = "its bound of 1200 or more is beyond what activations reach"
    _warn_unknown("fbgemm_fp8", quantization, "activation_scale_ub modules_to_not_convert")
    return Reading(_fp8_linears(store, quantization, PER_TOKEN_FP8, spare=False), ignored=spare)


def read_modelopt(store: Store, quantization: dict[str, Any]) -> Reading:
    """NVIDIA ModelOpt FP8: per tensor static, or per channel with per-token activations. KV scales under k_proj, v_proj."""
    algorithm = str(quantization.get("quant_algo") or "").upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise ValueError(f"ModelOpt quant_algo {algorithm!r} is not supported; FP8 and FP8_PER_CHANNEL_PER_TOKEN are")
    excluded = patterns(quantization, "ignore") or patterns(quantization, "exclude_modules")
    for module in modules_with(store, "weight_scale"):
        if _excluded(module, excluded):
            raise ValueError(f"{module} has a weight_scale although the config excludes it ({excluded})")
        if store.has(f"{module}.pre_quant_scale"):
            raise ValueError(f"{module}.pre_quant_scale: ModelOpt's AWQ scales are not supported")
    linears = _fp8_linears(store, quantization, PER_TENSOR_FP8 if algorithm == "FP8" else PER_TOKEN_FP8)
    return Reading(linears, *_kv(quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"), "FP8"))


def read_quark(store: Store, quantization: dict[str, Any]) -> Reading:
    """AMD Quark FP8 e4m3 (OCP encoding), per tensor or per channel; KV scales are the outputs of k_proj and v_proj."""
    whole = held(quantization, "global_quant_config", dict) or {}
    weight, inputs = (held(whole, key, dict, where="config.json: global_quant_config") for key in ("weight", "input_tensors"))
    weight = weight or {}
    kinds = {weight.get("dtype"), (inputs or weight).get("dtype", weight.get("dtype"))}
    if kinds != {"fp8_e4m3"} or weight.get("qscheme") not in ("per_tensor", "per_channel"):
        raise ValueError(f"Quark with weight {weight}, input {inputs} is not supported: fp8_e4m3 per tensor or channel is")
    act = None if inputs is None else PER_TOKEN_FP8 if inputs.get("is_dynamic") else PER_TENSOR_FP8
    if whole.get("output_tensors") or whole.get("bias") or quantization.get("softmax_quant_spec"):
        raise ValueError("Quark with quantized outputs, biases or softmax is not supported: weights and inputs are")
    layers = held(quantization, "layer_quant_config", dict) or {}
    for pattern in layers:
        layer = held(layers, pattern, dict, where="config.json: layer_quant_config") or {}
        differs = [key for key in ("weight", "input_tensors") if _essence(layer.get(key)) != _essence(whole.get(key))]
        if differs or layer.get("bias") or (layer.get("output_tensors") and not re.search("[kv]_proj", pattern)):
            raise ValueError(f"Quark's layer_quant_config {pattern!r} differs from the rest in {differs or 'its outputs'}, "
                             "which is not supported")
    caches = (layers, held(quantization, "kv_cache_quant_config", dict) or {})
    outputs = {(spec.get("dtype"), spec.get("qscheme")) for cache in caches for layer in cache.values()
               if layer and (spec := layer.get("output_tensors"))}
    if not outputs and (held(quantization, "export", dict) or {}).get("kv_cache_group"):
        outputs = {QUARK_KV}
    named = next((" ".join(map(str, kind)) for kind in outputs if kind != QUARK_KV), None)
    return Reading(_fp8_linears(store, quantization, act), *(_kv(named, "") if named else ("fp8" if outputs else None, None)))


QUARK_KV = ("fp8_e4m3", "per_tensor")
PER_TENSOR_FP8 = Spec(FP8, (None, None))


def _essence(spec: dict[str, Any] | None) -> Any:
    """What of a Quark tensor spec changes numbers."""
    keys = ("dtype", "qscheme", "is_dynamic", "group_size", "symmetric")
    return None if spec is None else tuple(spec.get(key) or None for key in keys)


def _kv(named: Any, fp8: str) -> tuple[str | None, str | None]:
    """(KV key, why not) of a cache that a config describes, or names; fp8: the name of what can be had."""
    if isinstance(named, dict):
        return kv_of_scheme(named)
    if not named or str(named).lower() == fp8.lower():
        return ("fp8" if named else None), None
    return None, f"its KV cache is {named}, which is not supported; choose one, e.g. --kv int8"


def _fp8_linears(store: Store, quantization: dict[str, Any], act: Spec | None, last: str = "weight_scale",
                 block: tuple[int, int] | None = None, divide: bool = False, spare: bool = True) -> dict[str, LinearSource]:
    """Of every module that has a scale named `last`. Warns of linears without one that the config does not exclude."""
    linears = {module: float_weight(Part(store, module), last, act, block, divide, spare)
               for module in modules_with(store, last)}
    skipped = [pattern for key in ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules", "exclude")
               for pattern in patterns(quantization, key)]
    plain = []
    for name in store.names():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module in linears:
            continue
        if store.dtype(name) in FLOAT8.values():
            raise ValueError(f"{name} is FP8 but has no scale beside it: its values cannot be known")
        if module.endswith("_proj") and len(store.shape(name)) == 2 and not _excluded(module, skipped):
            plain.append(module)
    if plain and linears:
        warnings.warn(f"{len(plain)} linears have 16 bits though the config excludes them nowhere (e.g. {plain[0]}): "
                      "they run in 16 bits", stacklevel=2)
    return linears


def _excluded(module: str, patterns: list[str]) -> bool:
    """Names or whole parts of names, "re:" regexes, and wildcards, where path* is path and what is below it, not path1."""

    def fits(pattern: str) -> bool:
        if pattern.startswith("re:"):
            return re.match(pattern[3:], module) is not None
        if "*" not in pattern.removesuffix("*"):
            return f".{pattern.removesuffix('*').strip('.')}." in f".{module}."
        return fnmatch.fnmatchcase(module, pattern)

    return any(map(fits, patterns))


def _warn_unknown(method: str, quantization: dict[str, Any], known: str) -> None:
    """Numbers are known from the tensors; a key that this version does not know is said, not skipped."""
    always = {"quant_method", "method", "producer", "version", *known.split()}
    if unknown := sorted(key for key, value in quantization.items() if key not in always and value is not None):
        warnings.warn(f"{method} config keys that are not understood and not used: {', '.join(unknown)}", stacklevel=2)


def _group_size(quantization: dict[str, Any]) -> int | None:
    size = _one(quantization, ("group_size", "q_group_size"), 128)
    if size != -1 and (type(size) is not int or size <= 0):
        raise ValueError(f"group size {size!r} is not supported (-1, or a positive number)")
    return None if size == -1 else size


def _groups(size: int | None, k: int) -> tuple[int | None, int]:
    """(input channels per scale, None for all; how many scales a row has)"""
    return (None, 1) if size is None or size >= k else (size, -(-k // size))


def _one(config: dict[str, Any], names: tuple[str, ...], default: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)
