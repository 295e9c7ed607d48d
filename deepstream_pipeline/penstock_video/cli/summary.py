"""The summary at the end of `penstock video run`: sources, rules, events and result files."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import NO_WIDTH_LIMIT, one_line
from penstock_video.analytics.registry import known_kinds
from penstock_video.cli.table import COLOURS, FAILED, cut_in_the_middle, dropped, drops_text, duration, record_of
from penstock_video.interfaces import SourceStatistics
from penstock_video.sources.lifecycle import TAKEN_OUT
from penstock_video.types import DropReason, SourceConfig, SourceState

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class RulesOfSource:
    """events: their number. counts: of the last frame: totals for line-crossing, current numbers for others. Both by
    KIND/RULE and KIND/RULE/LABEL."""

    source_id: str
    events: Mapping[str, int]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RuleRow:
    """at_the_end: None if the rule is no longer in force."""

    rule: str
    events: int
    at_the_end: int | None


def event_total(events: Mapping[str, int]) -> int:
    """The number of events of all rules, without the counts by class."""
    return sum(count for key, count in events.items() if key == _rule_of(key))


def events_by_rule(source: RulesOfSource) -> dict[str, int]:
    """Events by rule and class, also those without an event."""
    return {row.rule: row.events for row in _all_rows(source)}


def rule_rows(source: RulesOfSource) -> list[RuleRow]:
    """Sorted rows; classes of a rule only if there are several."""
    rows = _all_rows(source)
    classes: dict[str, int] = {}
    for row in rows:
        rule = _rule_of(row.rule)
        classes[rule] = classes.get(rule, -1) + 1  # the rule itself is none
    return [row for row in rows if row.rule == _rule_of(row.rule) or classes[_rule_of(row.rule)] > 1]


def rule_table(sources: Iterable[RulesOfSource]) -> Table:
    """A table with a row per source and rule."""
    table = Table(header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("rule", overflow="fold")
    for title in ("events", "at the end"):
        table.add_column(title, no_wrap=True, justify="right")
    for source in sources:
        for row in rule_rows(source):
            names = (Text(one_line(name)) for name in (source.source_id, row.rule))
            table.add_row(*names, str(row.events), UNKNOWN if row.at_the_end is None else str(row.at_the_end))
    return table


def _all_rows(source: RulesOfSource) -> list[RuleRow]:
    """Rows of rules; other counts of the last picture are left out."""
    known = {key for key in source.counts if key.partition("/")[0] in known_kinds()}
    in_force = {_rule_of(key) for key in known}
    keys = sorted(known | set(source.events))
    return [
        RuleRow(key, source.events.get(key, 0), source.counts.get(key, 0) if _rule_of(key) in in_force else None)
        for key in keys
    ]


def _rule_of(key: str) -> str:
    """KIND/RULE of KIND/RULE/LABEL; a rule's name has no "/", a label may."""
    return "/".join(key.split("/", 2)[:2])


_RESULT = re.compile(r"(events|objects)\.jsonl|annotated(-\d+)?\.mp4|poster\.jpg|summary\.html")
_PREVIOUS = ".previous"
_CLOCK_SLACK_S = 2.0  # file systems round


def move_earlier_aside(
    folders: Iterable[Path], sources: Sequence[SourceConfig], note: Callable[[str], None]
) -> tuple[Path, ...]:
    """Renames an earlier run's results to NAME.previous.SUFFIX, so that all others are of this run; returns the new
    paths. sources: each may have a folder; their own files stay. note: called with each that was moved."""
    places = (place for folder in folders for place in (folder, *(folder / one.source_id for one in sources)))
    found = [path for place in places for path in sorted(place.glob("*")) if _RESULT.fullmatch(path.name)]
    found = [path for path in found if not any(is_same_file(path, Path(one.uri)) for one in sources)]
    return tuple(moved for path in found if (moved := _moved_aside(path, note)) is not None)


def written_files(folders: Iterable[Path], since_s: float) -> tuple[tuple[Path, int], ...]:
    """Path and size of the files in the folders that changed in the last so many seconds, sorted."""
    began = time.time() - since_s - _CLOCK_SLACK_S
    found: dict[Path, int] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        with suppress(OSError):
            status = path.stat()
            if path.is_file() and status.st_mtime >= began and _PREVIOUS not in path.suffixes:
                found[path] = status.st_size
    return tuple(found.items())


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both names are of one file, or would be, where it is not there yet."""
    with suppress(OSError):
        return one.samefile(other)
    return one.resolve() == other.resolve()


def write_whole(path: Path, content: bytes) -> None:
    """All of it, or what was there stays. Raises OSError."""
    at = path.resolve()  # a link stays one
    if path.is_relative_to("/dev") or (at.exists() and not at.is_file()):  # who reads it has it open already
        at.write_bytes(content)
        return
    beside = at.with_name(f".{at.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        if at.exists():
            shutil.copymode(at, beside)
        beside.replace(at)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _moved_aside(path: Path, note: Callable[[str], None]) -> Path | None:
    if not _size(path) or not path.is_file():
        return None
    moved = path.with_suffix(f"{_PREVIOUS}{path.suffix}")
    try:
        path.replace(moved)
    except OSError:  # the sink will say what it cannot write
        return None
    note(f"{path} of an earlier run is now {moved.name}")
    return moved


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


MAX_LINES_SHOWN = 20
MANY_FILES = 6  # of one folder, as segments and recordings are: they share one line
STOPPED = "stopped"  # what ran until a person ended it; log lines say so, too
_TITLES = ("source", "state", "decoder", "frames", "inferred", "dropped", "events", "restarts", "fps")
_LEAST_ID_WIDTH = 12
REMOVED = "removed"  # while the others went on


@dataclass(frozen=True, slots=True)
class Summary:
    """How it went.

    removed: sources that went while it ran. files: path and size of what was written. code: the exit code.
    earlier: an earlier run's files under their new names.
    is_stopped: by a person, before its sources were over. sink_failures: a sentence each.
    """

    sources: tuple[SourceStatistics, ...]
    files: tuple[tuple[Path, int], ...]
    seconds: float
    code: int
    removed: tuple[SourceStatistics, ...] = ()
    is_stopped: bool = False
    sink_failures: tuple[str, ...] = ()
    earlier: tuple[Path, ...] = ()

    @property
    def everybody(self) -> tuple[SourceStatistics, ...]:
        """Those that were there at the end, then those that went before."""
        return self.sources + self.removed


def is_failed(source: SourceStatistics) -> bool:
    """Whether the source gave nothing, or not everything, though it was not stopped."""
    has_unanswered = any(source.drops.get(reason) for reason in (DropReason.INFER_FAILED, DropReason.REFUSED))
    return source.state in FAILED or (has_unanswered and not source.inferred)


def say_summary(summary: Summary, console: Console) -> None:
    """Tables: sources, rules, files, and one last line."""
    if summary.everybody:
        _print_sources(summary, console)
    rules = rule_table(map(_rules_of, summary.everybody))
    if rules.row_count:
        console.print(rules)
    lines = file_lines(summary.files)
    for line in lines[:MAX_LINES_SHOWN]:
        console.print(Text(line), soft_wrap=True)
    if (more := len(lines) - MAX_LINES_SHOWN) > 0:
        console.print(Text(f"… and {more} lines more of files"))
    if summary.earlier:
        names = ", ".join(one_line(str(path)) for path in summary.earlier)
        console.print(Text(f"of an earlier run, renamed: {names}"), soft_wrap=True)
    frames = sum(source.frames for source in summary.everybody)
    rate = f", {frames / summary.seconds:.1f} frames/s" if summary.seconds > 0 else ""
    console.print(Text(f"{frames} frames in {duration(summary.seconds)}{rate}"), soft_wrap=True)
    for source in summary.sources:
        if is_failed(source):
            reason = source.reason or "no frame got a usable answer from the engine"
            console.print(Text(one_line(f"{source.source_id} failed: {reason}"), style="red"), soft_wrap=True)
    for sentence in summary.sink_failures:
        console.print(Text(one_line(f"sink {sentence}"), style="red"), soft_wrap=True)


def summary_record(summary: Summary) -> dict[str, object]:
    """For programs."""
    return {
        "kind": "summary",
        "exit_code": summary.code,
        "seconds": round(summary.seconds, 3),
        "sources": [_record(source, summary) for source in summary.everybody],
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


def in_bytes(size: int) -> str:
    """1.2 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the loop returns")


def _print_sources(summary: Summary, console: Console) -> None:
    """In a terminal that is too narrow: ids cut in the middle, the lesser figures left out, drops in words below;
    numbers stay whole."""
    titles: Sequence[str] = _TITLES
    if all(source.decoder in ("", "cpu") for source in summary.everybody):  # what is so everywhere without a card
        titles = tuple(title for title in _TITLES if title != "decoder")
    whole = _source_table(summary, titles)
    if _width(whole, console) <= console.width:
        console.print(whole)
        return
    ways = (titles, [title for title in titles if title not in ("decoder", "inferred", "restarts")])
    tables = [_source_table(summary, way, id_width=_LEAST_ID_WIDTH) for way in ways]
    at = 0 if _width(tables[0], console) <= console.width else 1
    spare = max(console.width - _width(tables[at], console), 0)
    console.print(_source_table(summary, ways[at], id_width=_LEAST_ID_WIDTH + spare))
    for source in summary.everybody:
        if lost := drops_text(source.drops.items()):
            console.print(Text(one_line(f"{source.source_id} dropped {lost}")))


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=NO_WIDTH_LIMIT)).maximum


def _source_table(summary: Summary, titles: Sequence[str], id_width: int = 0) -> Table:
    """id_width: 0 for whole ids and drops in words, in a frame."""
    table = Table(header_style="bold")
    if id_width:
        table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        is_left = title in ("source", "state", "decoder")
        table.add_column(title, justify="left" if is_left else "right", no_wrap=True)
    for source in summary.everybody:
        lost = drops_text(source.drops.items()) or "0"
        name, rate = one_line(source.source_id), rate_of(source)
        cells = {
            "source": Text(cut_in_the_middle(name, id_width) if id_width else name),
            "state": _state_cell(source, is_stopped=summary.is_stopped),
            "decoder": Text(source.decoder or UNKNOWN),
            "frames": Text(str(source.frames)),
            "inferred": Text(str(source.inferred)),
            "dropped": Text(str(dropped(source)) if id_width else lost),
            "events": Text(str(event_total(source.events))),
            "restarts": Text(str(source.restarts)),
            "fps": Text(UNKNOWN if rate is None else f"{rate:.1f}"),
        }
        table.add_row(*(cells[title] for title in titles))
    return table


def _record(source: SourceStatistics, summary: Summary) -> dict[str, object]:
    """As while it ran, but with the rate of its life, and without what the next seconds would have brought."""
    rate = rate_of(source)
    known = record_of(source) | {"state": state_of(source, is_stopped=summary.is_stopped)}
    if known.get("reason") == TAKEN_OUT:
        del known["reason"]
    known.pop("left_s", None)
    return known | {
        "fps": None if rate is None else round(rate, 3),
        "events": event_total(source.events),
        "events_by_rule": events_by_rule(_rules_of(source)),
    }


def _rules_of(source: SourceStatistics) -> RulesOfSource:
    return RulesOfSource(source.source_id, source.events, source.counts)


def rate_of(source: SourceStatistics) -> float | None:
    """Frames a second from its first frame to its last, whatever the others did meanwhile; None of fewer than two."""
    return (source.frames - 1) / source.active_s if source.active_s > 0 and source.frames > 1 else None


def state_of(source: SourceStatistics, *, is_stopped: bool) -> str:
    """The state for display: stopped if a person ended the run, removed if the source went before."""
    if source.reason == TAKEN_OUT:
        return REMOVED
    return STOPPED if is_stopped and source.state is SourceState.RUNNING else source.state.value


def _state_cell(source: SourceStatistics, *, is_stopped: bool) -> Text:
    state = state_of(source, is_stopped=is_stopped)
    return Text(state, style="dim" if state in (STOPPED, REMOVED) else COLOURS.get(source.state, "yellow"))
