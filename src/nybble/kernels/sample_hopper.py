"""Tokens from logits on Hopper (sm_90a), in CUDA: the largest (`greedy_sm90.cu`), or one launch for temperature, top-k, top-p,
min-p and noise (`sample_sm90.cu`).

Not penalties or masks, which few rows have: `engine.sampler` applies them to the logits before. Same noise, so the same
tokens, as its torch operations but where rounding moves a border.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from nybble.kernels import nvrtc

THREADS, GREEDY_THREADS, MOST_TOKENS = 512, 1024, 1 << 18  # of the .cu
MOST_LOGITS = 48  # of a thread, where more programs can have the row


class GreedyArguments(ctypes.Structure):
    """`Arguments` of greedy_sm90.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("logits", "slots", "pool", "out")]


def greedy_cluster_for(rows: int, width: int) -> int:
    """Programs that share a row, from an H200. No token depends on it."""
    cluster = 8 if rows <= 16 else 4 if rows <= 32 else 2
    while cluster < 8 and width > 16 * GREEDY_THREADS * cluster:
        cluster *= 2
    return cluster


def greedy_source_and_defines(width: int, cluster: int) -> tuple[str, dict[str, int]]:
    return nvrtc.source("greedy_sm90.cu"), {"OUT": 0, "WIDTH": width, "CLUSTER": cluster}


@functools.cache
def greedy_kernel(width: int, cluster: int, device: int) -> ctypes.c_void_p:
    return nvrtc.load(nvrtc.machine_code(*greedy_source_and_defines(width, cluster)), "greedy", 0, device)


def greedy_into(logits: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    """float32 [S, V] -> int64 [S] as `engine.sampler.greedy`, also written to pool[slots]."""
    out, logits = torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits.contiguous()
    if logits.data_ptr() % 16:  # rows are read in fours
        logits = logits.clone()
    if len(logits):
        rows, width = logits.shape
        cluster = greedy_cluster_for(rows, width)
        arguments = GreedyArguments(*(tensor.data_ptr() for tensor in (logits, slots, pool, out)))
        found = greedy_kernel(width, cluster, logits.device.index)
        nvrtc.launch(found, cluster * rows, GREEDY_THREADS, 0, cluster, (arguments,), logits.device)
    return out


class Arguments(ctypes.Structure):
    """`Arguments` of sample_sm90.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("logits", "temperature", "top_p", "min_p", "top_k", "keys", "out")]


def cluster_for(rows: int, width: int) -> int:
    """Programs that share a row: many where rows are few or wide. No token depends on it."""
    cluster = 8 if rows <= 16 else 4 if rows <= 32 else 2
    while cluster < 8 and _logits(width, cluster) > MOST_LOGITS:
        cluster *= 2
    return cluster


def _logits(width: int, cluster: int) -> int:
    """Of a thread, in fours."""
    return -(-width // (4 * cluster * THREADS)) * 4


def _shared_bytes(width: int, cluster: int) -> int:
    """Beyond what the .cu declares: parts of its 3 x 1920 bins, and logits."""
    return 4 * (3 * 1920 + THREADS * _logits(width, cluster))


def source_and_defines(width: int, cluster: int) -> tuple[str, dict[str, int]]:
    return nvrtc.source("sample_sm90.cu"), {"OUT": 0, "WIDTH": width, "CLUSTER": cluster}


@functools.cache
def kernel(width: int, cluster: int, device: int) -> ctypes.c_void_p:
    code = nvrtc.machine_code(*source_and_defines(width, cluster))
    return nvrtc.load(code, "draw", _shared_bytes(width, cluster), device)


def prepare(width: int, device: torch.device) -> None:
    """Compile and load what any number of rows takes, so that no request waits for it."""
    clusters = sorted({cluster_for(rows, width) for rows in (1, 17, 33)})
    nvrtc.compile_ahead(source_and_defines(width, cluster) for cluster in clusters)
    for cluster in clusters:
        kernel(width, cluster, device.index)


def refusal(logits: Tensor) -> str | None:
    """Why these logits are not for the kernel, or None."""
    if logits.dtype != torch.float32 or not 0 < logits.shape[1] <= MOST_TOKENS:
        return f"wants float32 logits of up to {MOST_TOKENS} tokens"
    return nvrtc.refusal(logits.device)


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """float32 [S, V] and fields of `engine.sampler.Draws` (contiguous) -> int64 [S], -1 where the largest logit is no finite
    number."""
    out, logits = torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits.contiguous()
    if len(logits):
        rows, width = logits.shape
        cluster = cluster_for(rows, width)
        arguments = Arguments(*(tensor.data_ptr() for tensor in (logits, temperature, top_p, min_p, top_k, keys, out)))
        found = kernel(width, cluster, logits.device.index)
        nvrtc.launch(found, cluster * rows, THREADS, _shared_bytes(width, cluster), cluster, (arguments,), logits.device)
    return out
