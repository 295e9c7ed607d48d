"""The small plots below the verdict. Linear axes from 0; one message each."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from penstock_load.report.canvas import (
    BAD,
    BAND,
    GREY,
    INK,
    PALE,
    STRONG,
    label,
    log_latency,
    slo_line,
    small_figure,
    widen,
)
from penstock_load.report.curves import knee_of, offered_points
from penstock_load.report.document import plain_number
from penstock_load.report.latency_plots import answered_points, p99_points, percentile_curves
from penstock_load.report.opening import shown_run
from penstock_load.report.rounds import TimelinePart, key_phase, searched_knee, series_of, stretches
from penstock_load.results import Reload, Run, Side

_SLO_IN_SIGHT = 6.0  # the SLO is drawn if it is at most this multiple of the highest latency
_BLUE, _PALE_BLUE = STRONG[Side.TARGET], PALE[Side.TARGET]


def draw_key_latency(run: Run) -> Figure:
    """p50 and p99 per second, with the SLO."""
    figure, axes = small_figure()
    shown = shown_run(run)
    series = series_of(shown, Side.TARGET)
    axes.plot(series.at_s, series.p99_ms, color=_BLUE, linewidth=1.6, label="p99")
    axes.plot(series.at_s, series.p50_ms, color=_BLUE, linewidth=1.3, linestyle=(0, (2, 1)), label="p50")
    highest = max((value for value in series.p99_ms if value > 0), default=1.0)
    slo_ms = run.slo_p99_ms
    axes.set_ylim(0, 1.3 * (slo_ms if highest < slo_ms <= _SLO_IN_SIGHT * highest else highest))
    slo_line(axes, slo_ms)
    _over_time(axes, shown, "latency, ms", columns=2)
    return figure


def draw_key_rates(run: Run) -> Figure:
    """Offered, answered, rejected and failed requests per second."""
    figure, axes = small_figure()
    shown = shown_run(run)
    series = series_of(shown, Side.TARGET)
    axes.plot(series.at_s, series.ok, color=_BLUE, linewidth=1.6, label="answered")
    if any(value > 0 for value in series.bad):
        axes.plot(series.at_s, series.bad, color=BAD, linewidth=1.4, label="not answered")
    axes.plot(series.at_s, series.offered, color=INK, linewidth=1, linestyle="--", label="offered")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    _over_time(axes, shown, "requests a second", columns=3)
    return figure


def draw_key_queue(run: Run) -> Figure:
    """Requests in flight, per second."""
    shown = shown_run(run)
    points = [(second.at_s + 0.5, float(second.in_flight)) for phase in shown.phases for second in phase.timeline]
    return _filled(shown, points, "requests in flight")


def draw_key_memory(run: Run) -> Figure:
    """Memory of the server, per second."""
    shown = shown_run(run)
    series = series_of(shown, Side.TARGET)
    return _filled(shown, list(zip(series.at_s, series.rss_mib, strict=True)), "server memory, MiB")


def draw_key_curve(run: Run) -> Figure:
    """p99 against the offered rate, with the SLO and the knee."""
    figure, axes = small_figure()
    points = offered_points(run, Side.TARGET)
    p99_points(axes, points, Side.TARGET, run.slo_p99_ms)
    known = [point.p99_ms for point in points if point.p99_ms] or [run.slo_p99_ms]
    axes.set_ylim(*widen(min(*known, run.slo_p99_ms), max(*known, run.slo_p99_ms)))
    log_latency(axes)
    slo_line(axes, run.slo_p99_ms)
    _mark_knee(axes, run)
    axes.set_ylabel("p99, ms")
    _by_rate(axes)
    return figure


def draw_key_answered(run: Run) -> Figure:
    """Answered against offered rate."""
    figure, axes = small_figure()
    points = offered_points(run, Side.TARGET)
    highest = 1.05 * max(point.offered_per_s for point in points)
    axes.plot([0, highest], [0, highest], color=GREY, linestyle="--", linewidth=1, zorder=1)
    answered_points(axes, points, Side.TARGET, run.slo_p99_ms)
    axes.set_ylim(0, highest)
    _mark_knee(axes, run)
    axes.set_ylabel("answered a second")
    _by_rate(axes)
    return figure


def draw_key_percentiles(run: Run) -> Figure:
    """Latency by percentile, of the key phase."""
    figure, axes = small_figure()
    phase = key_phase(run)
    assert phase is not None, "a run without phases has no percentiles"
    bounds = [upper_ms for upper_ms, _ in phase.histogram()]
    percentile_curves(axes, [phase], run.slo_p99_ms, widen(min(bounds), max(bounds)))
    axes.set_xlabel("share of requests, %")
    return figure


def draw_key_refusals(run: Run) -> Figure:
    """How long refused requests waited, by percentile; the median of the rounds."""
    figure, axes = small_figure()
    phase = key_phase(run)
    assert phase is not None, "a run without phases has no refusals"
    names = ("p50", "p90", "p99")
    values = [phase.spread(lambda result, name=name: getattr(result.all.refusals, name)).median for name in names]  # type: ignore[misc]
    axes.bar_label(axes.bar(names, values, width=0.6, color=_BLUE), [f"{plain_number(ms)} ms" for ms in values])
    axes.set_xlim(-0.9, 2.4)  # room for the limit's label
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    _draw_limit(axes, _limit(run, "refusal_p99_ms"))
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("ms")
    return figure


def draw_key_loads(run: Run) -> Figure:
    """How long each load took."""
    return _bars(run, [("load", _BLUE, lambda reload: reload.load_ms)], limit=_limit(run, "load_ms"))


def draw_key_first_answers(run: Run) -> Figure:
    """The first and the second answer after each load."""
    kinds: list[tuple[str, str, Callable[[Reload], float]]] = [
        ("first answer", _BLUE, lambda reload: reload.first_answer_ms),
        ("second answer", _PALE_BLUE, lambda reload: reload.second_answer_ms),
    ]
    return _bars(run, kinds, limit=_limit(run, "first_answer_ms"))


def _filled(shown: Run, points: Sequence[tuple[float, float]], name: str) -> Figure:
    figure, axes = small_figure()
    at_s, values = [at for at, _ in points], [value for _, value in points]
    axes.plot(at_s, values, color=_BLUE, linewidth=1.6)
    axes.fill_between(at_s, values, color=_PALE_BLUE, alpha=0.4, linewidth=0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    _over_time(axes, shown, name, columns=0)
    return figure


def _over_time(axes: Axes, shown: Run, name: str, *, columns: int) -> None:
    """Labels the axes, and shades every other phase. columns: columns of the legend, 0 for none."""
    phases = stretches(shown)
    begins_s, ends_s = phases[0].began_s, max(phase.ends_s for phase in phases)
    axes.set_xlim(begins_s, ends_s)
    _name_phases(axes, phases)
    axes.set_ylabel(name)
    axes.set_xlabel("seconds")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True).tick_values(0, ends_s - begins_s)
    axes.set_xticks([begins_s + tick for tick in ticks], [plain_number(tick) for tick in ticks])
    axes.set_xlim(begins_s, ends_s)
    if columns:
        _legend(axes, columns)


def _name_phases(axes: Axes, phases: Sequence[TimelinePart]) -> None:
    length_s = phases[-1].ends_s - phases[0].began_s
    for place, phase in enumerate(phases):
        if place % 2:
            axes.axvspan(phase.began_s, phase.ends_s, color=BAND, linewidth=0, zorder=0)
        if len(phases) > 1 and (phase.ends_s - phase.began_s) / length_s > 0.15:
            middle_s = (phase.began_s + phase.ends_s) / 2
            name = label(phase.phase, at_most=18)
            axes.annotate(name, (middle_s, 0.98), xycoords=("data", "axes fraction"), ha="center", va="top", color=GREY)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, borderaxespad=0.1, handlelength=1.4)


def _by_rate(axes: Axes) -> None:
    axes.set_xlim(0, axes.get_xlim()[1])
    axes.set_xlabel("offered, requests a second")
    _legend(axes, 2)


def _mark_knee(axes: Axes, run: Run) -> None:
    if (knee := knee_of(run)) is None:
        return
    name = "highest confirmed" if searched_knee(run) is not None else "knee"
    axes.axvline(knee, color=INK, linewidth=1, zorder=1)
    at = (knee, 0.02)
    is_left = knee > 0.6 * axes.get_xlim()[1]
    axes.annotate(
        f"{name} {plain_number(knee)}/s",
        at,
        xycoords=("data", "axes fraction"),
        xytext=(-3 if is_left else 3, 2),
        textcoords="offset points",
        ha="right" if is_left else "left",
        color=INK,
    )


def _limit(run: Run, measure: str) -> float | None:
    return next((verdict.figure for verdict in run.verdicts if verdict.measure == measure), None)


def _bars(run: Run, kinds: Sequence[tuple[str, str, Callable[[Reload], float]]], *, limit: float | None) -> Figure:
    """A group of bars per reload. limit: of a target; drawn if it fits the axis."""
    figure, axes = small_figure()
    width = 0.8 / len(kinds)
    for place, (name, colour, pick) in enumerate(kinds):
        at = [number + (place - (len(kinds) - 1) / 2) * width for number in range(1, len(run.reloads) + 1)]
        axes.bar(at, list(map(pick, run.reloads)), width=width, color=colour, label=name)
    _draw_limit(axes, limit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("reload")
    axes.set_ylabel("ms")
    _legend(axes, len(kinds))
    return figure


def _draw_limit(axes: Axes, limit: float | None) -> None:
    highest = axes.get_ylim()[1]
    if limit is None or limit > _SLO_IN_SIGHT * highest:
        return
    axes.set_ylim(0, max(highest, 1.15 * limit))
    axes.axhline(limit, color=INK, linestyle="--", linewidth=1)
    axes.annotate(f"target {plain_number(limit)} ms", (0.02, limit), xycoords=("axes fraction", "data"), va="bottom")
