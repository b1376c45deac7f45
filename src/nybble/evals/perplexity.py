"""Perplexity: how surprised a model is by a text, through the kernels and the KV cache type it would be served with.

Protocol, the one that published tables mean: one token stream, non-overlapping windows, no BOS, the mean negative
log-likelihood of positions 1 .. window - 1 of each window. What the text is (which rows, joined how) is the file's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nybble.checkpoint import open_checkpoint
from nybble.hardware import pick_device
from nybble.models import Decoder, load_model, window_nll
from nybble.text import load_tokenizer, read_text

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Perplexity:
    """window_nll: mean negative log-likelihood of each window, in nats; the same windows of two models can be compared in
    pairs. kv: the cache type in effect, None for the activations' own dtype."""

    window_nll: tuple[float, ...]
    window: int
    kv: str | None
    seconds: float

    @property
    def nll(self) -> float:
        """Nats per token."""
        return sum(self.window_nll) / len(self.window_nll)

    @property
    def ppl(self) -> float:
        return math.exp(self.nll)

    @property
    def standard_error(self) -> float:
        """Of `nll`, from the spread between windows; NaN for one window."""
        count = len(self.window_nll)
        if count < 2:
            return math.nan
        variance = sum((x - self.nll) ** 2 for x in self.window_nll) / (count - 1)
        return math.sqrt(variance / count)

    def __str__(self) -> str:
        error = f" +- {self.ppl * self.standard_error:.2f}" if len(self.window_nll) > 1 else ""
        return (f"perplexity {self.ppl:.4f}{error} ({self.nll:.4f} nats per token; {len(self.window_nll)} windows of "
                f"{self.window} tokens, KV {self.kv or 'as the activations'}, {self.seconds:.1f} s)")


def perplexity(
    model: Decoder,
    token_ids: Sequence[int],
    window: int = 2048,
    kv: str | None = None,
    max_windows: int | None = None,
    progress: Progress | None = None,
    kv_scales: Sequence[tuple[float, float] | None] | None = None,
) -> Perplexity:
    """Perplexity of a token stream. The rest that fills no window is left out; a stream shorter than one window is one.

    kv: a key of `formats.spec.KV`, None for the activations' own dtype. kv_scales: per layer, for fp8 caches.
    Raises ValueError when the stream has fewer than two tokens or a number makes no sense.
    """
    if window < 2 or (max_windows is not None and max_windows < 1):
        raise ValueError(f"window = {window}, max_windows = {max_windows}: wants windows of 2 tokens and more, at least one")
    if len(token_ids) < 2:
        raise ValueError(f"the text has {len(token_ids)} tokens: perplexity wants two or more")
    window = min(window, len(token_ids), model.config.max_position)
    count = len(token_ids) // window
    count = count if max_windows is None else min(count, max_windows)
    started, means = time.perf_counter(), []
    for i in range(count):
        if progress is not None:
            progress("perplexity", i / count)
        ids = torch.tensor(token_ids[i * window : (i + 1) * window])[None]
        means.append(float(window_nll(model, ids, kv, kv_scales).double().mean()))
    if progress is not None:
        progress("perplexity", 1.0)
    return Perplexity(tuple(means), window, kv, time.perf_counter() - started)


def evaluate_perplexity(
    path: str | Path,
    ppl: str | Path,
    window: int = 2048,
    max_windows: int | None = None,
    kv: str = "auto",
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of a checkpoint (directory or .gguf) on the text file `ppl`. kv "auto": what the checkpoint asks for.

    Raises ValueError or FileNotFoundError for bad input.
    """
    text = read_text(ppl)
    checkpoint = open_checkpoint(path)
    name = checkpoint.kv if kv == "auto" else kv
    scales = None
    if name is not None and name.startswith("fp8"):
        scales = [checkpoint.kv_scales(layer) for layer in range(checkpoint.config["num_hidden_layers"])]
    model = load_model(checkpoint, pick_device(device) if not isinstance(device, torch.device) else device, progress=progress)
    token_ids = load_tokenizer(path).encode(text, add_special=False)
    return perplexity(model, token_ids, window, name, max_windows, progress, scales)
