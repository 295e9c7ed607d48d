"""A run as a document: what HTML and Markdown both say, in the order in which a person asks."""

from loadtest.report.curve_sections import latency_section, throughput_section, time_section
from loadtest.report.document import Absence, Document, Section
from loadtest.report.figures_section import figures_section
from loadtest.report.headline import headline, outcome
from loadtest.report.rounds import is_knee_search
from loadtest.report.server_sections import batch_section, load_section, reload_section, stage_section
from loadtest.report.trust_sections import condition_section, error_section, generator_section, witness_section
from loadtest.report.verdict_section import measurement_section, verdict_section
from loadtest.report.wording import one_line, sentence
from loadtest.results import Run


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
