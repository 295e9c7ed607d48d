"""`penstock video replay`: recorded tracks held against other rules, without a picture or a model."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer
from rich.text import Text

from deepstream_pipeline.errors import PipelineError, RuleRefused
from deepstream_pipeline.replay import Replay, labels_in, labels_with
from deepstream_pipeline.settings.complaints import SettingsRefused, close_to
from deepstream_pipeline.settings.reading import read_rules
from deepstream_pipeline.settings.rules import names_classes, rules_of
from deepstream_pipeline.settings.section import Plain
from deepstream_pipeline.sinks.schemas import EventLine, event_lines, read_objects_line
from deepstream_pipeline.types import AnalyticsEvent, FrameAnalytics, event_keys
from server.commands.terminal import fail, one_line, say_failure, stoppable, table_console
from server.commands.video_complaints import refuse
from server.commands.video_results import is_same_file, write_whole
from server.commands.video_rules import RulesOfSource, events_by_rule, rule_table
from server.commands.video_watch import write_json

MAX_DIFFERENCES_SHOWN = 10


def replay(
    objects: Annotated[Path, typer.Argument(metavar="OBJECTS.jsonl", dir_okay=False, help="what a run wrote")],
    rules: Annotated[Path | None, typer.Option("--rules", dir_okay=False, help="a YAML file of rules")] = None,
    line: Annotated[list[str] | None, typer.Option("--line", metavar="NAME=x1,y1,x2,y2", help="a line more")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="EVENTS.jsonl", help="write the events here")] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="EVENTS.jsonl", help="compare with these; exit code 1 if not equal"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object, and nothing else")] = False,
) -> None:
    """Hold the tracks of an objects.jsonl against rules, and tell what comes true: events and counts.

    The same rules give the same events as the run that wrote the file.
    """
    if rules is None and not line:
        fail("there are no rules: give --rules FILE, or --line NAME=x1,y1,x2,y2")
    if out is not None:
        _refuse_overwriting(out, {"the recording": objects, "--against": against, "--rules": rules})
    try:
        with stoppable("nothing is left to clear away"):
            theirs = _events_of(against) if against is not None else None
            played = _play(objects, rules, tuple(line or ()))
            if out is not None:
                write_whole(out, b"".join(line + b"\n" for line in played.lines))
            comparison = _compared(played.lines, theirs) if theirs is not None else None
    except SettingsRefused as refused:
        refuse(refused, as_json=as_json)
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
    """What came of it. lines: the events, as they stand in events.jsonl. counts: by source and rule."""

    frames: int = 0
    lines: list[bytes] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Events of the replay against those of a file; each is compared without the wall clock."""

    equal: int
    missing: tuple[EventLine, ...]
    added: tuple[EventLine, ...]

    @property
    def is_equal(self) -> bool:
        return not self.missing and not self.added


class _Tape:
    """The lines of a file, and the one that was read last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.line = b""
        self.labels: dict[int, str] = {}

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self.line = line
            yield line

    def event_line(self, event: AnalyticsEvent) -> bytes:
        """The event of the newest line's frame, as events.jsonl has it."""
        result = read_objects_line(self.line)
        self.labels |= {number: label for number, label in enumerate(result.labels) if label != f"class {number}"}
        known = tuple(self.labels.get(number, f"class {number}") for number in range(max(self.labels, default=-1) + 1))
        return event_lines(replace(result, analytics=FrameAnalytics((event,)), labels=known))[0]


def _refuse_overwriting(out: Path, read: Mapping[str, Path | None]) -> None:
    """Ends the command where the results would take the place of what they are made from, or compared with."""
    for name, path in read.items():
        if path is not None and is_same_file(out, path):
            fail(f"--out {out}: that is the file of {name}, which would be lost; write to another")


def _play(objects: Path, rules: Path | None, lines: tuple[str, ...]) -> Played:
    section = read_rules(rules, lines)
    meant = rules_of(section, _labels(objects, section))
    played = Played()
    replayed = Replay(lambda source_id: meant)
    with objects.open("rb") as file:
        tape = _Tape(file)
        played.lines = [tape.event_line(event) for event in replayed.events(tape)]
    if replayed.cut_line is not None:
        say_failure(f"{objects}: line {replayed.cut_line}, the last one, is cut off; those before it are used")
    if not replayed.frames:
        fail(f"{objects}: no frames in it", code=1)
    played.frames = replayed.frames
    played.counts = {source_id: dict(counts) for source_id, counts in replayed.counts.items()}
    return played


def _labels(objects: Path, section: Plain | None) -> tuple[str, ...]:
    """Those that rules are read with: of the recording, and what they name beyond it, which a note tells of."""
    if section is None or not names_classes(section):
        return ()
    with objects.open("rb") as file:
        seen = labels_in(file)
    labels, missing = labels_with(section.content, seen)
    if seen and missing:
        close = close_to(missing[0], seen) if len(missing) == 1 else ""
        hint = f"; {close}" if close else ""
        names = ", ".join(map(repr, missing))
        say_failure(f"{objects}: no object in it is called {names}, so that this class matches nothing{hint}")
    return labels


def _by_source(played: Played) -> list[RulesOfSource]:
    decode = msgspec.json.Decoder(EventLine).decode
    events: dict[str, Counter[str]] = {source_id: Counter() for source_id in played.counts}
    for one in map(decode, played.lines):
        events[one.source_id].update(event_keys(one.kind, one.rule, one.label))
    return [RulesOfSource(source_id, events[source_id], counts) for source_id, counts in played.counts.items()]


def _events_of(against: Path) -> Counter[EventLine]:
    """Of an events.jsonl; a last line that is half, as of a run that was killed, is left out."""
    decode = msgspec.json.Decoder(EventLine).decode
    events: Counter[EventLine] = Counter()
    lines = against.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            events.update([_timeless(decode(line))] if line.strip() else [])
        except msgspec.DecodeError as error:
            if number < len(lines) or line.endswith(b"\n"):
                fail(f"{against}: line {number} is no event of the schema full ({error})", code=1)
            say_failure(f"{against}: line {number}, the last one, is cut off; those before it are used")
    return events


def _compared(lines: list[bytes], theirs: Counter[EventLine]) -> Comparison:
    decode = msgspec.json.Decoder(EventLine).decode
    ours = Counter(_timeless(decode(line)) for line in lines)
    return Comparison((ours & theirs).total(), _sorted(theirs - ours), _sorted(ours - theirs))


def _timeless(event: EventLine) -> EventLine:
    return msgspec.structs.replace(event, time="")


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
        console.print(Text(one_line(f"{word}: {_in_words(event)}")), soft_wrap=True)
    if (more := len(differences) - MAX_DIFFERENCES_SHOWN) > 0:
        console.print(f"… and {more} more")


def _in_words(event: EventLine) -> str:
    track = "" if event.track_id is None else f", track {event.track_id}"
    return f"{event.source_id} frame {event.frame_num} {event.kind}/{event.rule}{track}, value {event.value:g}"


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
