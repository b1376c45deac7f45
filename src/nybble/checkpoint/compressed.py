"""compressed-tensors, read and described: which linear is quantized how, and which bytes say so.

Layouts follow the compressed-tensors package (pack-quantized, int-quantized, float-quantized, naive-quantized): codes are
packed with 2^(bits - 1) added, weights along the input, zero points along the output. Scales are multipliers.
`describe_linear` and `encode_linear` are the other direction, for the writer.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nybble.checkpoint.pack import pack_rows, unpack_rows
from nybble.checkpoint.reading import LinearSource, Part, Reading, float_weight, from_unsigned, integer_spec, modules_with
from nybble.checkpoint.store import Store
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import FP8, INT4, INT8, PER_TOKEN_INT8, SCHEMES, UINT4, Spec, describe, scheme_of
from nybble.text.errors import held

TURNED = "+hadamard"  # ends the model_type of what others would run wrongly
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
DEFAULTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "group_size": None, "block_structure": None,
            "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None, "observer": None,
            "observer_kwargs": None}


def read_compressed(store: Store, quantization: dict[str, Any]) -> Reading:
    """quantization: the `quantization_config` block. Raises ValueError for what is not supported."""
    size = hadamard_of(held(quantization, "transform_config", dict) or {})
    for key in ("sparsity_config", "moe_sparsity_config", *(["transform_config"] if not size else [])):
        block = held(quantization, key, dict) or {}
        if block.get("format", "dense") != "dense" or block.get("config_groups"):
            raise ValueError(f"compressed-tensors {key} {block} is not supported: only dense, untransformed weights are")
    groups, kv = [], kv_of_scheme(held(quantization, "kv_cache_scheme", dict))
    every = held(quantization, "config_groups", dict) or {}
    for name in every:
        group, where = held(every, name, dict, where="config.json: config_groups") or {}, f"config.json: {name}"
        for key in ("weights", "input_activations", "output_activations"):
            held(group, key, dict, where=where)
        outputs, targets = group.get("output_activations"), patterns(group, "targets", where)
        if outputs and targets and all(re.search(r"[kv]_proj\$?$", target) for target in targets):
            kv = kv_of_scheme(outputs)  # how KV scales were asked for before there was a kv_cache_scheme (until August 2024)
            group = {**group, "output_activations": None}
            if not group.get("weights"):
                continue
        if targets and not group.get("weights") and all(re.search(r"(Attention|attn)\$?$", target) for target in targets):
            kv = kv_of_scheme(group.get("input_activations"))
            warnings.warn(f"config group {name!r} quantizes attention: done for K and V in the cache; Q keeps 16 bits",
                          stacklevel=2)
            continue
        groups.append(_group(name, group, quantization))
    ignore = patterns(quantization, "ignore")

    def asked(module: str) -> Group | None:
        return None if matches(module, ignore) else best_match(module, groups)

    # What has scales and is not asked for keeps them unread, and the loader says so.
    linears = {module: _linear(Part(store, module), *group) for module in modules_with(store, "weight_packed", "weight_scale")
               if (group := asked(module)) is not None}
    for name in store.names():
        module, _, last = name.rpartition(".")
        plain = last == "weight" and module not in linears and len(store.shape(name)) == 2 and "embed" not in module
        if plain and (group := asked(module)) is not None:
            kind = f"{group[0]['num_bits']}-bit {group[0]['type']}"
            raise ValueError(f"{module} should be quantized ({kind}) as config.json says, but has no weight_scale")
    if size and any(source.shape[1] % size for module, source in linears.items() if module.endswith("down_proj")):
        raise ValueError(f"config.json: transform_config turns runs of {size} channels, which do not divide down_proj's input")
    return Reading(linears, *kv, hadamard=size)


def transform_config(size: int) -> dict[str, Any]:
    """What says that down_proj's input is multiplied by Hadamard matrices of `size` at run time, and its weight was turned to
    suit: SpinQuant's and QuaRot's R4 in compressed-tensors' words."""
    apply = [{"targets": ["re:.*down_proj$"], "ignore": [], "location": location, "inverse": location != "input"}
             for location in ("weight_input", "input")]
    return {"config_groups": {"R4": {"type": "hadamard", "randomize": False, "requires_grad": False, "head_dim": size,
                                     "apply": apply}}}


def hadamard_of(config: dict[str, Any]) -> int:
    """The size in a `transform_config` that is R4 alone and just as above, else 0."""
    group = (held(config, "config_groups", dict, where="config.json: transform_config") or {}).get("R4")
    size = group.get("head_dim") if isinstance(group, dict) else None
    power = isinstance(size, int) and size > 1 and size & (size - 1) == 0
    return size if power and config == transform_config(size) else 0


def kv_of_scheme(scheme: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """(KV key, None), or (None, why it cannot be had) for a `kv_cache_scheme`."""
    if not scheme:
        return None, None
    bits, kind, strategy = scheme.get("num_bits"), scheme.get("type", "int"), scheme.get("strategy") or "tensor"
    plain = scheme.get("symmetric", True) and not scheme.get("dynamic") and strategy in ("tensor", "attn_head")
    if (bits, kind) == (8, "float") and plain:
        return "fp8", None
    return None, (f"its kv_cache_scheme is {bits}-bit {kind}, {strategy}: only 8-bit float, symmetric, static, per tensor "
                  "or head is supported; choose a KV type, e.g. --kv int8")


def patterns(config: dict[str, Any], key: str, where: str = "config.json") -> list[str]:
    """A list of module names and "re:" patterns. Raises ValueError for what is none."""
    found = held(config, key, list[str], where=where) or []
    for pattern in found:
        if pattern.startswith("re:"):
            regex(pattern[3:], f"{where}: {key}")
    return found


def regex(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{where} holds {pattern!r}; wants a regular expression ({error})") from None


def matches(module: str, targets: Iterable[str]) -> bool:
    return any(_rank(module, target) is not None for target in targets)


def _rank(module: str, target: str) -> int | None:
    """0 for the module's own path, 1 for a regex, 2 for its class. The smallest wins, as in compressed-tensors."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    if target == module:
        return 0
    return 2 if target == "Linear" and "embed" not in module else None


Group = tuple[dict[str, Any], Spec | None, str]


def best_match(module: str, groups: list[tuple[list[str], Group]]) -> Group | None:
    found = [(rank, target, i) for i, (targets, _) in enumerate(groups) for target in targets
             if (rank := _rank(module, target)) is not None]
    return groups[min(found)[2]][1] if found else None


def _group(name: str, group: dict[str, Any], quantization: dict[str, Any]) -> tuple[list[str], Group]:
    weights, form = group.get("weights"), group.get("format") or quantization.get("format")
    if group.get("output_activations"):
        raise ValueError(f"config group {name!r} quantizes output activations, which is not supported")
    if form not in FORMATS or not weights:
        raise ValueError(f"config group {name!r} has format {form!r} with weights {weights}: "
                         f"supported are {', '.join(FORMATS)}")
    weights = _args(weights, name)
    if weights["dynamic"] or (weights["type"] != "int" and (weights["type"], weights["num_bits"]) != ("float", 8)):
        raise ValueError(f"config group {name!r}: {weights['num_bits']}-bit {weights['type']} weights are not supported")
    act = activation_spec(group.get("input_activations"), name)
    if act is not None and act.num == INT8 and weights["type"] != "int":
        raise ValueError(f"config group {name!r}: int8 activations with float weights are not supported")
    return group.get("targets") or [], (weights, act, form)


def _args(given: dict[str, Any], where: str) -> dict[str, Any]:
    if unknown := given.keys() - DEFAULTS.keys():
        raise ValueError(f"config group {where!r} has keys that are not understood: {', '.join(sorted(unknown))}")
    args, place = DEFAULTS | given, f"config.json: {where}"
    size, sides = held(args, "group_size", int, where=place), held(args, "block_structure", str, list[int], where=place)
    held(args, "type", str, where=place)
    if args["strategy"] is None:
        args["strategy"] = "tensor" if size is None else "group" if size > 0 else "channel"
    if sides is not None or args["strategy"] == "block":
        args["block_structure"] = [int(side) for side in re.findall(r"\d+", str(sides))]
        if len(args["block_structure"]) != 2 or 0 in args["block_structure"]:
            raise ValueError(f"{place}: block_structure = {sides!r}; wants rows and columns, [128, 128]")
    if args["strategy"] == "group" and (size is None or size < 1):
        raise ValueError(f"{place}: group_size = {size!r}; wants how many input channels share a scale")
    if args["num_bits"] not in range(2, 9) or args["strategy"] not in ("tensor", "channel", "group", "block", "token"):
        raise ValueError(f"config group {where!r}: {args['num_bits']} bits, strategy {args['strategy']!r} is not supported")
    return args


def activation_spec(given: dict[str, Any] | None, where: str = "") -> Spec | None:
    """What `input_activations` asks for. Raises ValueError for widths other than 8 bits."""
    if not given:
        return None
    args = _args(given, where)
    kind = (args["type"], args["num_bits"])
    if kind == ("float", 16):
        return None
    nums = {("int", 8): INT8, ("float", 8): FP8}
    tiles = {"token": (1, None), "tensor": (None, None), "group": (1, args["group_size"])}
    if kind not in nums or args["strategy"] not in tiles:
        raise ValueError(f"config group {where!r}: {kind[1]}-bit {kind[0]} activations, {args['strategy']}, are not supported")
    act = Spec(nums[kind], tiles[args["strategy"]], zero=not args["symmetric"], dynamic=bool(args["dynamic"]))
    if act.zero or args["dynamic"] not in (True, False) or (act.dynamic and act.tile[0] is None) or \
            (act.num == INT8 and act != PER_TOKEN_INT8):
        kinds = "asymmetric" if act.zero else "static" if not act.dynamic else f"dynamic, {args['strategy']},"
        raise ValueError(f"config group {where!r}: {kinds} {kind[0]}{kind[1]} activations are not supported; int8 ones "
                         "that are symmetric, per token and dynamic are, and symmetric FP8 ones")
    return act


def _linear(part: Part, args: dict[str, Any], act: Spec | None, form: str) -> LinearSource:
    module, bits, input_scale = part.module, args["num_bits"], part.static_scale(act)
    block = tuple(args["block_structure"]) if args["strategy"] == "block" else None
    if args["type"] == "float":
        return float_weight(part, "weight_scale", act, block)
    packed = part.has("weight_packed")
    if packed:
        (n, words), declared = part.sides("weight_packed"), part.tensor("weight_shape").tolist()
        k = declared[-1]
        if declared != [n, k] or words not in (-(-bits * k // 32), -(-k // (32 // bits))):
            raise ValueError(f"{module}.weight_shape says {declared}, but weight_packed holds {n} rows of {words} words")
    elif part.dtype("weight") == torch.int8:
        n, k = part.sides("weight")
    else:
        raise ValueError(f"{module}.weight is {part.dtype('weight')}, not int8 as format {form!r} says")
    group = args["group_size"] if args["strategy"] == "group" and args["group_size"] < k else None
    tile = block or (None if args["strategy"] == "tensor" else 1, group)
    spec = replace(integer_spec(bits, None, not args["symmetric"]), tile=tile)
    (rows, columns), scales = spec.num_scales((n, k)), part.shape("weight_scale")
    if scales not in ((rows, columns), (rows * columns,)) and not (rows == columns == 1 and scales == ()):
        raise ValueError(f"{module}.weight_scale has shape {list(scales)}; weights [{n}, {k}] in {args['strategy']} want "
                         f"[{rows}, {columns}]")
    names = part.names(*(("weight_packed", "weight_shape") if packed else ("weight",)), "weight_scale", "weight_zero_point",
                       "weight_g_idx", *(("input_scale",) if input_scale else ()), "input_zero_point")
    return LinearSource((n, k), scheme_of(spec, act), names, partial(_integers, part, spec, bits, (n, k)), input_scale)


def _integers(part: Part, spec: Spec, bits: int, shape: tuple[int, int]) -> QTensor:
    module, middle, packed, tiles = part.module, 1 << (bits - 1), part.has("weight_packed"), spec.num_scales(shape)
    if packed:
        codes = unpack_rows(part.tensor("weight_packed"), bits, shape[1])
    else:
        codes = part.tensor("weight").view(torch.uint8) + middle  # bytes wrap
        if bits < 8 and bool((codes >= 2 * middle).any()):
            raise ValueError(f"{module}.weight holds codes beyond {bits} bits")
    zeros = part.tensor("weight_zero_point") if spec.zero or part.has("weight_zero_point") else None
    if not spec.zero and zeros is not None:  # older versions store zeros for symmetric weights too
        if zeros.dtype == torch.int8 and bool(zeros.any()):
            raise ValueError(f"{module}.weight_zero_point is not zero, but the config says symmetric")
        zeros = None
    if zeros is not None and zeros.dtype == torch.int32 and packed:
        zeros = unpack_rows(zeros.t().contiguous(), bits, shape[0]).t()
    elif zeros is not None:
        zeros = zeros.to(torch.int16) + middle
    groups = part.tensor("weight_g_idx") if part.has("weight_g_idx") else None
    if groups is not None and bool((groups < 0).all()):
        groups = None  # how the package marks an unused one
    weight = from_unsigned(codes, bits, part.scale("weight_scale").reshape(tiles),
                           None if zeros is None else zeros.reshape(tiles), spec.group, groups)
    return replace(weight, spec=spec)


def describe_linear(q: QTensor, act: Spec | None) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """(format, weights args, input_activations args) that say what `q` and `act` are. Raises ValueError when nothing does."""
    spec = replace(q.spec, over=None)
    if q.over is not None and not whole_steps(q):
        raise ValueError("compressed-tensors cannot say that codes are rounded to an int8 grid (QQQ g128): write it as QQQ")
    weights = _args_of(spec, "channel") | ({"actorder": "group"} if q.order is not None else {})
    floating = spec.num.kind == "float"
    if spec.num not in (INT4, UINT4, INT8, FP8) or (weights["strategy"] == "block" and not floating):
        raise ValueError(f"{describe(spec)} cannot be written as compressed-tensors")
    whole = act is not None and spec.num.bits == 8
    form = "float-quantized" if floating else "int-quantized" if whole else "pack-quantized"
    return form, weights, None if act is None else _args_of(act, "token")


def _args_of(spec: Spec, row: str) -> dict[str, Any]:
    """row: what the strategy of a scale per row is called."""
    strategy = {(None, None): "tensor", (1, None): row}.get(spec.tile) or ("group" if spec.tile[0] == 1 else "block")
    args = {"num_bits": spec.num.bits, "type": "float" if spec.num.kind == "float" else "int", "symmetric": not spec.zero,
            "strategy": strategy, "dynamic": spec.dynamic}
    where = {"group": {"group_size": spec.tile[1]}, "block": {"block_structure": list(spec.tile)}}
    return args | where.get(strategy, {})


def encode_linear(module: str, q: QTensor, described: tuple[str, Any, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that hold `q` as `describe_linear` says; scales in the model's `dtype`, in float32 where that cannot hold
    them (QQQ's and FP8's from elsewhere; what is quantized here was rounded before codes were chosen)."""
    exact = q.scale if q.over is None else q.scale * q.over  # whole numbers times the row's scale
    scale = exact.to(dtype) if torch.equal(exact.to(dtype).float(), exact) else exact
    if q.spec.tile == (None, None):
        scale = scale.reshape(1)
    tensors = {f"{module}.weight_scale": scale.contiguous()}
    if described[0] != "pack-quantized":
        tensors[f"{module}.weight"] = q.codes.contiguous()
        if q.zero is not None:
            tensors[f"{module}.weight_zero_point"] = (unsigned(module, q)[1] - 128).to(torch.int8)
        return tensors
    bits, (codes, zero) = q.spec.num.bits, unsigned(module, q)
    tensors[f"{module}.weight_packed"] = pack_rows(codes, bits)
    tensors[f"{module}.weight_shape"] = torch.tensor(q.shape, dtype=torch.int64)
    if q.zero is not None:
        tensors[f"{module}.weight_zero_point"] = pack_rows(zero.t(), bits).t().contiguous()
    if q.order is not None:
        tensors[f"{module}.weight_g_idx"] = q.order.to(torch.int32)
    return tensors


def unsigned(module: str, q: QTensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and zero points [N, groups], int16, both with 2^(bits - 1) added where they are signed."""
    middle = 0 if q.spec.num == UINT4 else 1 << (q.spec.num.bits - 1)
    zero = middle + (torch.zeros_like(q.scale) if q.zero is None else q.zero)
    if not torch.equal(zero, zero.round()) or bool(((zero < 0) | (zero >= 1 << q.spec.num.bits)).any()):
        raise ValueError(f"{module}: its zero points are not whole numbers within {q.spec.num.bits} bits")
    return q.codes.to(torch.int16) + middle, zero.to(torch.int16)


def on_integer_grid(q: QTensor) -> QTensor:
    """int4 groups whose scales are whole multiples (0..16) of one step per row, as QQQ's int8 grid when every row has such a
    step: same values, and kernels then need one float scale per row. Anything else comes back as it is."""
    top = q.scale.amax(1, keepdim=True)
    done, over, whole = top == 0, torch.zeros_like(top), torch.zeros_like(q.scale)
    for most in range(1, 17):
        step = top / most
        count = torch.round(q.scale / step)
        fits = ~done & ((count * step == q.scale) & (count >= 0) & (count <= 16)).all(1, keepdim=True)
        over, whole, done = torch.where(fits, step, over), torch.where(fits, count, whole), done | fits
    if not bool(done.all()) or bool((q.scale < 0).any()):
        return q
    return QTensor(SCHEMES["w4a8_qqq_g128"].weight, q.codes, whole, over=over)


def whole_steps(q: QTensor) -> bool:
    """Whether a weight on an int8 grid has group scales that never round: whole numbers up to 16."""
    return bool(((q.scale == q.scale.round()) & (q.scale >= 0) & (q.scale <= 16)).all())


def config_groups(linears: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]], plain: list[str]) -> dict[str, Any]:
    """The `quantization_config` for described linears, with as few targets as say it exactly. plain: modules that stay 16-bit.

    One way for all: the class "Linear", and the head by its name, which in vLLM is of another class. Several: a regex on the
    last name where all its modules agree (every down_proj), else exact paths.
    """
    kinds: dict[str, list[str]] = {}
    for module, described in linears.items():
        kinds.setdefault(repr(described), []).append(module)
    last = lambda module: module.rsplit(".", 1)[-1]  # noqa: E731
    groups = {}
    for i, (key, modules) in enumerate(sorted(kinds.items(), key=lambda item: -len(item[1]))):
        others = {last(m) for other, ms in kinds.items() if other != key for m in ms} | {last(m) for m in plain}
        inner = [module for module in modules if "." in module]  # lm_head has no path to leave out
        clear = [name for name in dict.fromkeys(map(last, inner)) if name not in others]
        targets = [rf"re:.*\.{re.escape(name)}$" for name in clear] + [m for m in modules if last(m) not in clear]
        if len(kinds) == 1:
            targets = [*(module for module in modules if "." not in module), "Linear"]
        form, weights, act = linears[modules[0]]
        groups[f"group_{i}"] = {"targets": targets, "weights": weights, "input_activations": act, "output_activations": None,
                                "format": form}
    forms = {described[0] for described in linears.values()}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups,
            "format": forms.pop() if len(forms) == 1 else "mixed-precision" if forms else "dense", "ignore": sorted(plain),
            "kv_cache_scheme": None, "global_compression_ratio": None}
