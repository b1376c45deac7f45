"""Tokens from logits on Hopper (sm_90a), in CUDA: the largest (`greedy_sm90.cu`), or one launch for temperature, top-k, top-p,
min-p and noise (`sample_sm90.cu`).

Not penalties or masks, which few rows have: `engine.sampler` applies them to the logits before. Same noise, so the same
tokens, as its torch operations but where rounding moves a border.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nybble.kernels import nvrtc

THREADS, GREEDY_THREADS, MOST_TOKENS = 512, 1024, 1 << 18  # of the .cu
MOST_LOGITS, MOST_GREEDY_LOGITS = 48 * THREADS, 16 * GREEDY_THREADS  # of a program, where more can have the row

Arguments = nvrtc.structure("logits temperature top_p min_p top_k keys out")
GreedyArguments = nvrtc.structure("logits slots pool out")


def cluster_for(rows: int, width: int, most: int) -> int:
    """Programs that share a row: many where rows are few, or wider than `most` logits each. No token depends on it."""
    cluster = 8 if rows <= 16 else 4 if rows <= 32 else 2
    while cluster < 8 and width > most * cluster:
        cluster *= 2
    return cluster


def source_and_defines(name: str, width: int, cluster: int) -> tuple[str, dict[str, int]]:
    return nvrtc.source(f"{name}_sm90.cu"), {"OUT": 0, "WIDTH": width, "CLUSTER": cluster}


def greedy_into(logits: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    """float32 [S, V] -> int64 [S] as `engine.sampler.greedy`, also written to pool[slots]."""
    out, logits = torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits.contiguous()
    if logits.data_ptr() % 16:  # rows are read in fours
        logits = logits.clone()
    if len(logits):
        (rows, width), device = logits.shape, logits.device
        cluster = cluster_for(rows, width, MOST_GREEDY_LOGITS)
        kernel = nvrtc.kernel("greedy", device.index, 0, source_and_defines, "greedy", width, cluster)
        arguments = GreedyArguments(*nvrtc.addresses(logits, slots, pool, out))
        nvrtc.launch(kernel, cluster * rows, GREEDY_THREADS, 0, cluster, (arguments,), device)
    return out


def _shared_bytes(width: int, cluster: int) -> int:
    """Beyond what the .cu declares: parts of its 3 x 1920 bins, and a thread's logits, in fours."""
    return 4 * (3 * 1920 + THREADS * -(-width // (4 * cluster * THREADS)) * 4)


def prepare(width: int, device: torch.device) -> None:
    """Compile and load what any number of rows takes, so that no request waits for it."""
    clusters = sorted({cluster_for(rows, width, MOST_LOGITS) for rows in (1, 17, 33)})
    nvrtc.compile_ahead(source_and_defines("sample", width, cluster) for cluster in clusters)
    for cluster in clusters:
        _draw(width, cluster, device)


def _draw(width: int, cluster: int, device: torch.device) -> ctypes.c_void_p:
    return nvrtc.kernel("draw", device.index, _shared_bytes(width, cluster), source_and_defines, "sample", width, cluster)


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
        cluster = cluster_for(rows, width, MOST_LOGITS)
        arguments = Arguments(*nvrtc.addresses(logits, temperature, top_p, min_p, top_k, keys, out))
        nvrtc.launch(_draw(width, cluster, logits.device), cluster * rows, THREADS, _shared_bytes(width, cluster), cluster,
                     (arguments,), logits.device)
    return out
