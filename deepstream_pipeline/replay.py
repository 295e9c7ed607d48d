"""Recorded tracks through rules: the lines of a "full" objects.jsonl in, events out, as if they had come true live.

The same rules give the same events as the run that wrote the lines: rules see places and times rounded as the lines
have them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deepstream_pipeline.analytics.rules import Rules
from deepstream_pipeline.analytics.source import SourceAnalytics, new_analytics
from deepstream_pipeline.errors import RecordingUnreadable
from deepstream_pipeline.sinks.schemas import read_objects_line
from deepstream_pipeline.types import AnalyticsEvent, FrameResult

_MOST_SHOWN = 120  # characters of a bad line
_MOST_CLASSES = 100_000


@dataclass(slots=True)
class _Source:
    analytics: SourceAnalytics
    counts: Mapping[str, int]
    frame_num: int = -1


class Replay:
    """Of one recording, one line after the other, in memory that does not grow with it.

    rules_of: the rules of a source, asked once for each that comes up. frames: read so far. cut_line: the number of the
    last line where it is half, as a run that was killed leaves it: it is left out.
    """

    def __init__(self, rules_of: Callable[[str], Rules]) -> None:
        self._rules_of = rules_of
        self._sources: dict[str, _Source] = {}
        self.frames = 0
        self.cut_line: int | None = None

    @property
    def counts(self) -> dict[str, Mapping[str, int]]:
        """Of each source, FrameAnalytics.counts of its last frame."""
        return {source_id: source.counts for source_id, source in self._sources.items()}

    def events(self, lines: Iterable[bytes | str]) -> Iterator[AnalyticsEvent]:
        """In the order of the lines. Raises RecordingUnreadable at a line that is none of objects.jsonl, but for a last
        one that is half, and where a source's frames are not in order.
        """
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

    def _source(self, source_id: str) -> _Source:
        if source_id not in self._sources:
            self._sources[source_id] = _Source(new_analytics(self._rules_of(source_id), ()), {})
        return self._sources[source_id]


def replay(lines: Iterable[bytes | str], rules_of: Callable[[str], Rules]) -> Iterator[AnalyticsEvent]:
    """The events of a recording under other rules; see Replay, which has the counts, too."""
    return Replay(rules_of).events(lines)


def labels_in(lines: Iterable[bytes | str]) -> tuple[str, ...]:
    """By class_id, what the objects of a recording are called; for reading rules that name classes. Reads it whole.

    Raises RecordingUnreadable.
    """
    labels: tuple[str, ...] = ()
    for _, result in _results(lines):
        labels = _joined(labels, result.labels)
    return labels


def labels_with(section: object, labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labels that the section's rules can be read with, those of its names that are none of `labels`).

    A recording tells only of classes that it shows; a model may know more. Names that it lacks stand behind all
    numbers that are known or named, where nothing is.
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
    """Of a number, a label, a list of them, or numbers as "1;2" (which are not labels, whatever they are)."""
    if isinstance(class_id, str) and ";" in class_id:
        return [int(part) for part in class_id.split(";") if part.strip().isdecimal()]
    return class_id if isinstance(class_id, list) else [class_id]


def _results(
    lines: Iterable[bytes | str], on_cut: Callable[[int], None] = lambda number: None
) -> Iterator[tuple[int, FrameResult]]:
    """on_cut: told of the last line where it has no end and cannot be read."""
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
    """Both; a class that only one names has its name. What nobody named is called by its number."""
    if seen == known[: len(seen)]:
        return known
    longest = range(max(len(known), len(seen)))
    return tuple(_name(class_id, known, seen) for class_id in longest)


def _name(class_id: int, known: tuple[str, ...], seen: tuple[str, ...]) -> str:
    number = f"class {class_id}"
    names = (labels[class_id] for labels in (seen, known) if class_id < len(labels))
    return next((name for name in names if name != number), number)
