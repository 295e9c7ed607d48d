"""Stores in a temporary folder, and results to write into them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock_video.analytics.rules import Rules
from penstock_video.sinks.osd import Osd
from penstock_video.store.options import EventsOptions
from penstock_video.store.reader import EventReader, Filter
from penstock_video.store.writer import EventStore
from penstock_video.types import AnalyticsEvent, CrossingDirection, FrameResult
from tests.deepstream_pipeline.sinks.results import Clock, crossing, result

ALL = Filter()


def a_store(
    folder: Path, *, clock: Callable[[], float] | None = None, recordings: Path | None = None, **options: object
) -> EventStore:
    """A store with its own clock, which stands still."""
    chosen = replace(EventsOptions(folder=folder), **options)  # type: ignore[arg-type]
    return EventStore(chosen, Osd(), recordings=recordings, clock=clock or Clock())


def reader(folder: Path) -> EventReader:
    """Of the same folder."""
    return EventReader(folder)


def crossed(number: int, *, direction: str = "in", source_id: str = "cam", track_id: int = 1) -> AnalyticsEvent:
    """A line that counts both ways, crossed by an object with a box."""
    event = crossing(number, source_id=source_id, track_id=track_id)
    box = (10.0, 20.0, 30.0, 60.0)
    return replace(event, rule="door", direction=CrossingDirection(direction), xyxy=box, score=0.875)


def result_with(number: int, *events: AnalyticsEvent, source_id: str = "cam", has_image: bool = False) -> FrameResult:
    """The number-th frame with these events; ten frames a second."""
    return result(number, source_id=source_id, events=events, has_image=has_image)


def is_set_up(store: EventStore, source_id: str = "cam", *, is_live: bool = True) -> None:
    """As the program sets a source."""
    store.set_source(source_id, name="", rules=Rules(), is_live=is_live)
