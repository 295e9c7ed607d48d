"""Statistics of a source, and Protocols between the parts of the video program: tracker, analytics, sink, pipeline
control and previews."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from pydantic.config import JsonDict

from penstock_video.types import Detections, Frame, FrameAnalytics, FrameResult, SourceConfig, SourceState, Tracks

SECRET: JsonDict = {"writeOnly": True}  # json_schema_extra of an option whose value may have ${NAME} and is never shown
INTERNAL: JsonDict = {"readOnly": True}  # of an option that is no key of the settings file


class Tracker(Protocol):
    """Tracks objects of one source. Sans-IO: no clock, no thread. Frames come in order of frame_num."""

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """The frame's tracks, from its detections. A frame of a new segment resets the tracker."""
        ...

    def coast(self, frame: Frame) -> Tracks:
        """The tracks of a frame that was not inferred: each continues its motion."""
        ...

    def reset(self) -> None:
        """Forgets every track, as after the end of a file. Identities are not reused."""
        ...


class Analytics(Protocol):
    """The rules of one source. Sans-IO."""

    def observe(self, frame: Frame, tracks: Tracks) -> FrameAnalytics:
        """The frame's events and counts."""
        ...

    def restart(self) -> None:
        """The next frame is of another stream: earlier objects are gone, and counts stay."""
        ...


class Sink(Protocol):
    """Destination of results. Its own thread calls it behind a bounded channel, so it may block within its timeouts."""

    def write(self, result: FrameResult) -> None:
        """Raises SinkFailed if the result cannot be written; the next call may succeed."""
        ...

    def end_source(self, source_id: str) -> None:
        """Ends a source: finishes its files."""
        ...

    def close(self) -> None:
        """Flushes within its own deadline. Raises SinkFailed if that is not possible."""
        ...


@dataclass(frozen=True, slots=True)
class Extension:
    """A user's tracker or sink, module:Class in the settings. options: of its model `Options`, if any."""

    type: str
    new: Callable[..., Any] = field(repr=False)
    options: object | None = None

    def create(self) -> Any:
        return self.new() if self.options is None else self.new(self.options)

    @property
    def has_tracks(self) -> bool:
        """Whether a tracker gives identities, unless its class has `has_tracks = False`."""
        return bool(getattr(self.new, "has_tracks", True))


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Current statistics of a source. uri: without user and password.

    reason: why it is not running, else empty. fps: decoded over the last seconds. frames: decoded so far. frames_total:
    of a file, None if unknown. inferred: frames that the network answered. drops: by DropReason. latency_s: median from
    packet to sinks, over the last seconds; None before the first frame. position_s, duration_s: in a file. active_s:
    from first to last frame. decoder: cpu or nvdec, empty until it is open. decoder_reason: why the CPU decodes a
    source that a GPU might. counts: FrameAnalytics.counts of the last frame. events: totals by event_keys.
    is_recordable: its packets fit into MP4, so that events can have a film.
    """

    source_id: str
    camera_name: str
    uri: str
    state: SourceState
    reason: str = ""
    fps: float = 0.0
    frames: int = 0
    frames_total: int | None = None
    inferred: int = 0
    drops: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0
    width: int = 0
    height: int = 0
    codec: str = ""
    is_live: bool = False
    is_frozen: bool = False
    latency_s: float | None = None
    position_s: float = 0.0
    duration_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    is_loop: bool = False
    active_s: float = 0.0
    decoder: str = ""
    decoder_reason: str = ""
    is_recordable: bool = True


@dataclass(frozen=True, slots=True)
class ProbedSource:
    """What an address shows. fps: of the stream, 0 if unknown. duration_s: of a file, if known. jpeg: a picture.

    is_recordable: its packets fit into MP4, so that events can have a film.
    """

    width: int
    height: int
    fps: float
    codec: str
    is_live: bool
    duration_s: float | None
    jpeg: bytes = field(repr=False)
    is_recordable: bool = True


class PipelineControl(Protocol):
    """Control of a running pipeline. Thread-safe; only `probe`, `change` and `restart` wait for a camera, within
    a deadline. Raises errors of errors.py."""

    def add(self, source: SourceConfig) -> None: ...

    def remove(self, source_id: str) -> None: ...

    def probe(self, source: SourceConfig) -> ProbedSource:
        """Opens an address once, beside the sources."""
        ...

    def config(self, source_id: str) -> SourceConfig:
        """A source's configuration, with its user and password."""
        ...

    def change(self, source: SourceConfig) -> None:
        """Another address or other options under an ID that exists. Its rules and their counts stay."""
        ...

    def restart(self, source_id: str) -> None:
        """Opens a source anew, a file from its beginning, also one that is over. Its rules stay, and count from 0."""
        ...

    def pause(self, source_id: str) -> None: ...

    def resume(self, source_id: str) -> None: ...

    def record(self, source_id: str, *, before_s: float, after_s: float) -> str:
        """Starts a recording; returns its file path. Raises NotSetUp, SourceNotOpen, SourceNotRecordable."""
        ...

    def statistics(self) -> tuple[SourceStatistics, ...]:
        """Statistics of every source, in the order of addition."""
        ...

    def source(self, source_id: str) -> SourceStatistics:
        """Statistics of one source. Raises UnknownSource."""
        ...

    def rules(self, source_id: str) -> object:
        """The source's analytics section as plain values, as for set_rules."""
        ...

    def set_rules(self, source_id: str, section: object) -> None:
        """Replaces the source's analytics section from its next frame on; unchanged rules keep their counts."""
        ...

    def is_healthy(self) -> bool:
        """Whether its threads run and its engine answers."""
        ...


@dataclass(frozen=True, slots=True)
class SourceAdded:
    """A change: a source is added."""

    config: SourceConfig


@dataclass(frozen=True, slots=True)
class SourceChanged:
    """A change: a source has other options. is_new_address: and another address."""

    config: SourceConfig
    is_new_address: bool


@dataclass(frozen=True, slots=True)
class SourceRemoved:
    """A change: a source is removed."""

    source_id: str


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """A change: a source has another analytics section, as plain values."""

    source_id: str
    section: object


Change = SourceAdded | SourceChanged | SourceRemoved | RulesChanged


class Saved(StrEnum):
    """Whether a change was written to the settings file. off: the program runs without --save-changes."""

    YES = "yes"
    OFF = "off"
    FAILED = "failed"


class ChangeSaver(Protocol):
    """Makes changes of API clients, and may write them to the settings file. Thread-safe."""

    def apply(self, change: Change, run: Callable[[], None]) -> Saved:
        """Makes the change with `run`. Raises what that raises, and ChangeNotSaved before it."""
        ...


class NoSaver:
    """Makes changes that end with the program."""

    def apply(self, change: Change, run: Callable[[], None]) -> Saved:
        run()
        return Saved.OFF


class View(NamedTuple):
    """How a client sees a source's pictures. width: in pixels, at least; 0 for that of the previews' options. is_drawn:
    with objects and rules."""

    width: int = 0
    is_drawn: bool = True


FULL_VIEW = View()


class Previews(Protocol):
    """The newest picture of each source, encoded only while it is watched, and once for all clients with one view."""

    def wait(self, source_id: str, after: int, timeout_s: float, view: View = FULL_VIEW) -> tuple[int, bytes] | None:
        """(number, JPEG) of a picture newer than `after`; None on timeout."""
        ...
