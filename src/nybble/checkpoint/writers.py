"""The formats that are written: what each can say of a linear, the tensors that hold it, the config that describes all.

Exact or refused: a weight comes back from what is written as the same integers with the same scales, or is not written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nybble.checkpoint.compressed import config_groups, describe_linear, encode_linear, on_integer_grid, unsigned, whole_steps
from nybble.checkpoint.foreign import AWQ_COLUMN_OF_NIBBLE, QQQ_PLACE
from nybble.checkpoint.pack import pack_rows
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import INT4, PER_TOKEN_INT8, Spec, describe

Described = Any  # hashable: linears with equal ones are described alike


@dataclass(frozen=True)
class Writer:
    """describe(q, act) -> what the config will say of it. encode(module, q, described, the model's dtype) -> tensors by
    name. block({module: described}, 16-bit modules) -> the `quantization_config`. All raise ValueError with the reason."""

    describe: Callable[[QTensor, Spec | None], Described]
    encode: Callable[[str, QTensor, Described, torch.dtype], dict[str, Tensor]]
    block: Callable[[dict[str, Described], list[str]], dict[str, Any]]


# ---- GPTQ and AWQ: weight-only, scales in half precision


AGAIN = "quantize the original model with --scheme w4a16"
PER_CHANNEL = "quantize the original model with --scheme w4a8 --group channel"


def _weight_only(q: QTensor, act: Spec | None, what: str) -> None:
    """What the weight is comes first: --weights-only is advised only where it will do."""
    if q.spec.num.kind != "int" or q.spec.tile[0] != 1:
        raise ValueError(f"{what} holds integers with one scale per row or per group of a row, not {describe(q.spec)}: {AGAIN}")
    if q.over is not None and not whole_steps(q):
        raise ValueError(f"{what} has no int8 grid, to which {describe(q.spec)} rounds: compressed-tensors holds these "
                         f"weights as 8-bit ones, or {AGAIN}")
    _half(q, what)
    if act is not None:
        raise ValueError(f"{what} cannot say that activations have {act.num.bits} bits: --weights-only writes the weights "
                         "alone, which others then run with 16-bit activations")


def _half(q: QTensor, what: str) -> Tensor:
    """Scales [groups, N] in float16, else bfloat16, whichever holds them; group scales on a grid times its step."""
    exact = q.scale.double() if q.over is None else q.scale.double() * q.over.double()
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(exact.to(dtype).double(), exact):
            return exact.to(dtype).t().contiguous()
    raise ValueError(f"{what} has 16-bit scales and these need more: compressed-tensors keeps them in float32, or {AGAIN}")


def _gptq_describe(q: QTensor, act: Spec | None) -> Described:
    bits = q.spec.num.bits
    if q.spec.num.kind == "int" and any(side % (32 // bits) for side in q.shape):
        raise ValueError(f"GPTQ packs whole words: {list(q.shape)} is not a multiple of {32 // bits}")
    _weight_only(q, act, "GPTQ")
    return bits, q.spec.group or -1, q.zero is None, q.order is not None


def _gptq_encode(module: str, q: QTensor, described: Described, dtype: torch.dtype) -> dict[str, Tensor]:
    bits, group, symmetric, _ = described
    codes, zero = unsigned(module, q)
    order = torch.arange(q.shape[1]) // (group if group > 0 else q.shape[1]) if q.order is None else q.order
    stored = zero - 1 if symmetric else zero  # v1 stores zero - 1; a zero of 0 would wrap there, so asymmetric is written as v2
    return {f"{module}.qweight": pack_rows(codes, bits).t().contiguous(), f"{module}.scales": _half(q, "GPTQ"),
            f"{module}.qzeros": pack_rows(stored.t(), bits), f"{module}.g_idx": order.to(torch.int32)}


def _gptq_block(described: dict[str, Described], plain: list[str]) -> dict[str, Any]:
    [(common, _)] = Counter(described.values()).most_common(1)
    if len({symmetric for _, _, symmetric, _ in described.values()}) > 1:
        raise ValueError("GPTQ stores symmetric and asymmetric weights in one version: this checkpoint mixes them")
    says = lambda kind: {"bits": kind[0], "group_size": kind[1], "sym": kind[2], "desc_act": kind[3]}  # noqa: E731
    rules = {f"+:{_as_loaded(module)}": {k: v for k, v in says(kind).items() if v != says(common)[k]}
             for module, kind in described.items() if kind != common}
    rules |= {f"-:{_as_loaded(module)}": {} for module in plain if module != "lm_head"}
    return {"quant_method": "gptq", **says(common), "checkpoint_format": "gptq" if common[2] else "gptq_v2",
            "lm_head": "lm_head" in described, "true_sequential": True} | ({"dynamic": rules} if rules else {})


def _as_loaded(module: str) -> str:
    """A regex for a module's path, and for that of the fused one that vLLM looks up in its place."""
    stem, dot, last = module.rpartition(".")
    fused = "qkv_proj" if last in ("q_proj", "k_proj", "v_proj") else "gate_up_proj" if last in ("gate_proj", "up_proj") else ""
    return f"^{re.escape(stem + dot)}({last}|{fused})$" if fused else f"^{re.escape(module)}$"


def _awq_describe(q: QTensor, act: Spec | None) -> Described:
    if q.spec.num.bits != 4 or q.order is not None or q.shape[0] % 8:
        found = "GPTQ-ordered groups" if q.order is not None else f"{describe(q.spec)} {list(q.shape)}"
        raise ValueError(f"AWQ holds 4-bit codes in contiguous groups, eight rows a word, not {found}"
                         f"{'' if q.shape[0] % 8 else f': {AGAIN}'}")
    _weight_only(q, act, "AWQ")
    return q.spec.group or -1


def _awq_encode(module: str, q: QTensor, described: Described, dtype: torch.dtype) -> dict[str, Tensor]:
    codes, zero = unsigned(module, q)

    def columns(rows: Tensor) -> Tensor:
        ordered = rows.view(rows.shape[0], -1, 8)[..., list(AWQ_COLUMN_OF_NIBBLE)]
        return pack_rows(ordered.reshape(rows.shape), 4)

    return {f"{module}.qweight": columns(codes.t().contiguous()), f"{module}.qzeros": columns(zero.t().contiguous()),
            f"{module}.scales": _half(q, "AWQ")}


def _awq_block(described: dict[str, Described], plain: list[str]) -> dict[str, Any]:
    if len(set(described.values())) > 1:
        raise ValueError(f"AWQ has one group size for all linears: these have {sorted(set(described.values()))}")
    if hidden := [part for part in plain if any(part in module for module in described)]:
        raise ValueError(f"AWQ names 16-bit linears by a part of their name, and {hidden[0]} is part of a quantized one's")
    return {"quant_method": "awq", "bits": 4, "group_size": next(iter(described.values())), "zero_point": True,
            "version": "gemm", "modules_to_not_convert": plain or None, **({"lm_head": True} if "lm_head" in described else {})}


# ---- QQQ


def _qqq_describe(q: QTensor, act: Spec | None) -> Described:
    n, k = q.shape
    if q.spec.num != INT4 or q.zero is not None or q.order is not None or q.spec.tile[0] != 1 or n % 64 or k % 64:
        raise ValueError(f"QQQ holds symmetric 4-bit weights of 64 rows and 64 columns or multiples, not {describe(q.spec)} "
                         f"{[n, k]}: {PER_CHANNEL}")
    channel = q.spec.group in (None, k) and q.over is None
    if not channel and (q.spec.group != 128 or (q if q.over is not None else on_integer_grid(q)).over is None):
        raise ValueError("QQQ has one scale per row, or groups of 128 whose scales lie on an int8 grid per row, which these "
                         f"{describe(q.spec)} do not: {PER_CHANNEL}")
    if act is not None and act != PER_TOKEN_INT8:
        raise ValueError(f"QQQ means int8 activations per token, and these are {describe(act)}: quantize the original model "
                         "with --scheme w4a8")
    if act is None:
        raise ValueError("QQQ means int8 activations, which this checkpoint does not have: --activations int8 would add them")
    return -1 if channel else 128


def _qqq_encode(module: str, q: QTensor, described: Described, dtype: torch.dtype) -> dict[str, Tensor]:
    if described == 128:
        q = q if q.over is not None else on_integer_grid(q)
        group = q.scale.to(torch.float16)
        if not torch.equal(group.float(), q.scale):
            raise ValueError(f"{module}: its group scales need more than float16")
        stored = group.t().reshape(group.shape[1], -1, 8, 8).transpose(2, 3).reshape(group.shape[1], -1).contiguous()
        nibbles, over, extra = q.codes + 8, q.over, {f"{module}.s_group": stored}
    else:  # codes in the high half of a byte: the kernel multiplies by 16 what is scaled by a sixteenth
        nibbles, over, extra = q.codes & 15, q.scale / 16, {}
    channel = over.view(-1, 4, 4, 2).transpose(1, 2).reshape(1, -1).contiguous()
    return {f"{module}.B": pack_qqq(nibbles.to(torch.uint8), described == 128), f"{module}.s_channel": channel, **extra}


def pack_qqq(nibbles: Tensor, grouped: bool) -> Tensor:
    """uint8 [N, K] of 4 bits -> B int32 [K / 16, 2 N]; the inverse of `foreign.qqq_nibbles`, which says what is where."""
    n, k = nibbles.shape
    fields = nibbles.view(n // 64, 4, 2, 8, k // 16, 4, 4).permute(4, 0, 3, 5, 1, 2, 6).reshape(k // 16, -1, 8)
    placed = torch.empty_like(fields)
    placed[..., QQQ_PLACE[grouped]] = fields
    return pack_rows(placed.reshape(k // 16, -1), 4)


def _qqq_block(described: dict[str, Described], plain: list[str]) -> dict[str, Any]:
    if len(set(described.values())) > 1:
        raise ValueError("QQQ is per channel or in groups of 128 for all linears: this checkpoint mixes them")
    if rest := [module for module in plain if module != "lm_head"]:
        raise ValueError(f"QQQ quantizes every linear but the head, and {rest[0]} has 16 bits")
    return {"quant_method": "qqq", "wbits": 4, "group_size": next(iter(described.values()))}


WRITERS = {
    "compressed-tensors": Writer(describe_linear, encode_linear, config_groups),
    "qqq": Writer(_qqq_describe, _qqq_encode, _qqq_block),
    "gptq": Writer(_gptq_describe, _gptq_encode, _gptq_block),
    "awq": Writer(_awq_describe, _awq_encode, _awq_block),
}
