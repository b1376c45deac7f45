"""`--recipe auto`: which layers deserve more bits, measured rather than guessed.

Not a rounding method: it asks the others. The one idea: round one site of one layer, everything else float, and see how far
the model's predictions move; then spend the bits where a bit buys most. Layers are still read one at a time: what each
rounded site did to the calibration tokens is carried along to the last layer beside the float model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nybble.formats.qtensor import dense, dequantize
from nybble.formats.spec import fit_group
from nybble.models.decoder import Layer
from nybble.quantize.calibrate import Stats, Stream, quantize_parts
from nybble.quantize.gptq import output_error
from nybble.quantize.recipe import SITES, Recipe
from nybble.quantize.rtn import quantize_rtn

GROUPS = (128, 64, 32)
ROWS = 256  # of logits made at a time


@dataclass(frozen=True)
class Candidate:
    """place: "3.down". bits: of all its weights, scales included. error: see `measure`."""

    place: str
    scheme: str
    weights: int
    bits: float
    error: float


def candidates(recipe: Recipe, in_features: int) -> list[str]:
    """Names of the schemes a linear of this width may get, cheapest first."""
    groups = [f"{recipe.scheme}_g{group}" for group in GROUPS if fit_group(group, in_features) == group != in_features]
    return [recipe.scheme, *groups, recipe.scheme.replace("w4", "w8")]


@torch.inference_mode()
def measure(layers: Iterable[Layer], stream: Stream, logits: Callable[[Tensor], Tensor], recipe: Recipe,
            scale_dtype: torch.dtype) -> list[Candidate]:
    """What each candidate at each site would cost, from float layers (read as they are needed), the calibration tokens before
    the first, and `logits`: float [M, H] after the last -> float32 [M, V].

    error: the Kullback-Leibler divergence of the next token's distribution from the float model's, in nats, mean over the
    stream's first chunk, when this site's weights alone are rounded as the recipe says; for its other candidates scaled by
    tr(E H E^T) of rounding to nearest, the output error on all of the stream.
    """
    moved: dict[str, Tensor] = {}
    options: dict[str, list[Candidate]] = {}
    base: dict[str, str] = {}
    step, kv = stream.steps[0]
    for index, layer in enumerate(layers):
        for place, hidden in moved.items():
            moved[place] = layer.run(hidden, kv, step)
        before, statistics = stream.hidden[0], []
        for projection, x in stream.walk(layer):
            statistics.append(Stats(projection.parts[0].shape[1], stream.device, None, 0.0))
            for rows in x():
                statistics[-1].add(rows, None)
        for site, projection, stats in zip(SITES, layer.projections, statistics):
            place, parts, width = f"{index}.{site}", projection.parts, projection.parts[0].shape[1]
            weight, moment = torch.cat([dense(part.weight) for part in parts]), stats.moment
            own = recipe.scheme_for(width)
            for name in candidates(recipe, width):
                scheme = replace(recipe, layers={place: name}).scheme_for(width, place)
                q = quantize_rtn(weight, scheme.weight, scale_dtype, recipe.mse, place)
                error = output_error(weight, q, moment)
                found = Candidate(place, name, weight.numel(), q.bits_per_weight * weight.numel(), error)
                options.setdefault(place, []).append(found)
                base[place] = name if scheme == own else base.get(place, name)
            for result, part in zip(quantize_parts(parts, stats, own, recipe, scale_dtype).values(), parts):
                projection.replace(part.name, dequantize(result.weight, before.dtype), None)
            moved[place] = layer.run(before, kv, step)
            for part in parts:
                projection.replace(part.name, part.weight, part.act)
    lost = dict.fromkeys(moved, 0.0)
    for rows in torch.arange(before.shape[0], device=before.device).split(ROWS):
        wanted = logits(stream.hidden[0][rows]).log_softmax(-1)
        for place, hidden in moved.items():
            found = logits(hidden[rows]).log_softmax(-1)
            lost[place] += float((wanted.exp() * (wanted - found)).sum()) / before.shape[0]
    measured = []
    for place, each in options.items():
        per_error = max(lost[place], 0.0) / max(next(c.error for c in each if c.scheme == base[place]), 1e-30)
        measured += [replace(c, error=c.error * per_error) for c in each]
    return measured


def allocate(measured: Iterable[Candidate], bits: float) -> dict[str, Candidate]:
    """The candidate of each place that together lose least within `bits` per weight on average.

    Every place starts with its cheapest; then steps along the lower convex hulls of (bits, error) are taken, best ratio
    first, while they fit. Raises ValueError when even the cheapest do not.
    """
    places: dict[str, list[Candidate]] = {}
    for candidate in measured:
        places.setdefault(candidate.place, []).append(candidate)
    chosen, steps = {}, []
    for place, options in places.items():
        options = sorted(options, key=lambda c: (c.bits, c.error))
        now = chosen[place] = options[0]
        while better := [c for c in options if c.bits > now.bits and c.error < now.error]:
            best = max(better, key=lambda c: (now.error - c.error) / (c.bits - now.bits))
            steps.append(((now.error - best.error) / (best.bits - now.bits), now, best))
            now = best
    room = bits * sum(c.weights for c in chosen.values()) - sum(c.bits for c in chosen.values())
    if room < 0:
        least = sum(c.bits for c in chosen.values()) / sum(c.weights for c in chosen.values())
        raise ValueError(f"bits = {bits:g}: the cheapest schemes take {least:.3f} bits per weight")
    for _, before, after in sorted(steps, key=lambda step: -step[0]):
        if chosen[before.place] is before and after.bits - before.bits <= room:
            room -= after.bits - before.bits
            chosen[before.place] = after
    return chosen


def explain(measured: Iterable[Candidate], chosen: dict[str, Candidate]) -> list[str]:
    """A table for people: what each site of each layer got, its error then, and the error at the fewest bits."""
    cheapest: dict[str, Candidate] = {}
    for candidate in measured:
        now = cheapest.setdefault(candidate.place, candidate)
        cheapest[candidate.place] = min(now, candidate, key=lambda c: c.bits)
    layers = sorted({int(place.split(".")[0]) for place in chosen})
    average = sum(c.bits for c in chosen.values()) / sum(c.weights for c in chosen.values())
    total = [sum(c.error for c in each.values()) for each in (cheapest, chosen)]
    cell = lambda place: f"{chosen[place].scheme} {cheapest[place].error:.2e} > {chosen[place].error:.2e}"  # noqa: E731
    lines = [f"chosen per layer at {average:.2f} bits per weight; divergence from the float model in nats when one site is "
             f"rounded, at the fewest bits > as chosen (sum {total[0]:.3f} > {total[1]:.3f}):",
             "layer  " + "".join(f"{site:34}" for site in SITES).rstrip()]
    lines += [f"{i:5}  " + "".join(f"{cell(f'{i}.{site}'):34}" for site in SITES).rstrip() for i in layers]
    return lines


def record(measured: Iterable[Candidate]) -> dict[str, str]:
    """The measured errors, for the recipe: "3.down" -> "w4a8 1.2e-03, w8a8 4.5e-06"."""
    texts: dict[str, list[str]] = {}
    for c in measured:
        texts.setdefault(c.place, []).append(f"{c.scheme} {c.error:.2e}")
    return {place: ", ".join(text) for place, text in texts.items()}


def first_rows(tokens: Tensor, most: int = 8192) -> Tensor:
    """The calibration sequences that are measured on: int64 [up to `most` tokens in all, L], spread evenly."""
    count = max(1, min(tokens.shape[0], most // tokens.shape[1]))
    return tokens[torch.linspace(0, tokens.shape[0] - 1, count).round().long()]
