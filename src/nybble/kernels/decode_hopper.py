"""Attention of a step of generated tokens on Hopper (sm_90a), in CUDA (`decode_sm90.cu`): from the projection to the rows of
the linear that follows, rotary embedding, the cache's new token and quantization included.

Not portable, and for heads of 128 channels, int8 or int4 caches and contexts of few splits: all else is `attention_triton`'s,
whose bits these are. This file looks whether the kernel fits, cuts the work and launches.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.kernels import attention_triton, nvrtc
from nybble.kernels.attention_triton import LOG2_E
from nybble.kernels.cache_hopper import pages_ahead
from nybble.kernels.nvrtc import OUT
from nybble.kernels.types import LayerKV, Rows, Step

DIM, TILE_BYTES = 128, 4096
TILES = {"int8": attention_triton.decode_tiles(DIM, 8), "int4": attention_triton.decode_tiles(DIM, 4)}
MOST_PARTIAL_BYTES = 32768  # of a (row, KV head)'s partial sums
MOST_ROWS = 4096
# (row, KV head) pairs; what is around the attention of more is done as fast by kernels of its own.
MOST_AT_ONCE = {"int8": 1 << 31, "int4": 4096}
# Longest context of at most so many (row, KV head) pairs: `attention_triton` shares longer rows among more programs.
LONGEST = ((31, 512), (330, 1024), (1056, 2048), (1 << 31, 4096))


class Shape(NamedTuple):
    """Who works on a (row, KV head): blocks of a cluster, warps of each; tiles, of K and V in turn, that a warp has in flight;
    blocks that a processor holds. None of it moves a bit."""

    warps: int
    ring: int
    cluster: int
    resident: int


def shape_for(name: str, pairs: int, group: int, count: int = 132) -> Shape:
    """For so many (row, KV head) pairs with `group` query heads each on `count` processors; from an H200, 1 to 256 rows of
    Llama-2-13B and Llama-3-8B, of equal and of different lengths."""
    if pairs <= count:
        return Shape(8, 4, 1, 1)
    if name == "int8":
        if pairs <= 6 * count:
            return Shape(8, 2, 1, 2) if pairs <= 2 * count else Shape(4, 4, 1, 2)
        return Shape(4, 3, 1, 4) if group > 1 or pairs <= 9 * count else Shape(3, 3, 1, 5)
    if pairs <= 2 * count:
        return Shape(4, 2, 2, 4)
    if pairs <= (4 if group == 1 else 0) * count:
        return Shape(4, 3, 1, 3)
    if pairs <= (9 if group == 1 else 6) * count:
        return Shape(4, 2, 1, 4)
    return Shape(3, 2, 1, 5) if group == 1 and pairs <= 16 * count else Shape(2, 2, 1, 8)


Arguments = nvrtc.structure("qkv table context position slot cos_sin k v k_params v_params out codes scale arrivals",
                            "q_scale v_scale", "rows table_width blocks splits ahead sees_own")  # fmt: skip


def source_and_defines(shape: Shape, name: str, heads: int, group: int, block_size: int, fused: bool, quantize: bool, out: int
                       ) -> tuple[str, dict[str, int]]:
    defines = {"INT4": int(name == "int4"), "HEADS": heads, "GROUP": group, "BLOCK_SIZE": block_size, "WARPS": shape.warps,
               "RING": shape.ring, "CLUSTER": shape.cluster, "RESIDENT": shape.resident,
               "FUSED": int(fused), "QUANTIZE": int(quantize), "OUT": out}  # fmt: skip
    return nvrtc.source("decode_sm90.cu"), defines


def shared_bytes(shape: Shape, name: str, group: int, blocks: int, splits: int) -> int:
    """The layout is the .cu's."""
    sets, codes, tile = (2, 64, 64) if name == "int4" else (1, 128, 32)
    portions = shape.warps * sets * (1 << (group - 1).bit_length()) * (tile * 2 + 16)
    stats_at = -(-shape.warps * shape.ring * (TILE_BYTES + sets * tile * 4 + 8) // 16) * 16 + portions + group * DIM * 2
    table_at = -(-(stats_at + group * (1 + sets) * 4) // 16) * 16 + 2 * codes + 32
    return table_at + -(-blocks * 4 // 16) * 16 + splits * group * (DIM * 4 + 8)


def compile_ahead(kv: LayerKV, heads: int, dtype: torch.dtype, rows: int, quantize: bool | None) -> None:
    """What `run` will be asked for, by steps of up to so many rows over a cache like `kv`: start compiling it. quantize: what
    becomes of projections, None where only queries come."""
    _, kv_heads, block_size, _ = kv.v.shape
    group, count = heads // kv_heads, nvrtc.processors(kv.v.device.index)
    if dtype not in OUT or not _takes(kv, heads):
        return
    kinds = {(shape_for(kv.name, pairs, group, count), fused) for pairs in range(kv_heads, rows * kv_heads + 1, kv_heads)
             for fused in (False, quantize is not None) if not fused or pairs <= MOST_AT_ONCE[kv.name]}
    nvrtc.compile_ahead(source_and_defines(shape, kv.name, kv_heads, group, block_size, fused, fused and quantize, OUT[dtype])
                        for shape, fused in sorted(kinds))


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    return torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)


def _takes(kv: LayerKV, heads: int) -> bool:
    """Whether there is a kernel for a cache like `kv` at all, under so many query heads."""
    _, kv_heads, block_size, width = kv.v.shape
    tiles = TILES.get(kv.name)
    if tiles is None or heads % kv_heads or heads // kv_heads > 8:
        return False
    return width * (2 if kv.name == "int4" else 1) == DIM and block_size % tiles.tile == 0


def fits(x: Tensor, heads: int, kv: LayerKV, step: Step, rotary: int, window: int) -> bool:
    """x: queries or projections, `heads` of them queries."""
    if x.dtype not in OUT or not _takes(kv, heads) or rotary != DIM or window or not 0 < step.num_decode <= MOST_ROWS:
        return False
    kv_heads, tiles = kv.v.shape[1], TILES[kv.name]
    group = heads // kv_heads
    pairs, splits = step.num_decode * kv_heads, attention_triton.split_count(step.max_context, tiles)
    longest = next(longest for most, longest in LONGEST if pairs <= most)
    if step.max_context > longest or x.ndim == 2 and pairs > MOST_AT_ONCE[kv.name]:
        return False
    aligned = all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (x, kv.k, kv.v, kv.k_params, kv.v_params))
    return splits * group * DIM * 4 <= MOST_PARTIAL_BYTES and aligned


def run(x: Tensor, heads: int, kv: LayerKV, step: Step, scale: float, cos_sin: Tensor | None, quantize: bool,
        shape: Shape | None = None, out: Tensor | None = None) -> Tensor | Rows:
    """x: projections [T, (heads + 2 kv_heads) * DIM], whose K and V are written, or without cos_sin queries [T, heads, DIM]
    -> [T, heads, DIM] in x's dtype (`out`, if given), or its int8 rows. Only what `fits`."""
    rows, device = step.num_decode, x.device
    _, kv_heads, block_size, _ = kv.v.shape
    shape = shape or shape_for(kv.name, rows * kv_heads, heads // kv_heads, nvrtc.processors(device.index))
    out = torch.empty((rows, heads, DIM), dtype=x.dtype, device=device) if out is None else out
    codes = torch.empty((rows, heads * DIM), dtype=torch.int8, device=device) if quantize else None
    by = torch.empty(rows, dtype=torch.float32, device=device) if quantize else None
    blocks, splits = -(-step.max_context // block_size), attention_triton.split_count(step.max_context, TILES[kv.name])
    tensors = (x, step.block_table, step.context_len, step.positions, step.slots, cos_sin, kv.k, kv.v, kv.k_params, kv.v_params,
               out, codes, by, _arrivals(device))
    arguments = Arguments(*nvrtc.addresses(*tensors), scale * LOG2_E * kv.k_scale, kv.v_scale,
                          rows, step.block_table.stride(0), min(blocks, step.block_table.shape[1]), splits,
                          pages_ahead(kv, step), step.sees_own)
    maps = (nvrtc.bytes_map(t.data_ptr(), t.numel() // 128, 128, TILE_BYTES // 128) for t in (kv.k, kv.v))
    group = heads // kv_heads
    nvrtc.launch(
        nvrtc.kernel("decode", device.index, nvrtc.MOST_BYTES, source_and_defines, shape, kv.name, kv_heads, group, block_size,
                     cos_sin is not None, quantize, OUT[x.dtype]),
        rows * kv_heads * shape.cluster, shape.warps * 32, shared_bytes(shape, kv.name, group, blocks, splits), shape.cluster,
        (*maps, arguments), device,
    )  # fmt: skip
    return out if codes is None or by is None else Rows(codes, by)
