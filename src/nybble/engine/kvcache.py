"""How many bytes the paged KV cache takes, and the tensors it is made of. Who uses which block is `blocks.py`'s business."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from nybble.kernels.types import LayerKV, cache_shapes, scaled

DEFAULT_CPU_BYTES = 1 << 30
DEFAULT_CUDA_FRACTION = 0.9


class Shape(Protocol):
    """What the cache needs to know of a model; `models.ModelConfig` has it."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes, in bytes, decided once at start."""

    weights: int
    workspace: int  # activations, logits and sampler state at the largest step
    graphs: int  # measured once they are recorded
    kv: int
    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        gib = lambda n: f"{n / 2**30:.2f} GiB"  # noqa: E731
        parts = {"weights": self.weights, "workspace": self.workspace, "graphs": self.graphs}  # 0: not measured on a CPU
        return (
            "".join(f"{name} {gib(size)}, " for name, size in parts.items() if size)
            + f"KV cache {gib(self.kv)} = {self.num_tokens} tokens in {self.num_blocks} blocks of {self.block_size}, "
            f"{self.bytes_per_token} bytes per token"
        )


def bytes_per_token(config: Shape, kv_name: str) -> int:
    """K and V of one token in all layers, scales and minima included. Raises as `kernels.types.cache_shapes`."""
    shape, store, params = cache_shapes(kv_name, 1, config.num_kv_heads, 1, config.head_dim)
    parameter_bytes = 0 if params is None else 2 * math.prod(params)
    return 2 * config.num_layers * (math.prod(shape) * store.itemsize + parameter_bytes)


def allocate(
    config: Shape,
    kv_name: str,
    num_blocks: int,
    block_size: int,
    device: torch.device | str,
    scales: Sequence[tuple[float, float] | None] | None = None,
) -> list[LayerKV]:
    """One zeroed `LayerKV` per layer. `scales`: per layer (k_scale, v_scale), fp8 only. Raises as `bytes_per_token`."""
    shape, store, params = cache_shapes(kv_name, num_blocks, config.num_kv_heads, block_size, config.head_dim)

    def zeros(shape: tuple[int, ...], of: torch.dtype) -> torch.Tensor:
        # In bytes, because not every torch fills float8. numpy's zeros are pages that take memory when they are first
        # written, so a CPU's cache costs what is used of it.
        size = (*shape[:-1], shape[-1] * of.itemsize)
        if torch.device(device).type == "cpu":
            return torch.from_numpy(np.zeros(size, np.uint8)).view(of)
        return torch.zeros(size, dtype=torch.uint8, device=device).view(of)

    layers = []
    for layer in range(config.num_layers):
        pair = [None if params is None else zeros(params, torch.float16) for _ in range(2)]
        cache = LayerKV(kv_name, zeros(shape, store), zeros(shape, store), *pair)
        layers.append(scaled(cache, scales[layer] if scales is not None else None))
    return layers


def kv_budget(kv_memory: float | None, device: torch.device, workspace: int) -> int:
    """Bytes for the cache. kv_memory: bytes (above 1), a fraction of the device's memory that everything together may use
    (up to 1), or None: 0.9 of a GPU, 1 GiB (at most a quarter of the machine) on a CPU.

    Raises ValueError when weights and workspace leave nothing.
    """
    if kv_memory is not None and kv_memory <= 0:
        raise ValueError(f"kv_memory = {kv_memory}: wants bytes, or a fraction of the device up to 1")
    if kv_memory is not None and kv_memory > 1:
        budget = int(kv_memory)
        if device.type == "cuda" and budget + workspace > torch.cuda.mem_get_info(device)[0]:
            free = torch.cuda.mem_get_info(device)[0]
            raise ValueError(f"kv_memory = {budget} bytes and a workspace of {workspace} do not fit in {free} bytes free")
        return budget
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * (kv_memory or DEFAULT_CUDA_FRACTION)) - (total - free) - workspace
        if budget <= 0:
            raise ValueError(
                f"weights and workspace ({workspace} bytes) leave no memory for the KV cache: {free} of {total} bytes are "
                "free; lower max_batched_tokens or raise kv_memory"
            )
        return budget
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(machine * kv_memory) if kv_memory is not None else min(DEFAULT_CPU_BYTES, machine // 4)
