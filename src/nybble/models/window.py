"""Whole windows of text at once, without an engine: what perplexity and calibration run on.

Every row is one prompt row of a step over a scratch cache. Within one pass a layer's cache is dead once the layer has run,
so all layers share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nybble.formats.numerics import FLOAT8
from nybble.formats.spec import INT4_KV_GROUPS, KV
from nybble.kernels.types import LayerKV, Step, scaled
from nybble.models.config import ModelConfig
from nybble.models.decoder import Decoder

BLOCK_SIZE = 64
FLOAT_KV = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
STORED = {name: dtype for dtype, name in FLOAT_KV.items()}


def window_step(token_ids: Tensor, past: int = 0, capacity: int | None = None, block_size: int = BLOCK_SIZE) -> Step:
    """One step over int64 [B, L] tokens at positions past .. past + L - 1, row r in blocks of its own.

    capacity: tokens that a row's blocks hold (default past + L); the same for all steps over one cache. A single token per
    row after a past is a decode row. Wants B * ceil(capacity / block_size) blocks.
    """
    rows, length = token_ids.shape
    device = token_ids.device
    width = -(-(capacity or past + length) // block_size)
    positions = torch.arange(past, past + length, device=device)
    table = torch.arange(rows * width, device=device).view(rows, width)
    slots = table[:, positions // block_size] * block_size + positions % block_size
    decode = past > 0 and length == 1
    int32 = torch.int32
    return Step(
        token_ids=token_ids.reshape(-1),
        positions=positions.to(int32).repeat(rows),
        slots=slots.reshape(-1),
        query_start=torch.arange(0, (rows + 1) * length, length, device=device, dtype=int32),
        context_len=torch.full((rows,), past + length, device=device, dtype=int32),
        block_table=table.to(int32),
        num_decode=rows if decode else 0,
        max_query=0 if decode else length,
        max_context=past + length,
        logit_rows=None,
    )


def scratch_kv(
    config: ModelConfig,
    kv_name: str,
    num_blocks: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    block_size: int = BLOCK_SIZE,
    scales: Sequence[tuple[float, float] | None] | None = None,
) -> list[LayerKV]:
    """One cache that all layers share, as a list with an entry per layer: good for a single pass over fresh tokens.

    kv_name: a key of `formats.spec.KV` (ValueError otherwise). dtype: what a 16/32-bit cache stores instead of
    what its name says. scales: per layer (k, v), fp8 only.
    """
    if kv_name not in KV:
        raise ValueError(f"kv = {kv_name!r} is not a KV cache type; there are {', '.join(KV)}")
    spec = KV[kv_name]
    store = dtype or STORED[kv_name] if kv_name in STORED else FLOAT8.get(spec.num.name, torch.uint8)
    width = config.head_dim * spec.num.bits // 8 if spec.num.bits < 8 else config.head_dim
    blocks = (num_blocks, config.num_kv_heads, block_size)
    k, v = (torch.empty((*blocks, width), dtype=store, device=device) for _ in range(2))
    params = (num_blocks, config.num_kv_heads, INT4_KV_GROUPS, block_size, 2) if kv_name == "int4" else (*blocks, 2)
    k_params, v_params = (torch.empty(params, dtype=torch.float16, device=device) if spec.zero else None for _ in range(2))
    shared = LayerKV(kv_name, k, v, k_params, v_params)
    pairs = scales or [None] * config.num_layers
    return [scaled(shared, pair) for pair in pairs]


def prepare_window(
    model: Decoder,
    token_ids: Tensor,
    kv_name: str | None = None,
    scales: Sequence[tuple[float, float] | None] | None = None,
) -> tuple[Step, list[LayerKV]]:
    """Step and scratch cache for int64 [B, L] token ids. kv_name None: the activations' own dtype, nothing quantized.

    Raises ValueError when L is longer than the model's context.
    """
    rows, length = token_ids.shape
    if length > model.config.max_position:
        raise ValueError(f"a window of {length} tokens: the model was made for {model.config.max_position} positions")
    step = window_step(token_ids.to(model.device))
    kv = scratch_kv(model.config, kv_name or FLOAT_KV[model.dtype], step.block_table.numel(), model.device, scales=scales)
    return step, kv


@torch.inference_mode()
def hidden_window(
    model: Decoder,
    token_ids: Tensor,
    kv_name: str | None = None,
    scales: Sequence[tuple[float, float] | None] | None = None,
) -> Tensor:
    """Normed hidden states [B, L, H] of int64 [B, L] token ids; `model.logits` turns rows of them into logits."""
    step, kv = prepare_window(model, token_ids, kv_name, scales)
    return model.hidden(step, kv).view(*token_ids.shape, -1)


@torch.inference_mode()
def forward_window(
    model: Decoder,
    token_ids: Tensor,
    kv_name: str | None = None,
    scales: Sequence[tuple[float, float] | None] | None = None,
) -> Tensor:
    """float32 logits [B, L, V] of int64 [B, L] token ids. Large: a window of 2048 over 49152 words is 400 MB; see
    `window_nll` for the likelihood alone."""
    return model.logits(hidden_window(model, token_ids, kv_name, scales).flatten(0, 1)).view(*token_ids.shape, -1)


@torch.inference_mode()
def window_nll(
    model: Decoder,
    token_ids: Tensor,
    kv_name: str | None = None,
    scales: Sequence[tuple[float, float] | None] | None = None,
    chunk: int = 256,
) -> Tensor:
    """Negative log-likelihood of every token but each row's first, in nats: int64 [B, L] -> float32 [B, L - 1].

    Logits are made `chunk` rows at a time.
    """
    hidden = hidden_window(model, token_ids, kv_name, scales)[:, :-1].flatten(0, 1)
    targets = token_ids[:, 1:].to(model.device).flatten()
    parts = [
        torch.nn.functional.cross_entropy(model.logits(rows), wanted, reduction="none")
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.cat(parts).view(token_ids.shape[0], -1)
