"""The seams of the video program: what a decoder, a tracker, a set of rules and a sink promise each other."""

from collections.abc import Sequence
from typing import Protocol

from deepstream_pipeline.types import AnalyticsEvent, Detections, Frame, Tracks


class Decoder(Protocol):
    """One source, opened. Used by one thread; close may come from another and ends a waiting read."""

    def read(self) -> Frame:
        """The next frame; blocks until there is one. Raises StreamEnded, DecodeError, SourceUnavailable."""
        ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """Identities over time, for one source. Sans-IO: no clock, no thread."""

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """The frame's tracks. Frames come in order; a gap in frame_num counts as frames without detections."""
        ...

    def reset(self) -> None:
        """Forget every track, as after the end of a file. Identities are not used again."""
        ...


class Analytics(Protocol):
    """The rules of one source. Sans-IO."""

    def observe(self, frame: Frame, tracks: Tracks) -> Sequence[AnalyticsEvent]:
        """What came true with this frame, in the order of the rules."""
        ...


class Sink(Protocol):
    """Where results go. It never waits longer than its own bound: a slow sink drops its oldest and counts them."""

    def write(self, frame: Frame, tracks: Tracks, events: Sequence[AnalyticsEvent]) -> None:
        """Raises SinkFailed where nothing more can be taken."""
        ...

    def close(self) -> None:
        """Flush what was taken. Raises SinkFailed where that is not possible."""
        ...
