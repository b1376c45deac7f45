"""What crosses the seam between layers and kernels: quantized rows, a layer's cache, and one forward step's addresses.

Nothing here knows about requests or schedules; `Step` is what is left of a schedule once it is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.formats.numerics import FLOAT8
from nybble.formats.spec import INT4_KV_GROUPS, KV, Spec


class Rows(NamedTuple):
    """Activations quantized per token: value[m, k] = codes[m, k] * scale[m]."""

    codes: Tensor  # int8 [M, K]
    scale: Tensor  # float32 [M]


@dataclass(frozen=True)
class LayerKV:
    """One layer's paged cache. Block b, head h, token t in block, channel d: `k[b, h, t, d]`.

    `name` is a key of `formats.spec.KV`. 16/32-bit types store D values of that dtype and no parameters. int8 stores uint8
    codes [.., D] and (scale, minimum) as float16 [blocks, heads, block, 2]: value = code * scale + minimum. int4 has such a
    pair for each half of the channels, [blocks, heads, 2, block, 2], and packs channels j, D/4 + j into byte 2j, D/2 + j,
    3D/4 + j into byte 2j + 1 of uint8 [.., D // 2], the first of the two in the low nibble. fp8 stores a float8 dtype and uses
    the per-layer multipliers `k_scale`, `v_scale` (value = code * scale). Where a checkpoint has one per head, these are 1 and
    `k_heads`, `v_heads` are folded into K, V, Q and the output by the attention layer: kernels never look at them.
    """

    name: str
    k: Tensor  # [blocks, kv_heads, block_size, D or D // 2]
    v: Tensor
    k_params: Tensor | None = None  # float16 [blocks, kv_heads, block_size, 2], int4 [blocks, kv_heads, 2, block_size, 2]
    v_params: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_heads: Tensor | None = None  # float32 [kv_heads]
    v_heads: Tensor | None = None

    @property
    def spec(self) -> Spec:
        return KV[self.name]

    @property
    def codec(self) -> str:
        """How a kernel reads it: `name`, or "copy" where numbers are kept as they are."""
        return self.name if self.spec.num.bits <= 8 else "copy"

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.v.shape[3] * (2 if self.name == "int4" else 1)


@dataclass(frozen=True)
class Turn:
    """What one layer does to K and Q before K is stored, so that few bits hold it: k' = (k - shift) @ k and q' = q @ q, after
    rotary embedding. `k @ q^T` is the identity, so q' . k' = q . k but for a number per query, which softmax takes away. V may
    be turned too: v' = v @ v, and what attention gives is multiplied by `out`. All of a query's KV head, [kv_heads, D, D],
    float32 (a GPU may have float16 beside 16-bit activations)."""

    k: Tensor
    q: Tensor
    shift: Tensor  # float32 [kv_heads, D]
    v: Tensor | None = None
    out: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> Turn:
        """On a device, matrices in `dtype`."""
        matrices = {n: None if x is None else x.to(device, dtype).contiguous() for n, x in vars(self).items() if n != "shift"}
        return Turn(**matrices, shift=self.shift.to(device))


FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cache_shapes(name: str, blocks: int, kv_heads: int, block_size: int, head_dim: int
                 ) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None]:
    """Of a layer's cache: shape and dtype of K (and of V), and the shape of its float16 parameters where it has any. Raises
    ValueError for a type that there is not, and for one that cannot hold such heads."""
    if name not in KV:
        raise ValueError(f"kv = {name!r} is not a KV cache type; there are {', '.join(KV)}")
    if name == "int4" and head_dim % 4:
        raise ValueError(f"kv = 'int4' stores quarters of a head and head_dim is {head_dim}; int8 would do")
    spec, outer = KV[name], (blocks, kv_heads)
    params = (*outer, *((INT4_KV_GROUPS,) if name == "int4" else ()), block_size, 2) if spec.zero else None
    width = head_dim // 2 if name == "int4" else head_dim
    return (*outer, block_size, width), FLOATS.get(name) or FLOAT8.get(spec.num.name, torch.uint8), params


def scaled(kv: LayerKV, pair: tuple[float | Tensor, float | Tensor] | None) -> LayerKV:
    """A layer's cache with its (K, V) multipliers: each one number, or float32 [kv_heads]. None: 1."""
    if pair is None:
        return kv
    k, v = (scale.to(kv.k.device, torch.float32) if isinstance(scale, Tensor) else None for scale in pair)
    if any(heads is not None and heads.shape != (kv.k.shape[1],) for heads in (k, v)):
        raise ValueError(f"KV scales for {len(k if k is not None else v)} heads do not fit a cache of {kv.k.shape[1]}")
    return replace(kv, k_scale=pair[0] if k is None else 1.0, v_scale=pair[1] if v is None else 1.0, k_heads=k, v_heads=v)


@dataclass(frozen=True)
class Step:
    """One forward pass over T tokens that belong to R rows. The first `num_decode` rows hold one generated token each, the
    rest hold consecutive prompt tokens. Which kernel a token meets depends on this split alone, so a token's result does
    not depend on what else is in the batch: tokens that were generated are always decode rows, also when a preempted
    request computes them again.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int64 [T]: block * block_size + offset of where K and V of the token are written
    query_start: Tensor  # int32 [R + 1]
    context_len: Tensor  # int32 [R]: tokens the row's last token sees, itself included
    block_table: Tensor  # int32 [R, W]
    num_decode: int
    max_query: int  # longest prompt row, 0 when all rows decode
    max_context: int  # at least the longest context
    logit_rows: Tensor | None  # int64 [S]: tokens whose logits are wanted; None: all
    max_prompt_context: int | None = None  # the same of prompt rows alone, where that is known

    @property
    def sees_own(self) -> bool:
        """Generated tokens alone, and of this step's keys a row sees its own only. All of them draw then: a preempted request
        that computes several again has rows that see each other's."""
        drawing = self.num_decode if self.logit_rows is None else len(self.logit_rows)
        return self.num_decode == len(self.slots) == drawing
