"""Scales for an FP8 KV cache: the largest K (as it enters the cache, rotated and QK-normed) and V of each layer or head.

Not rounding of weights. A scale is a multiplier, largest / 448, so that nothing clips; E4M3's error does not depend on it
otherwise (reference: its rounding is relative), which is why no percentile is searched.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nybble.checkpoint import convert_checkpoint, open_checkpoint
from nybble.checkpoint.write import staged
from nybble.formats.spec import FP8
from nybble.hardware import pick_device
from nybble.models import load_model
from nybble.models.decoder import Decoder
from nybble.models.load import Progress
from nybble.models.window import FLOAT_KV, hidden_window, scratch_kv, window_step
from nybble.quantize.calibrate import take_windows
from nybble.quantize.recipe import shipped_text
from nybble.text import load_tokenizer, read_text

Pair = tuple[float | Tensor, float | Tensor]

MIN_TOKENS = 1024  # a maximum over fewer says little about what comes later: one engine froze its scales on a 13-token probe
NOTABLE_NATS = 0.02  # more than this per token is said


@dataclass(frozen=True)
class KvScales:
    """scales: per layer (K, V), floats or float32 [kv_heads]. tokens: how many were seen. divergence: mean KL, in nats per
    token of the last window, of next-token probabilities with the scaled cache from those with one that is not quantized."""

    scales: dict[int, Pair]
    tokens: int
    divergence: float

    def __str__(self) -> str:
        return (f"FP8 KV scales of {len(self.scales)} layers from {self.tokens} tokens; the cache moves next-token "
                f"probabilities by {self.divergence:.5f} nats a token (KL, last calibration window)")


@torch.inference_mode()
def kv_scales(model: Decoder, windows: Tensor, per_head: bool = False, progress: Progress | None = None) -> KvScales:
    """windows: int64 [B, L] token ids, no padding.

    Raises ValueError for fewer than `MIN_TOKENS` tokens, and for a layer whose K or V is zero or not finite everywhere.
    """
    if windows.numel() < MIN_TOKENS:
        raise ValueError(f"{windows.numel()} tokens are too few to calibrate an FP8 KV cache, {MIN_TOKENS} is the least: use a "
                         "longer text or more samples")
    config, name = model.config, FLOAT_KV[model.dtype]
    largest = torch.zeros(config.num_layers, 2, config.num_kv_heads)
    caches = []
    for i, window in enumerate(windows.split(1)):
        step = window_step(window.to(model.device))
        if not caches:
            caches = [scratch_kv(config, name, step.block_table.numel(), model.device)[0] for _ in range(config.num_layers)]
        model.hidden(step, caches)
        block, offset = step.slots // caches[0].block_size, step.slots % caches[0].block_size
        for layer, cache in enumerate(caches):
            for side, stored in enumerate((cache.k, cache.v)):
                seen = stored[block, :, offset].abs().amax((0, 2)).float().cpu()
                largest[layer, side] = torch.maximum(largest[layer, side], seen)
        if progress is not None:
            progress("calibrating KV", (i + 1) / len(windows))
    scales: dict[int, Pair] = {}
    for layer, sides in enumerate(largest / FP8.qmax):
        if not bool((torch.isfinite(sides) & (sides > 0)).all()):
            raise ValueError(f"layer {layer} has a head whose K or V is {sides.min().item() * FP8.qmax} at most: no scale fits")
        scales[layer] = (sides[0], sides[1]) if per_head else (float(sides[0].max()), float(sides[1].max()))
    divergence = _divergence(model, windows[-1:], name, list(scales.values()))
    if divergence > NOTABLE_NATS:
        biased = " Its K projections have biases, which leave little of FP8's precision to the rest." if config.qkv_bias else ""
        warnings.warn(f"an FP8 KV cache moves this model's next-token probabilities by {divergence:.3f} nats a token "
                      f"(KL).{biased} Compare --kv int8", stacklevel=2)
    return KvScales(scales, windows.numel(), divergence)


def _divergence(model: Decoder, window: Tensor, name: str, scales: list[Pair]) -> float:
    plain, scaled = hidden_window(model, window, name)[0], hidden_window(model, window, "fp8", scales)[0]
    apart = []
    for p, q in zip(plain.split(64), scaled.split(64)):
        p, q = model.logits(p).log_softmax(-1), model.logits(q).log_softmax(-1)
        apart.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(apart).mean())


def calibrate_kv(path: str | Path, calibration: str | Path | None = None, per_head: bool = False, samples: int = 16,
                 sequence_length: int = 512, device: str | torch.device | None = None, activations: str | None = None,
                 progress: Progress | None = None) -> KvScales:
    """`kv_scales` of a checkpoint on a text file (None: the text that comes with the package)."""
    text = shipped_text() if calibration is None else read_text(calibration)
    ids = load_tokenizer(path).encode(text, add_special=False)
    model = load_model(open_checkpoint(path, activations), pick_device(device), progress=progress)
    length = min(sequence_length, model.config.max_position, max(len(ids), 1))
    windows = take_windows(ids, samples, length, model.config.vocab_size)
    return kv_scales(model, windows, per_head, progress)


def add_kv_scales(path: Path, scales: KvScales, format: str = "compressed-tensors") -> None:
    """Write a checkpoint that Nybble wrote again, in its place, with scales."""
    with staged(path.absolute()) as partial:
        convert_checkpoint(path, partial, format, scales=scales.scales)
