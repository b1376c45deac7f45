"""What crosses the seam between layers and kernels: quantized rows, a layer's cache, and one forward step's addresses.

Nothing here knows about requests or schedules; `Step` is what is left of a schedule once it is on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nybble.formats.spec import KV, Spec


class Rows(NamedTuple):
    """Activations quantized per token: value[m, k] = codes[m, k] * scale[m]."""

    codes: Tensor  # int8 [M, K]
    scale: Tensor  # float32 [M]


@dataclass(frozen=True)
class LayerKV:
    """One layer's paged cache. Block b, head h, token t in block, channel d: `k[b, h, t, d]`.

    `name` is a key of `formats.spec.KV`. 16/32-bit types store D values of that dtype and no parameters. int8 stores uint8
    codes [.., D]; int4 packs channel d (low nibble) and d + D/2 (high nibble) in uint8 [.., D // 2]. Both keep
    (scale, minimum) as float16 [blocks, heads, block, 2]: value = code * scale + minimum. fp8 stores a float8 dtype and uses
    the per-layer multipliers `k_scale`, `v_scale` (value = code * scale).
    """

    name: str
    k: Tensor  # [blocks, kv_heads, block_size, D or D // 2]
    v: Tensor
    k_params: Tensor | None = None  # float16 [blocks, kv_heads, block_size, 2]
    v_params: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def spec(self) -> Spec:
        return KV[self.name]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


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
    max_context: int
    logit_rows: Tensor | None  # int64 [S]: tokens whose logits are wanted; None: all
