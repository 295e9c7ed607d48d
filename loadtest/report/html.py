"""A run as one HTML file that fetches nothing: its plots are in it."""

import base64
from pathlib import Path

import jinja2

from loadtest.report.contents import compose
from loadtest.report.document import PlotName
from loadtest.results import Run

TEMPLATE = "report.html.jinja"


def write_html(run: Run, path: Path) -> None:
    """The report at that path, for a browser, paper or a phone. Raises OSError where it cannot be written."""
    path.write_text(render_html(run), encoding="utf-8")


def render_html(run: Run) -> str:
    """The report's text."""
    document = compose(run)
    plots = {section.plot: _plot_uri(section.plot, run) for section in document.sections if section.plot}
    return _environment().get_template(TEMPLATE).render(document=document, plots=plots)


def _plot_uri(name: PlotName, run: Run) -> str:
    """As an image of its own, so that no id or script in it can reach the page."""
    from loadtest.report import plots  # matplotlib takes a second: only those wait who write a report

    return f"data:image/svg+xml;base64,{base64.b64encode(plots.draw(name, run).encode()).decode()}"


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("loadtest.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
