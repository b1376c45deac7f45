"""What goes into a paged cache and comes out for prompts, on Hopper (sm_90a), in CUDA: rotary embedding with the write of K
and V (`rope_sm90.cu`), and the gathering of a prompt's context (`gather_sm90.cu`).

Not portable: all else, heads with norms or turns among it, is `ops_triton`'s and `attention_triton`'s, whose bits these are.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nybble.kernels import nvrtc
from nybble.kernels.types import LayerKV, Step

OUT = {torch.bfloat16: 0, torch.float16: 1}
KINDS = {"copy": 0, "int8": 1, "int4": 2, "fp8": 3, "fp8_e5m2": 4}  # KIND of the .cu
# Of at most so many tokens: how often a warp has heads, most warps of a program. From an H200, Llama-2-13B and Llama-3-8B.
SPREAD = ((16, 1, 2), (256, 1, 12), (1 << 31, 2, 6))
GATHER_THREADS = 256


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


class RopeArguments(ctypes.Structure):
    """`Arguments` of rope_sm90.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "q", "k", "v", "k_params", "v_params", "position", "slot", "cos_sin")),
        *((name, ctypes.c_float) for name in ("k_scale", "v_scale")),
    ]  # fmt: skip


class GatherArguments(ctypes.Structure):
    """`Arguments` of gather_sm90.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_params", "v_params", "table", "context", "query_start", "k_out",
                                               "v_out")),
        *((name, ctypes.c_int) for name in ("table_width", "window", "first_row", "first_head", "capacity", "heads")),
    ]  # fmt: skip


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


def compile_ahead(kv: LayerKV, heads: int, dtype: torch.dtype, tile: int) -> None:
    """Start compiling what steps over a cache like `kv` will ask for: `rope_write` and the gathering, in tiles of `tile`."""
    _, kv_heads, block_size, width = kv.v.shape
    head_dim, kind = width * (2 if kv.name == "int4" else 1), _kind(kv)
    if dtype not in OUT or not Gather.fits(kv, head_dim):
        return
    turns = turns_of(heads, kv_heads, head_dim)
    shapes = {shape_for(tokens, turns) for tokens, _, _ in SPREAD}
    ropes = [rope_source(shape, kind, heads, kv_heads, head_dim, block_size, OUT[dtype]) for shape in sorted(shapes)]
    nvrtc.compile_ahead([*ropes, gather_source(kind, kv_heads, head_dim, block_size, tile)])


@functools.cache
def rope_kernel(device: int, *defined: Any) -> ctypes.c_void_p:
    """defined: of `rope_source`."""
    return nvrtc.load(nvrtc.machine_code(*rope_source(*defined)), "rope_write", 0, device)


@functools.cache
def gather_kernel(device: int, *defined: Any) -> ctypes.c_void_p:
    """defined: of `gather_source`."""
    return nvrtc.load(nvrtc.machine_code(*gather_source(*defined)), "gather", 0, device)


def _aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 and t.is_contiguous() for t in tensors)


def _kind(kv: LayerKV) -> str:
    return "copy" if kv.k.element_size() == 2 else kv.name


def fits(qkv: Tensor, kv: LayerKV, head_dim: int, rotary: int) -> bool:
    """Whether `rope_write` takes them: whole heads turn, and a cache that keeps 16 bits keeps those of `qkv`."""
    if qkv.dtype not in OUT or len(qkv) == 0 or rotary != head_dim or head_dim % 16 or head_dim > 256:
        return False
    kind = _kind(kv)
    return (kind in KINDS and (kind != "copy" or kv.k.dtype == qkv.dtype)
            and _aligned(qkv, kv.k, kv.v, kv.k_params, kv.v_params))


def rope_write(qkv: Tensor, kv: LayerKV, step: Step, cos_sin: Tensor, kv_heads: int, head_dim: int,
               shape: Shape | None = None) -> Tensor:
    """`reference.rope_write` without norms and turns. qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq, D]. Only what `fits`."""
    tokens, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    turns = turns_of(heads, kv_heads, head_dim)
    shape = shape or shape_for(tokens, turns)
    tensors = (qkv, q, kv.k, kv.v, kv.k_params, kv.v_params, step.positions, step.slots, cos_sin)
    arguments = RopeArguments(*(None if t is None else t.data_ptr() for t in tensors), kv.k_scale, kv.v_scale)
    nvrtc.launch(rope_kernel(qkv.device.index, shape, _kind(kv), heads, kv_heads, head_dim, kv.block_size, OUT[qkv.dtype]),
                 tokens * -(-turns // (shape.warps * shape.items)), shape.warps * 32, 0, 1, (arguments,), qkv.device)
    return q


@dataclass(frozen=True)
class Gather:
    """`attention_triton._gather` to who launches it: the same arguments in the same order, or addresses of tensors."""

    device: torch.device
    arg_names: ClassVar[tuple[str, ...]] = ()  # none of them is a scale

    @staticmethod
    def fits(kv: LayerKV, head_dim: int) -> bool:
        return head_dim % 16 == 0 and head_dim <= 256 and _kind(kv) in KINDS and _aligned(kv.k, kv.v, kv.k_params, kv.v_params)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return functools.partial(self._start, grid)

    def _start(self, grid: tuple[int, int, int], *arguments: Any, **_: Any) -> Gather:
        tensors, (width, window, row, head, capacity, heads, dim, _, block_size, kind, _, tile) = arguments[:9], arguments[9:]
        addresses = (t if isinstance(t, int) else t.data_ptr() for t in tensors)
        nvrtc.launch(
            gather_kernel(self.device.index, kind, heads, dim, block_size, tile),
            2 * capacity // gather_tokens(kind, dim, tile) * grid[1] * grid[2], GATHER_THREADS, 0, 1,
            (GatherArguments(*addresses, width, window, row, head, capacity, grid[1]),), self.device,
        )  # fmt: skip
        return self
