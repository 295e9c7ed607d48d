"""The files of a run: those that an earlier one left, and those that this one wrote."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

EVENTS_FILE, OBJECTS_FILE = "events.jsonl", "objects.jsonl"
_CLOCK_SLACK_S = 2.0  # file systems round


class _Line(msgspec.Struct):
    source_id: str = ""
    kind: str = ""
    rule: str = ""
    label: str | None = None


EventCounts = Mapping[tuple[str, str], int]
"""By source, and by KIND/RULE, KIND/RULE/LABEL, or nothing for all of the source."""


def keys_of(kind: str, rule: str, label: str | None) -> tuple[str, ...]:
    """Under which an event is counted."""
    key = f"{kind}/{rule}"
    return ("", key) if label is None else ("", key, f"{key}/{label}")


class EarlierResults:
    """What stands in the folders before the run. Made before it begins.

    is_kept: lines are added to those that are there, as for cameras; else they are moved aside, to NAME.1, since the
    frames of two runs in one file cannot be told apart. note: told of each that was moved.
    """

    def __init__(self, folders: Iterable[Path], *, is_kept: bool, note: Callable[[str], None]) -> None:
        self._sizes: dict[Path, int] = {}
        for folder in folders:
            for name in (EVENTS_FILE, OBJECTS_FILE):
                if not is_kept:
                    _move_aside(folder / name, note)
            self._sizes[folder / EVENTS_FILE] = _size(folder / EVENTS_FILE)

    def counted_events(self) -> EventCounts | None:
        """Of this run's lines in the events.jsonl of the folders; None where there is none."""
        decode = msgspec.json.Decoder(_Line).decode
        counts: Counter[tuple[str, str]] = Counter()
        is_known = False
        for path, before in self._sizes.items():
            with suppress(OSError, msgspec.DecodeError), path.open("rb") as lines:
                is_known = True
                lines.seek(before)
                for event in (decode(line) for line in lines if line.endswith(b"\n")):
                    counts.update((event.source_id, key) for key in keys_of(event.kind, event.rule, event.label))
        return counts if is_known else None


def written_files(folders: Iterable[Path], since_s: float) -> tuple[tuple[Path, int], ...]:
    """Path and size of the files in the folders that changed in the last so many seconds, sorted."""
    began = time.time() - since_s - _CLOCK_SLACK_S
    found: dict[Path, int] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        with suppress(OSError):
            status = path.stat()
            if path.is_file() and status.st_mtime >= began:
                found[path] = status.st_size
    return tuple(found.items())


def _move_aside(path: Path, note: Callable[[str], None]) -> None:
    if not _size(path):
        return
    with suppress(OSError):  # the sink will say what it cannot write
        path.rename(path.with_name(f"{path.name}.1"))
        note(f"{path} of an earlier run is now {path.name}.1")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
