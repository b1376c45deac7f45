"""The two ends of a step in portable Triton, one launch each: which token a row starts from, and the greedy token it ends with
(on Hopper `sample_hopper`'s, where it works).

Tokens that the host has not seen lie in a pool on the device; what they mean is `engine.runner`'s business.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nybble.kernels import sample_hopper
from nybble.kernels.linear_triton import launch_options

_BLOCK = 4096


@triton.jit
def _resolve(ids_ptr, pool_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < count
    token = tl.load(ids_ptr + at, mask=kept, other=0)
    known = tl.load(pool_ptr + (-1 - token), mask=kept & (token < 0), other=0)
    tl.store(out_ptr + at, tl.where(token < 0, tl.maximum(known, 0), token), mask=kept)


def resolve(ids: Tensor, pool: Tensor) -> Tensor:
    """int64 [T]: ids below 0 stand for pool[-1 - id]; a failed draw there (below 0) reads as token 0."""
    out = torch.empty_like(ids)
    if len(ids):
        _resolve[(triton.cdiv(len(ids), 256),)](ids, pool, out, len(ids), 256, num_warps=2)
    return out


@triton.jit
def _greedy(logits_ptr, slots_ptr, pool_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A lane keeps its first largest logit; the largest of all lanes with the lowest token wins. A NaN counts as larger."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = lane
    for first in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=8):  # loads of eight turns are in flight
        x = tl.load(logits_ptr + row * WIDTH + first + lane, mask=first + lane < WIDTH, other=float("-inf"))
        x = tl.where(x == x, x, float("inf"))
        better = x > best
        best = tl.where(better, x, best)
        token = tl.where(better, first + lane, token)
    most = tl.max(best, 0)
    token = tl.min(tl.where(best == most, token, 0x7FFFFFFF), 0).to(tl.int64)
    token = tl.where((most > float("-inf")) & (most < float("inf")), token, -1)
    tl.store(out_ptr + row, token)
    tl.store(pool_ptr + slot, token)


@functools.cache
def _on_hopper(device: torch.device, vocab_size: int) -> bool:
    """Whether Hopper's kernel takes such logits: it finds the largest of rows as torch does, or a warning says why not. After
    this none is compiled any more."""
    if sample_hopper.refusal(torch.empty(0, vocab_size, device=device)) is not None:
        return False
    logits = torch.randn(33, vocab_size, device=device, generator=torch.Generator(device).manual_seed(0))
    slots, pool = torch.arange(33, device=device), torch.empty(33, dtype=torch.int64, device=device)
    try:
        found = [sample_hopper.greedy_into(logits[:rows], slots, pool) for rows in (1, 17, 33)]
        same = all(tokens.equal(logits[: len(tokens)].argmax(1)) for tokens in (*found, pool))
        reason = None if same else "its tokens are not those of the largest logits"
    except Exception as error:
        reason = f"its start-up test failed: {type(error).__name__}: {str(error).strip()[:200]}"
    if reason is not None:
        logging.getLogger(__name__).warning("the kernel for greedy tokens is not used on %s: %s", device, reason)
    return reason is None


def greedy_into(logits: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    """float32 [S, V] -> int64 [S] as `engine.sampler.greedy`, also written to pool[slots]."""
    if _on_hopper(logits.device, logits.shape[1]):
        return sample_hopper.greedy_into(logits, slots, pool)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        options = launch_options(logits.device, 16)
        _greedy[(len(logits),)](logits.contiguous(), slots, pool, out, logits.shape[1], _BLOCK, **options)
    return out
