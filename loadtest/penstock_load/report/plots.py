"""A run's plots as SVG. Imports matplotlib (about a second): import it only where a report is written."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from penstock_load.report.canvas import BESIDE, GREY, INK, STRONG, as_svg, canvas, label, new_figure
from penstock_load.report.document import PlotName, plain_number
from penstock_load.report.figures import phase_name
from penstock_load.report.key_plots import (
    draw_key_answered,
    draw_key_curve,
    draw_key_first_answers,
    draw_key_latency,
    draw_key_loads,
    draw_key_memory,
    draw_key_percentiles,
    draw_key_queue,
    draw_key_rates,
    draw_key_refusals,
)
from penstock_load.report.latency_plots import draw_latency, draw_throughput, draw_time, points_of, shade_phases
from penstock_load.report.rounds import PhaseRounds, Series, drawn_phases, series_of, split_phases, stretches
from penstock_load.results import Run, Side

_STAGE_COLOURS = {
    "decode": "#56B4E9",
    "preprocess": "#009E73",
    "queue": "#F0E442",
    "infer": "#0072B2",
    "postprocess": "#CC79A7",
    "server": "#8C96A0",
    "other": "#D5D9DD",
}
_MORE_COLOURS = ("#E69F00", "#D55E00", "#999933", "#882255", "#44AA99")
_WHITE_ON = ("#0072B2", "#009E73", "#882255", "#D55E00")
FEWEST_BARS = 8
_GREYS = {Side.TARGET: GREY, Side.BESIDE: "#B9A17F"}
_GREENS = {Side.TARGET: "#007A5A", Side.BESIDE: BESIDE}
_PURPLES = {Side.TARGET: "#8F4E9F", Side.BESIDE: "#C9A3D4"}


def draw_batches(run: Run) -> Figure:
    """A bar a batch size, a panel a phase."""
    phases = [phase for phase in drawn_phases(run) if phase.batch_sizes()]
    figure, axes = new_figure(len(phases), 0.6 + 1.9 * len(phases))
    for one, phase in zip(axes, phases, strict=True):
        _bars(one, phase)
    axes[-1].set_xlabel("rows in a batch")
    return figure


def draw_stages(run: Run) -> Figure:
    """A stacked bar a phase, the first phase on top."""
    split = split_phases(run)
    figure, (axes,) = new_figure(1, 1.3 + 0.5 * len(split))
    colours = _colours(list(split[0][1]))
    longest = max(sum(stages.values()) for _, stages in split) or 1.0
    for row, (_, stages) in enumerate(split):
        _stack(axes, row, list(stages.items()), colours, longest)
    axes.set_yticks(range(len(split)), [label(phase_name(phase)) for phase, _ in split])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("mean time of an answer since it was sent, ms")
    for name, colour in colours.items():
        axes.bar(0, 0, color=colour, label=label(name))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(7, len(colours)), handlelength=1)
    return figure


def draw_load(run: Run) -> Figure:
    """Cores, shares and memory over time, each only if it was read."""
    series = [(side, series_of(run, side)) for side in Side if any(result.side is side for result in run.phases)]
    panels = [(title, drawn) for title, lines in _PANELS if (drawn := _readings(lines, series))]
    figure, axes = new_figure(len(panels), 0.7 + 1.9 * len(panels), is_shared=True)
    for one, (title, drawn) in zip(axes, panels, strict=True):
        for name, colour, at_s, values in drawn:
            one.plot(at_s, values, color=colour, linewidth=1.5, label=name, **points_of(at_s))
        one.set_ylim(0, max(one.get_ylim()[1] * 1.15, 0.01))
        one.set_ylabel(title if len(drawn) > 1 or "share" not in title else f"{drawn[0][0]}, %")
        if len(drawn) > 1:
            one.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    shade_phases(axes, stretches(run))
    return figure


@dataclass(frozen=True, slots=True)
class _PlotLine:
    name: str
    colours: dict[Side, str]
    pick: Callable[[Series], list[float]]
    scale: float = 1.0


_PANELS: tuple[tuple[str, tuple[_PlotLine, ...]], ...] = (
    ("server CPU, cores", (_PlotLine("server", STRONG, lambda series: series.server_cpu),)),
    (
        "busy share, %",
        (
            _PlotLine("machine CPU", _GREYS, lambda series: series.machine_cpu, 100.0),
            _PlotLine("GPU runs a kernel (util)", _GREENS, lambda series: series.gpu, 100.0),
            _PlotLine("GPU's SMs with work", _PURPLES, lambda series: series.gpu_sm, 100.0),
        ),
    ),
    ("server memory, MiB", (_PlotLine("server", STRONG, lambda series: series.rss_mib),)),
)


def _readings(
    lines: Sequence[_PlotLine], series: Sequence[tuple[Side, Series]]
) -> list[tuple[str, str, list[float], list[float]]]:
    """(name, colour, times, values) of every line of a panel that was read."""
    drawn = []
    for side, one in series:
        for line in lines:
            values = [line.scale * value for value in line.pick(one)]
            if not all(map(math.isnan, values)):
                name = line.name if side is Side.TARGET else f"{line.name}, beside"
                drawn.append((name, line.colours[side], one.at_s, values))
    return drawn


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour a stage, in the order of a request's way; stages that only this server has get others."""
    unique = dict.fromkeys(names)
    more = [name for name in unique if name not in _STAGE_COLOURS]
    others = {name: _MORE_COLOURS[place % len(_MORE_COLOURS)] for place, name in enumerate(more)}
    return {name: _STAGE_COLOURS.get(name) or others[name] for name in unique}


def _stack(axes: Axes, row: int, stages: Sequence[tuple[str, float]], colours: dict[str, str], longest: float) -> None:
    left = 0.0
    for name, ms in stages:
        axes.barh(row, ms, left=left, color=colours[name], edgecolor="white", linewidth=0.8, height=0.72)
        if ms > 0.055 * longest:
            ink = "white" if colours[name] in _WHITE_ON else INK
            axes.text(left + ms / 2, row, plain_number(ms), ha="center", va="center", fontsize=8.5, color=ink)
        left += ms
    axes.text(left + 0.008 * longest, row, f"{plain_number(left)} ms", va="center", fontsize=9, color=INK)


def _bars(axes: Axes, phase: PhaseRounds) -> None:
    sizes = phase.batch_sizes()
    total = sum(amount for _, amount in sizes)
    rows, shares = [size for size, _ in sizes], [100 * amount / total for _, amount in sizes]
    bars = axes.bar(rows, shares, color=STRONG[phase.side], width=0.8)
    if len(rows) <= 16:
        axes.bar_label(bars, [plain_number(share) for share in shares], fontsize=8.5, color=INK, padding=2)
    axes.set_ylim(0, max(shares) * 1.2)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 100])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set_xlim(0.4, max(*rows, FEWEST_BARS) + 0.6)
    axes.grid(visible=False, axis="x")
    axes.set_title(label(phase_name(phase), at_most=60))
    axes.set_ylabel("share of answers, %" if phase.says_batch_sizes() else "share of batches, %")


_DRAW: dict[PlotName, Callable[[Run], Figure]] = {
    PlotName.LATENCY: draw_latency,
    PlotName.TIME: draw_time,
    PlotName.THROUGHPUT: draw_throughput,
    PlotName.BATCHES: draw_batches,
    PlotName.STAGES: draw_stages,
    PlotName.LOAD: draw_load,
}
_DRAW_SMALL: dict[PlotName, Callable[[Run], Figure]] = {
    PlotName.KEY_LATENCY: draw_key_latency,
    PlotName.KEY_RATES: draw_key_rates,
    PlotName.KEY_QUEUE: draw_key_queue,
    PlotName.KEY_MEMORY: draw_key_memory,
    PlotName.KEY_CURVE: draw_key_curve,
    PlotName.KEY_ANSWERED: draw_key_answered,
    PlotName.KEY_PERCENTILES: draw_key_percentiles,
    PlotName.KEY_REFUSALS: draw_key_refusals,
    PlotName.KEY_LOADS: draw_key_loads,
    PlotName.KEY_FIRST_ANSWERS: draw_key_first_answers,
}


def draw(name: PlotName, run: Run) -> str:
    """The plot as an SVG document, the same for the same run. The run has what it shows."""
    is_small = name in _DRAW_SMALL
    with canvas(is_small=is_small):
        return as_svg((_DRAW_SMALL if is_small else _DRAW)[name](run), salt=name)
