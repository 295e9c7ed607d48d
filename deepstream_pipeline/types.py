"""The nouns of the video program: what flows from a source to a sink.

Arrays are borrowed and never written to: whoever changes one makes its own. Each value checks its shapes once, when it
is made, and raises ValueError: a wrong shape is a fault of the program, never of a camera.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
RowArray = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | npt.NDArray[np.float16]


class SourceState(StrEnum):
    """Where a source is in its life, as a person and the metrics see it."""

    CONNECTING = "connecting"
    RUNNING = "running"
    STALLED = "stalled"
    RECONNECTING = "reconnecting"
    AUTH_FAILED = "auth_failed"
    PAUSED = "paused"
    ENDED = "ended"
    FAILED = "failed"


class DropReason(StrEnum):
    """Why a decoded frame was not inferred, or what came of it was not kept.

    ring_full: its source's ring had no room. queue_full: a newer frame took its place. too_old: it waited too long.
    refused: the gate could not answer it in time. infer_failed: the engine failed. corrupt: its packets were damaged.
    stopped: its source ended, or was taken out.
    """

    RING_FULL = "ring_full"
    QUEUE_FULL = "queue_full"
    TOO_OLD = "too_old"
    REFUSED = "refused"
    INFER_FAILED = "infer_failed"
    CORRUPT = "corrupt"
    STOPPED = "stopped"


class DropPolicy(StrEnum):
    """What a full queue does. block: who fills it waits (files). The others lose a frame, and count it."""

    BLOCK = "block"
    DROP_OLDEST = "drop-oldest"
    DROP_NEWEST = "drop-newest"


class DecoderKind(StrEnum):
    """Who decodes a source. cpu: FFmpeg. nvdec: a card's video engine. auto: nvdec where it can, else cpu."""

    AUTO = "auto"
    CPU = "cpu"
    NVDEC = "nvdec"


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """A source, in DeepStream's words where it has them.

    uri: a path, or file:, rtsp:, rtsps:, http:, https: or a V4L2 device (/dev/video0); may hold a user and password.
    source_id: DeepStream's camera_id; unique in the program. camera_name: for people. is_loop: a file begins anew at
    its end. is_realtime: a file is played at its own speed, as a camera that drops what is late. policy: None for
    what fits the kind: block for files, drop-oldest for live ones. expected_fps: more than 10 above it is a runaway;
    None for what the stream says of itself. reconnect_interval_s: without a frame for so long the source is opened
    anew (rtsp-reconnect-interval). reconnect_attempts: in a row, -1 for ever. frozen_after_s: the same picture for so
    long is told. is_udp: RTSP over UDP, else TCP. record_cache_s: how much of the stream is kept for recordings that
    begin before their event, 0 for none. decoder: of its pictures. is_from_api: an API client named it, not the
    operator, so the addresses that it connects to are checked.
    """

    uri: str = field(repr=False)
    source_id: str
    camera_name: str = ""
    is_loop: bool = False
    is_realtime: bool = False
    policy: DropPolicy | None = None
    expected_fps: float | None = None
    reconnect_interval_s: float = 10.0
    reconnect_attempts: int = -1
    open_timeout_s: float = 10.0
    frozen_after_s: float = 30.0
    is_udp: bool = False
    record_cache_s: float = 0.0
    decoder: DecoderKind = DecoderKind.AUTO
    is_from_api: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture of one source.

    frame_num: 0, 1, 2, … decoded frames of the source, across reconnections; one that was lost leaves a gap.
    pts_s: presentation time in seconds, rising strictly per source, across loops and reconnections. captured_at:
    monotonic seconds when its packet came, or was due (a file that is played as a camera); captured_unix_s: the same
    moment on the wall clock. width, height: of the source, in pixels. image: (H, W, 3) uint8, RGB, at the source's
    size; None where nobody draws or crops. segment: rises where what is seen begins anew (opened again, looped, another
    resolution, a cut): a tracker's identities do not cross it. is_corrupt: decoded from damaged packets. digest: of the
    picture's content, equal for equal pictures. sample_aspect_ratio: of a pixel as a player shows it, width by height.
    """

    source_id: str
    frame_num: int
    pts_s: float
    captured_at: float
    width: int
    height: int
    image: ByteArray | None = None
    captured_unix_s: float = 0.0
    segment: int = 0
    is_corrupt: bool = False
    digest: int = 0
    sample_aspect_ratio: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        image = self.image
        if image is None:
            return
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"a frame's image is (H, W, 3) uint8, not {_what(image)}")
        if image.shape[:2] != (self.height, self.width):
            raise ValueError(f"a frame of {self.width}x{self.height} has an image of {_what(image)}")


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A network's input without a batch axis, C order, in the memory of a GPU. address: in this process."""

    address: int
    shape: tuple[int, ...]
    dtype: "np.dtype[np.generic]"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PreparedFrame:
    """A frame, and what the network is to see of it. Both lie in the source's ring until `release` is called, once.

    row: the network's input without a batch axis, C order; None where this frame is not inferred (interval).
    After `release` neither row nor frame.image may be read. Who needs the image longer copies it.
    """

    frame: Frame
    row: RowArray | DeviceRow | None
    release: Callable[[], None]


class CloseReason(StrEnum):
    """Why the mux closed a batch.

    full: it has batch-size frames. timeout: batched-push-timeout passed since its first. slot_free: the engine idled.
    """

    FULL = "full"
    TIMEOUT = "timeout"
    SLOT_FREE = "slot_free"


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames of one or several sources for one call of the network; each has a row.

    oldest_at: when the first of them came to the mux, monotonic seconds.
    """

    frames: tuple[PreparedFrame, ...]
    reason: CloseReason
    oldest_at: float

    def __post_init__(self) -> None:
        if any(prepared.row is None for prepared in self.frames):
            raise ValueError("a frame without a row is not for the network")

    def __len__(self) -> int:
        return len(self.frames)


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """What a detector saw in one frame.

    xyxy: (n, 4) float32, corners in source pixels. score: (n,) float32 in [0, 1]. class_id: (n,) int64.
    """

    xyxy: FloatArray
    score: FloatArray
    class_id: IntArray

    def __post_init__(self) -> None:
        _check("xyxy", self.xyxy, (len(self), 4), np.float32)
        _check("score", self.score, (len(self),), np.float32)
        _check("class_id", self.class_id, (len(self),), np.int64)

    def __len__(self) -> int:
        return len(self.xyxy)


@cache
def no_detections() -> Detections:
    """Of a frame in which nothing was seen."""
    return Detections(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class of a whole picture, or of a crop of it. model: who says so. score: as the model's parser gives it."""

    model: str
    class_id: int
    label: str
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """Detections of one frame, each with the identity that a tracker gives it.

    track_id: (n,) int64, unique in a source for as long as the program runs.
    age_frames: (n,) int64, frames since the track began, 1 for a new one. is_estimate: no detector looked at the frame.
    """

    detections: Detections
    track_id: IntArray
    age_frames: IntArray
    is_estimate: bool = False

    def __post_init__(self) -> None:
        _check("track_id", self.track_id, (len(self),), np.int64)
        _check("age_frames", self.age_frames, (len(self),), np.int64)

    def __len__(self) -> int:
        return len(self.detections)


@cache
def no_tracks() -> Tracks:
    """Of a frame in which nothing is followed."""
    return Tracks(no_detections(), np.empty(0, np.int64), np.empty(0, np.int64))


class AnalyticsKind(StrEnum):
    """DeepStream's names of the rules (gst-nvdsanalytics); dwell is ours."""

    ROI_FILTERING = "roi-filtering"
    OVERCROWDING = "overcrowding"
    LINE_CROSSING = "line-crossing"
    DIRECTION_DETECTION = "direction-detection"
    DWELL = "dwell"


@dataclass(frozen=True, slots=True)
class AnalyticsEvent:
    """A rule came true.

    track_id, class_id: None where the rule counts instead of following one object (overcrowding).
    rule: the rule's name in the configuration. value: the count, the direction in degrees, or seconds; 1.0 for plain
    truth.
    """

    kind: AnalyticsKind
    source_id: str
    frame_num: int
    pts_s: float
    track_id: int | None
    rule: str
    value: float
    class_id: int | None = None


def event_keys(kind: str, rule: str, label: str | None) -> tuple[str, ...]:
    """Under which an event is counted: KIND/RULE, and KIND/RULE/LABEL where it is about one object."""
    key = f"{kind}/{rule}"
    return (key,) if label is None else (key, f"{key}/{label}")


@dataclass(frozen=True, slots=True, eq=False)
class FrameAnalytics:
    """What the rules say of one frame.

    events: what came true with it, in the order of the rules. counts: by "KIND/RULE" (line-crossing/Entry, per class
    line-crossing/Entry/person where labels are known), what was counted so far, or is there now. rules_of: for each
    track of the frame, the names of the rules that hold for it now; as long as the tracks, or empty.
    """

    events: tuple[AnalyticsEvent, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    rules_of: tuple[tuple[str, ...], ...] = ()


NOTHING_SAID = FrameAnalytics()


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """What a frame's way took, in seconds. total_s: from captured_at until a sink is given it."""

    mux_s: float = 0.0
    infer_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class FrameResult:
    """All that is known of one frame: what a sink is given, in the order of frame_num per source.

    frame: its image, where it has one, is the result's own and may be kept. labels: by class_id, may be shorter.
    classes: of the whole picture, where the primary model is a classifier. attributes: for each track, what secondary
    models say of it; as long as the tracks, or empty. is_inferred: else the tracks are the tracker's estimate.
    """

    frame: Frame
    tracks: Tracks
    analytics: FrameAnalytics = NOTHING_SAID
    labels: tuple[str, ...] = ()
    classes: tuple[ClassScore, ...] = ()
    attributes: tuple[tuple[ClassScore, ...], ...] = ()
    is_inferred: bool = True
    times: FrameTimes = FrameTimes()

    def label(self, class_id: int) -> str:
        """The class's name, or its number."""
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """A source as it is now, for people and programs. uri: without user and password.

    reason: why it is not running, empty while it is. fps: decoded over the last seconds. frames: decoded so far;
    frames_total: of a file, None where it is not known. inferred: frames the network answered. drops: by DropReason.
    latency_s: of a typical frame, packet to sinks, over the last seconds; None before the first. position_s,
    duration_s: in a file, which begins anew at its end where is_loop. active_s: from its first frame to its last.
    decoder: cpu or nvdec, empty until it is open.
    counts: FrameAnalytics.counts of the last frame. events: how many there were, by event_keys.
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


def _check(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {np.dtype(dtype)} of shape {list(shape)}, not {_what(array)}")


def _what(array: npt.NDArray[np.generic]) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
