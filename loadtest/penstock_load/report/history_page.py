"""The history of scenarios as an HTML page with charts. Imports matplotlib."""

import base64
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from penstock_load.measure.history import RunSummary
from penstock_load.report.canvas import TARGET, as_svg, canvas, label, slo_line, small_figure
from penstock_load.report.pages import environment
from penstock_load.report.run_series import RunSeries, history_table

TEMPLATE = "history.html.jinja"
MAX_DRAWN, MAX_NAMED = 60, 8  # runs in a chart, and commits named below it


def render_history(series: Sequence[RunSeries]) -> str:
    """The page, one file without external resources."""
    parts = [
        {"title": one.title, "table": history_table(one), "charts": _charts(one) if len(one.runs) > 1 else ()}
        for one in series
    ]
    return environment().get_template(TEMPLATE).render(parts=parts)


def _charts(series: RunSeries) -> list[tuple[str, str]]:
    """(title, data URI) of each chart."""
    runs = series.runs[:MAX_DRAWN][::-1]
    figures = [
        ("Latency", "ms", [("p99", "-", [run.p99_ms for run in runs]), ("p50", ":", [run.p50_ms for run in runs])]),
        (
            "Rate",
            "requests a second",
            [
                ("answered", "-", [run.ok_per_s for run in runs]),
                ("capacity", ":", [run.capacity_per_s for run in runs]),
            ],
        ),
        ("Load", "ms", [("load", "-", [run.load_ms for run in runs])]),
        ("Streams", "streams", [("held", "-", [run.streams_held for run in runs])]),
    ]
    found = []
    for title, unit, lines in figures:
        measured = [line for line in lines if any(value is not None for value in line[2])]
        if measured:
            with canvas(is_small=True):
                slo_ms = runs[-1].slo_p99_ms if title == "Latency" else None
                svg = as_svg(_draw(runs, unit, measured, slo_ms), salt=title)
            found.append((title, f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"))
    return found


def _draw(
    runs: Sequence[RunSummary], unit: str, lines: Sequence[tuple[str, str, list[float | None]]], slo_ms: float | None
) -> Figure:
    """One line per figure and one point per run, oldest to the left, with the commits below."""
    figure, axes = small_figure()
    for name, style, values in lines:
        points = [(place, value) for place, value in enumerate(values) if value is not None]
        axes.plot(
            *zip(*points, strict=True), style, color=TARGET, marker="o", markersize=3.5, linewidth=1.4, label=name
        )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    if slo_ms is not None:
        slo_line(axes, slo_ms)
    _name_commits(axes, runs)
    axes.set_ylabel(unit)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1, handlelength=1.4)
    return figure


def _name_commits(axes: Axes, runs: Sequence[RunSummary]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=MAX_NAMED, integer=True))
    places = list(range(0, len(runs), -(-len(runs) // MAX_NAMED)))
    names = [label(runs[place].commit or runs[place].began_at[5:10], at_most=9) for place in places]
    axes.set_xticks(places, names, rotation=30, ha="right")
