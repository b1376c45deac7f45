"""From a checkpoint's path to an engine: the one place where the engine meets checkpoints, models and texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nybble.engine.config import DEFAULT_KV, EngineConfig
from nybble.engine.core import Engine
from nybble.hardware import pick_device


def open_engine(path: str | Path, device: str = "auto", config: EngineConfig | None = None,
                progress: Callable[..., Any] | None = None) -> Engine:
    """Load a model and make it an engine. What `config` leaves open comes from the checkpoint: KV type, EOS ids, names.

    device: "auto" is the first GPU if there is one. progress: passed to `models.load_model`.
    """
    from nybble.checkpoint import open_checkpoint
    from nybble.models import load_model, turn_keys
    from nybble.text import load_tokenizer

    config = config or EngineConfig()
    target = pick_device(device)
    checkpoint = open_checkpoint(path, config.activations)
    model = load_model(checkpoint, target, progress=progress)
    tokenizer = load_tokenizer(path)
    config = replace(
        config,
        kv=config.kv or checkpoint.kv or DEFAULT_KV,
        eos_ids=config.eos_ids or tuple(tokenizer.eos_ids),
        model_name=config.model_name or Path(path).name,
        scheme=config.scheme or checkpoint.scheme_name,
        weights=checkpoint.precision[0],
        activations=checkpoint.precision[1],
    )
    model = turn_keys(model, config.kv, partial(tokenizer.encode, add_special=False))
    return Engine(model, config, checkpoint.scales_for(config.kv))
