"""`nybble eval`: a model over texts and tasks, alone or beside another, with intervals for the differences.

Its one idea: both models see the same items, so what is judged is the mean of per-item differences, never the difference of
two means with errors of their own.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nybble.engine.ranks import Ranks
from nybble.evals.likelihood import Progress, open_subject
from nybble.evals.perplexity import Divergence, Perplexity, Trace, perplexity
from nybble.evals.tasks import TASKS, TaskResult, answer_task, read_task, score_task
from nybble.hardware import pick_device
from nybble.nn.parallel import ALONE, Group
from nybble.text import read_text


@dataclass(frozen=True)
class Evaluation:
    """results: in the order asked for. divergences, traces: by name of the text ("ppl:wiki.txt")."""

    model: str
    scheme: str
    kv: str
    device: str
    results: tuple[TaskResult, ...]
    divergences: dict[str, Divergence]
    traces: dict[str, Trace] = field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every task's metrics, and the scores of each item."""
        named = lambda m: "perplexity" if m == "nll" else m  # noqa: E731
        tasks = [{"task": r.task, "items": len(r.scores[r.headline]), "headline": named(r.headline), "seconds": r.seconds,
                  "note": r.note, "metrics": {named(m): r.value(m) for m in r.scores}, "scores": r.scores,
                  "standard_errors": {m: r.standard_error(m) for m in r.scores}} for r in self.results]
        return {"model": self.model, "scheme": self.scheme, "kv": self.kv, "device": self.device, "tasks": tasks,
                "divergences": {name: asdict(found) for name, found in self.divergences.items()}}

    def __str__(self) -> str:
        lines = [("task", "metric", "value", "+-", "items")]
        for r in self.results:
            for m in r.scores:
                error = r.standard_error(m) * (r.value(m) if m == "nll" else 1)
                spread = "" if math.isnan(error) else shown(m, error)[1]
                lines.append((r.task, *shown(m, r.value(m)), spread, str(len(r.scores[m]))))
        head = f"{self.model}: {self.scheme}, KV {self.kv}, {self.device}; +- is one standard error"
        return f"{head}\n{table(lines)}{_notes(self)}"


@dataclass(frozen=True)
class Delta:
    """One metric of two models. change: of the mean (nats per token for "nll"), with its 95 % interval. p: of a two-sided
    test that nothing changed (exact McNemar), for 0/1 metrics."""

    task: str
    metric: str
    before: float
    after: float
    change: float
    low: float
    high: float
    p: float | None
    items: int

    @property
    def better(self) -> bool:
        """By more than chance explains."""
        return self.high < 0 if self.metric == "nll" else self.low > 0


def evaluate(
    path: str | Path, tasks: Sequence[str], data: str | Path = ".", kv: str = "auto", window: int = 2048,
    max_windows: int | None = None, limit: int | None = None, shots: int = 5, device: str = "auto",
    progress: Progress | None = None, against: Evaluation | None = None, keep: bool = False,
    activations: str | None = None, tensor_parallel: int = 1, group: Group = ALONE,
) -> Evaluation:
    """tasks: "ppl:FILE", or a name in `tasks.TASKS`, perhaps with ":PATH". limit: items per file. shots: solved examples for
    mmlu, ceval and gsm8k. against: an evaluation with `keep`, for the divergence on texts. group: the ranks that this is one
    of, where it was not called to start `tensor_parallel` of them.

    Raises ValueError or FileNotFoundError before a model is loaded.
    """
    counts = (("limit", limit, 1), ("shots", shots, 0), ("window", window, 2), ("max_windows", max_windows, 1))
    for what, value, least in counts:
        if value is not None and value < least:
            raise ValueError(f"{what} = {value}: wants {least} or more")
    asked = list(dict.fromkeys((name, rest) for name, _, rest in (task.strip().partition(":") for task in tasks)))
    if not asked or ("ppl", "") in asked:
        raise ValueError(f"tasks = {list(tasks)}: wants one or more of ppl:FILE, {', '.join(TASKS)} (--ppl FILE, "
                         "--tasks NAME,...)")
    items = {}
    for name, rest in asked:
        items[name, rest] = read_text(rest) if name == "ppl" else read_task(name, rest, Path(data), shots, limit)
    ranks = None
    if tensor_parallel > 1:
        work = {"path": str(path), "tasks": list(tasks), "data": str(data), "kv": kv, "window": window, "limit": limit,
                "max_windows": max_windows, "shots": shots, "keep": keep, "activations": activations}
        ranks = Ranks(tensor_parallel, pick_device(device), "nybble.evals.evaluate:evaluate_along", **work)
        group = ranks.group
    subject = open_subject(path, kv, device if group is ALONE else group.device, progress, activations, group)
    scheme, kv_name, kind = subject.checkpoint.scheme_name, subject.kv_name, subject.model.device.type
    results: dict[tuple[str, str], TaskResult] = {}
    divergences, traces = {}, {}
    for name, rest in asked:
        if name == "ppl":
            alone = [Path(text).name for task, text in asked if task == "ppl"].count(Path(rest).name) == 1
            label = f"ppl:{Path(rest).name if alone else rest}"
            other = against.traces.get(label) if against is not None else None
            found = perplexity(subject, subject.encode(items[name, rest]), window, max_windows, progress, other, keep)
            results[name, rest] = TaskResult(label, "nll", {"nll": found.window_nll}, found.seconds,
                                             _windows(found, window, subject.model.config.max_position))
            if found.divergence is not None:
                divergences[label] = found.divergence
            if found.trace is not None:
                traces[label] = found.trace
        elif TASKS[name].kind != "answer":
            results[name, rest] = score_task(name, items[name, rest], subject, progress)
    del subject
    if ranks is not None:
        ranks.close()
    free_device_memory()
    for name, rest in asked:  # these load an engine
        if (name, rest) not in results and group.rank == 0:
            place = str(pick_device(device))
            results[name, rest] = answer_task(name, items[name, rest], Path(path), kv_name, place, activations, progress,
                                              tensor_parallel)
    found = tuple(results[pair] for pair in asked if pair in results)
    return Evaluation(Path(path).name, scheme, kv_name, kind, found, divergences, traces)


def evaluate_along(group: Group, _channel: object, **options: Any) -> None:
    """What the other ranks do, but for answers, which rank 0 asks an engine for."""
    evaluate(group=group, **options)


def _windows(found: Perplexity, asked: int, positions: int) -> str:
    count = len(found.window_nll)
    why = f"the model has {positions:,} positions" if found.window == positions else "the text has no more"
    return (f"{count} window{'s' if count > 1 else ''} of {found.window:,} tokens"
            + (f", not of {asked:,}: {why}" if found.window < asked else ""))


def _notes(found: Evaluation) -> str:
    return "".join(f"\n{r.task}: {r.note}" for r in found.results if r.note)


def deltas(before: Evaluation, after: Evaluation) -> list[Delta]:
    """Paired, metric by metric. Raises ValueError when the two were not given the same items."""
    found = []
    for a, b in zip(before.results, after.results, strict=True):
        for m in a.scores:
            x, y = a.scores[m], b.scores[m]
            if a.task != b.task or len(x) != len(y):
                raise ValueError(f"{a.task} with {len(x)} items and {b.task} with {len(y)} do not pair up")
            change = paired_mean(x, y) if m == "nll" else paired_share(x, y)
            found.append(Delta(a.task, m, a.value(m), b.value(m), *change, None if m == "nll" else mcnemar(x, y), len(x)))
    return found


def comparison(before: Evaluation, after: Evaluation) -> str:
    """Both, side by side, as text."""
    lines = [("task", "metric", before.model, after.model, "change", "95 % interval", "p", "items")]
    for d in deltas(before, after):
        unit = "nats/token" if d.metric == "nll" else "points"
        p = "" if d.p is None else "<0.001" if d.p < 0.001 else f"{d.p:.3f}"
        lines.append((d.task, *shown(d.metric, d.before), shown(d.metric, d.after)[1], f"{signed(d, d.change)} {unit}",
                      interval(d), p, str(d.items)))
    columns = [column for column in zip(*lines) if column[0] != "p" or any(column[1:])]  # texts have none
    lines = list(zip(*columns))
    text = [f"{e.model}: {e.scheme}, KV {e.kv}, {e.device}" for e in (before, after)] + [table(lines) + _notes(after)]
    text += [f"{name}: KL({before.model} || {after.model}) {d.kl_mean:.5f} nats mean, {d.kl_99:.4f} at the 99th percentile; "
             f"same token first in {d.top1_agreement:.2%} of {d.tokens:,}" for name, d in after.divergences.items()]
    return "\n".join(text)


def paired_mean(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Mean of y - x and its 95 % t interval; infinite for one pair."""
    diff = np.asarray(y, np.float64) - np.asarray(x, np.float64)
    mean = float(diff.mean())
    half = t_quantile(len(diff) - 1) * float(diff.std(ddof=1)) / math.sqrt(len(diff)) if len(diff) > 1 else math.inf
    return mean, mean - half, mean + half


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: with t = sqrt(v) tan(a), the density of a is proportional to cos(a)^(v - 1)."""
    angle = np.linspace(0, math.pi / 2, 200_001)
    weight = np.cos(angle) ** (freedom - 1)
    share = np.concatenate(([0], np.cumsum((weight[1:] + weight[:-1]) / 2)))
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95, share / share[-1], angle)))


def paired_share(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Change of the share of ones and its 95 % interval: Wald's with half an item added to each cell of the 2 x 2 table
    (Agresti and Min 2005), which stays honest when few or no items change."""
    gained, lost = changed(x, y)
    m = len(x) + 2
    middle = (gained - lost) / m
    half = 1.959964 * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / m) / m
    return (gained - lost) / len(x), middle - half, middle + half


def mcnemar(x: Sequence[float], y: Sequence[float]) -> float:
    """Exact two-sided p: items that changed are as likely to have become right as wrong."""
    gained, lost = changed(x, y)
    return min(1.0, 2 * sum(math.comb(gained + lost, k) for k in range(min(gained, lost) + 1)) / 2 ** (gained + lost))


def jsonable(value: Any) -> Any:
    """The same with None for numbers that JSON does not have: the interval of a single window, what a broken model gives."""
    if isinstance(value, dict):
        return {key: jsonable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def changed(x: Sequence[float], y: Sequence[float]) -> tuple[int, int]:
    return sum(b > a for a, b in zip(x, y)), sum(b < a for a, b in zip(x, y))


def shown(metric: str, value: float) -> tuple[str, str]:
    """(name, value) as people read them."""
    return ("perplexity", f"{value:.3f}") if metric == "nll" else (metric, f"{value:.1%}")


def signed(delta: Delta, value: float, digits: int = 4) -> str:
    """One of a delta's differences: nats, or points of a hundred."""
    return f"{value:+.{digits}f}" if delta.metric == "nll" else f"{100 * value:+.1f}"


def interval(delta: Delta, digits: int = 4) -> str:
    """The 95 % interval as people read it."""
    if not math.isfinite(delta.high - delta.low):
        return "unknown" if delta.items > 1 else "unknown from one item"
    return f"{signed(delta, delta.low, digits)} to {signed(delta, delta.high, digits)}"


def table(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def free_device_memory() -> None:
    """Give back what a dropped model held, before the next is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
