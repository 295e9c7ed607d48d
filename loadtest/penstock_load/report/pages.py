"""A run as one HTML file without external resources, or as Markdown."""

import base64
import re
from collections import Counter
from pathlib import Path

import jinja2

from penstock_load.report.curves import knee_of, latency_section, throughput_section, time_section
from penstock_load.report.document import (
    Absence,
    Cell,
    Document,
    PlotName,
    Section,
    Table,
    Tone,
    count,
    duration,
    number,
    one_line,
    plain_number,
    sentence,
    times,
)
from penstock_load.report.figures import figures_section, measurement_section, verdict_section
from penstock_load.report.rounds import PhaseRounds, is_knee_search, key_phase, spread_of
from penstock_load.report.server_sections import batch_section, load_section, reload_section, stage_section
from penstock_load.report.trust_sections import condition_section, error_section, generator_section, witness_section
from penstock_load.results import Run, State

_SUBJECT_CHARACTERS = 80


def outcome(run: Run) -> Tone:
    """GOOD: at least one target is met and none missed; BAD: one is missed, or the run counts for nothing."""
    states = [verdict.state for verdict in run.verdicts]
    if run.complaints or State.FAIL in states:
        return Tone.BAD
    return Tone.GOOD if State.PASS in states else Tone.PLAIN


def headline(run: Run) -> str:
    """One sentence: the verdict, what was tested, and the figures that matter most."""
    is_judged = any(verdict.state in (State.PASS, State.FAIL) for verdict in run.verdicts)
    if is_knee_search(run) and not (is_judged or run.complaints):
        return f"KNEE: {_knee(run)}; {_subject(run)}"
    return f"{_verdict(run)}; {', '.join([_subject(run), *_figures(run)])}"


def _verdict(run: Run) -> str:
    states = Counter(verdict.state for verdict in run.verdicts)
    if run.complaints:
        return f"FAIL: nothing passes ({times(len(run.complaints), 'complaint')})"
    judged = states[State.PASS] + states[State.FAIL]
    if states[State.FAIL]:
        return f"FAIL: {count(states[State.FAIL])} of {_rows(judged)} not met{_unjudged(states)}"
    if states[State.PASS]:
        return f"PASS: {count(states[State.PASS])} of {_rows(judged)}{_unjudged(states)}"
    if run.verdicts:
        return f"NO VERDICT: no target could be judged{_unjudged(states)}"
    return "NO VERDICT: no target speaks of this scenario"


def _rows(judged: int) -> str:
    return times(judged, "row")


def _unjudged(states: Counter[State]) -> str:
    counts = [f"{states[state]} {state.value}" for state in (State.NOT_COMPARABLE, State.NOT_MEASURED) if states[state]]
    return f" ({', '.join(counts)})" if counts else ""


def _subject(run: Run) -> str:
    server = f" ({one_line(run.server, at_most=_SUBJECT_CHARACTERS)})" if run.server else ""
    scenario, target = (one_line(text, at_most=_SUBJECT_CHARACTERS) for text in (run.scenario, run.target_url))
    return f"{scenario} against {target}{server}"


def _figures(run: Run) -> list[str]:
    phase = key_phase(run)
    if is_knee_search(run):
        return [_knee(run)]
    if phase is None:
        return _reload_figures(run)
    return [_rate(phase), _p99(phase)]


def _knee(run: Run) -> str:
    knee, slo = knee_of(run), f"p99 within {plain_number(run.slo_p99_ms)} ms"
    return f"no rate that was tried keeps {slo}" if knee is None else f"{plain_number(knee)} requests/s keep {slo}"


def _rate(phase: PhaseRounds) -> str:
    if phase.first.is_open_loop:
        return f"{plain_number(phase.spread(lambda result: result.offered_per_s).median)} requests/s"
    return f"{plain_number(phase.spread(lambda result: result.ok_per_s).median)} answers/s"


def _p99(phase: PhaseRounds) -> str:
    p99 = phase.waited_spread(lambda result: result.all.latency.p99)
    return f"p99 {_latency(p99.median)}" if p99 else "nothing was answered"


def _latency(ms: float) -> str:
    return f"{number(ms)} ms" if ms < 10_000 else duration(ms / 1e3)


def _reload_figures(run: Run) -> list[str]:
    if held := next((one for one in run.measurements if one.measure == "streams_held"), None):
        return [f"{plain_number(held.spread.median)} streams held"]
    if not run.reloads:
        return ["nothing was measured"]
    load_ms = spread_of([reload.load_ms for reload in run.reloads]).median
    first_ms = spread_of([reload.first_answer_ms for reload in run.reloads]).median
    return [times(len(run.reloads), "reload"), f"load {_latency(load_ms)}", f"first answer {_latency(first_ms)}"]


def compose(run: Run) -> Document:
    """Everything that a report of the run says; of what it cannot say, why."""
    found = _in_order(run)
    return Document(
        title=f"{one_line(run.scenario, at_most=80)} · load test",
        headline=headline(run),
        tone=outcome(run),
        about=sentence(run.about),
        complaints=tuple(sentence(complaint) for complaint in run.complaints),
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
    from penstock_load.report import plots  # matplotlib takes a second: only those wait who write a report

    return f"data:image/svg+xml;base64,{base64.b64encode(plots.draw(name, run).encode()).decode()}"


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("penstock_load.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"([\\`*\[\]|~])")


def write_markdown(run: Run, path: Path) -> None:
    """The report at that path. Raises OSError where it cannot be written."""
    path.write_text(render_markdown(run), encoding="utf-8")


def render_markdown(run: Run) -> str:
    """The report's text."""
    document = compose(run)
    blocks = [f"# {escape(document.title)}", *_complaints(document), f"**{escape(document.headline)}**"]
    blocks += [escape(document.about)] if document.about else []
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
    return ["\n".join(["> **Nothing in this run can pass:**", ">", *lines])]


def _plots(document: Document) -> list[Absence]:
    """The sections that have only a plot, which Markdown cannot show."""
    only_plots = [one for one in document.sections if one.plot is not None and not one.sentences and not one.tables]
    return [Absence(one.title, " ".join(("This is a plot in report.html.", *one.remarks))) for one in only_plots]


def _section(section: Section) -> list[str]:
    blocks = [f"## {escape(section.title)}", *map(escape, section.sentences)]
    blocks += [_table(table) for table in section.tables]
    return [*blocks, *map(escape, section.remarks)]


def _table(table: Table) -> str:
    rule = [":--" if index in table.texts else "--:" for index in range(len(table.head))]
    lines = [_row([escape(word) for word in table.head]), _row(rule)]
    lines += [_row([_cell(cell) for cell in row]) for row in table.rows]
    caption = f"**{escape(table.caption)}**\n\n" if table.caption else ""
    return caption + "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.tone in (Tone.GOOD, Tone.BAD):
        text = f"**{text}**"
    return f"{text} ({escape(cell.detail)})" if cell.detail else text
