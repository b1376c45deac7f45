"""What goes into a paged cache and comes out for prompts, on Hopper (sm_90a), in CUDA: rotary embedding with the write of K
and V (`rope_sm90.cu`), and the gathering of a prompt's context (`gather_sm90.cu`).

Not portable: all else, heads with norms or turns among it, is `ops_triton`'s and `attention_triton`'s, whose bits these are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nybble.kernels import nvrtc
from nybble.kernels.nvrtc import OUT
from nybble.kernels.types import LayerKV, Step

KINDS = {"copy": 0, "int8": 1, "int4": 2, "fp8": 3, "fp8_e5m2": 4}  # KIND of the .cu
# Of at most so many tokens: how often a warp has heads, most warps of a program. From an H200, Llama-2-13B and Llama-3-8B.
SPREAD = ((16, 1, 2), (256, 1, 12), (1 << 31, 2, 6))
GATHER_THREADS = 256
# Linears of more rows multiply longer than they read, so that much of the cache can be on its way meanwhile (an H200: of 128
# rows 24 and 32 MB are as good, 40 worse; of 64 rows nothing is gained, of 32 it costs).
READING_ROWS, AHEAD_BYTES = 64, 28 << 20


class Shape(NamedTuple):
    """Warps of a program, and how many times each of them has heads. None of it moves a bit."""

    warps: int
    items: int


def turns_of(heads: int, kv_heads: int, head_dim: int) -> int:
    """How often a warp can be filled with heads of a token, Q, K and V apart."""
    at_once = 32 // lanes_of(head_dim)
    return -(-heads // at_once) + 2 * -(-kv_heads // at_once)


def shape_for(tokens: int, turns: int) -> Shape:
    items, most = next((items, most) for tokens_at_most, items, most in SPREAD if tokens <= tokens_at_most)
    programs = -(-turns // (items * most))
    return Shape(-(-turns // (items * programs)), items)


def lanes_of(head_dim: int) -> int:
    """Threads that have a head, sixteen channels each."""
    return max(2, 1 << (head_dim // 16 - 1).bit_length())


RopeArguments = nvrtc.structure("qkv q k v k_params v_params position slot cos_sin table context", floats="k_scale v_scale",
                                ints="table_width rows ahead")  # fmt: skip
GatherArguments = nvrtc.structure("k v k_params v_params table context query_start k_out v_out",
                                  ints="table_width window first_row first_head capacity heads")  # fmt: skip


def rope_source(shape: Shape, kind: str, heads: int, kv_heads: int, head_dim: int, block_size: int, out: int
                ) -> tuple[str, dict[str, int]]:
    defines = {"KIND": KINDS[kind], "HEADS": heads, "KV_HEADS": kv_heads, "DIM": head_dim, "BLOCK_SIZE": block_size,
               "WARPS": shape.warps, "ITEMS": shape.items, "OUT": out}  # fmt: skip
    return nvrtc.source("rope_sm90.cu"), defines


def gather_source(kind: str, heads: int, head_dim: int, block_size: int, tile: int) -> tuple[str, dict[str, int]]:
    defines = {"KIND": KINDS[kind], "HEADS": heads, "DIM": head_dim, "BLOCK_SIZE": block_size, "TILE": tile,
               "TOKENS": gather_tokens(kind, head_dim, tile), "THREADS": GATHER_THREADS, "OUT": 1}  # fmt: skip
    return nvrtc.source("gather_sm90.cu"), defines


def gather_tokens(kind: str, head_dim: int, tile: int) -> int:
    """Tokens of a program that gathers, a part of the tile: at most eight loads of a thread are in flight."""
    channels, tokens = 16 if kind == "int4" else 8, tile
    while tokens * head_dim > 8 * channels * GATHER_THREADS:
        tokens //= 2
    return tokens


def pages_ahead(kv: LayerKV, step: Step) -> int:
    """Pages, of a head each, that the kernel before attention moves to the second-level cache while it waits for its input: of
    int8 and int4, whose attention is `decode_sm90.cu`; Triton's over bf16 took 6 % longer."""
    if kv.k_params is None or step.num_decode <= READING_ROWS or step.num_decode < len(step.slots) or kv.block_size % 16:
        return 0
    return AHEAD_BYTES // sum(x[0, 0].nbytes for x in (kv.k, kv.v, kv.k_params, kv.v_params))


def compile_ahead(kv: LayerKV, heads: int, dtype: torch.dtype, tile: int) -> None:
    """Start compiling what steps over a cache like `kv` will ask for: `rope_write` and the gathering, in tiles of `tile`."""
    if dtype not in OUT or not Gather.fits(kv):
        return
    (_, kv_heads, block_size, _), head_dim = kv.v.shape, kv.head_dim
    turns = turns_of(heads, kv_heads, head_dim)
    shapes = {shape_for(tokens, turns) for tokens, _, _ in SPREAD}
    ropes = [rope_source(shape, kv.codec, heads, kv_heads, head_dim, block_size, OUT[dtype]) for shape in sorted(shapes)]
    nvrtc.compile_ahead([*ropes, gather_source(kv.codec, kv_heads, head_dim, block_size, tile)])


def _aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 and t.is_contiguous() for t in tensors)


def fits(qkv: Tensor, kv: LayerKV, head_dim: int, rotary: int) -> bool:
    """Whether `rope_write` takes them: whole heads turn, and a cache that keeps 16 bits keeps those of `qkv`."""
    if qkv.dtype not in OUT or len(qkv) == 0 or rotary != head_dim or (kv.codec == "copy" and kv.k.dtype != qkv.dtype):
        return False
    return Gather.fits(kv) and _aligned(qkv)


def rope_write(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, head_dim: int,
               shape: Shape | None = None) -> Tensor:
    """`reference.rope_write` without norms and turns. qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq, D]. Only what `fits`."""
    tokens, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    turns = turns_of(heads, kv_heads, head_dim)
    shape = shape or shape_for(tokens, turns)
    addresses = nvrtc.addresses(qkv, q, kv.k, kv.v, kv.k_params, kv.v_params, step.positions, step.slots, cos_sin,
                                step.block_table, step.context_len)  # fmt: skip
    arguments = RopeArguments(*addresses, kv.k_scale, kv.v_scale, step.block_table.stride(0), step.num_decode,
                              pages_ahead(kv, step))  # fmt: skip
    kernel = nvrtc.kernel("rope_write", qkv.device.index, 0, rope_source, shape, kv.codec, heads, kv_heads, head_dim,
                          kv.block_size, OUT[qkv.dtype])  # fmt: skip
    nvrtc.launch(kernel, tokens * -(-turns // (shape.warps * shape.items)), shape.warps * 32, 0, 1, (arguments,), qkv.device)
    return q


@dataclass(frozen=True)
class Gather:
    """`attention_triton._gather` to who launches it: the same arguments in the same order, or addresses of tensors."""

    device: torch.device
    arg_names: ClassVar[tuple[str, ...]] = ()  # none of them is a scale

    @staticmethod
    def fits(kv: LayerKV) -> bool:
        """Caches of at most 16 bits, of whole vectors."""
        vectors = kv.head_dim % 16 == 0 and kv.head_dim <= 256
        return kv.name != "fp32" and vectors and _aligned(kv.k, kv.v, kv.k_params, kv.v_params)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return functools.partial(self._start, grid)

    def _start(self, grid: tuple[int, int, int], *arguments: Any, **_: Any) -> Gather:
        tensors, (width, window, row, head, capacity, heads, dim, _, block_size, kind, _, tile) = arguments[:9], arguments[9:]
        addresses = (t if isinstance(t, int) else t.data_ptr() for t in tensors)
        nvrtc.launch(
            nvrtc.kernel("gather", self.device.index, 0, gather_source, kind, heads, dim, block_size, tile),
            2 * capacity // gather_tokens(kind, dim, tile) * grid[1] * grid[2], GATHER_THREADS, 0, 1,
            (GatherArguments(*addresses, width, window, row, head, capacity, grid[1]),), self.device,
        )  # fmt: skip
        return self
