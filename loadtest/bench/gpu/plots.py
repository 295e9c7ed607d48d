"""The plots of the GPU bench's report, from its rows: what the chart of 2017 showed, and what util does not."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from loadtest.bench.gpu.figures import PointRow, PointRun
from penstock_load.report.canvas import canvas, log_latency, new_figure, slo_line, widen
from penstock_load.report.document import plain_number

MODES: Mapping[str, tuple[str, str, str]] = {  # colours of Okabe and Ito, which colour-blind people tell apart
    "none": ("no MPS", "#D55E00", "o"),
    "mps": ("MPS", "#0072B2", "s"),
    "mps-whole": ("MPS, no thread limit", "#56B4E9", "v"),
    "batching": ("batching", "#CC79A7", "^"),
    "mps+batching": ("MPS + batching", "#009E73", "D"),
}
WAYS = {"engine": ("nvJPEG in the model's instance", "#0072B2"), "gateway": ("the gateway's CPU decoders", "#D55E00")}
PIXELS_PER_INCH = 110


def write_plots(
    folder: Path, rows: Sequence[PointRow], runs: Sequence[PointRun], slo_ms: float, threads: int
) -> list[str]:
    """The names of the files that were written: of what there is. threads: percent that a client of MPS may use."""
    with canvas():
        figures = {
            "chart.png": chart_figure([row for row in rows if row.part == "chart" or _is_whole(row)], threads),
            "activity.png": activity_figure([row for row in rows if row.part == "chart"]),
            "served.png": served_figure([row for row in rows if row.part in ("raw", "served")]),
            "jpeg.png": jpeg_figure([run for run in runs if run.part == "jpeg rate"], slo_ms),
        }
        written = []
        for name, figure in figures.items():
            if figure is not None:
                FigureCanvasAgg(figure)
                figure.savefig(folder / name, dpi=PIXELS_PER_INCH, metadata={"Software": None})
                written.append(name)
    return written


def chart_figure(rows: Sequence[PointRow], threads: int) -> Figure | None:
    """Pictures a second over the number of clients, a line a mode; bars from the lowest round to the highest."""
    if not rows:
        return None
    figure, (axes,) = new_figure(1, 4.6)
    for mode, (words, color, marker) in MODES.items():
        points = _of_mode(rows, mode)
        if not points:
            continue
        label = f"{words}, {threads} % of the threads each" if mode == "mps" and threads else words
        rates = [row.figures["rate"] for row in points]
        middles = [rate.median for rate in rates]
        errors = [[r.median - r.low for r in rates], [r.high - r.median for r in rates]]
        axes.errorbar(_clients(points), middles, errors, color=color, marker=marker, capsize=3, label=label)
        axes.annotate(
            f"{middles[-1]:,.0f}", (_clients(points)[-1], middles[-1]), xytext=(7, -3), textcoords="offset points",
            color=color, fontsize=9,
        )  # fmt: skip
    _over_clients(axes, rows)
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axes.set_ylabel("images/s")
    axes.set_title("ResNet-50, one image a request, N clients at once")
    axes.legend(loc="upper left")
    return figure


def activity_figure(rows: Sequence[PointRow]) -> Figure | None:
    """A panel a mode: nvidia-smi's util beside SM and tensor activity."""
    modes = [mode for mode in MODES if any("sm_activity" in row.figures for row in _of_mode(rows, mode))]
    if not modes:
        return None
    figure, panels = new_figure((len(modes) + 1) // 2, 2.9 * ((len(modes) + 1) // 2), columns=min(len(modes), 2))
    lines = (
        ("util", "nvidia-smi's util", "#767676", "--"),
        ("sm_activity", "SM activity", "#0072B2", "-"),
        ("tensor_activity", "tensor activity", "#009E73", "-"),
        ("memory_bandwidth_activity", "memory bandwidth", "#E69F00", "-"),
    )
    for axes, mode in zip(panels, modes, strict=False):
        points = [row for row in _of_mode(rows, mode) if "sm_activity" in row.figures]
        for name, label, color, style in lines:
            shown = [row for row in points if name in row.figures]
            shares = [row.figures[name].median * 100 for row in shown]
            axes.plot(_clients(shown), shares, color=color, linestyle=style, marker=".", label=label)
        _over_clients(axes, points)
        axes.set_ylim(0, 104)
        axes.set_ylabel("%")
        axes.set_title(MODES[mode][0])
    for axes in panels[len(modes) :]:
        axes.set_visible(False)
    panels[0].legend(loc="center right", fontsize=8)
    return figure


def served_figure(rows: Sequence[PointRow]) -> Figure | None:
    """Bars: raw beside served, a group for each number of processes, batch and memory that both have."""
    by_key: dict[tuple[int, int, str], dict[str, PointRow]] = {}
    for row in rows:
        key = (int(row.key["processes"]), int(row.key["batch"]), str(row.key["memory"]))
        by_key.setdefault(key, {})[row.part] = row
    keys = sorted(key for key, parts in by_key.items() if len(parts) > 1)
    if not keys:
        return None
    figure, (axes,) = new_figure(1, 0.62 * len(keys) + 1.2)
    for offset, (part, color) in zip((0.2, -0.2), (("raw", "#767676"), ("served", "#0072B2")), strict=True):
        rates = [by_key[key][part].figures["rate"] for key in keys]
        places = [place + offset for place in range(len(keys))]
        errors = [[r.median - r.low for r in rates], [r.high - r.median for r in rates]]
        axes.barh(places, [r.median for r in rates], 0.38, xerr=errors, color=color, label=part, ecolor="#222222")
        for place, rate in zip(places, rates, strict=True):
            axes.annotate(
                f"{rate.median:,.0f}", (rate.high, place), xytext=(5, -3), textcoords="offset points", fontsize=8.5
            )
    words = [f"{p} process{'es' * (p > 1)}, batch {b}, {memory}" for p, b, memory in keys]
    axes.set_yticks(range(len(keys)), words)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axes.margins(x=0.1)
    axes.set_xlabel("images/s")
    axes.set_title("The same program, served through shared memory and raw")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    return figure


def jpeg_figure(tries: Sequence[PointRun], slo_ms: float) -> Figure | None:
    """p99 over the rate that was asked for, a dot a try, filled where it kept within the SLO.

    A try whose p99 is endless is not drawn.
    """
    shown = [run for run in tries if "p99_ms" in run.figures]
    if not shown:
        return None
    figure, (axes,) = new_figure(1, 4.0)
    for way, (label, color) in WAYS.items():
        for is_held in (True, False):
            dots = [run for run in shown if run.key["decoded_by"] == way and _is_sustained(run, slo_ms) is is_held]
            rates, latencies = ([run.figures[name] for run in dots] for name in ("asked_per_s", "p99_ms"))
            face, words = (color, f"{label}: kept") if is_held else ("none", "missed")
            axes.scatter(rates, latencies, facecolors=face, edgecolors=color, label=words)
    latencies = [run.figures["p99_ms"] for run in shown]
    axes.set_ylim(*widen(min(*latencies, slo_ms), max(*latencies, slo_ms)))
    axes.set_xlim(0)
    log_latency(axes)
    slo_line(axes, slo_ms)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axes.set_xlabel("JPEGs/s asked for, Poisson; a missed rate is tried twice")
    axes.set_ylabel("p99 from the moment due, ms")
    axes.set_title("JPEG over HTTP through the gateway")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def _is_sustained(run: PointRun, slo_ms: float) -> bool:
    return run.figures["p99_ms"] <= slo_ms and not run.figures.get("failed")


def _is_whole(row: PointRow) -> bool:
    return row.key.get("mode") == "mps-whole"


def _of_mode(rows: Sequence[PointRow], mode: str) -> list[PointRow]:
    return sorted((row for row in rows if row.key["mode"] == mode), key=lambda row: int(row.key["clients"]))


def _clients(rows: Sequence[PointRow]) -> list[int]:
    return [int(row.key["clients"]) for row in rows]


def _over_clients(axes: Axes, rows: Sequence[PointRow]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(_clients(rows)))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.08)
    axes.set_xlabel("clients")
