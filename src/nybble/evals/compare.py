"""Checkpoints side by side: what each costs (disk, KV cache) and what it loses (perplexity). Not a benchmark of speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nybble.checkpoint import open_checkpoint
from nybble.engine.kvcache import bytes_per_token
from nybble.evals.perplexity import Perplexity, evaluate_perplexity
from nybble.formats.qtensor import QTensor
from nybble.models import read_config

Progress = Callable[[str, float], None]
FLOAT_KV = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Measured:
    """One checkpoint. weight_bytes: its weights, those that are not quantized in
    the checkpoint's dtype; disk_bytes: its file or its safetensors files."""

    name: str
    scheme: str
    kv: str
    weight_bytes: float
    disk_bytes: int
    kv_bytes_per_token: int
    perplexity: Perplexity


@dataclass(frozen=True)
class Comparison:
    """rows[0] is what the others are compared with."""

    rows: tuple[Measured, ...]

    def loss(self, row: Measured) -> tuple[float, float]:
        """(mean, standard error) of the row's extra nats per token, window by window against the first row."""
        extra = [b - a for a, b in zip(self.rows[0].perplexity.window_nll, row.perplexity.window_nll)]
        mean = sum(extra) / len(extra)
        spread = math.sqrt(sum((x - mean) ** 2 for x in extra) / max(len(extra) - 1, 1) / len(extra))
        return mean, spread if len(extra) > 1 else math.nan

    def __str__(self) -> str:
        head = ("", "weights", "KV", "weights, MB", "KV, bytes per token", "perplexity", "lost, nats per token")
        lines = [head]
        for row in self.rows:
            mean, spread = self.loss(row)
            lost = "-" if row is self.rows[0] else f"{mean:+.4f} +- {spread:.4f}"
            lines.append((row.name, row.scheme, row.kv, f"{row.weight_bytes / 1e6:.1f}", f"{row.kv_bytes_per_token:,}",
                          f"{row.perplexity.ppl:.3f}", lost))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def measure(
    path: str | Path, text: str | Path, name: str | None = None, kv: str = "auto", window: int = 2048,
    max_windows: int | None = None, device: str | torch.device | None = None, progress: Progress | None = None,
) -> Measured:
    """Measure one checkpoint on a text file."""
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint.config)
    chosen = checkpoint.kv if kv == "auto" else kv
    folder = Path(path)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    bits = 0.0
    for tensor in checkpoint.names():
        value = checkpoint.get(tensor)
        quantized = isinstance(value, QTensor)
        width = min(value.element_size(), checkpoint.dtype.itemsize) if not quantized else 0  # GGUF decodes to float32
        bits += value.bits_per_weight * value.codes.numel() if quantized else 8 * width * value.numel()
    label = chosen or FLOAT_KV[config.dtype]
    found = evaluate_perplexity(path, text, window, max_windows, kv, device, progress)
    return Measured(name or folder.name, checkpoint.scheme_name, label, bits / 8, sum(f.stat().st_size for f in files),
                    bytes_per_token(config, label), found)


def compare(
    paths: Sequence[str | Path], text: str | Path, window: int = 2048, max_windows: int | None = None,
    device: str | torch.device | None = None, progress: Progress | None = None,
) -> Comparison:
    """Measure checkpoints on the same windows of one text. They must share a vocabulary (ValueError otherwise)."""
    sizes = {str(path): read_config(open_checkpoint(path).config).vocab_size for path in paths}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"perplexities over different vocabularies do not compare: {sizes}")
    return Comparison(tuple(
        measure(path, text, window=window, max_windows=max_windows, device=device, progress=progress) for path in paths
    ))
