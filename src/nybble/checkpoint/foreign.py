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

from nybble.checkpoint.compressed import kv_of_scheme
from nybble.checkpoint.pack import unpack_rows
from nybble.checkpoint.reading import (
    AnyStore,
    LinearSource,
    Reading,
    check_scale,
    float_weight,
    from_unsigned,
    integer_spec,
    modules_with,
)
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import FP8, INT4, INT8_CHANNEL, PER_TOKEN_FP8, PER_TOKEN_INT8, Spec, scheme_of


def read_qqq(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """QQQ (Zhang et al. 2024, HandH1998/QQQ): W4A8 per channel, or groups of 128 whose scales live on an int8 grid."""
    bits = _one(quantization, ("wbits", "bits", "w_bit"), 4)
    group = _one(quantization, ("group_size", "q_group_size"), -1)
    if bits != 4 or group not in (-1, 128) or not quantization.get("sym", True):
        raise ValueError(f"QQQ with {bits} bits, group size {group}, sym {quantization.get('sym', True)} is not supported: "
                         "4 bits, symmetric, group -1 or 128 is")
    linears = {}
    for module in modules_with(store, "B"):
        rows, words = store.shape(f"{module}.B")
        n, k = words // 2, rows * 16
        s_group = f"{module}.s_group"
        groups = store.shape(s_group) if store.has(s_group) else (0,)
        per_channel = 0 in groups
        if n % 64 or words % 2 or store.shape(f"{module}.s_channel") not in ((1, n), (n,)) or \
                not (per_channel or groups == (k // 128, n)):
            raise ValueError(f"{module}: B {[rows, words]} with s_channel {list(store.shape(f'{module}.s_channel'))} and "
                             f"s_group {list(groups)} is not a QQQ weight")
        spec = Spec(INT4, (1, None)) if per_channel else Spec(INT4, (1, 128), over=INT8_CHANNEL)
        names = (f"{module}.B", f"{module}.s_channel", *([s_group] if store.has(s_group) else []))
        linears[module] = LinearSource((n, k), scheme_of(spec, PER_TOKEN_INT8), names, _qqq_reader(store, module, spec))
    return Reading(linears)


def _qqq_reader(store: AnyStore, module: str, spec: Spec) -> Any:
    def read() -> QTensor:
        over = check_scale(store.tensor(f"{module}.s_channel").float(), f"{module}.s_channel").view(-1, 4, 4, 2)
        over = over.transpose(1, 2).reshape(-1, 1)
        nibbles = qqq_nibbles(store.tensor(f"{module}.B"), grouped=spec.over is not None)
        if spec.over is None:
            # Two's complement; the stored scale is for codes in the high half of a byte, which the kernel multiplies by 16.
            codes = nibbles.to(torch.int8)
            return QTensor(spec, torch.where(codes > 7, codes - 16, codes), over * 16)
        scale = store.tensor(f"{module}.s_group").float()
        scale = scale.view(scale.shape[0], -1, 8, 8).transpose(2, 3).reshape(scale.shape[0], -1).t().contiguous()
        return QTensor(spec, nibbles.to(torch.int8) - 8, check_scale(scale, f"{module}.s_group"), over=over)

    return read


def qqq_nibbles(words: Tensor, grouped: bool) -> Tensor:
    """B int32 [K / 16, 2 N] -> uint8 [N, K].

    Element (k, n) sits in row k / 16, word 128 (n / 64) + 16 (n % 8) + 4 (k % 16 / 4) + n / 16 % 4. Its nibble depends on
    t = k % 4 and b = n % 16 / 8: 2 t + 1 - b per channel; e / 2 + 4 (e % 2) with e = 4 b + t for groups.
    """
    rows, width = words.shape
    nibbles = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    # axes: row, n / 64, n % 8, k % 16 / 4, n / 16 % 4, nibble
    nibbles = nibbles.to(torch.uint8).view(rows, width // 128, 8, 4, 4, 8)
    b, t = torch.arange(2)[:, None], torch.arange(4)[None, :]
    e = 4 * b + t
    place = e // 2 + 4 * (e % 2) if grouped else 2 * t + 1 - b
    nibbles = nibbles[..., place.flatten()].view(rows, width // 128, 8, 4, 4, 2, 4)
    # n = 64 a1 + 16 a4 + 8 b + a2; k = 16 a0 + 4 a3 + t
    return nibbles.permute(1, 4, 5, 2, 0, 3, 6).reshape(width // 2, rows * 16)


# The order in which AutoAWQ's gemm layout puts eight columns into the nibbles of a word.
AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def read_awq(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """AutoAWQ 4-bit, versions gemm and gemv: unsigned codes and zero points as they are, value = (q - z) * s."""
    bits = _one(quantization, ("bits", "w_bit"), 4)
    group = _group_size(quantization)
    version = str(quantization.get("version", "gemm")).lower()
    if bits != 4 or version not in ("gemm", "gemv"):
        raise ValueError(f"AWQ with {bits} bits, version {version!r} is not supported: 4 bits, gemm or gemv are")
    zero_point = quantization.get("zero_point", True)
    skipped = quantization.get("modules_to_not_convert") or []
    linears = {}
    for module in modules_with(store, "qweight"):
        if any(part in module for part in skipped):
            raise ValueError(f"{module} is quantized but modules_to_not_convert {skipped} says it is not")
        rows, columns = store.shape(f"{module}.qweight")
        n, k = (columns * 8, rows) if version == "gemm" else (rows, columns * 8)
        size = group if group is not None and group < k else None
        spec = Spec(integer_spec(4, size, True).num, (1, size), zero=True) if zero_point else integer_spec(4, size, False)
        names = tuple(f"{module}.{last}" for last in ("qweight", "scales", "qzeros") if store.has(f"{module}.{last}"))
        if zero_point and f"{module}.qzeros" not in names:
            raise ValueError(f"{module} has no qzeros, but the config says zero_point")
        reader = _awq_gemm if version == "gemm" else _awq_gemv
        linears[module] = LinearSource((n, k), scheme_of(spec, None), names, partial(reader, store, module, spec, (n, k)))
    return Reading(linears)


def _awq_gemm(store: AnyStore, module: str, spec: Spec, shape: tuple[int, int]) -> QTensor:
    n, k = shape
    inverse = torch.tensor(AWQ_COLUMN_OF_NIBBLE).argsort()

    def columns(words: Tensor) -> Tensor:
        return unpack_rows(words, 4, n).view(words.shape[0], -1, 8)[..., inverse].reshape(words.shape[0], n)

    scale = check_scale(store.tensor(f"{module}.scales"), f"{module}.scales").t()
    zero = columns(store.tensor(f"{module}.qzeros")).t() if spec.zero else None
    return from_unsigned(columns(store.tensor(f"{module}.qweight")).t().contiguous(), 4, scale, zero, spec.group)


def _awq_gemv(store: AnyStore, module: str, spec: Spec, shape: tuple[int, int]) -> QTensor:
    n, k = shape
    groups = 1 if spec.group is None else -(-k // spec.group)
    scale = check_scale(store.tensor(f"{module}.scales")[:, :groups], f"{module}.scales")
    zeros = store.tensor(f"{module}.qzeros") if spec.zero else None
    zero = None if zeros is None else unpack_rows(zeros, 4, zeros.shape[1] * 8)[:, :groups]
    return from_unsigned(unpack_rows(store.tensor(f"{module}.qweight"), 4, k), 4, scale, zero, spec.group)


def read_gptq(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: 2, 3, 4 or 8 bits, v1 (zeros minus one) or v2.

    A symmetric checkpoint labelled with the wrong version is read by what it holds, with a warning.
    """
    bits = quantization.get("bits", 4)
    symmetric, version = quantization.get("sym", True), _gptq_version(quantization)
    group = _group_size(quantization)
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"GPTQ with {bits} bits is not supported (2, 3, 4 and 8 are)")
    if quantization.get("dynamic"):
        _refuse_dynamic(store, quantization["dynamic"])
    linears = {}
    for module in modules_with(store, "qweight"):
        rows, n = store.shape(f"{module}.qweight")
        k = rows * 32 // bits
        size = group if group is not None and group < k else None
        groups = 1 if size is None else -(-k // size)
        if store.shape(f"{module}.scales") != (groups, n):
            raise ValueError(f"{module}.scales has shape {list(store.shape(f'{module}.scales'))}; {bits}-bit weights "
                             f"[{n}, {k}] in groups of {size} want [{groups}, {n}]")
        spec = integer_spec(bits, size, not symmetric)
        names = tuple(f"{module}.{last}" for last in ("qweight", "qzeros", "scales", "g_idx") if store.has(f"{module}.{last}"))
        linears[module] = LinearSource(
            (n, k), scheme_of(spec, None), names,
            partial(_gptq, store, module, spec, bits, version, (n, k), _by_gptqmodel(quantization)))
    return Reading(linears)


def _gptq(store: AnyStore, module: str, spec: Spec, bits: int, version: int, shape: tuple[int, int],
          by_gptqmodel: bool) -> QTensor:
    n, k = shape
    codes = unpack_rows(store.tensor(f"{module}.qweight").t().contiguous(), bits, k)
    scale = check_scale(store.tensor(f"{module}.scales"), f"{module}.scales").t()
    order = store.tensor(f"{module}.g_idx") if store.has(f"{module}.g_idx") else None
    if order is not None and not bool(order.any()):
        order = None  # all zeros: written by tools that do not reorder
    zeros = store.tensor(f"{module}.qzeros")
    stored = unpack_rows(zeros, bits, n)
    middle, mask = 1 << (bits - 1), (1 << bits) - 1
    if not spec.zero:
        values = stored.unique().tolist()
        if values not in ([middle - 1], [middle]):
            raise ValueError(f"{module}: the config says symmetric, but its stored zero points are {values[:8]}: "
                             f"symmetric {bits}-bit ones are all {middle - 1} (v1) or all {middle} (v2)")
        if values != [middle + version - 2]:
            warnings.warn(f"{module}: labelled GPTQ v{version}, but its zero points are v{3 - version}'s: read as these",
                          stacklevel=2)
        return from_unsigned(codes, bits, scale, None, spec.group, order)
    if version == 1 and by_gptqmodel:
        # GPTQModel subtracts one from each field of a whole word at once, with borrows: only a whole-word addition undoes it.
        ones = sum(1 << (bits * i) for i in range(32 // bits)) if 32 % bits == 0 else None
        if ones is not None:
            words = (zeros.to(torch.int64) + ones) & 0xFFFFFFFF
            stored = unpack_rows(torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32), bits, n)
        else:
            stored = (stored + 1) & mask
    elif version == 1:
        stored = (stored + 1) & mask
    return from_unsigned(codes, bits, scale, stored.t(), spec.group, order)


def _gptq_version(quantization: dict[str, Any]) -> int:
    named = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    versions = {"gptq": 1, "gptq_v2": 2}
    if named not in versions:
        raise ValueError(f"GPTQ checkpoint_format {named!r} is a kernel's layout, not supported; {', '.join(versions)} are")
    return versions[named]


def _by_gptqmodel(quantization: dict[str, Any]) -> bool:
    makers = (quantization.get("meta") or {}).get("quantizer") or []
    return any("gptqmodel" in str(maker).lower() for maker in ([makers] if isinstance(makers, str) else makers))


def _refuse_dynamic(store: AnyStore, rules: dict[str, Any]) -> None:
    """Per-module overrides are honoured where they only leave modules alone ("-:regex"); others would change bits silently."""
    for rule, changed in rules.items():
        pattern = rule.removeprefix("+:").removeprefix("-:")
        if not rule.startswith("-:") and changed and any(re.match(pattern, m) for m in modules_with(store, "qweight")):
            raise ValueError(f"GPTQ with per-module overrides ({rule!r}: {changed}) is not supported")


def read_fp8(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """quant_method "fp8": AutoFP8 (one scale per tensor) and DeepSeek or Qwen blocks (`weight_scale_inv`, a multiplier)."""
    scheme = quantization.get("activation_scheme", "dynamic")
    block = quantization.get("weight_block_size")
    if scheme not in ("static", "dynamic") or quantization.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"FP8 with activation_scheme {scheme!r}, fmt {quantization.get('fmt')!r} is not supported")
    if (quantization.get("meta") or {}).get("weight_scale_semantics") or quantization.get("weight_scale_semantics"):
        divide = "inverse" in str(quantization.get("weight_scale_semantics") or quantization["meta"]["weight_scale_semantics"])
    else:
        divide = _by_gptqmodel(quantization)
    act = Spec(FP8, (None, None)) if scheme == "static" else Spec(FP8, (1, block[1]), dynamic=True) if block else PER_TOKEN_FP8
    last = "weight_scale_inv" if modules_with(store, "weight_scale_inv") else "weight_scale"
    linears = {module: float_weight(store, module, f"{module}.{last}", act, tuple(block) if block else None,
                                    divide=divide and last == "weight_scale_inv", input_scale=_input_scale(store, module, act))
               for module in modules_with(store, last)}
    _check_all_scaled(store, linears)
    kv = "fp8" if quantization.get("kv_cache_scheme") == "static" else None
    return Reading(linears, kv)


def read_fbgemm_fp8(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """fbgemm_fp8: one scale per row; activations per token, whose absmax is clipped at `activation_scale_ub` first."""
    bound = quantization.get("activation_scale_ub")
    if bound is not None and bound < 1200.0:
        raise ValueError(f"fbgemm_fp8 with activation_scale_ub {bound}: clipping activations is not supported")
    linears = {module: float_weight(store, module, f"{module}.weight_scale", PER_TOKEN_FP8)
               for module in modules_with(store, "weight_scale")}
    spare = {f"{module}.input_scale_ub": "its bound of 1200 is beyond what activations reach" for module in linears
             if store.has(f"{module}.input_scale_ub")}
    _check_all_scaled(store, linears)
    return Reading(linears, ignored=spare)


def read_modelopt(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """NVIDIA ModelOpt FP8: per tensor static, or per channel with per-token activations. KV scales under k_proj, v_proj."""
    algorithm = str(quantization.get("quant_algo") or "").upper()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise ValueError(f"ModelOpt quant_algo {algorithm!r} is not supported; FP8 and FP8_PER_CHANNEL_PER_TOKEN are")
    act = Spec(FP8, (None, None)) if algorithm == "FP8" else PER_TOKEN_FP8
    excluded = quantization.get("ignore") or quantization.get("exclude_modules") or []
    linears = {}
    for module in modules_with(store, "weight_scale"):
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in excluded):
            raise ValueError(f"{module} has a weight_scale although the config excludes it ({excluded})")
        if store.has(f"{module}.pre_quant_scale"):
            raise ValueError(f"{module}.pre_quant_scale: ModelOpt's AWQ scales are not supported")
        linears[module] = float_weight(store, module, f"{module}.weight_scale", act,
                                       input_scale=_input_scale(store, module, act))
    _check_all_scaled(store, linears)
    scheme, algo = quantization.get("kv_cache_scheme"), quantization.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        kv, refusal = kv_of_scheme(scheme)
    else:
        named = str(scheme or algo or "").upper()
        kv = "fp8" if named == "FP8" else None
        refusal = f"its KV cache is {named}, which is not supported; choose one, e.g. --kv int8" if named and not kv else None
    return Reading(linears, kv, refusal)


def read_quark(store: AnyStore, quantization: dict[str, Any]) -> Reading:
    """AMD Quark FP8 e4m3 (OCP encoding), per tensor or per channel; KV scales are the outputs of k_proj and v_proj."""
    whole = quantization.get("global_quant_config") or {}
    weight, inputs = whole.get("weight") or {}, whole.get("input_tensors")
    kinds = {weight.get("dtype"), (inputs or {}).get("dtype", weight.get("dtype"))}
    if kinds != {"fp8_e4m3"} or weight.get("qscheme") not in ("per_tensor", "per_channel"):
        raise ValueError(f"Quark with weight {weight}, input {inputs} is not supported: fp8_e4m3 per tensor or channel is")
    dynamic = bool((inputs or {}).get("is_dynamic"))
    act = None if inputs is None else PER_TOKEN_FP8 if dynamic else Spec(FP8, (None, None))
    linears = {module: float_weight(store, module, f"{module}.weight_scale", act, input_scale=_input_scale(store, module, act))
               for module in modules_with(store, "weight_scale")}
    _check_all_scaled(store, linears)
    kv = "fp8" if (quantization.get("export") or {}).get("kv_cache_group") else None
    return Reading(linears, kv)


def _input_scale(store: AnyStore, module: str, act: Spec | None) -> str | None:
    """The static activation scale's name; also one that a dynamic scheme leaves unused is part of the linear."""
    name = f"{module}.input_scale"
    if store.has(name):
        return name
    if act is not None and not act.dynamic:
        raise ValueError(f"{module} has static activations but no input_scale")
    return None


def _check_all_scaled(store: AnyStore, linears: dict[str, LinearSource]) -> None:
    for name in store.names():
        if store.dtype(name) in (torch.float8_e4m3fn, torch.float8_e5m2) and name.rpartition(".")[0] not in linears:
            raise ValueError(f"{name} is FP8 but has no scale beside it: its values cannot be known")


def _group_size(quantization: dict[str, Any]) -> int | None:
    size = _one(quantization, ("group_size", "q_group_size"), 128)
    if size != -1 and (not isinstance(size, int) or size <= 0):
        raise ValueError(f"group size {size!r} is not supported (-1, or a positive number)")
    return None if size == -1 else size


def _one(config: dict[str, Any], names: tuple[str, ...], default: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)
