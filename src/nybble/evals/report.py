"""`nybble report`: one HTML page about a checkpoint for somebody who never quantized a model, and the same as JSON.

Nothing on it comes from elsewhere: styles and charts (SVG) are inline, there is no script. Text is escaped as it is put in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from nybble.checkpoint import open_checkpoint
from nybble.evals.evaluate import Delta, Evaluation, deltas, evaluate, free_device_memory, shown
from nybble.evals.examine import Anatomy, examine
from nybble.evals.likelihood import open_subject
from nybble.evals.perplexity import Divergence
from nybble.models import read_config
from nybble.text import read_text

Progress = Callable[[str, float], None]
WHAT = {"q_proj": "what a word looks for", "k_proj": "what a word offers", "v_proj": "what a word passes on",
        "o_proj": "attention, summed up", "gate_proj": "which features open", "up_proj": "features",
        "down_proj": "features, summed up"}
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
    said = advice(found, before, after, changes)
    content = {"model": after.to_dict(), "against": before.to_dict() if before else None, "deltas": [vars(d) for d in changes],
               "bits_per_weight": found.bits_per_weight, "anatomy": asdict(found), "advice": said}
    return render(found, before, after, changes, said), content


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
    worst = max(found.linears, key=lambda f: f.outlier)
    if worst.outlier > 50 and "a8" in worst.scheme:
        transform = str(found.recipe.get("transform", "none"))
        cure = ("Smoothing (transform = rotate+smooth) reaches that place, a rotation does not." if worst.kind == "down_proj"
                else "A rotation or smoothing would help there." if transform == "none" else "")
        said.append(f"Before {worst.kind} of layer {worst.layer} one channel is {worst.outlier:,.0f} times as large as the "
                    f"usual one, which makes 8-bit activations coarse there. {cure if 'smooth' not in transform else ''}")
    keys = max((f for f in found.cache if f.which == "K"), key=lambda f: max(f.outlier))
    if max(keys.outlier) > 12:
        said.append(f"Keys have channels {max(keys.outlier):.0f} times as large as usual (layer {keys.layer}): keep the KV "
                    "cache at 8 bits unless int4 was measured and found good.")
    return said


def render(found: Anatomy, before: Evaluation | None, after: Evaluation, changes: Sequence[Delta], said: Sequence[str]) -> str:
    """The page."""
    now, then = found.bytes_linear + found.bytes_other, found.bytes_before
    lost = next((d for d in changes if d.metric == "nll"), None)
    apart = next(iter(after.divergences.values()), None)
    cards = [
        ("Size", f"{now / 1e6:,.0f} MB", f"{then / now:.1f} times smaller than {then / 1e6:,.0f} MB" if now < 0.95 * then else
         f"{then / 1e6:,.0f} MB before"),
        ("Bits per weight", f"{found.bits_per_weight:.2f}", "in the layers, scales included; 16 before"),
        ("Memory per token", f"{found.kv_bytes_per_token / 1024:,.1f} KiB",
         f"KV cache in {after.kv}; {found.kv_bytes_per_token_16bit / 1024:,.1f} KiB in 16 bits"),
        ("Perplexity", f"{after.results[0].value('nll'):.2f}",
         f"{lost.after / lost.before - 1:+.1%} from {lost.before:.2f}; lower is better" if lost else "lower is better"),
    ]
    if apart is not None:
        cards.append(("Same next token", f"{apart.top1_agreement:.1%}", f"as before, in {apart.tokens:,} places of the text"))
    beside = f", beside {before.model}" if before else ""
    parts = [
        f"<header><p class=brand>nybb<i>le</i> report</p><h1>{escape(after.model)}</h1>"
        f"<p class=faint>{escape(after.scheme)}, KV cache {escape(after.kv)}{escape(beside)}</p></header>",
        f"<p class=verdict>{escape(said[0])}</p>",
        _join("<ul class=advice>", (f"<li>{escape(line)}" for line in said[1:]), "</ul>"),
        _join("<section class=cards>",
              (f"<div><span>{a}</span><b>{b}</b><small>{escape(c)}</small></div>" for a, b, c in cards), "</section>"),
        _section("Where the bytes are", "Quantization shrinks the layers. Embeddings and the output head usually stay in 16 "
                 "bits, so in a small model they weigh the most.", _stack(found, then)),
        _quality(before, after, changes),
        _section("Which matrix runs in which format", "A model is a stack of layers with seven matrices each. Fewer bits are "
                 "smaller and faster; matrices that suffer get more.", _formats(found)),
    ]
    errors = {(f.kind, f.layer): f.output_error for f in found.linears if f.output_error is not None}
    if errors:
        parts.append(_section("What each matrix gets wrong", "A bar is one layer: the share of the matrix's output that "
                              "rounding changed on this text. Short and even is good, a lone tall bar deserves more bits.",
                              _bars(errors, "{:.1%}")))
    inputs = {(f.kind, f.layer): f.outlier for f in found.linears if f.kind not in ("k_proj", "v_proj", "up_proj")}
    parts += [
        _section("Outliers on the way", "Inputs of a matrix are rounded to 8 bits with one step size per token, so one huge "
                 "channel makes the step coarse for all others. Bars show the largest channel over the usual one, each line "
                 "ten times the one below: up to 10 is easy, above 100 is hard.", _bars(inputs, "{:,.0f}x", logarithmic=True)),
        _section("Ranges in the KV cache", "What the model remembers of each token. A cell is one head in one layer, darker "
                 "where its numbers reach further. Even shades are good for low-bit caches.", _heat(found)),
        _details(found),
        _join("<details><summary>The recipe it was made with</summary><div class=scroll><table>",
              (f"<tr><td>{escape(k)}<td>{escape(str(v))}" for k, v in found.recipe.items()
               if v != "" and not isinstance(v, dict)),
              "</table></div></details>"),
        f"<footer>{_join('<p>', map(escape, found.notes), '</p>')}<p>{WORDS}</p></footer>",
    ]
    return ('<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
            f'initial-scale=1"><title>{escape(after.model)}: report</title><style>{STYLE}</style><main>{"".join(parts)}</main>'
            "</html>\n")


def _join(start: str, pieces: Any, end: str) -> str:
    middle = "".join(pieces)
    return f"{start}{middle}{end}" if middle else ""


def _section(title: str, words: str, body: str) -> str:
    return f"<section><h2>{title}</h2><p class=faint>{words}</p>{body}</section>"


def _figure(title: str, words: str, drawing: str, box: tuple[int, int], axis: tuple[str, str, str], style: str = "") -> str:
    """A chart that takes all the width it gets; words are outside of the drawing, so that they are never stretched."""
    return (f'<figure><figcaption><b>{title}</b> <small>{words}</small></figcaption><svg viewBox="0 0 {box[0]} {box[1]}" '
            f'preserveAspectRatio="none" role="img" aria-label="{title}" style="{style}">{drawing}</svg>'
            f"<p class=axis><span>{axis[0]}</span><span>{axis[1]}</span><span>{axis[2]}</span></p></figure>")


def _rect(x: float, y: float, width: float, height: float, rest: str, title: str) -> str:
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width}" height="{height:.4g}"{rest}><title>{title}</title></rect>'


def _stack(found: Anatomy, then: float) -> str:
    now = (("accent", found.bytes_linear), ("other", found.bytes_other))
    top = max(then, found.bytes_linear + found.bytes_other)
    lines = "".join(
        f"<div class=stack><span>{name}</span><div>"
        + "".join(f'<i class={kind} style="width:{100 * size / top:.2f}%"></i>' for kind, size in pieces)
        + f"</div><b>{sum(size for _, size in pieces) / 1e6:,.1f} MB</b></div>"
        for name, pieces in (("before", (("plain", then),)), ("now", now)))
    return lines + (f"<p class=key><i class=accent></i>layers {found.bytes_linear / 1e6:,.1f} MB <i "
                    f"class=other></i>embeddings, head, norms {found.bytes_other / 1e6:,.1f} MB</p>")


def _quality(before: Evaluation | None, after: Evaluation, changes: Sequence[Delta]) -> str:
    label = lambda task, metric: f"{escape(task)}<small>{shown(metric, 0)[0]}</small>"  # noqa: E731
    frame = "<div class=scroll><table><tr><th>text or task<th>{}<th class=count>items{}</table></div>"
    if before is None:
        rows = "".join(f"<tr><td>{label(r.task, m)}<td>{shown(m, r.value(m))[1]}<td class=count>{len(r.scores[m]):,}"
                       for r in after.results for m in r.scores)
        return _section("How good it is", "Measured with the kernels and the KV cache that would serve it. Name the original "
                        "with --against to see what was lost.", frame.format("result", rows))
    rows = ""
    for d in changes:
        scale, unit, digits = (1, "nats", 3) if d.metric == "nll" else (100, "points", 1)
        better = d.high < 0 if d.metric == "nll" else d.low > 0
        mark = "same" if d.low <= 0 <= d.high else "good" if better else "bad"
        part = lambda x, scale=scale, digits=digits: f"{scale * x:+.{digits}f}"  # noqa: E731
        rows += (f"<tr><td>{label(d.task, d.metric)}<td>{shown(d.metric, d.before)[1]}<td>{shown(d.metric, d.after)[1]}<td "
                 f"class={mark}>{part(d.change)} {unit}<small>{part(d.low)} to {part(d.high)}</small>"
                 f"<td class=count>{d.items:,}")
    far = "".join(f"<p class=faint>On {escape(name)} the two models' predictions are {d.kl_mean:.4f} nats apart on average (KL "
                  f"divergence), {d.kl_99:.3f} in the worst hundredth.</p>" for name, d in after.divergences.items())
    return _section("What it cost in quality", "Both models got the same text and questions. Under each change is the range "
                    "that it lies in with 95 % certainty; a range that includes zero may be chance.",
                    frame.format("before<th>now<th>change", rows) + far)


def _formats(found: Anatomy) -> str:
    """A map of schemes, layers across and matrices down, darker with more bits."""
    kinds, layers = list(dict.fromkeys(f.kind for f in found.linears)), 1 + max(f.layer for f in found.linears)
    schemes: dict[str, tuple[float, int]] = {}
    for f in found.linears:
        schemes[f.scheme] = (f.bits, schemes.get(f.scheme, (0, 0))[1] + 1)
    order = sorted(schemes, key=lambda name: schemes[name])
    spread = min(max((schemes[order[-1]][0] - schemes[order[0]][0]) / 6, 0.2), 0.65)
    shade = {name: 0.35 + spread * i / max(len(order) - 1, 1) for i, name in enumerate(order)}
    cells = "".join(_rect(f.layer, kinds.index(f.kind), 0.94, 0.86, f' style="fill-opacity:{shade[f.scheme]:.2f}"',
                          f"layer {f.layer} {f.kind}: {escape(f.scheme)}, {f.bits:.2f} bits") for f in found.linears)
    key = "".join(f'<i class=accent style="opacity:{shade[name]:.2f}"></i>{escape(name)} ({schemes[name][1]}) '
                  for name in order)
    names = "".join(f"<span>{kind.removesuffix('_proj')}</span>" for kind in kinds)
    return (f"<div class=map><div>{names}</div>"
            + _figure("", "", cells, (layers, len(kinds)), ("layer 0", "", str(layers - 1)), "height:10.5rem;border:0")
            + f"</div><p class=key>{key}</p>")


def _bars(values: dict[tuple[str, int], float], form: str, logarithmic: bool = False) -> str:
    """Small multiples, one per kind of matrix, a bar per layer, all on one scale."""
    top, layers = max(values.values()) or 1.0, 1 + max(layer for _, layer in values)
    decades = max(math.log10(max(top, 10.0)), 1.0)
    height = lambda v: max(100 * (math.log10(max(v, 1.0)) / decades if logarithmic else v / top), 0.8)  # noqa: E731
    lines = [100 - 100 * i / decades for i in range(1, int(decades) + 1)] if logarithmic else []
    grid = "".join(f'<line x1="0" x2="{layers}" y1="{y:.4g}" y2="{y:.4g}"/>' for y in lines)
    figures = []
    for kind, words in WHAT.items():
        found = {layer: value for (k, layer), value in sorted(values.items()) if k == kind}
        if found:
            most = max(found, key=lambda layer: found[layer])
            bars = "".join(_rect(layer + 0.1, 100 - height(v), 0.8, height(v), " class=tall" if height(v) > 60 else "",
                                 f"layer {layer}: {form.format(v)}") for layer, v in found.items())
            half = form.format(statistics.median(found.values()))
            middle = f"half below {half}, most {form.format(found[most])} (layer {most})"
            figures.append(_figure(kind, words, grid + bars, (layers, 100), ("layer 0", middle, str(layers - 1))))
    return f"<div class=multiples>{''.join(figures)}</div>"


def _heat(found: Anatomy) -> str:
    figures = []
    for which, word in (("K", "Keys"), ("V", "Values")):
        facts = [f for f in found.cache if f.which == which]
        top, heads = max(max(f.absmax) for f in facts) or 1.0, len(facts[0].absmax)
        cells = "".join(
            _rect(f.layer, head, 0.94, 0.88, f' style="fill-opacity:{0.06 + 0.94 * reach / top:.2f}"',
                  f"layer {f.layer}, head {head}: up to {reach:.1f}, largest channel {ratio:.1f} times the usual")
            for f in facts for head, (reach, ratio) in enumerate(zip(f.absmax, f.outlier)))
        middle = f"usually up to {statistics.median(reach for f in facts for reach in f.absmax):.1f}, at most {top:.1f}"
        figures.append(_figure(word, f"{heads} heads (rows) in {len(facts)} layers", cells, (len(facts), heads),
                               ("layer 0", middle, str(len(facts) - 1)), f"height:{max(min(heads * 16, 220), 48)}px;border:0"))
    return f"<div class=multiples>{''.join(figures)}</div>"


def _details(found: Anatomy) -> str:
    share = lambda x: "" if x is None else f"{x:.2%}"  # noqa: E731
    rows = "".join(f"<tr><td>{f.layer}<td>{f.kind}<td>{escape(f.scheme)}<td>{f.parameters / 1e6:.2f} M<td>{f.bits:.2f}"
                   f"<td>{share(f.weight_error)}<td>{share(f.output_error)}<td>{f.outlier:.1f}" for f in found.linears)
    return ("<details><summary>Every matrix in numbers</summary><div "
            f"class=scroll><table><tr><th>layer<th>matrix<th>scheme<th>weights<th>bits<th>weight error<th>output "
            f"error<th>outlier{rows}</table></div></details>")


WORDS = ("Perplexity says how many words the model hesitates between: 20 means as unsure as a choice among 20. A nat is the "
         "unit of its logarithm; 0.01 nats are 1 % of perplexity. W4A8 stores weights in 4 bits and computes with 8-bit "
         "activations. The KV cache is the model's memory of the conversation and grows with every token.")
STYLE = """
:root{color-scheme:light dark;--back:light-dark(#faf9f7,#16171a);--card:light-dark(#fff,#1f2125);
--text:light-dark(#1d1d1f,#e8e6e3);--faint:light-dark(#6d6962,#9b968f);--line:light-dark(#e6e2db,#303338);
--accent:light-dark(#b4532a,#f0a27a);--other:light-dark(#d8cfc4,#5a5550);--good:light-dark(#2e7d4f,#7fd1a0);
--bad:light-dark(#b3261e,#ff8a80)}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.6 system-ui,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
.brand{margin:0;font-weight:700;letter-spacing:.02em}.brand i{color:var(--accent);font-style:normal}
h1{margin:.2rem 0 0;font-size:clamp(1.5rem,5vw,2.2rem);line-height:1.2;overflow-wrap:anywhere;letter-spacing:-.01em}
h2{margin:0 0 .3rem;font-size:1.2rem}.faint,small,.axis,.key,footer{color:var(--faint)}header .faint{margin:.2rem 0 0}
.verdict{margin:1.6rem 0 .8rem;font-size:clamp(1.1rem,3vw,1.35rem);line-height:1.45;max-width:46rem;text-wrap:pretty}
.advice{margin:0;padding-left:1.1rem;max-width:46rem}.advice li{margin:.3rem 0}.advice li::marker{color:var(--accent)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));gap:.75rem}
.cards div,figure,.scroll,.map{background:var(--card);border:1px solid var(--line);border-radius:.9rem}
.cards div{padding:.9rem 1rem;display:flex;flex-direction:column}.cards span{font-size:.82rem;color:var(--faint)}
.cards b{font-size:1.6rem;line-height:1.3;letter-spacing:-.01em}.cards small{line-height:1.4}
section{margin-top:2.6rem}section>p{margin:.2rem 0 1rem;max-width:46rem;text-wrap:pretty}small{font-size:.8rem}
.stack{display:flex;align-items:center;gap:.75rem;margin:.4rem 0}.stack span{width:3.2rem;color:var(--faint)}
.stack div{flex:1;display:flex;height:1.5rem;border-radius:.4rem;overflow:hidden}.stack b{width:5.6rem;text-align:right}
i.accent{background:var(--accent)}i.other{background:var(--other)}i.plain{background:var(--line)}
.key{font-size:.85rem;margin:.6rem 0 0!important}.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;
margin:0 .4rem 0 0;vertical-align:-.05rem}.key i:not(:first-child){margin-left:1rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem}.scroll+.faint{margin-top:.8rem}
th,td{padding:.55rem .9rem;text-align:right;border-top:1px solid var(--line)}
th{color:var(--faint);font-weight:500;font-size:.82rem}
tr:first-child>*{border-top:0}th:first-child,td:first-child{text-align:left}
td{white-space:nowrap}td small{display:block}.good{color:var(--good)}.bad{color:var(--bad)}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,25rem),1fr));gap:1rem}
figure{margin:0;padding:.8rem 1rem .6rem}.map{display:flex;padding:.9rem 1rem .4rem;gap:.8rem}
.map figure{flex:1;border:0;padding:0}
.map>div{display:grid;height:10.5rem;grid-auto-rows:1fr;align-items:center;font-size:.78rem;line-height:1;color:var(--faint)}
.map figcaption{display:none}.map svg{margin:0}
svg{display:block;width:100%;height:5.5rem;margin-top:.5rem;border-bottom:1px solid var(--line)}
rect{fill:var(--accent);fill-opacity:.62}rect.tall,rect:hover{fill-opacity:1!important}
line{stroke:var(--line);vector-effect:non-scaling-stroke}
.axis{display:flex;justify-content:space-between;gap:.5rem;margin:.3rem 0 0;font-size:.78rem;line-height:1.35;text-align:center}
.axis span:nth-child(odd){white-space:nowrap}
details{margin-top:1.5rem}summary{cursor:pointer;font-weight:600;margin-bottom:.6rem}
details td{padding:.25rem .9rem;font-size:.85rem}
footer{margin-top:2.6rem;padding-top:1rem;border-top:1px solid var(--line);font-size:.85rem}footer p{max-width:46rem}
@media(max-width:34rem){th,td{padding:.5rem .45rem}table{font-size:.82rem}section .count{display:none}
.cards b{font-size:1.35rem}
td small{font-size:.72rem}.cards{grid-template-columns:1fr 1fr}.cards div:last-child:nth-child(odd){grid-column:1/-1}}
@media print{body{background:#fff}figure,.cards div{break-inside:avoid}}
"""
