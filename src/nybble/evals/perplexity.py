"""Perplexity: how surprised a model is by a text, through the kernels and the KV cache type it would be served with.

Protocol, the one that published tables mean: one token stream, non-overlapping windows, no BOS, the mean negative
log-likelihood of positions 1 .. window - 1 of each window. What the text is (which rows, joined how) is the file's business.
Read beside another model's trace, the same pass says how far the two models' predictions are apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nybble.evals.likelihood import Progress, Subject, tracked
from nybble.models.window import hidden_window
from nybble.nn.embed import Head

LOGIT_ROWS = 256


@dataclass(frozen=True)
class Trace:
    """What a model made of a text: last hidden states [window, H] per window, on the CPU, and the head that makes logits of
    them. Smaller than logits by the size of the vocabulary."""

    hidden: tuple[Tensor, ...]
    head: Head


@dataclass(frozen=True)
class Divergence:
    """Predictions beside a reference's, over all tokens: KL(reference || model) in nats, and how often both rank the same
    token first."""

    kl_mean: float
    kl_99: float
    top1_agreement: float
    tokens: int


@dataclass(frozen=True)
class Perplexity:
    """window_nll: mean negative log-likelihood of each window, in nats; the same windows of two models can be compared in
    pairs."""

    window_nll: tuple[float, ...]
    window: int
    seconds: float
    divergence: Divergence | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def nll(self) -> float:
        """Nats per token."""
        return sum(self.window_nll) / len(self.window_nll)

    @property
    def ppl(self) -> float:
        return math.exp(self.nll)


@torch.inference_mode()
def perplexity(subject: Subject, token_ids: Sequence[int], window: int = 2048, max_windows: int | None = None,
               progress: Progress | None = None, against: Trace | None = None, keep: bool = False) -> Perplexity:
    """Perplexity of a token stream. The rest that fills no window is left out; a stream shorter than one window is one.

    against: another model's trace of the same windows. keep: return the trace of this one.
    Raises ValueError when the stream has fewer than two tokens, a number makes no sense, or the trace is of other windows.
    """
    model = subject.model
    if window < 2 or (max_windows is not None and max_windows < 1):
        raise ValueError(f"window = {window}, max_windows = {max_windows}: wants windows of 2 tokens and more, at least one")
    if len(token_ids) < 2:
        raise ValueError(f"the text has {len(token_ids)} tokens: perplexity wants two or more")
    window = min(window, len(token_ids), model.config.max_position)
    count = len(token_ids) // window
    count = count if max_windows is None else min(count, max_windows)
    if against is not None and [h.shape[0] for h in against.hidden] != [window] * count:
        raise ValueError(f"the other model's trace is not of {count} windows of {window} tokens: use the same text and window")
    started, means, kept, apart, agree = time.perf_counter(), [], [], [], []
    for i in tracked(range(count), "perplexity", progress):
        ids = torch.tensor(token_ids[i * window : (i + 1) * window])
        hidden = hidden_window(model, ids[None], subject.kv, subject.kv_scales)[0]
        other = None if against is None else against.hidden[i].to(hidden.device)
        nll = []
        for start in range(0, window - 1, LOGIT_ROWS):
            rows = slice(start, min(start + LOGIT_ROWS, window - 1))
            logits, wanted = model.logits(hidden[rows]), ids[1:][rows].to(hidden.device)
            nll.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
            if other is not None:
                theirs = against.head(other[rows])
                if theirs.shape != logits.shape:
                    raise ValueError(f"vocabularies of {theirs.shape[-1]} and {logits.shape[-1]} tokens do not compare")
                agree.append((theirs.argmax(-1) == logits.argmax(-1)).cpu())
                p, q = theirs.double().log_softmax(-1), logits.double().log_softmax(-1)
                apart.append((p.exp() * (p - q)).sum(-1).clamp_min(0).cpu())
        means.append(float(torch.cat(nll).double().mean()))
        if keep:
            kept.append(hidden.cpu())
    divergence = None
    if apart:
        kl, same = torch.cat(apart).numpy(), torch.cat(agree)
        divergence = Divergence(float(kl.mean()), float(np.quantile(kl, 0.99)), float(same.double().mean()), len(kl))
    trace = Trace(tuple(kept), model.head.whole()) if keep else None
    return Perplexity(tuple(means), window, time.perf_counter() - started, divergence, trace)
