"""Plots as SVG text, written by hand: lines over linear or logarithmic axes, and the roofline. No plotting library, no files.

The one idea: a chart is data (`Chart`), and one function draws any number of them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

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


def chart_svg(charts: Sequence[Chart], title: str, columns: int = 2, scale: float = 1.0) -> str:
    """One SVG document with the charts in rows of `columns`."""
    columns = min(columns, len(charts))
    head = 30 if title else 0
    width, height = columns * WIDTH, head + -(-len(charts) // columns) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width * scale:.0f}" '
        f'height="{height * scale:.0f}" font-family="sans-serif" font-size="11" fill="#1f2937">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="{width / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>')
    for number, chart in enumerate(charts):
        x, y = number % columns * WIDTH, head + number // columns * HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_draw(chart), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


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


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _dot(x: float, y: float, color: str, hint: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.7" fill="{color}"><title>{escape(hint)}</title></circle>'


def _draw(chart: Chart) -> list[str]:
    dots = chart.dots or {}
    everything = [p for line in chart.series.values() for p in line] + [d[:2] for row in dots.values() for d in row]
    x = _axis([p[0] for p in everything], chart.log_x, LEFT, WIDTH - RIGHT)
    y = _axis([p[1] for p in everything], chart.log_y, HEIGHT - BOTTOM, TOP)
    middle, bottom = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM
    shown = lambda p: all(math.isfinite(v) and (v > TINY or not axis.log) for v, axis in zip(p, (x, y)))  # noqa: E731
    out = [_text(middle, 18, chart.title, extra=' font-weight="bold"'), _text(middle, HEIGHT - 14, chart.x_label)]
    out.append(_text(0, 0, chart.y_label, extra=f' transform="translate(14,{(TOP + bottom) / 2}) rotate(-90)"'))
    for value in x.ticks():
        line = f'<path d="M{x(value):.1f} {TOP}V{bottom}" stroke="#e5e7eb"/>'
        out.append(line + _text(x(value), bottom + 15, _number(value)))
    for value in y.ticks():
        line = f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>'
        out.append(line + _text(LEFT - 6, y(value) + 4, _number(value), "end"))
    names = [*chart.series, *dots]
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    for name, line in chart.series.items():
        kept = [p for p in line if shown(p)]
        if kept:
            path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in kept)
            out.append(f'<path d="M{path}" fill="none" stroke="{colors[name]}" stroke-width="1.8"/>')
        if chart.marks:
            out += [_dot(x(a), y(b), colors[name], f"{_number(a)}: {_number(b)}") for a, b in kept]
    for name, row in dots.items():
        out += [_dot(x(a), y(b), colors[name], hint) for a, b, hint in row if shown((a, b))]
    for row, name in enumerate(name for name in names if name):
        key = f'<rect x="{LEFT + 8}" y="{TOP + 6 + 14 * row}" width="9" height="9" fill="{colors[name]}"/>'
        out.append(key + _text(LEFT + 21, TOP + 14 + 14 * row, name, "start"))
    return out
