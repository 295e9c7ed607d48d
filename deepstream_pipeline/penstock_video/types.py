"""Data types of the video program, from source to sink.

Arrays are borrowed and read-only: copy an array to change it. Constructors check shapes and raise ValueError.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import FloatArray as FloatArray
from penstock.protocol.inference import IntArray as IntArray
from penstock_video.detections import Detections as Detections
from penstock_video.detections import Tracks as Tracks
from penstock_video.detections import no_detections as no_detections
from penstock_video.detections import no_tracks as no_tracks
from penstock_video.detections import what_is

ByteArray = npt.NDArray[np.uint8]
RowArray = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | npt.NDArray[np.float16]


class SourceState(StrEnum):
    """State of a source."""

    CONNECTING = "connecting"
    RUNNING = "running"
    STALLED = "stalled"
    RECONNECTING = "reconnecting"
    AUTH_FAILED = "auth_failed"
    PAUSED = "paused"
    ENDED = "ended"
    FAILED = "failed"


class DropReason(StrEnum):
    """Why a decoded frame was not inferred or its result was dropped.

    ring_full: no free slot in the source's ring. queue_full: replaced by a newer frame. too_old: it waited too long.
    refused: the gateway rejected its deadline. infer_failed: the engine failed. corrupt: its packets were damaged.
    stopped: its source ended or was removed.
    """

    RING_FULL = "ring_full"
    QUEUE_FULL = "queue_full"
    TOO_OLD = "too_old"
    REFUSED = "refused"
    INFER_FAILED = "infer_failed"
    CORRUPT = "corrupt"
    STOPPED = "stopped"


class DropPolicy(StrEnum):
    """What a full queue does. block: the producer waits (files). The others drop a frame and count it."""

    BLOCK = "block"
    DROP_OLDEST = "drop-oldest"
    DROP_NEWEST = "drop-newest"


class EncoderKind(StrEnum):
    """The H.264 encoder of a video sink. auto: NVENC if the GPU has it and it opens, else the CPU."""

    AUTO = "auto"
    NVENC = "nvenc"
    CPU = "cpu"


class DecoderKind(StrEnum):
    """A source's decoder. cpu: FFmpeg. nvdec: the GPU. auto: nvdec if possible, else cpu."""

    AUTO = "auto"
    CPU = "cpu"
    NVDEC = "nvdec"


class DecoderSharing(StrEnum):
    """How a source uses its NVDEC decoder. SHARED: with another source. MISMATCH: its own, since its pictures were
    wrong in a shared one."""

    OWN = "own"
    SHARED = "shared"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """A source, in DeepStream's terms if it has them.

    uri: a path, file:, rtsp:, rtsps:, http:, https: or a V4L2 device (/dev/video0); may contain a user and password.
    source_id: DeepStream's camera_id, unique. camera_name: for display. is_loop: a file restarts at its end.
    is_realtime: a file plays at its own speed and drops late frames, like a camera. policy: None for block (files) or
    drop-oldest (live). expected_fps: None for the stream's own; 10 above it is a runaway. reconnect_interval_s: without
    a frame for this time the source is reopened (rtsp-reconnect-interval). reconnect_attempts: consecutive, -1 for no
    limit. frozen_after_s: the same picture for this time is logged. is_udp: RTSP over UDP, else TCP. record_cache_s:
    seconds cached for recordings that begin before their event. is_from_api: added by an API client, so its addresses
    are checked.
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

    frame_num: counts decoded frames from 0, across reconnections; a lost frame leaves a gap. pts_s: presentation time
    in seconds, strictly increasing per source. captured_at: monotonic seconds of its packet's arrival, or of its due
    time for a file in real time. captured_unix_s: the same as wall clock. width, height: of the source, in pixels.
    image: (H, W, 3) uint8 RGB at source size; None if it is not drawn or cropped. segment: increases at each
    discontinuity (reopened, looped, another resolution, a cut); track identities do not cross it. is_corrupt: decoded
    from damaged packets. digest: equal for equal pictures. sample_aspect_ratio: of a pixel, width by height.
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
            raise ValueError(f"a frame's image is (H, W, 3) uint8, not {what_is(image)}")
        if image.shape[:2] != (self.height, self.width):
            raise ValueError(f"a frame of {self.width}x{self.height} has an image of {what_is(image)}")


class Orientation(NamedTuple):
    """Makes a stored picture upright: first swap rows and columns, then mirror left to right, then top to bottom.

    The eight combinations are those of EXIF and of a video's display matrix.
    """

    is_transposed: bool = False
    is_mirrored_x: bool = False
    is_mirrored_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the upright picture."""
        return (height, width) if self.is_transposed else (width, height)


UPRIGHT = Orientation()


class DevicePicture(NamedTuple):
    """8 bit, 4:2:0, NV12: luma (height, width) and interleaved chroma ((height + 1) // 2, (width + 1) // 2, 2).

    Borrowed until its decoder is given the next packet. luma, chroma: addresses; pitch: bytes from line to line, of
    both. width, height: as stored, before turning. stream: the handle of the CUDA stream in whose order it is complete.
    orientation: makes it upright. matrix: colorspace as FFmpeg numbers it (AVCOL_SPC: 1 BT.709, 5 and 6 BT.601, 2 where
    it says nothing). is_full_range: luma from 0 to 255, else 16 to 235. source_size: the stream's (width, height), if
    the decoder made the picture smaller.
    """

    luma: int
    chroma: int
    pitch: int
    width: int
    height: int
    stream: int
    orientation: Orientation = UPRIGHT
    matrix: int = 2
    is_full_range: bool = False
    source_size: tuple[int, int] | None = None

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) of the stream's upright pictures."""
        return self.orientation.size(*(self.source_size or (self.width, self.height)))

    @property
    def upright_stored_size(self) -> tuple[int, int]:
        """(width, height) of this picture, upright."""
        return self.orientation.size(self.width, self.height)


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A network's input in GPU memory, without a batch axis, C order. address: in this process."""

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
    """A frame and its network input, both in the source's ring until `release` is called, once. row: the input without
    a batch axis, C order; None if this frame is not inferred (interval). Copy an image that is needed after
    `release`."""

    frame: Frame
    row: RowArray | DeviceRow | None
    release: Callable[[], None]


class CloseReason(StrEnum):
    """Why the mux closed a batch. full: batch-size frames. timeout: batched-push-timeout since the first frame.
    slot_free: the engine was idle."""

    FULL = "full"
    TIMEOUT = "timeout"
    SLOT_FREE = "slot_free"


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames with rows for one call of the network. oldest_at: when the first frame came to the mux, monotonic
    seconds."""

    frames: tuple[PreparedFrame, ...]
    reason: CloseReason
    oldest_at: float

    def __post_init__(self) -> None:
        if any(prepared.row is None for prepared in self.frames):
            raise ValueError("a frame without a row is not for the network")

    def __len__(self) -> int:
        return len(self.frames)


NO_CLASS = -1


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class of a picture or a crop. model: its classifier. score: from the model's parser.

    A text is the label of NO_CLASS. A vector is that of an embedding network, with NO_CLASS and an empty label.
    """

    model: str
    class_id: int
    label: str
    score: float
    vector: tuple[float, ...] = ()


class AnalyticsKind(StrEnum):
    """Kinds of rules: DeepStream's names (gst-nvdsanalytics), and dwell."""

    ROI_FILTERING = "roi-filtering"
    OVERCROWDING = "overcrowding"
    LINE_CROSSING = "line-crossing"
    DIRECTION_DETECTION = "direction-detection"
    DWELL = "dwell"


class CrossingDirection(StrEnum):
    """Side to which an object crosses a line that counts both ways. in: from left to right, seen along the line."""

    IN = "in"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class AnalyticsEvent:
    """An event of a rule. kind: an AnalyticsKind, or that of a user's rule. track_id, class_id: None if the rule counts
    objects (overcrowding). rule: its configured name. value: the count, the direction in degrees, or seconds; otherwise
    1.0. direction: of a line that counts both ways, else None. xyxy: of the object, in source pixels; score: the
    detector's; both None without an object in this frame."""

    kind: str
    source_id: str
    frame_num: int
    pts_s: float
    track_id: int | None
    rule: str
    value: float
    class_id: int | None = None
    direction: CrossingDirection | None = None
    xyxy: tuple[float, float, float, float] | None = None
    score: float | None = None


def counter_name(rule: str, direction: str | None) -> str:
    """The rule's counter that an event counts in: RULE, or RULE.in and RULE.out of a line that counts both ways."""
    return rule if direction is None else f"{rule}.{direction}"


def event_keys(kind: str, counter: str, label: str | None) -> tuple[str, ...]:
    """Keys of the event's counters: KIND/COUNTER, and KIND/COUNTER/LABEL if it is about one object."""
    key = f"{kind}/{counter}"
    return (key,) if label is None else (key, f"{key}/{label}")


@dataclass(frozen=True, slots=True, eq=False)
class FrameAnalytics:
    """Results of the rules for one frame.

    events: in the order of the rules. counts: total so far or current number, by "KIND/RULE" (roi-filtering/Yard, and
    per class roi-filtering/Yard/person if labels are known); a line that counts both ways has line-crossing/Door.in and
    line-crossing/Door.out instead. rules_of: for each track, the names of the rules that hold now; as long as the
    tracks, or empty. speeds_mps: for each track, metres a second over the last second, None if not known; empty without
    a ground.
    """

    events: tuple[AnalyticsEvent, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    rules_of: tuple[tuple[str, ...], ...] = ()
    speeds_mps: tuple[float | None, ...] = ()


NO_ANALYTICS = FrameAnalytics()


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Seconds that a frame took. total_s: from captured_at to the sink."""

    mux_s: float = 0.0
    infer_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class FrameResult:
    """Everything known of one frame; sinks get it in the order of frame_num per source.

    frame: its image belongs to the result. labels: by class_id, may be shorter. classes: of the whole picture, if the
    primary model is a classifier. attributes: for each track, from secondary models; as long as the tracks, or empty. A
    vector is there only in the frame that has a new one. skeleton: pairs of keypoints that lines join. is_inferred:
    else the tracks are the tracker's estimate.
    """

    frame: Frame
    tracks: Tracks
    analytics: FrameAnalytics = NO_ANALYTICS
    labels: tuple[str, ...] = ()
    classes: tuple[ClassScore, ...] = ()
    attributes: tuple[tuple[ClassScore, ...], ...] = ()
    is_inferred: bool = True
    times: FrameTimes = FrameTimes()
    skeleton: tuple[tuple[int, int], ...] = ()

    def label(self, class_id: int) -> str:
        """The class's name, or its number."""
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"
