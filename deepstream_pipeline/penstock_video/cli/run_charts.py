"""SVG charts of the page of a run: lines over time, crossings over time, bars."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock_video.cli.markup import Markup, joined, tag

WIDTH, HEIGHT = 380, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 8, 22  # margins of the plot
MAX_SERIES = 5  # colours of the page
Clock = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """values: one a bin; None for a bin without frames."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """bins of width_s. clock: the text of a time after the beginning."""

    bins: int
    width_s: float
    clock: Clock

    def x(self, bin_number: float) -> float:
        """Position of a bin's left edge."""
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * bin_number / max(self.bins, 1)


def line_chart(title: str, series: Sequence[Series], axis: TimeAxis, *, text: str) -> Markup:
    """A line chart over time with a legend. text: description for screen readers."""
    most = _round_up(max((value or 0.0 for one in series for value in one.values), default=0.0))
    parts = [_grid(0.0, most, axis)]
    for number, one in enumerate(series):
        for run in _runs(one.values):
            points = " ".join(f"{axis.x(bin_number + 0.5):.1f},{_y(value, 0.0, most):.1f}" for bin_number, value in run)
            parts.append(tag("polyline", points=points, class_=f"line s{number}"))
    legend = tag(
        "ul", *(tag("li", tag("i", class_=f"s{n}"), one.name) for n, one in enumerate(series)), class_="legend"
    )
    return _figure(title, text, joined(*parts), legend)


def crossing_chart(
    title: str, into: Sequence[int], out_of: Sequence[int] | None, axis: TimeAxis, *, text: str
) -> Markup:
    """A bar chart over time: `in` above the axis, `out` below it. out_of: None for a line that counts one way."""
    most, least = _round_up(max(into, default=0)), -_round_up(max(out_of, default=0)) if out_of is not None else 0.0
    parts = [_grid(least, most, axis)]
    for number, values, sign in ((0, into, 1), (1, out_of or (), -1)):
        for bin_number, value in enumerate(values):
            if value:
                top, foot = sorted((_y(sign * value, least, most), _y(0.0, least, most)))
                width = max(axis.x(1) - axis.x(0) - 0.6, 0.8)
                parts.append(
                    tag("rect", x=axis.x(bin_number), y=top, width=width, height=foot - top, class_=f"bar s{number}")
                )
    names = ("in", "out") if out_of is not None else ("crossings",)
    legend = tag("ul", *(tag("li", tag("i", class_=f"s{n}"), name) for n, name in enumerate(names)), class_="legend")
    return _figure(title, text, joined(*parts), legend)


def bar_chart(title: str, bars: Sequence[tuple[str, int]], *, text: str) -> Markup:
    """A vertical bar chart with names below and values above the bars."""
    most = max((value for _, value in bars), default=0) or 1
    step = (WIDTH - 2 * _RIGHT) / max(len(bars), 1)
    about = tag("small", text)
    parts = []
    for number, (name, value) in enumerate(bars):
        height = (HEIGHT - _TOP - _BOTTOM - 14) * value / most
        left, top = _RIGHT + number * step, HEIGHT - _BOTTOM - height
        parts += [
            tag("rect", x=left + step * 0.1, y=top, width=step * 0.8, height=max(height, 0.5), class_="bar s0"),
            tag("text", str(value), x=left + step / 2, y=top - 4, class_="middle") if value else Markup(),
            tag("text", name, x=left + step / 2, y=HEIGHT - 7.0, class_="middle"),
        ]
    return _figure(joined(title, about), text, joined(*parts))


def _figure(title: str, text: str, content: Markup, *more: Markup) -> Markup:
    picture = tag("svg", content, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=text)
    return tag("figure", tag("figcaption", title), picture, *more)


def _grid(least: float, most: float, axis: TimeAxis) -> Markup:
    """Horizontal lines with numbers, and times below."""
    parts = []
    half = most / 2 if not least and most > 1 else most
    for value in sorted({least, 0.0, half, most}):
        y = _y(value, least, most)
        parts += [
            tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid" if value else "axis"),
            tag("text", f"{abs(value):g}", x=_LEFT - 5, y=y + 4, class_="end"),
        ]
    for share, place in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at_s = axis.bins * axis.width_s * share
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * share
        parts.append(tag("text", axis.clock(at_s), x=x, y=HEIGHT - 6, class_=place))
    return joined(*parts)


def _y(value: float, least: float, most: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (most - value) / ((most - least) or 1.0)


def _round_up(value: float) -> float:
    """1, 2, 4, 6, 8 or 10 times a power of ten, at least 1: its half is short, too."""
    if value <= 1:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 4, 6, 8, 10) if value <= step * scale)


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """The values between gaps, with their numbers."""
    runs: list[list[tuple[int, float]]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((number, value))
    return [run for run in runs if run]
