"""The plots of what the server says of itself: batch sizes, stages, load."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loadtest.report.figures_section import phase_name
from loadtest.report.plots_canvas import BESIDE, GREY, INK, STRONG, label, new_figure
from loadtest.report.plots_latency import points_of, shade_phases
from loadtest.report.rounds import PhaseRounds, drawn_phases, split_phases
from loadtest.report.timeline import Series, series_of, stretches
from loadtest.report.wording import plain_number
from loadtest.results import Run, Side

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
    told = split_phases(run)
    figure, (axes,) = new_figure(1, 1.3 + 0.5 * len(told))
    colours = _colours(list(told[0][1]))
    longest = max(sum(stages.values()) for _, stages in told) or 1.0
    for row, (_, stages) in enumerate(told):
        _stack(axes, row, list(stages.items()), colours, longest)
    axes.set_yticks(range(len(told)), [label(phase_name(phase)) for phase, _ in told])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("mean time of an answer since it was sent, ms")
    for name, colour in colours.items():
        axes.bar(0, 0, color=colour, label=label(name))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(7, len(colours)), handlelength=1)
    return figure


def draw_load(run: Run) -> Figure:
    """Cores, shares and memory over time, each only where somebody read it."""
    series = [(side, series_of(run, side)) for side in Side if any(result.side is side for result in run.phases)]
    panels = [(title, told) for title, lines in _PANELS if (told := _readings(lines, series))]
    figure, axes = new_figure(len(panels), 0.7 + 1.9 * len(panels), is_shared=True)
    for one, (title, told) in zip(axes, panels, strict=True):
        for name, colour, at_s, values in told:
            one.plot(at_s, values, color=colour, linewidth=1.5, label=name, **points_of(at_s))
        one.set_ylim(0, max(one.get_ylim()[1] * 1.15, 0.01))
        one.set_ylabel(title if len(told) > 1 or "share" not in title else f"{told[0][0]}, %")
        if len(told) > 1:
            one.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    shade_phases(axes, stretches(run))
    return figure


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    colours: dict[Side, str]
    pick: Callable[[Series], list[float]]
    scale: float = 1.0


_PANELS: tuple[tuple[str, tuple[_Line, ...]], ...] = (
    ("server CPU, cores", (_Line("server", STRONG, lambda series: series.server_cpu),)),
    (
        "busy share, %",
        (
            _Line("machine CPU", _GREYS, lambda series: series.machine_cpu, 100.0),
            _Line("GPU runs a kernel (util)", _GREENS, lambda series: series.gpu, 100.0),
            _Line("GPU's SMs with work", _PURPLES, lambda series: series.gpu_sm, 100.0),
        ),
    ),
    ("server memory, MiB", (_Line("server", STRONG, lambda series: series.rss_mib),)),
)


def _readings(
    lines: Sequence[_Line], series: Sequence[tuple[Side, Series]]
) -> list[tuple[str, str, list[float], list[float]]]:
    """(name, colour, times, values) of every line of a panel that somebody read."""
    told = []
    for side, one in series:
        for line in lines:
            values = [line.scale * value for value in line.pick(one)]
            if not all(map(math.isnan, values)):
                name = line.name if side is Side.TARGET else f"{line.name}, beside"
                told.append((name, line.colours[side], one.at_s, values))
    return told


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour a stage, in the order of a request's way; stages that only this server has get others."""
    told = dict.fromkeys(names)
    more = [name for name in told if name not in _STAGE_COLOURS]
    others = {name: _MORE_COLOURS[place % len(_MORE_COLOURS)] for place, name in enumerate(more)}
    return {name: _STAGE_COLOURS.get(name) or others[name] for name in told}


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
