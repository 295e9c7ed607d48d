"""The one plot of the report: the 99th percentile over the number of streams, filled where the streams were held."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.bench.gpu.plots import PIXELS_PER_INCH
from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.results import Body, decoders_limit, figures, of_part
from loadtest.report.plots_canvas import canvas, log_latency, new_figure, slo_line, widen

COLORS = ("#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito, which colour-blind people tell apart
NAME = "gpu-video.png"


def write_plot(folder: Path, bodies: Sequence[Body], bound_ms: float) -> str:
    """The file's name; empty where no number of streams was tried."""
    with canvas():
        figure = _figure(bodies, bound_ms)
        if figure is None:
            return ""
        FigureCanvasAgg(figure)
        figure.savefig(folder / NAME, dpi=PIXELS_PER_INCH, metadata={"Software": None})
    return NAME


def _figure(bodies: Sequence[Body], bound_ms: float) -> Figure | None:
    latencies = [float(one["p99_ms"]) for body in of_part(bodies, "streams") for one in _tries(body)]
    if not latencies:
        return None
    figure, (axes,) = new_figure(1, 4.2)
    for color, (name, camera) in zip(COLORS, CAMERAS.items(), strict=True):
        of_camera = of_part(bodies, "streams", name)
        for is_held in (True, False):
            dots = [one for body in of_camera for one in _tries(body) if (not one["complaint"]) is is_held]
            if dots:
                words = f"{camera.words}: {'held' if is_held else 'missed'}"
                face = color if is_held else "none"
                counts, p99 = [one["streams"] for one in dots], [one["p99_ms"] for one in dots]
                axes.scatter(counts, p99, facecolors=face, edgecolors=color, label=words)
        alone = figures(of_camera, "alone_per_s")
        if alone and alone.median:
            axes.axvline(alone.median / FPS, color=color, linestyle="--", linewidth=1)
    if full_at := max((decoders_limit(body) for body in of_part(bodies, "streams")), default=0):
        axes.axvline(full_at, color="#555555", linestyle=":", label=f"the card makes no more decoders: {full_at}")
    axes.set_ylim(*widen(min(*latencies, bound_ms), max(*latencies, bound_ms)))
    axes.set_xlim(0)
    log_latency(axes)
    slo_line(axes, bound_ms)
    axes.set_xlabel("streams of 30 frames/s; dashed: what NVDEC alone decodes")
    axes.set_ylabel("p99 from capture to result, ms")
    axes.set_title("Every frame decoded, inferred, tracked")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def _tries(body: Body) -> list[Body]:
    """Those that had answers."""
    return [one for one in body["found"]["tries"] if one.get("p99_ms", 0.0) > 0]
