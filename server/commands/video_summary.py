"""What `penstock video run` leaves on standard output at its end: per source what became of it, and the files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepstream_pipeline.types import AnalyticsKind, SourceState, SourceStatistics
from server.commands.terminal import one_line
from server.commands.video_results import EventCounts
from server.commands.video_rows import COLOURS, FAILED, drops_in_words, duration, record_of

MAX_LINES_SHOWN = 20
MANY_FILES = 6  # of one folder, as segments and recordings are: they are told in one line
STOPPED = "stopped"  # what ran until a person ended it
RULE_KINDS = {kind.value for kind in AnalyticsKind}


@dataclass(frozen=True, slots=True)
class Summary:
    """How it went.

    files: path and size of what was written. events: None where nobody kept them. code: the exit code. is_stopped: by a
    person, before its sources were over. sink_failures: a sentence each.
    """

    sources: tuple[SourceStatistics, ...]
    files: tuple[tuple[Path, int], ...]
    events: EventCounts | None
    seconds: float
    code: int
    is_stopped: bool = False
    sink_failures: tuple[str, ...] = ()


def is_failed(source: SourceStatistics) -> bool:
    """Whether nothing, or not all, came of the source though nobody stopped it."""
    got_no_answer = bool(source.frames and not source.inferred and source.drops.get("infer_failed"))
    return source.state in FAILED or got_no_answer


def say_summary(summary: Summary, console: Console) -> None:
    """Tables: sources, rules, files, and one last line."""
    if summary.sources:
        console.print(_source_table(summary))
    rules = rule_table({source.source_id: source.counts for source in summary.sources}, summary.events)
    if rules.row_count:
        console.print(rules)
    lines = file_lines(summary.files)
    for line in lines[:MAX_LINES_SHOWN]:
        console.print(Text(line), soft_wrap=True)
    if (more := len(lines) - MAX_LINES_SHOWN) > 0:
        console.print(Text(f"… and {more} lines more of files"))
    frames = sum(source.frames for source in summary.sources)
    rate = f", {frames / summary.seconds:.1f} frames/s" if summary.seconds > 0 else ""
    console.print(Text(f"{frames} frames in {duration(summary.seconds)}{rate}"), soft_wrap=True)
    for source in summary.sources:
        if is_failed(source):
            reason = source.reason or "no frame got an answer from the engine"
            console.print(Text(one_line(f"{source.source_id} failed: {reason}"), style="red"), soft_wrap=True)
    for sentence in summary.sink_failures:
        console.print(Text(one_line(f"sink {sentence}"), style="red"), soft_wrap=True)


def summary_record(summary: Summary) -> dict[str, object]:
    """For programs."""
    return {
        "kind": "summary",
        "exit_code": summary.code,
        "seconds": round(summary.seconds, 3),
        "sources": [_record(source, summary) for source in summary.sources],
        "sink_failures": list(summary.sink_failures),
        "files": [{"path": str(path), "size_bytes": size} for path, size in summary.files],
    }


def file_lines(files: Sequence[tuple[Path, int]]) -> list[str]:
    """A line a file; one for all of a folder that has many."""
    of_folder: dict[Path, list[int]] = {}
    for path, size_bytes in files:
        of_folder.setdefault(path.parent, []).append(size_bytes)
    many = {folder: sizes for folder, sizes in of_folder.items() if len(sizes) > MANY_FILES}
    lines = [f"{one_line(str(path))}  {in_bytes(size)}" for path, size in files if path.parent not in many]
    return lines + [
        f"{one_line(str(folder))}/  {len(sizes)} files, {in_bytes(sum(sizes))}" for folder, sizes in many.items()
    ]


def rule_table(counts: Mapping[str, Mapping[str, int]], events: EventCounts | None) -> Table:
    """counts: by source, those of its last frame: of line-crossing all that there were, of others who is there now."""
    table = Table("source", "rule", "events", "at the end", header_style="bold")
    for source_id, of_source in counts.items():
        for rule, count in rule_counts(of_source):
            numbers = (Text(text, justify="right") for text in (_number_of(events, source_id, rule), str(count)))
            table.add_row(Text(one_line(source_id)), Text(one_line(rule)), *numbers)
    return table


def rule_counts(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Those of rules, sorted; what merely stood in the last picture is no result."""
    return sorted((rule, count) for rule, count in counts.items() if rule.partition("/")[0] in RULE_KINDS)


def in_bytes(size: int) -> str:
    """1.2 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the loop returns")


def _source_table(summary: Summary) -> Table:
    table = Table(header_style="bold")
    for title in ("source", "state", "frames", "inferred", "dropped", "events", "restarts", "fps"):
        table.add_column(title, justify="left" if title in ("source", "state", "dropped") else "right")
    for source in summary.sources:
        table.add_row(
            Text(one_line(source.source_id)),
            _state_cell(source, is_stopped=summary.is_stopped),
            str(source.frames),
            str(source.inferred),
            Text(drops_in_words(source.drops.items()) or "0"),
            _number_of(summary.events, source.source_id),
            str(source.restarts),
            f"{_rate(source, summary):.1f}",
        )
    return table


def _record(source: SourceStatistics, summary: Summary) -> dict[str, object]:
    """As while it ran, but with the rate of the whole run, and without what the next seconds would have brought."""
    state = STOPPED if summary.is_stopped and source.state is SourceState.RUNNING else source.state.value
    known = record_of(source) | {"state": state, "fps": round(_rate(source, summary), 3)}
    known.pop("left_s", None)
    return known | {"events": None if summary.events is None else summary.events.get((source.source_id, ""), 0)}


def _rate(source: SourceStatistics, summary: Summary) -> float:
    return source.frames / summary.seconds if summary.seconds > 0 else 0.0


def _state_cell(source: SourceStatistics, *, is_stopped: bool) -> Text:
    if is_stopped and source.state is SourceState.RUNNING:
        return Text(STOPPED, style="dim")
    return Text(source.state.value, style=COLOURS.get(source.state, "yellow"))


def _number_of(events: EventCounts | None, source_id: str, key: str = "") -> str:
    return "–" if events is None else str(events.get((source_id, key), 0))
