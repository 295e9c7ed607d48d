"""`penstock video replay`: recorded tracks held against other rules, without a picture or a model."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer
from rich.text import Text

from deepstream_pipeline.errors import PipelineError, RuleRefused
from deepstream_pipeline.replay import Replay, labels_in
from deepstream_pipeline.settings.complaints import SettingsRefused
from deepstream_pipeline.settings.reading import read_rules
from deepstream_pipeline.settings.rules import names_classes, rules_of
from deepstream_pipeline.sinks.schemas import EventLine, event_lines, read_objects_line
from deepstream_pipeline.types import AnalyticsEvent, FrameAnalytics
from server.commands.terminal import fail, one_line, stoppable, table_console
from server.commands.video_complaints import refuse
from server.commands.video_results import EventCounts, keys_of
from server.commands.video_summary import rule_table
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
    try:
        with stoppable("nothing is left to clear away"):
            played = _play(objects, rules, tuple(line or ()), out)
            comparison = _compared(played.lines, against) if against is not None else None
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


def _play(objects: Path, rules: Path | None, lines: tuple[str, ...], out: Path | None) -> Played:
    section = read_rules(rules, lines)
    labels: tuple[str, ...] = ()
    if names_classes(section):
        with objects.open("rb") as file:
            labels = labels_in(file)
    meant = rules_of(section, labels)
    played = Played()
    replayed = Replay(lambda source_id: meant)
    with ExitStack() as files:
        tape = _Tape(files.enter_context(objects.open("rb")))
        played.lines = [tape.event_line(event) for event in replayed.events(tape)]
    played.frames = replayed.frames
    played.counts = {source_id: dict(counts) for source_id, counts in replayed.counts.items()}
    if out is not None:
        out.write_bytes(b"".join(line + b"\n" for line in played.lines))
    return played


def _counted(lines: list[bytes]) -> EventCounts:
    decode = msgspec.json.Decoder(EventLine).decode
    events = map(decode, lines)
    return Counter((one.source_id, key) for one in events for key in keys_of(one.kind, one.rule, one.label))


def _compared(lines: list[bytes], against: Path) -> Comparison:
    decode = msgspec.json.Decoder(EventLine).decode
    try:
        theirs = Counter(_timeless(decode(line)) for line in against.read_bytes().splitlines() if line.strip())
    except msgspec.DecodeError as error:
        fail(f"{against}: a line is no event of the schema full ({error})", code=1)
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
    table = rule_table(played.counts, _counted(played.lines))
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
    found: dict[str, object] = {"frames": played.frames, "events": len(played.lines), "counts": played.counts}
    if comparison is not None:
        found["against"] = {
            "is_equal": comparison.is_equal,
            "equal": comparison.equal,
            "missing": [msgspec.to_builtins(event) for event in comparison.missing],
            "added": [msgspec.to_builtins(event) for event in comparison.added],
        }
    return found
