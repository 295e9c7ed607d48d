"""A run's plots as SVG. Importing this imports matplotlib (about a second): do so only where a report is written."""

from collections.abc import Callable

from matplotlib.figure import Figure

from loadtest.report.document import PlotName
from loadtest.report.plots_canvas import as_svg, canvas
from loadtest.report.plots_latency import draw_latency, draw_throughput, draw_time
from loadtest.report.plots_server import draw_batches, draw_load, draw_stages
from loadtest.results import Run

_DRAW: dict[PlotName, Callable[[Run], Figure]] = {
    PlotName.LATENCY: draw_latency,
    PlotName.TIME: draw_time,
    PlotName.THROUGHPUT: draw_throughput,
    PlotName.BATCHES: draw_batches,
    PlotName.STAGES: draw_stages,
    PlotName.LOAD: draw_load,
}


def draw(name: PlotName, run: Run) -> str:
    """The plot as an SVG document, the same for the same run. The run has what it shows."""
    with canvas():
        return as_svg(_DRAW[name](run), salt=name)
