"""The plots of what clients saw: latency distribution, course over time, throughput against offered rate."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from penstock_load.report.canvas import (
    BAD,
    BAND,
    GOOD,
    GREY,
    INK,
    PALE,
    STRONG,
    label,
    log_latency,
    new_figure,
    slo_line,
    widen,
)
from penstock_load.report.curves import BINS_A_DECADE, OfferedPoint, knee_of, offered_points
from penstock_load.report.document import plain_number
from penstock_load.report.rounds import (
    PhaseRounds,
    Series,
    TimelinePart,
    drawn_phases,
    searched_knee,
    series_of,
    stretches,
)
from penstock_load.results import Run, Side
from penstock_load.search import TrialOutcome

_BIN = 10 ** (1 / BINS_A_DECADE)
_DOTS, _MOST_ROUNDS, _UNITS_SHOWN = 300, 12, 3.0
_TIME_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_TAILS = (0.5, 0.9, 0.99, 0.999, 0.9999)
Histogram = Sequence[tuple[float, int]]


def draw_latency(run: Run) -> Figure:
    """A row a phase: histogram to the left, latency by percentile to the right; both sides of a phase together."""
    phases = [phase for phase in drawn_phases(run) if phase.histogram()]
    names = list(dict.fromkeys(phase.phase for phase in phases))
    figure, axes = new_figure(len(names), 0.5 + 2.9 * len(names), columns=2)
    bounds = [upper_ms for phase in phases for upper_ms, _ in phase.histogram()]
    limits = widen(min(bounds) / _BIN, max(bounds))
    for row, name in enumerate(names):
        sides = [phase for phase in phases if phase.phase == name]
        _histograms(axes[2 * row], sides, run.slo_p99_ms, limits)
        percentile_curves(axes[2 * row + 1], sides, run.slo_p99_ms, limits)
    return figure


def draw_time(run: Run) -> Figure:
    """Percentiles above (where there are any), rates below, on one axis of time."""
    sides = [side for side in Side if any(result.side is side for result in run.phases)]
    series = {side: series_of(run, side) for side in sides}
    shown = [value for one in series.values() for value in (*one.p50_ms, *one.p99_ms) if value > 0]
    figure, axes = new_figure(2 if shown else 1, 5.6 if shown else 3.2, is_shared=True)
    if shown:
        _over_time(axes[0], series, len(sides) > 1)
        axes[0].set_ylim(*widen(min(shown), max(*shown, _slo_if_near(run.slo_p99_ms, max(shown)))))
        log_latency(axes[0])
        slo_line(axes[0], run.slo_p99_ms)
        axes[0].set_ylabel("latency, ms")
    _rates(axes[-1], series)
    axes[-1].set_ylabel("requests a second")
    shade_phases(axes, stretches(run))
    return figure


def draw_throughput(run: Run) -> Figure:
    """Answered against offered above, p99 against offered below."""
    figure, (above, below) = new_figure(2, 6.4, is_shared=True)
    sides = [side for side in Side if offered_points(run, side)]
    points = {side: offered_points(run, side) for side in sides}
    for side in sides:
        answered_points(above, points[side], side, run.slo_p99_ms)
        p99_points(below, points[side], side, run.slo_p99_ms)
    _finish_throughput(above, below, points, run.slo_p99_ms)
    knee = knee_of(run)
    if knee is not None:
        usable = [point.offered_per_s for point in points[Side.TARGET] if point.is_usable]
        is_above = searched_knee(run) is None and knee >= max(usable)
        _mark_knee(above, below, knee, is_above=is_above)
    return figure


def shade_phases(axes: Sequence[Axes], phases: Sequence[TimelinePart]) -> None:
    """Every other phase on a grey band, its name above the first axes where there is room; and the axis of time."""
    begins, ends = min(phase.began_s for phase in phases), max(phase.ends_s for phase in phases)
    length = max(ends - begins, 1e-9)
    for one in axes:
        one.set_xlim(begins, ends)
        for phase in phases[::2]:
            one.axvspan(phase.began_s, phase.ends_s, color=BAND, linewidth=0, zorder=0)
    for phase in phases:
        _name_phase(axes[0], phase, share=(phase.ends_s - phase.began_s) / length)
    _name_rounds(axes, phases)
    _time_axis(axes[-1], length)


def points_of(at_s: Sequence[float]) -> dict[str, Any]:
    """How to mark a series' points: dots where they are few, for one alone makes no line."""
    return {"marker": ".", "markersize": 3.0 if len(at_s) < _DOTS else 1.0}


def _time_axis(axes: Axes, length_s: float) -> None:
    unit, seconds = next((it for it in _TIME_UNITS if length_s >= _UNITS_SHOWN * it[1]), _TIME_UNITS[-1])
    low, high = axes.get_xlim()
    ticks = MaxNLocator(nbins=9, steps=[1, 2, 5, 10]).tick_values(low / seconds, high / seconds)
    axes.xaxis.set_major_locator(FixedLocator([seconds * at for at in ticks]))
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value / seconds)))
    axes.set_xlabel(f"{unit} since the run's start")


def _name_rounds(axes: Sequence[Axes], phases: Sequence[TimelinePart]) -> None:
    begins: dict[int, float] = {}
    for phase in phases:
        begins.setdefault(phase.round, phase.began_s)
    if not 1 < len(begins) <= _MOST_ROUNDS:
        return
    for number, at_s in begins.items():
        for one in axes:
            one.axvline(at_s, color=GREY, linewidth=0.9, linestyle=":")
        axes[-1].annotate(
            f"round {number}",
            (at_s, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -3),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=GREY,
        )


def _name_phase(axes: Axes, phase: TimelinePart, *, share: float) -> None:
    if share < 0.018:
        return
    is_upright = 100 * share < len(label(phase.phase))
    axes.annotate(
        label(phase.phase, at_most=18 if is_upright else 40),
        ((phase.began_s + phase.ends_s) / 2, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8.5,
        color=GREY,
        rotation=90 if is_upright else 0,
        annotation_clip=False,
    )


def _histograms(axes: Axes, sides: Sequence[PhaseRounds], slo_ms: float, limits: tuple[float, float]) -> None:
    for phase in sides:
        histogram = phase.histogram()
        total = sum(amount for _, amount in histogram)
        edges, heights = _steps(histogram, total)
        is_alone = len(sides) == 1
        axes.stairs(heights, edges, fill=is_alone or phase.side is Side.TARGET, color=PALE[phase.side], alpha=0.7)
        axes.stairs(heights, edges, color=STRONG[phase.side], linewidth=1.4, label=phase.side.value)
    axes.set_xlim(*limits)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    log_latency(axes, is_x=True)
    slo_line(axes, slo_ms, is_x=True)
    axes.set_title(label(sides[0].phase, at_most=40))
    axes.set_xlabel("latency, ms")
    axes.set_ylabel("share of requests, %")
    if len(sides) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _steps(histogram: Histogram, total: int) -> tuple[list[float], list[float]]:
    """Edges and heights of all bins from the first to the last, the empty ones too."""
    counts = {_position(upper_ms): amount for upper_ms, amount in histogram}
    first, last = min(counts), max(counts)
    edges = [_BIN ** (place - 1) for place in range(first, last + 2)]
    return edges, [100 * counts.get(place, 0) / total for place in range(first, last + 1)]


def _position(upper_ms: float) -> int:
    return round(math.log10(upper_ms) * BINS_A_DECADE)


def percentile_curves(axes: Axes, sides: Sequence[PhaseRounds], slo_ms: float, limits: tuple[float, float]) -> None:
    """The share on an axis on which each further nine is as wide as the one before it."""
    deepest = 1.0
    for phase in sides:
        histogram = phase.histogram()
        total = sum(amount for _, amount in histogram)
        nines, latencies = _curve(histogram, total)
        deepest = max(deepest, nines[-1])
        axes.plot(nines, latencies, color=STRONG[phase.side], linewidth=1.8, label=phase.side.value)
    axes.set_xlim(0, deepest)
    axes.set_ylim(*limits)
    log_latency(axes)
    slo_line(axes, slo_ms)
    ticks = [tail for tail in _TAILS if _nines(tail) <= deepest + 1e-9]
    axes.xaxis.set_major_locator(FixedLocator([0.0, *map(_nines, ticks)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nines, _: f"{plain_percent(1 - 10**-nines)}"))
    axes.set_xlabel("share of requests, % (each further nine as wide)")
    axes.set_ylabel("answered within, ms")


def plain_percent(share: float) -> str:
    """0.999 as 99.9."""
    return f"{100 * share:.4f}".rstrip("0").rstrip(".")


def _nines(share: float) -> float:
    return -math.log10(1 - share)


def _curve(histogram: Histogram, total: int) -> tuple[list[float], list[float]]:
    """Latency by share: the lower edge of the first bin at 0, then each bin's upper edge; the last one at its count."""
    nines, latencies = [0.0], [histogram[0][0] / _BIN]
    seen = 0
    for upper_ms, amount in histogram:
        seen += amount
        nines.append(_nines(min(seen / total, 1 - 0.5 / total)))
        latencies.append(upper_ms)
    return nines, latencies


def _slo_if_near(slo_ms: float, highest_ms: float) -> float:
    return slo_ms if slo_ms < 20 * highest_ms else 0.0


def _over_time(axes: Axes, series: dict[Side, Series], has_sides: bool) -> None:
    for side, one in series.items():
        suffix = f" {side.value}" if has_sides else ""
        dots = points_of(one.at_s)
        axes.plot(one.at_s, one.p99_ms, color=STRONG[side], linewidth=1.5, label=f"p99{suffix}", **dots)
        axes.plot(one.at_s, one.p50_ms, color=PALE[side], linewidth=1.5, label=f"p50{suffix}", **dots)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _rates(axes: Axes, series: dict[Side, Series]) -> None:
    wrong: list[tuple[float, float]] = []
    for side, one in series.items():
        suffix = f" {side.value}" if len(series) > 1 else ""
        offered = "offered" if side is Side.TARGET else None
        axes.plot(one.at_s, one.offered, color=INK, linewidth=0.8, linestyle="--", label=offered)
        axes.plot(one.at_s, one.ok, color=STRONG[side], linewidth=1.5, label=f"answered{suffix}", **points_of(one.at_s))
        wrong += [(at_s, bad) for at_s, bad in zip(one.at_s, one.bad, strict=True) if bad > 0]
    if wrong:
        axes.plot(*zip(*wrong, strict=True), "x", color=BAD, markersize=3.5, label="went wrong")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def answered_points(axes: Axes, points: Sequence[OfferedPoint], side: Side, slo_ms: float) -> None:
    """Answered rate against offered rate."""
    axes.plot([p.offered_per_s for p in points], [p.ok_per_s for p in points], color=PALE[side], linewidth=1)
    _scatter(axes, [(p.offered_per_s, p.ok_per_s, p.outcome(slo_ms)) for p in points], side)


def p99_points(axes: Axes, points: Sequence[OfferedPoint], side: Side, slo_ms: float) -> None:
    """p99 against offered rate."""
    known = [(p.offered_per_s, p.p99_ms, p.outcome(slo_ms)) for p in points if p.p99_ms is not None]
    axes.plot([x for x, _, _ in known], [y for _, y, _ in known], color=PALE[side], linewidth=1)
    _scatter(axes, known, side)


def _scatter(axes: Axes, points: Sequence[tuple[float, float, TrialOutcome]], side: Side) -> None:
    is_target = side is Side.TARGET
    suffix = "" if is_target else " (beside)"
    styles = {
        TrialOutcome.KEPT: ("o", GOOD if is_target else STRONG[side], f"keeps the SLO{suffix}"),
        TrialOutcome.BROKEN: ("x", BAD if is_target else STRONG[side], f"breaks the SLO{suffix}"),
        TrialOutcome.UNUSABLE: ("^", GREY, f"generator's limit{suffix}"),
    }
    for outcome, (marker, colour, name) in styles.items():
        these = [(x, y) for x, y, each in points if each is outcome]
        if these:
            axes.plot(*zip(*these, strict=True), marker, color=colour, markersize=6, markeredgewidth=1.8, label=name)


def _finish_throughput(above: Axes, below: Axes, points: dict[Side, tuple[OfferedPoint, ...]], slo_ms: float) -> None:
    everything = [point for side in points.values() for point in side]
    highest = max(point.offered_per_s for point in everything) * 1.05
    above.plot([0, highest], [0, highest], color=GREY, linestyle="--", linewidth=1, label="all answered", zorder=1)
    above.set_xlim(0, highest)
    above.set_ylim(0, highest)
    above.set_ylabel("answered a second")
    above.legend(loc="upper left")
    known = [point.p99_ms for point in everything if point.p99_ms]
    if known:
        below.set_ylim(*widen(min(*known, slo_ms), max(*known, slo_ms)))
    log_latency(below)
    slo_line(below, slo_ms)
    below.set_ylabel("p99, ms")
    below.set_xlabel("offered, requests a second")


def _mark_knee(above: Axes, below: Axes, knee: float, *, is_above: bool) -> None:
    for axes in (above, below):
        axes.axvline(knee, color=INK, linewidth=1.2, zorder=1)
    left, right = above.get_xlim()
    is_left = (knee - left) / (right - left) > 0.75
    above.annotate(
        f"knee: {'above ' if is_above else ''}{plain_number(knee)}/s",
        (knee, 0.06),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if is_left else 6, 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        fontweight="bold",
        color=INK,
    )
