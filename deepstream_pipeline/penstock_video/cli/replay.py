"""`penstock video replay`: evaluates analytics rules on recorded tracks, without pictures or a model."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer
from rich.text import Text

from penstock.cli.terminal import fail, one_line, print_failure, stoppable, table_console
from penstock_video.analytics.rules import Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.cli.progress import refuse_settings, write_json
from penstock_video.cli.summary import RulesOfSource, events_by_rule, is_same_file, rule_table, write_whole
from penstock_video.errors import PipelineError, RecordingUnreadable, RuleRefused
from penstock_video.settings.document import InvalidSettings, close_to
from penstock_video.settings.loader import read_rules
from penstock_video.settings.section import Plain
from penstock_video.settings.sources import names_classes, rules_of
from penstock_video.sinks.schemas import EventLine, event_lines, read_objects_line
from penstock_video.types import AnalyticsEvent, FrameAnalytics, FrameResult, counter_name, event_keys

_MOST_SHOWN = 120  # characters of a bad line
_MOST_CLASSES = 100_000


@dataclass(slots=True)
class _ReplayedSource:
    analytics: SourceAnalytics
    counts: Mapping[str, int]
    frame_num: int = -1


class Replay:
    """Replays one recording line by line, in constant memory.

    rules_of: the rules of a source, called once for each new source. frames: read so far. cut_line: the number of an
    incomplete last line, which is skipped.
    """

    def __init__(self, rules_of: Callable[[str], Rules]) -> None:
        self._rules_of = rules_of
        self._sources: dict[str, _ReplayedSource] = {}
        self.frames = 0
        self.cut_line: int | None = None

    @property
    def counts(self) -> dict[str, Mapping[str, int]]:
        """FrameAnalytics.counts of each source's last frame."""
        return {source_id: source.counts for source_id, source in self._sources.items()}

    def events(self, lines: Iterable[bytes | str]) -> Iterator[AnalyticsEvent]:
        """Events in the order of the lines. Raises RecordingUnreadable at a line that is not of objects.jsonl, except
        an incomplete last one, and if a source's frames are not in order."""
        for number, result in _results(lines, self._note_cut):
            frame = result.frame
            source = self._source(frame.source_id)
            if frame.frame_num <= source.frame_num:
                raise RecordingUnreadable(
                    f"line {number}: frame {frame.frame_num} of source {frame.source_id!r} after its frame "
                    f"{source.frame_num}; the lines of a source come in the order of its frames, of one run"
                )
            source.frame_num = frame.frame_num
            source.analytics.labels = _joined(source.analytics.labels, result.labels)
            said = source.analytics.observe(frame, replace(result.tracks, is_estimate=not result.is_inferred))
            source.counts = said.counts
            self.frames += 1
            yield from said.events

    def _note_cut(self, number: int) -> None:
        self.cut_line = number

    def _source(self, source_id: str) -> _ReplayedSource:
        if source_id not in self._sources:
            self._sources[source_id] = _ReplayedSource(SourceAnalytics(self._rules_of(source_id), ()), {})
        return self._sources[source_id]


def labels_in(lines: Iterable[bytes | str]) -> tuple[str, ...]:
    """Class labels by class_id in a recording, for rules that name classes. Reads all of it.

    Raises RecordingUnreadable.
    """
    labels: tuple[str, ...] = ()
    for _, result in _results(lines):
        labels = _joined(labels, result.labels)
    return labels


def labels_with(section: object, labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labels for reading the section's rules, names in it that are not in `labels`).

    A recording has only the classes that it shows; a model may know more. Missing names get numbers after all known
    ones.
    """
    named = [one for value in _class_ids(section) for one in _each(value)]
    most = max((one for one in named if isinstance(one, int)), default=-1)
    known = (*labels, *(f"class {number}" for number in range(len(labels), min(most, _MOST_CLASSES) + 1)))
    missing = tuple(dict.fromkeys(one for one in named if isinstance(one, str) and one not in known))
    return (*known, *missing), missing


def _class_ids(content: object) -> Iterator[object]:
    if isinstance(content, list):
        for item in content:
            yield from _class_ids(item)
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from (iter([value]) if key == "class-id" else _class_ids(value))


def _each(class_id: object) -> list[object]:
    """Each of a number, a label, a list of them, or numbers as "1;2" (never labels)."""
    if isinstance(class_id, str) and ";" in class_id:
        return [int(part) for part in class_id.split(";") if part.strip().isdecimal()]
    return class_id if isinstance(class_id, list) else [class_id]


def _results(
    lines: Iterable[bytes | str], on_cut: Callable[[int], None] = lambda number: None
) -> Iterator[tuple[int, FrameResult]]:
    """on_cut: called with the number of an incomplete last line."""
    left = iter(lines)
    for number, line in enumerate(left, 1):
        encoded = line.encode() if isinstance(line, str) else line
        if not encoded.strip():
            continue
        try:
            yield number, read_objects_line(encoded)
        except (ValueError, OverflowError) as error:
            if not encoded.endswith(b"\n") and next(left, None) is None:
                on_cut(number)
                return
            shown = encoded[:_MOST_SHOWN].decode("utf-8", "replace").rstrip()
            raise RecordingUnreadable(
                f'line {number} is no line of objects.jsonl in the schema "full" ({error}): {shown}'
            ) from error


def _joined(known: tuple[str, ...], seen: tuple[str, ...]) -> tuple[str, ...]:
    """Merges both. A class that only one names keeps that name; an unnamed class has its number."""
    if seen == known[: len(seen)]:
        return known
    longest = range(max(len(known), len(seen)))
    return tuple(_name(class_id, known, seen) for class_id in longest)


def _name(class_id: int, known: tuple[str, ...], seen: tuple[str, ...]) -> str:
    number = f"class {class_id}"
    names = (labels[class_id] for labels in (seen, known) if class_id < len(labels))
    return next((name for name in names if name != number), number)


MAX_DIFFERENCES_SHOWN = 10


def replay(
    objects: Annotated[Path, typer.Argument(metavar="OBJECTS.jsonl", dir_okay=False, help="what a run wrote")],
    rules: Annotated[Path | None, typer.Option("--rules", dir_okay=False, help="a YAML file of rules")] = None,
    line: Annotated[list[str] | None, typer.Option("--line", metavar="NAME=x1,y1,x2,y2", help="a line more")] = None,
    zone: Annotated[list[str] | None, typer.Option("--zone", metavar="NAME=x1,y1,x2,y2,…", help="a zone more")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="EVENTS.jsonl", help="write the events here")] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="EVENTS.jsonl", help="compare with these; exit code 1 if not equal"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object, and nothing else")] = False,
) -> None:
    """Evaluates rules on the tracks of an objects.jsonl, and prints events and counts.

    The same rules give the same events as the run that wrote the file.
    """
    if rules is None and not line and not zone:
        fail("there are no rules: give --rules FILE, --line NAME=x1,y1,x2,y2, or --zone")
    if out is not None:
        _refuse_overwriting(out, {"the recording": objects, "--against": against, "--rules": rules})
    try:
        with stoppable("nothing is left to clear away"):
            theirs = _events_of(against) if against is not None else None
            played = _play(objects, read_rules(rules, tuple(line or ()), tuple(zone or ())))
            if out is not None:
                write_whole(out, b"".join(line + b"\n" for line in played.lines))
            comparison = _compared(played.lines, theirs) if theirs is not None else None
    except InvalidSettings as refused:
        refuse_settings(refused, as_json=as_json)
    except RuleRefused as error:
        fail(error.message)
    except PipelineError as error:
        fail(f"{objects}: {error.message}", code=1)
    except OSError as error:
        fail(f"{error.filename or objects}: {error.strerror or error}", code=1)
    if as_json:
        write_json(_record(played, comparison))
    else:
        _say(played, comparison)
    raise typer.Exit(1 if comparison is not None and not comparison.is_equal else 0)


@dataclass(slots=True)
class Played:
    """The result. lines: events as in events.jsonl. counts: by source and rule."""

    frames: int = 0
    lines: list[bytes] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares events of the replay with those of a file, without the wall clock, and without score and box, which
    former versions did not write."""

    equal: int
    missing: tuple[EventLine, ...]
    added: tuple[EventLine, ...]

    @property
    def is_equal(self) -> bool:
        return not self.missing and not self.added


class _Tape:
    """The lines of a file, and the last line read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.line = b""
        self.labels: dict[int, str] = {}

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.line = line
            yield line

    def event_line(self, event: AnalyticsEvent) -> bytes:
        """The event of the newest line's frame, as in events.jsonl."""
        result = read_objects_line(self.line)
        self.labels |= {number: label for number, label in enumerate(result.labels) if label != f"class {number}"}
        known = tuple(self.labels.get(number, f"class {number}") for number in range(max(self.labels, default=-1) + 1))
        return event_lines(replace(result, analytics=FrameAnalytics((event,)), labels=known))[0]


def _refuse_overwriting(out: Path, read: Mapping[str, Path | None]) -> None:
    """Ends the command if the results would overwrite its input or the compared file."""
    for name, path in read.items():
        if path is not None and is_same_file(out, path):
            fail(f"--out {out}: that is the file of {name}, which would be lost; write to another")


def _play(objects: Path, section: Plain | None) -> Played:
    meant = rules_of(section, _labels(objects, section))
    played = Played()
    replayed = Replay(lambda source_id: meant)
    with objects.open("rb") as file:
        tape = _Tape(file)
        played.lines = [tape.event_line(event) for event in replayed.events(tape)]
    if replayed.cut_line is not None:
        print_failure(f"{objects}: line {replayed.cut_line}, the last one, is cut off; those before it are used")
    if not replayed.frames:
        fail(f"{objects}: no frames in it", code=1)
    played.frames = replayed.frames
    played.counts = {source_id: dict(counts) for source_id, counts in replayed.counts.items()}
    return played


def _labels(objects: Path, section: Plain | None) -> tuple[str, ...]:
    """Labels for reading the rules: from the recording, and others that the rules name, with a note."""
    if section is None or not names_classes(section):
        return ()
    with objects.open("rb") as file:
        seen = labels_in(file)
    labels, missing = labels_with(section.content, seen)
    if seen and missing:
        close = close_to(missing[0], seen) if len(missing) == 1 else ""
        hint = f"; {close}" if close else ""
        names = ", ".join(map(repr, missing))
        print_failure(f"{objects}: no object in it is called {names}, so that this class matches nothing{hint}")
    return labels


def _by_source(played: Played) -> list[RulesOfSource]:
    decode = msgspec.json.Decoder(EventLine).decode
    events: dict[str, Counter[str]] = {source_id: Counter() for source_id in played.counts}
    for one in map(decode, played.lines):
        events[one.source_id].update(event_keys(one.kind, counter_name(one.rule, one.direction), one.label))
    return [RulesOfSource(source_id, events[source_id], counts) for source_id, counts in played.counts.items()]


def _events_of(against: Path) -> Counter[EventLine]:
    """Events of an events.jsonl; an incomplete last line is skipped."""
    decode = msgspec.json.Decoder(EventLine).decode
    events: Counter[EventLine] = Counter()
    lines = against.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            events.update([_timeless(decode(line))] if line.strip() else [])
        except msgspec.DecodeError as error:
            if number < len(lines) or line.endswith(b"\n"):
                fail(f"{against}: line {number} is no event of the schema full ({error})", code=1)
            print_failure(f"{against}: line {number}, the last one, is cut off; those before it are used")
    return events


def _compared(lines: list[bytes], theirs: Counter[EventLine]) -> Comparison:
    decode = msgspec.json.Decoder(EventLine).decode
    ours = Counter(_timeless(decode(line)) for line in lines)
    return Comparison((ours & theirs).total(), _sorted(theirs - ours), _sorted(ours - theirs))


def _timeless(event: EventLine) -> EventLine:
    return msgspec.structs.replace(event, time="", score=None, xyxy=None)


def _sorted(events: Counter[EventLine]) -> tuple[EventLine, ...]:
    return tuple(
        sorted(events.elements(), key=lambda event: (event.source_id, event.frame_num, event.kind, event.rule))
    )


def _say(played: Played, comparison: Comparison | None) -> None:
    console = table_console()
    table = rule_table(_by_source(played))
    if table.row_count:
        console.print(table)
    console.print(f"{len(played.lines)} events in {played.frames} frames")
    if comparison is None:
        return
    console.print(f"{comparison.equal} are equal, {len(comparison.missing)} missing here, {len(comparison.added)} new")
    differences = [("missing", event) for event in comparison.missing] + [("new", event) for event in comparison.added]
    for word, event in differences[:MAX_DIFFERENCES_SHOWN]:
        console.print(Text(one_line(f"{word}: {_text(event)}")), soft_wrap=True)
    if (more := len(differences) - MAX_DIFFERENCES_SHOWN) > 0:
        console.print(f"… and {more} more")


def _text(event: EventLine) -> str:
    track = "" if event.track_id is None else f", track {event.track_id}"
    counter = counter_name(event.rule, event.direction)
    return f"{event.source_id} frame {event.frame_num} {event.kind}/{counter}{track}, value {event.value:g}"


def _record(played: Played, comparison: Comparison | None) -> dict[str, object]:
    found: dict[str, object] = {
        "frames": played.frames,
        "events": len(played.lines),
        "events_by_rule": {source.source_id: events_by_rule(source) for source in _by_source(played)},
        "counts": played.counts,
    }
    if comparison is not None:
        found["against"] = {
            "is_equal": comparison.is_equal,
            "equal": comparison.equal,
            "missing": [msgspec.to_builtins(event) for event in comparison.missing],
            "added": [msgspec.to_builtins(event) for event in comparison.added],
        }
    return found
