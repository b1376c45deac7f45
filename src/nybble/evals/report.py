"""`nybble report`: one HTML page about a checkpoint for somebody who never quantized a model, and the same as JSON.

What it says and how it looks is the template `data/report.html`; here are the figures, the verdict and the shapes of charts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from nybble.checkpoint import open_checkpoint
from nybble.evals.evaluate import Delta, Evaluation, deltas, evaluate, free_device_memory, interval, jsonable, shown, signed
from nybble.evals.examine import Anatomy, examine
from nybble.evals.likelihood import Progress, open_subject
from nybble.evals.perplexity import Divergence
from nybble.models import read_config
from nybble.text import read_text

WHAT = {"q_proj": "what a word looks for", "k_proj": "what a word offers", "v_proj": "what a word passes on",
        "o_proj": "attention, summed up", "gate_proj": "which features open", "up_proj": "features",
        "down_proj": "features, summed up"}
HARD_OUTLIER = 100  # times the usual channel, what the page's chart calls hard
VERDICTS = (  # nats per token lost, up to: on the text, or by the KL divergence where that says more
    (0.005, "Practically nothing was lost: use it wherever you used the original."),
    (0.03, "Very little was lost: use it wherever you used the original."),
    (0.07, "A little was lost: good for chat, summaries and drafts; check it on your own task before you rely on it."),
    (0.2, "A noticeable part of the quality was lost: fine where size or speed decides, but compare answers on your own task."),
    (math.inf, "Much was lost: try another recipe before you use this checkpoint."),
)


def report(
    path: str | Path, against: str | Path | None = None, text: str | Path | None = None, tasks: Sequence[str] = (),
    data: str | Path = ".", limit: int | None = None, window: int = 1024, max_windows: int | None = None, kv: str = "auto",
    device: str = "auto", progress: Progress | None = None,
) -> tuple[str, dict[str, Any]]:
    """-> (the page, the same as JSON). text: what perplexity and the examination run on; None: the one in the package. Others
    as `evaluate`. Raises ValueError or FileNotFoundError."""
    source = open_checkpoint(against) if against is not None else None
    if source is not None:
        of, was = (read_config(one.config) for one in (open_checkpoint(path), source))
        for what in ("hidden_size", "num_layers", "intermediate_size", "vocab_size"):
            if getattr(of, what) != getattr(was, what):
                raise ValueError(f"{path} has {what} = {getattr(of, what)} and {against} has {getattr(was, what)}: "
                                 "--against wants the model that the checkpoint was made from")
    with as_file(files("nybble.evals") / "data" / "sample.txt") as sample:
        text = Path(text) if text is not None else sample
        options: dict[str, Any] = {"data": data, "limit": limit, "window": window, "max_windows": max_windows, "device": device,
                                   "progress": progress}
        asked = [f"ppl:{text}", *tasks]
        before = None if against is None else evaluate(against, asked, keep=True, **options)
        after = evaluate(path, asked, kv=kv, against=before, **options)
        subject = open_subject(path, kv, device, progress)
        ids = subject.encode(read_text(text))[: min(window, subject.model.config.max_position)]
        found = examine(subject, ids, source, progress)
    del subject
    free_device_memory()
    changes = [] if before is None else deltas(before, after)
    said, figures = advice(found, before, after, changes), cards(found, after, changes)
    content = {"model": after.to_dict(), "against": before.to_dict() if before else None, "deltas": [vars(d) for d in changes],
               "bits_per_weight": found.bits_per_weight, "anatomy": asdict(found), "advice": said,
               "cards": figures}
    return render(found, before, after, changes, said, figures), jsonable(content)


def verdict(change: float, apart: Divergence | None, model: str, against: str) -> str:
    """change: nats per token lost on the text. A model that merely does as well is not the same model, so the divergence has a
    say: KL is what would be lost on text of the original's own."""
    if apart is not None and (apart.top1_agreement < 0.5 or apart.kl_mean > 1.0):
        return (f"The two models hardly agree: they expect the same next token in {apart.top1_agreement:.1%} of the places, "
                f"and their predictions are {apart.kl_mean:.2f} nats apart. Is {against} the model that {model} was made from? "
                "If so, quantization broke it; if not, nothing here says what was lost.")
    lost = change if apart is None else max(change, apart.kl_mean)
    return next((word for limit, word in VERDICTS if lost < limit), VERDICTS[-1][1])


def advice(found: Anatomy, before: Evaluation | None, after: Evaluation, changes: Sequence[Delta]) -> list[str]:
    """Recommendations in words, the verdict first."""
    apart, other = next(iter(after.divergences.values()), None), before.model if before is not None else ""
    said = [verdict(d.change, apart, after.model, other) for d in changes if d.metric == "nll"][:1]
    said = said or ["This is what is inside. Name the original with --against to see what was lost."]
    if any(d.metric != "nll" for d in changes):
        worse = dict.fromkeys(d.task for d in changes if d.metric != "nll" and d.high < 0)
        said.append(f"Accuracy fell by more than chance explains on {', '.join(worse)}." if worse else
                    "On no task did accuracy fall by more than chance explains with this many questions.")
    errors = sorted(((f.output_error, f) for f in found.linears if f.output_error is not None), key=lambda pair: -pair[0])
    if errors:
        median, tall = statistics.median(e for e, _ in errors), [(e, f) for e, f in errors if f.bits < 8][:3]
        if tall and tall[0][0] > max(4 * median, 0.005):
            named = ", ".join(f"{f.kind} of layer {f.layer} ({e:.1%})" for e, f in tall)
            said.append(f"The error is largest in few places: {named}, where {median:.1%} is usual. nybble quantize "
                        "--recipe auto gives such layers more bits.")
        else:
            said.append(f"The error is spread evenly: half of the matrices are below {median:.1%}, none stands out.")
    rounded = [f for f in found.linears if "a8" in f.scheme]
    worst = max(rounded or found.linears, key=lambda f: f.outlier)
    if worst.outlier > HARD_OUTLIER and rounded:
        transform = str(found.recipe.get("transform", "none"))
        cure = ("Smoothing (--transform rotate+smooth) or --online-hadamard reaches that place, a rotation does not."
                if worst.kind == "down_proj" else "A rotation or smoothing would help there." if transform == "none" else "")
        said.append(f"Before {worst.kind} of layer {worst.layer} one channel is {worst.outlier:,.0f} times as large as the "
                    f"usual one, which makes 8-bit activations coarse there. {cure if 'smooth' not in transform else ''}")
    keys = max((f for f in found.cache if f.which == "K"), key=lambda f: max(f.outlier))
    if max(keys.outlier) > 12:
        said.append(f"Keys have channels {max(keys.outlier):.0f} times as large as usual (layer {keys.layer}): keep the KV "
                    "cache at 8 bits unless int4 was measured and found good.")
    return said


def cards(found: Anatomy, after: Evaluation, changes: Sequence[Delta]) -> list[tuple[str, str, str]]:
    """The figures that say most: (name, value, what it was or means)."""
    now, then = found.bytes_linear + found.bytes_other, found.bytes_before
    lost = next((d for d in changes if d.metric == "nll"), None)
    apart = next(iter(after.divergences.values()), None)
    figures = [
        ("Size", f"{now / 1e6:,.0f} MB", f"{then / now:.1f} times smaller than {then / 1e6:,.0f} MB" if now < 0.95 * then else
         f"{then / 1e6:,.0f} MB before"),
        ("Bits per weight", f"{found.bits_per_weight:.2f}", "in the layers, scales included; 16 before"),
        ("Memory per token", f"{found.kv_bytes_per_token / 1024:,.1f} KiB",
         f"KV cache in {after.kv}; {found.kv_bytes_per_token_16bit / 1024:,.1f} KiB in 16 bits"),
        ("Perplexity", f"{after.results[0].value('nll'):.2f}",
         f"{lost.after / lost.before - 1:+.1%} from {lost.before:.2f}; lower is better" if lost else "lower is better"),
    ]
    if apart is not None:
        figures.append(("Same next token", f"{apart.top1_agreement:.1%}", f"as before, in {apart.tokens:,} places of the text"))
    return figures


def render(found: Anatomy, before: Evaluation | None, after: Evaluation, changes: Sequence[Delta], said: Sequence[str],
           figures: Sequence[tuple[str, str, str]]) -> str:
    """The page: `data/report.html`, filled in."""
    now, then = found.bytes_linear + found.bytes_other, found.bytes_before
    errors = {(f.kind, f.layer): f.output_error for f in found.linears if f.output_error is not None}
    outliers = {(f.kind, f.layer): f.outlier for f in found.linears if f.kind not in ("k_proj", "v_proj", "up_proj")}
    kinds = list(dict.fromkeys(f.kind for f in found.linears))
    schemes, formats = _formats(found, kinds)
    source = (files("nybble.evals") / "data" / "report.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source).render(
        found=found, before=before, after=after, changes=changes, said=said, cards=figures, shown=shown, signed=signed,
        interval=interval,
        sizes=(("before", (("plain", then),)), ("now", (("accent", found.bytes_linear), ("other", found.bytes_other)))),
        largest=max(now, then), kinds=kinds, schemes=schemes, formats=formats,
        errors=_bars(errors, "{:.1%}"), outliers=_bars(outliers, "{:,.0f}x", logarithmic=True),
        ranges=[_heat(found, "K", "Keys"), _heat(found, "V", "Values")],
        recipe=[(name, value) for name, value in found.recipe.items() if value != "" and not isinstance(value, dict)])


class Cell(NamedTuple):
    """A rectangle of a figure. title: what hovering shows."""

    x: float
    y: float
    width: float
    height: float
    title: str
    opacity: float | None = None
    tall: bool = False


class Figure(NamedTuple):
    """A chart in a box of width x height. axis: words under its left end, middle and right end. lines: heights of a grid."""

    title: str
    words: str
    width: int
    height: int
    cells: list[Cell]
    axis: tuple[str, str, str]
    style: str = ""
    lines: Sequence[float] = ()


def _formats(found: Anatomy, kinds: list[str]) -> tuple[list[tuple[str, int, float]], Figure]:
    """A map of schemes, layers across and matrices down, darker with more bits; and its key: (scheme, matrices, shade)."""
    layers = 1 + max(f.layer for f in found.linears)
    schemes: dict[str, tuple[float, int]] = {}
    for f in found.linears:
        schemes[f.scheme] = (f.bits, schemes.get(f.scheme, (0, 0))[1] + 1)
    order = sorted(schemes, key=lambda name: schemes[name])
    spread = min(max((schemes[order[-1]][0] - schemes[order[0]][0]) / 6, 0.2), 0.65)
    shade = {name: 0.35 + spread * i / max(len(order) - 1, 1) for i, name in enumerate(order)}
    cells = [Cell(f.layer, kinds.index(f.kind), 0.94, 0.86, f"layer {f.layer} {f.kind}: {f.scheme}, {f.bits:.2f} bits",
                  shade[f.scheme]) for f in found.linears]
    figure = Figure("", "", layers, len(kinds), cells, ("layer 0", "", str(layers - 1)), "height:10.5rem;border:0")
    return [(name, schemes[name][1], shade[name]) for name in order], figure


def _bars(values: dict[tuple[str, int], float], form: str, logarithmic: bool = False) -> list[Figure]:
    """Small multiples, one per kind of matrix, a bar per layer, all on one scale."""
    if not values:
        return []
    top, layers = max(values.values()) or 1.0, 1 + max(layer for _, layer in values)
    decades = max(math.log10(max(top, 10.0)), 1.0)
    height = lambda v: max(100 * (math.log10(max(v, 1.0)) / decades if logarithmic else v / top), 0.8)  # noqa: E731
    lines = [100 - 100 * i / decades for i in range(1, int(decades) + 1)] if logarithmic else []
    figures = []
    for kind, words in WHAT.items():
        found = {layer: value for (k, layer), value in sorted(values.items()) if k == kind}
        if found:
            most = max(found, key=lambda layer: found[layer])
            cells = [Cell(layer + 0.1, 100 - height(v), 0.8, height(v), f"layer {layer}: {form.format(v)}",
                          tall=height(v) > 60) for layer, v in found.items()]
            half = form.format(statistics.median(found.values()))
            middle = f"half below {half}, most {form.format(found[most])} (layer {most})"
            figures.append(Figure(kind, words, layers, 100, cells, ("layer 0", middle, str(layers - 1)), lines=lines))
    return figures


def _heat(found: Anatomy, which: str, word: str) -> Figure:
    facts = [f for f in found.cache if f.which == which]
    top, heads = max(max(f.absmax) for f in facts) or 1.0, len(facts[0].absmax)
    cells = [Cell(f.layer, head, 0.94, 0.88, f"layer {f.layer}, head {head}: up to {reach:.1f}, largest channel {ratio:.1f} "
                  "times the usual", 0.06 + 0.94 * reach / top)
             for f in facts for head, (reach, ratio) in enumerate(zip(f.absmax, f.outlier))]
    middle = f"usually up to {statistics.median(reach for f in facts for reach in f.absmax):.1f}, at most {top:.1f}"
    return Figure(word, f"{heads} heads (rows) in {len(facts)} layers", len(facts), heads, cells,
                  ("layer 0", middle, str(len(facts) - 1)), f"height:{max(min(heads * 16, 220), 48)}px;border:0")
