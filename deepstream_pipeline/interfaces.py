"""The seams of the video program: what its parts promise each other."""

from typing import Protocol

from deepstream_pipeline.types import (
    Detections,
    Frame,
    FrameAnalytics,
    FrameResult,
    SourceConfig,
    SourceStatistics,
    Tracks,
)


class Tracker(Protocol):
    """Identities over time, for one source. Sans-IO: no clock, no thread. Frames come in order of frame_num."""

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """The frame's tracks, from what a detector saw in it. A frame of another segment begins anew by itself."""
        ...

    def coast(self, frame: Frame) -> Tracks:
        """The frame's tracks, where no detector looked at it: each moved on as it moved before."""
        ...

    def reset(self) -> None:
        """Forget every track, as after the end of a file. Identities are not used again."""
        ...


class Analytics(Protocol):
    """The rules of one source. Sans-IO."""

    def observe(self, frame: Frame, tracks: Tracks) -> FrameAnalytics:
        """What came true with this frame, and what is counted so far."""
        ...


class Sink(Protocol):
    """Where results go. Called by one thread of its own, behind a bounded channel: a slow sink delays no other.

    It may block as long as its own time-outs say; what comes meanwhile waits in the channel, or is dropped there.
    """

    def write(self, result: FrameResult) -> None:
        """Raises SinkFailed where nothing more can be taken now; it is called again with the next one."""
        ...

    def end_source(self, source_id: str) -> None:
        """No more of this source will come: its files are finished."""
        ...

    def close(self) -> None:
        """Flush what was taken, with a deadline of its own. Raises SinkFailed where that is not possible."""
        ...


class PipelineControl(Protocol):
    """What the control API and the command ask of a running pipeline. From any thread; none of it waits for a camera.

    Raises UnknownSource, SourceExists, RuleRefused, TooManySources, of errors.py.
    """

    def add(self, source: SourceConfig) -> None: ...

    def remove(self, source_id: str) -> None: ...

    def pause(self, source_id: str) -> None: ...

    def resume(self, source_id: str) -> None: ...

    def record(self, source_id: str, *, before_s: float, after_s: float) -> str:
        """Begin a recording from so long ago to so long from now; the path of the file that will be there.

        Raises NotSetUp, SourceNotOpen where nothing of the source is there to be recorded, and SourceNotRecordable.
        """
        ...

    def statistics(self) -> tuple[SourceStatistics, ...]:
        """Of every source, in the order in which they were added."""
        ...

    def rules(self, source_id: str) -> object:
        """The source's analytics section, as it can be given to set_rules: plain dicts, lists, numbers and strings."""
        ...

    def set_rules(self, source_id: str, section: object) -> None:
        """Another analytics section for the source, from its next frame on; counts of unchanged rules are kept."""
        ...

    def is_healthy(self) -> bool:
        """Whether its threads turn and its engine answers."""
        ...


class Previews(Protocol):
    """The newest annotated picture of each source, encoded only while somebody looks."""

    def wait(self, source_id: str, after: int, timeout_s: float) -> tuple[int, bytes] | None:
        """(number, JPEG) of a picture newer than that number; None where none came in time."""
        ...
