"""Plots as SVG: lines over linear or logarithmic axes, and the roofline. No plotting library.

The one idea: a chart is data (`Chart`), here is where its points go, and the template `chart.svg` draws any number of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 320, 66, 18, 34, 48  # of one chart, in pixels
TINY = 1e-290  # below this a logarithm's power of ten is no number any more
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#4d7c0f")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """series: by name, lines through (x, y). marks: a dot at each of their points. dots: by name, (x, y, what hovering shows),
    not joined. A logarithmic axis leaves out values that are not above TINY."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    marks: bool = False
    log_x: bool = False
    log_y: bool = False
    dots: Mapping[str, Sequence[tuple[float, float, str]]] | None = None


class Point(NamedTuple):
    """One kernel at one size. operations, bytes: what it must do and move at the least. family: what it is drawn as. peak: the
    name of the peak that limits it (default: the highest)."""

    label: str
    family: str
    operations: float
    bytes: float
    microseconds: float
    peak: str | None = None


def roofline_svg(points: Sequence[Point], bandwidth: float, peaks: Mapping[str, float], title: str = "Roofline") -> str:
    """Measured points under the machine's roof: operations per byte across, TFLOP/s (or TOP/s) upward, both logarithmic.

    bandwidth: bytes/s that a copy reaches. peaks: by name (e.g. "int8 tensor cores"), operations/s. Raises ValueError without
    points or peaks.
    """
    if not points or not peaks:
        raise ValueError("a roofline wants at least one point and one peak")
    at = [one.operations / one.bytes for one in points]
    low = 10 ** math.floor(math.log10(min(at) / 1.5))
    high = 10 ** math.ceil(math.log10(1.5 * max(*at, *(peak / bandwidth for peak in peaks.values()))))
    roofs = {
        f"{name}: {peak / 1e12:.0f} T/s": [(low, low * bandwidth / 1e12), (peak / bandwidth, peak / 1e12), (high, peak / 1e12)]
        for name, peak in peaks.items()
    }
    dots: dict[str, list[tuple[float, float, str]]] = {}
    for intensity, one in zip(at, points):
        rate = one.operations / one.microseconds * 1e6
        roof = min(peaks[one.peak] if one.peak else max(peaks.values()), intensity * bandwidth)
        moved = one.bytes / one.microseconds / 1e3
        hint = f"{one.label}: {one.microseconds:.1f} us, {rate / 1e12:.3g} T/s, {moved:.0f} GB/s, {rate / roof:.0%} of the roof"
        dots.setdefault(one.family, []).append((intensity, rate / 1e12, hint))
    up = f"TFLOP/s (slope: {bandwidth / 1e12:.2f} TB/s)"
    return chart_svg([Chart(title, "operations per byte", up, roofs, log_x=True, log_y=True, dots=dots)], "", scale=1.8)


def chart_svg(charts: Sequence[Chart], title: str, scale: float = 1.0) -> str:
    """One SVG document with the charts in rows of two."""
    columns, head = min(2, len(charts)), 30 if title else 0
    places = ((n % columns * WIDTH, head + n // columns * HEIGHT) for n in range(len(charts)))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("nybble.bench") / "chart.svg").read_text(encoding="utf-8"))
    return template.render(width=columns * WIDTH, height=head + -(-len(charts) // columns) * HEIGHT, scale=scale, title=title,
                           panels=[(*place, _panel(chart)) for place, chart in zip(places, charts)])


class Axis(NamedTuple):
    """Maps values in [low, high] to pixels from `start` to `end`."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**e for e in range(first, last + 1, max(1, (last - first) // 6))]
        step = _step(self.high - self.low)
        return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten: about five of them in the span."""
    rough = span / 5
    power = 10 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def _axis(values: Sequence[float], log: bool, start: float, end: float) -> Axis:
    kept = [v for v in values if math.isfinite(v) and (v > TINY or not log)] or [1.0]
    if log:
        low, high = 10.0 ** math.floor(math.log10(min(kept)) + 1e-9), 10.0 ** math.ceil(math.log10(max(kept)) - 1e-9)
        return Axis(low, high if high > low else low * 10, True, start, end)
    low, high = min(0.0, *kept), max(0.0, *kept)
    step = _step(high - low if high - low > TINY else 1.0)
    return Axis(math.floor(low / step) * step, (math.ceil(high / step - 1e-9) or 1) * step, False, start, end)


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:g}"


def _panel(chart: Chart) -> dict[str, Any]:
    """What the template draws of a chart: everything at its pixel."""
    dots = chart.dots or {}
    everything = [p for line in chart.series.values() for p in line] + [d[:2] for row in dots.values() for d in row]
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    x = _axis([p[0] for p in everything], chart.log_x, left, right)
    y = _axis([p[1] for p in everything], chart.log_y, bottom, TOP)
    shown = lambda p: all(math.isfinite(v) and (v > TINY or not axis.log) for v, axis in zip(p, (x, y)))  # noqa: E731
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate([*chart.series, *dots])}
    lines = {name: kept for name, line in chart.series.items() if (kept := [p for p in line if shown(p)])}
    marked = {name: [(a, b, f"{_number(a)}: {_number(b)}") for a, b in line] for name, line in lines.items() if chart.marks}
    marked |= {name: marked.get(name, []) + [d for d in row if shown(d[:2])] for name, row in dots.items()}
    return {
        "chart": chart, "left": left, "right": right, "top": TOP, "bottom": bottom,
        "middle": (left + right) / 2, "center": (TOP + bottom) / 2,
        "x_ticks": [(x(value), _number(value)) for value in x.ticks()],
        "y_ticks": [(y(value), _number(value)) for value in y.ticks()],
        "lines": [(colors[name], [(x(a), y(b)) for a, b in line]) for name, line in lines.items()],
        "marks": [(x(a), y(b), colors[name], hint) for name, row in marked.items() for a, b, hint in row],
        "legend": [(name, color) for name, color in colors.items() if name],
    }
