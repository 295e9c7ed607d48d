"""A run as one HTML file without external resources, or as Markdown."""

import base64
import re
from pathlib import Path

import jinja2

from penstock_load.report.comparison import LastRun, comparison_section
from penstock_load.report.curves import latency_section, throughput_section, time_section
from penstock_load.report.document import Absence, Cell, Document, PlotName, Section, Table, Tone, one_line, sentence
from penstock_load.report.figures import figures_section, measurement_section, neighbours, verdict_section
from penstock_load.report.opening import headline, key_charts, key_figures, outcome, subject, terms
from penstock_load.report.rounds import is_knee_search
from penstock_load.report.server_sections import batch_section, load_section, reload_section, stage_section
from penstock_load.report.trust_sections import condition_section, error_section, generator_section, witness_section
from penstock_load.results import Run


def compose(run: Run, last: LastRun | None = None) -> Document:
    """The content of a run's report, and reasons for missing sections. last: the run to compare with."""
    found = _in_order(run)
    head, figures, charts = headline(run), key_figures(run), key_charts(run)
    shown = [head, *(f"{one.name} {one.cell.detail}" for one in figures), *(one.finding for one in charts)]
    return Document(
        title=f"{one_line(run.scenario, at_most=80)} · load test",
        headline=head,
        tone=outcome(run),
        note=sentence(neighbours(run)),
        terms=terms(shown),
        subject=subject(run),
        about=sentence(run.about),
        complaints=tuple(sentence(complaint) for complaint in run.complaints),
        figures=figures,
        charts=charts,
        comparison=comparison_section(last),
        sections=tuple(part for part in found if isinstance(part, Section)),
        absences=tuple(part for part in found if isinstance(part, Absence)),
    )


def _in_order(run: Run) -> list[Section | Absence | None]:
    throughput = throughput_section(run)
    is_search = is_knee_search(run)
    return [
        verdict_section(run),
        *([throughput] if is_search else []),
        figures_section(run),
        reload_section(run),
        latency_section(run),
        time_section(run),
        *([] if is_search else [throughput]),
        batch_section(run),
        stage_section(run),
        load_section(run),
        witness_section(run),
        generator_section(run),
        error_section(run),
        measurement_section(run),
        condition_section(run),
    ]


TEMPLATE = "report.html.jinja"


def write_html(run: Run, path: Path, last: LastRun | None = None) -> None:
    """The report at that path, for a browser, paper or a phone. Raises OSError where it cannot be written."""
    path.write_text(render_html(run, last), encoding="utf-8")


def render_html(run: Run, last: LastRun | None = None) -> str:
    """The report's text."""
    document = compose(run, last)
    names = [*(chart.plot for chart in document.charts), *(one.plot for one in document.sections if one.plot)]
    plots = {name: _plot_uri(name, run) for name in names}
    return environment().get_template(TEMPLATE).render(document=document, plots=plots)


def _plot_uri(name: PlotName, run: Run) -> str:
    """As an image of its own, so that no id or script in it can reach the page."""
    from penstock_load.report import plots  # matplotlib takes a second: only those wait who write a report

    return f"data:image/svg+xml;base64,{base64.b64encode(plots.draw(name, run).encode()).decode()}"


def environment() -> jinja2.Environment:
    """Templates of the reports: text is escaped, an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("penstock_load.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"([\\`*\[\]|~])")


def write_markdown(run: Run, path: Path, last: LastRun | None = None) -> None:
    """The report at that path. Raises OSError where it cannot be written."""
    path.write_text(render_markdown(run, last), encoding="utf-8")


def render_markdown(run: Run, last: LastRun | None = None) -> str:
    """The report's text."""
    document = compose(run, last)
    blocks = [f"# {escape(document.title)}", *_complaints(document), f"**{escape(document.headline)}**"]
    blocks += [escape(text) for text in (document.note, document.subject, document.about) if text]
    blocks += [_key_figures(document)] if document.figures else []
    if document.terms:
        blocks.append("; ".join(f"*{term}*: {meaning}" for term, meaning in document.terms) + ".")
    blocks += ["\n".join(f"- {escape(one.title)}: {escape(one.finding)}" for one in document.charts)]
    if isinstance(document.comparison, Section):
        blocks += _section(document.comparison)
    else:
        blocks += [f"{escape(document.comparison.title)}: {escape(document.comparison.why)}"]
    for section in document.sections:
        blocks += _section(section) if section.sentences or section.tables else []
    if absences := [*document.absences, *_plots(document)]:
        blocks.append("## What is not in this report, and why")
        blocks.append("\n".join(f"- {escape(part.title)}: {escape(part.why)}" for part in absences))
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """The text as it stands, whatever signs are in it: none of them marks anything up."""
    marked = "".join(_ENTITIES.get(sign, sign) for sign in text)
    return _SPECIAL.sub(r"\\\1", marked)


def _complaints(document: Document) -> list[str]:
    if not document.complaints:
        return []
    lines = [f"> - {escape(complaint)}" for complaint in document.complaints]
    return ["\n".join(["> **This run is invalid and cannot pass:**", ">", *lines])]


def _plots(document: Document) -> list[Absence]:
    """The sections that have only a plot, which Markdown cannot show."""
    only_plots = [one for one in document.sections if one.plot is not None and not one.sentences and not one.tables]
    return [Absence(one.title, " ".join(("This is a plot in report.html.", *one.remarks))) for one in only_plots]


def _key_figures(document: Document) -> str:
    head = _row([escape(figure.name) for figure in document.figures])
    cells = _row([_cell(figure.cell) for figure in document.figures])
    return "\n".join((head, _row(["--:" for _ in document.figures]), cells))


def _section(section: Section) -> list[str]:
    blocks = [f"## {escape(section.title)}", *map(escape, section.sentences)]
    blocks += [_table(table) for table in section.tables]
    return [*blocks, *map(escape, section.remarks)]


def _table(table: Table) -> str:
    rule = [":--" if index in table.texts else "--:" for index in range(len(table.head))]
    lines = [_row([escape(word) for word in table.head]), _row(rule)]
    lines += [_row([_cell(cell) for cell in row]) for row in table.rows]
    if table.is_folded:
        return "\n".join((f"<details><summary>{escape(table.caption)}</summary>", "", *lines, "", "</details>"))
    caption = f"**{escape(table.caption)}**\n\n" if table.caption else ""
    return caption + "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.tone in (Tone.GOOD, Tone.BAD):
        text = f"**{text}**"
    return f"{text} ({escape(cell.detail)})" if cell.detail else text
