"""Whole windows of text at once, without an engine: what evaluation and calibration run on.

Every row is one prompt row of a step over a scratch cache. Within one pass a layer's cache is dead once the layer has run,
so all layers share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.kernels.types import FLOATS, LayerKV, Step, cache_shapes, scaled
from nybble.models.config import ModelConfig
from nybble.models.decoder import Decoder

BLOCK_SIZE = 64
FLOAT_KV = {dtype: name for name, dtype in FLOATS.items()}
Scales = Sequence[tuple[float, float] | None] | None  # per layer (k, v), of fp8 caches


def prompts_step(rows: Sequence[Sequence[int]], device: torch.device, logit_rows: Sequence[int] | None = None
                 ) -> tuple[Step, int]:
    """Rows of token ids, each a prompt from position 0 in blocks of its own -> the step, and how many blocks it wants."""
    lengths = torch.tensor([len(row) for row in rows])
    blocks = -(-lengths // BLOCK_SIZE)
    first, total, longest = blocks.cumsum(0) - blocks, int(blocks.sum()), int(lengths.max())
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    table = (first[:, None] + torch.arange(int(blocks.max()))).clamp_max(total - 1)
    slots = first.repeat_interleave(lengths) * BLOCK_SIZE + positions
    int32 = lambda t: t.to(device, torch.int32)  # noqa: E731
    return Step(
        token_ids=torch.tensor([i for row in rows for i in row], device=device),
        positions=int32(positions), slots=slots.to(device), query_start=int32(F.pad(lengths.cumsum(0), (1, 0))),
        context_len=int32(lengths), block_table=int32(table), num_decode=0, max_query=longest, max_context=longest,
        logit_rows=None if logit_rows is None else torch.tensor(logit_rows, device=device),
    ), total


def window_step(token_ids: Tensor) -> Step:
    """One step over int64 [B, L] prompts. Wants B * ceil(L / BLOCK_SIZE) blocks."""
    return prompts_step(token_ids.tolist(), token_ids.device)[0]


def scratch_kv(config: ModelConfig, kv_name: str, num_blocks: int, device: torch.device | str, scales: Scales = None
               ) -> list[LayerKV]:
    """One cache that all layers share, as a list with an entry per layer: good for a single pass over fresh tokens.

    kv_name: a key of `formats.spec.KV`. Raises as `kernels.types.cache_shapes`.
    """
    shape, store, params = cache_shapes(kv_name, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    empty = lambda of, dtype: None if of is None else torch.empty(of, dtype=dtype, device=device)  # noqa: E731
    half = torch.float16
    shared = LayerKV(kv_name, empty(shape, store), empty(shape, store), empty(params, half), empty(params, half))
    return [scaled(shared, pair) for pair in scales or [None] * config.num_layers]


def prepare_window(model: Decoder, token_ids: Tensor, kv_name: str | None = None,
                   scales: Scales = None) -> tuple[Step, list[LayerKV]]:
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
def hidden_window(model: Decoder, token_ids: Tensor, kv_name: str | None = None,
                  scales: Scales = None) -> Tensor:
    """Normed hidden states [B, L, H] of int64 [B, L] token ids; `model.logits` turns rows of them into logits."""
    step, kv = prepare_window(model, token_ids, kv_name, scales)
    return model.hidden(step, kv).view(*token_ids.shape, -1)


@torch.inference_mode()
def forward_window(model: Decoder, token_ids: Tensor, kv_name: str | None = None,
                   scales: Scales = None) -> Tensor:
    """float32 logits [B, L, V] of int64 [B, L] token ids. Large: a window of 2048 over 49152 words is 400 MB; see
    `window_nll` for the likelihood alone."""
    return model.logits(hidden_window(model, token_ids, kv_name, scales).flatten(0, 1)).view(*token_ids.shape, -1)
