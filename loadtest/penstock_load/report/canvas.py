"""What all plots share: size, colours that colour-blind people tell apart, axes, bands and labels."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock_load.report.document import one_line, plain_number
from penstock_load.results import Side

WIDTH_IN = 9.0
TARGET, BESIDE = "#0072B2", "#D55E00"
PALE = {Side.TARGET: "#7FB8D8", Side.BESIDE: "#EAAE7F"}
STRONG = {Side.TARGET: TARGET, Side.BESIDE: BESIDE}
GOOD, BAD, INK, GREY, BAND = "#007A5A", "#B3261E", "#222222", "#767676", "#EEF1F4"
LABEL_CHARACTERS = 26
_MARGIN = 1.25
_LEAST_RATIO = 7.0
_STYLE: dict[Any, Any] = {  # matplotlib types its keys as one long Literal
    "svg.hashsalt": "penstock",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.unicode_minus": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E2E5E9",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": True,
}


_SMALL: dict[Any, Any] = {"font.size": 8.5, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8}
SMALL_IN = (3.7, 2.5)  # width, height: three beside each other, or one on a phone


@contextmanager
def canvas(*, is_small: bool = False) -> Iterator[None]:
    """matplotlib with our style alone, as long as the block lasts."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | (_SMALL if is_small else {}))
        yield


def as_svg(figure: Figure, *, salt: str) -> str:
    """The figure as one <svg> element, without dates; salt makes its ids its own."""
    matplotlib.rcParams["svg.hashsalt"] = salt
    out = io.StringIO()
    FigureCanvasSVG(figure)
    metadata = {"Date": None, "Creator": None, "Type": None, "Format": None}
    figure.savefig(out, format="svg", transparent=True, metadata=metadata)  # the page's background shows
    text = out.getvalue()
    return text[text.index("<svg") :]


def new_figure(rows: int, height_in: float, *, columns: int = 1, is_shared: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=is_shared)
    return figure, [axes for row in grid for axes in row]


def small_figure() -> tuple[Figure, Axes]:
    """A figure of one small chart."""
    figure = Figure(figsize=SMALL_IN, layout="constrained")
    return figure, figure.subplots()


def label(text: str, *, at_most: int = LABEL_CHARACTERS) -> str:
    """A foreign text that the font can draw, short enough to stand beside a line."""
    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(sign if ord(sign) in known else "?" for sign in one_line(text, at_most=at_most))


def log_latency(axes: Axes, *, is_x: bool = False) -> None:
    """A logarithmic axis of latency with plain numbers in milliseconds."""
    axis = axes.xaxis if is_x else axes.yaxis
    (axes.set_xscale if is_x else axes.set_yscale)("log")
    low, high = axes.get_xlim() if is_x else axes.get_ylim()
    decades = math.log10(high / low) if low > 0 else 1
    steps = (1.0, 2.0, 5.0) if decades <= 3 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=steps, numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axis.set_minor_formatter(NullFormatter())


def widen(low: float, high: float) -> tuple[float, float]:
    """Limits for a logarithmic axis around what is shown, so far apart that two of 1, 2, 5, 10 lie within."""
    low, high = low / _MARGIN, high * _MARGIN
    if high / low < _LEAST_RATIO:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(_LEAST_RATIO), middle * math.sqrt(_LEAST_RATIO)
    return low, high


def slo_line(axes: Axes, slo_ms: float, *, is_x: bool = False) -> None:
    """The SLO as a labelled dashed line, where it lies within the axis; call it when the limits stand."""
    low, high = axes.get_xlim() if is_x else axes.get_ylim()
    if not low <= slo_ms <= high:
        return
    text = f"SLO {plain_number(slo_ms)} ms"
    if is_x:
        axes.axvline(slo_ms, color=INK, linestyle="--", linewidth=1)
        axes.annotate(
            text,
            (slo_ms, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=INK,
            rotation=90,
        )
        return
    axes.axhline(slo_ms, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        text,
        (0, slo_ms),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
        zorder=1.6,
    )
