"""From a checkpoint's path to an engine: the one place where the engine meets checkpoints, models and texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nybble.engine.config import DEFAULT_KV, EngineConfig
from nybble.engine.core import Engine
from nybble.engine.grammar import Grammars
from nybble.formats.spec import KV
from nybble.hardware import pick_device
from nybble.nn.parallel import ALONE, Group

if TYPE_CHECKING:
    import torch

    from nybble.engine.runner import ModelRunner


def open_engine(path: str | Path, device: str = "auto", config: EngineConfig | None = None,
                progress: Callable[..., Any] | None = None, dummy: bool = False) -> Engine:
    """Load a model and make it an engine. What `config` leaves open comes from the checkpoint: KV type, EOS ids, names.

    device: "auto" is the first GPU if there is one; with config.tensor_parallel also those after it. progress: passed to
    `models.load_model`. dummy: path is a key of `models.SHAPES`, and the weights are random, of config.scheme.
    """
    config, target = config or EngineConfig(), pick_device(device)
    if config.kv not in (None, *KV):
        raise ValueError(f"kv = {config.kv!r}: wants auto, {', '.join(KV)}")
    if config.tensor_parallel == 1:
        runner, config, grammars = open_runner(path, target, config, progress, dummy)
        return Engine(runner, config, grammars=grammars)
    from nybble.checkpoint import open_checkpoint
    from nybble.engine.ranks import Ranks
    from nybble.models import read_config, shape, share_of

    share_of(shape(str(path)) if dummy else read_config(open_checkpoint(path).config), config.tensor_parallel)
    work = {"path": str(path), "engine": asdict(config), "dummy": dummy}
    ranks = Ranks(config.tensor_parallel, target, "nybble.engine.ranks:follow", **work)
    try:
        runner, config, grammars = open_runner(path, target, config, progress, dummy, ranks.group)
    except BaseException:
        ranks.close()
        raise
    runner.tell = ranks.tell
    return Engine(runner, config, grammars=grammars)


def open_runner(path: str | Path, device: torch.device, config: EngineConfig, progress: Callable[..., Any] | None = None,
                dummy: bool = False, group: Group = ALONE) -> tuple[ModelRunner, EngineConfig, Grammars | None]:
    """What runs a rank's share of the model, with the config made whole, and what reads grammars."""
    from nybble.checkpoint import open_checkpoint
    from nybble.engine.runner import ModelRunner
    from nybble.models import dummy_model, load_model, shape, turn_keys
    from nybble.text import load_tokenizer

    if dummy:
        config = replace(config, kv=config.kv or DEFAULT_KV, model_name=config.model_name or str(path))
        made_up = shape(str(path))  # random weights know no positions
        made_up = replace(made_up, max_position=max(made_up.max_position, config.max_context or 0))
        return ModelRunner(dummy_model(made_up, config.scheme, device, group=group), config), config, None
    checkpoint = open_checkpoint(path, config.activations)
    model = load_model(checkpoint, device, progress=progress, group=group)
    tokenizer = load_tokenizer(path)
    config = replace(
        config,
        kv=config.kv or checkpoint.kv or DEFAULT_KV,
        eos_ids=config.eos_ids or tuple(tokenizer.eos_ids),
        model_name=config.model_name or os.path.basename(os.path.abspath(path)),  # "." too
        scheme=config.scheme or checkpoint.scheme_name,
        weights=checkpoint.precision[0],
        activations=checkpoint.precision[1],
    )
    model = turn_keys(model, config.kv, partial(tokenizer.encode, add_special=False))
    scales = group.heads(checkpoint.scales_for(config.kv))
    vocab_size = max(model.config.vocab_size, tokenizer.vocab_size)
    grammars = Grammars(tokenizer.backend.to_str, config.eos_ids, vocab_size)
    return ModelRunner(model, config, scales), config, grammars
