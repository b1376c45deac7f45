"""Log-likelihoods of continuations, many at once, through the kernels and the KV cache type that would serve them.

Not an engine: nothing is generated, so every request is one prompt row of a step over a scratch cache, and rows of any length
share a step. Requests whose input is the same (four letters after one question) are run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from nybble.checkpoint import Checkpoint, open_checkpoint
from nybble.hardware import pick_device
from nybble.models import Decoder, load_model, turn_keys
from nybble.models.load import Progress
from nybble.models.window import FLOAT_KV, prompts_step, scratch_kv
from nybble.nn.parallel import ALONE, Group
from nybble.text import Tokenizer, load_tokenizer

Ids = Sequence[int]
T = TypeVar("T")
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
LOGIT_ROWS = 512


def tracked(items: Sequence[T], what: str, progress: Progress | None) -> Iterator[T]:
    """The items; progress is told which share of them is done."""
    for number, item in enumerate(items):
        if progress is not None:
            progress(what, number / len(items))
        yield item
    if progress is not None:
        progress(what, 1.0)


@dataclass(frozen=True)
class Subject:
    """A model to be measured. kv: key of `formats.spec.KV`, None is the activations' own dtype; kv_scales: per layer, for
    fp8."""

    path: Path
    checkpoint: Checkpoint
    model: Decoder
    tokenizer: Tokenizer
    kv: str | None
    kv_scales: list[tuple[float, float] | None] | None

    @property
    def kv_name(self) -> str:
        return self.kv or FLOAT_KV[self.model.dtype]

    @property
    def prefix_id(self) -> int:
        """What stands before a text that begins with nothing: BOS, or EOS."""
        return next((i for i in (self.tokenizer.bos_id, *self.tokenizer.eos_ids) if i is not None), 0)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, split where the context's own tokens end; a BOS in front when the tokenizer puts one. White space
        at the end of the context moves to the continuation, an empty context is the BOS or EOS: as lm-eval has it."""
        kept = context.rstrip()
        whole, split = self.encode(context + continuation), len(self.encode(kept))
        first = self.tokenizer.encode("a")[:1]
        start = first if first == [self.tokenizer.bos_id] else []
        return start + whole[:split] or [self.prefix_id], whole[split:]


def open_subject(path: str | Path, kv: str = "auto", device: str | torch.device | None = None,
                 progress: Progress | None = None, activations: str | None = None, group: Group = ALONE) -> Subject:
    """kv "auto": what the checkpoint asks for, 16 bits if it asks for nothing. activations: as in `open_checkpoint`. Raises
    ValueError, FileNotFoundError."""
    checkpoint = open_checkpoint(path, activations)
    name = checkpoint.kv if kv == "auto" else kv
    scales = group.heads(checkpoint.scales_for(name))
    target = device if isinstance(device, torch.device) else pick_device(device)
    tokenizer = load_tokenizer(path)
    model = load_model(checkpoint, target, progress=progress, group=group)
    model = turn_keys(model, name, partial(tokenizer.encode, add_special=False))
    return Subject(Path(path), checkpoint, model, tokenizer, name, scales)


@torch.inference_mode()
def likelihoods(subject: Subject, pairs: Sequence[tuple[Ids, Ids]], progress: Progress | None = None, what: str = "scoring",
                step_tokens: int | None = None) -> list[tuple[float, bool]]:
    """(context ids, continuation ids) -> (log-likelihood of the continuation in nats, whether greedy decoding gives it).

    What is longer than the model's context loses its beginning. Raises ValueError for an empty context or continuation, and
    a continuation that fills the context.
    """
    model, limit = subject.model, subject.model.config.max_position
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not context or not 0 < len(continuation) <= limit:
            raise ValueError(f"request {index}: {len(context)} tokens of context and {len(continuation)} to score; wants one "
                             f"or more of each, and at most {limit} to score")
        rows.setdefault(tuple([*context, *continuation][:-1][-limit:]), []).append(index)
    most = step_tokens or STEP_TOKENS[model.device.type]
    steps: list[list[tuple[int, ...]]] = []
    room = 0
    for row in sorted(rows, key=len, reverse=True):
        if len(row) > room:
            steps.append([])
            room = max(most, len(row))
        steps[-1].append(row)
        room -= len(row)
    found = [(0.0, True)] * len(pairs)
    for some in tracked(steps, what, progress):
        picks: list[int] = []  # tokens whose logits are wanted, what should follow each, and who asks
        targets: list[int] = []
        owners: list[int] = []
        end = 0
        for row in some:
            end += len(row)
            for index in rows[row]:
                wanted = pairs[index][1]
                picks += range(end - len(wanted), end)
                targets += wanted
                owners += [index] * len(wanted)
        step, blocks = prompts_step(some, model.device, picks)
        kv = scratch_kv(model.config, subject.kv_name, blocks, model.device, scales=subject.kv_scales)
        nats, hits = [], []
        for hidden, ids in zip(model.hidden(step, kv).split(LOGIT_ROWS), torch.tensor(targets).split(LOGIT_ROWS)):
            logits, ids = model.logits(hidden), ids.to(model.device)
            nats.append(F.cross_entropy(logits, ids, reduction="none").neg())
            hits.append(logits.argmax(-1) == ids)
        for index, value, hit in zip(owners, torch.cat(nats).double().tolist(), torch.cat(hits).tolist()):
            found[index] = (found[index][0] + value, found[index][1] and hit)
    return found
