"""Recorded tracks through rules: the lines of a "full" objects.jsonl in, events out, as if they had come true live.

The same rules give the same events as the run that wrote the lines: rules see places and times rounded as the lines
have them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from deepstream_pipeline.analytics.rules import Rules
from deepstream_pipeline.analytics.source import SourceAnalytics, new_analytics
from deepstream_pipeline.errors import RecordingUnreadable
from deepstream_pipeline.sinks.schemas import read_objects_line
from deepstream_pipeline.types import AnalyticsEvent, FrameResult

_MOST_SHOWN = 120  # characters of a bad line


@dataclass(slots=True)
class _Source:
    analytics: SourceAnalytics
    counts: Mapping[str, int]
    frame_num: int = -1


class Replay:
    """Of one recording, one line after the other, in memory that does not grow with it.

    rules_of: the rules of a source, asked once for each that comes up. frames: read so far.
    """

    def __init__(self, rules_of: Callable[[str], Rules]) -> None:
        self._rules_of = rules_of
        self._sources: dict[str, _Source] = {}
        self.frames = 0

    @property
    def counts(self) -> dict[str, Mapping[str, int]]:
        """Of each source, FrameAnalytics.counts of its last frame."""
        return {source_id: source.counts for source_id, source in self._sources.items()}

    def events(self, lines: Iterable[bytes | str]) -> Iterator[AnalyticsEvent]:
        """In the order of the lines. Raises RecordingUnreadable at a line that is none of objects.jsonl, and where a
        source's frames are not in order.
        """
        for number, result in _results(lines):
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


def _results(lines: Iterable[bytes | str]) -> Iterator[tuple[int, FrameResult]]:
    for number, line in enumerate(lines, 1):
        encoded = line.encode() if isinstance(line, str) else line
        if not encoded.strip():
            continue
        try:
            yield number, read_objects_line(encoded)
        except (ValueError, OverflowError) as error:
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
