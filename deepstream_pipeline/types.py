"""The nouns of the video program: what flows from a source to a sink.

Arrays are borrowed and never written to: whoever changes one makes its own. Each value checks its shapes once, when it
is made, and raises ValueError: a wrong shape is a fault of the program, never of a camera.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture of one source.

    frame_num: 0, 1, 2, … per source since it was opened; a dropped frame leaves a gap.
    pts_s: presentation time in seconds, rising strictly per source. captured_at: monotonic seconds of its decoding.
    image: (H, W, 3) uint8, RGB.
    """

    source_id: str
    frame_num: int
    pts_s: float
    captured_at: float
    image: ByteArray

    def __post_init__(self) -> None:
        if self.image.dtype != np.uint8 or self.image.ndim != 3 or self.image.shape[2] != 3:
            raise ValueError(f"a frame's image is (H, W, 3) uint8, not {_what(self.image)}")


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Frames of one or several sources, made ready for one call of the network.

    images: (N, 3, H, W), row i made of frames[i], in the network's size and element type.
    """

    frames: tuple[Frame, ...]
    images: ByteArray | FloatArray

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.shape[:2] != (len(self.frames), 3):
            raise ValueError(f"images of {len(self.frames)} frames are (N, 3, H, W), not {_what(self.images)}")


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


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """Detections of one frame, each with the identity that a tracker gives it.

    track_id: (n,) int64, unique in a source for as long as the source is open.
    age_frames: (n,) int64, frames since the track began, 1 for a new one.
    """

    detections: Detections
    track_id: IntArray
    age_frames: IntArray

    def __post_init__(self) -> None:
        _check("track_id", self.track_id, (len(self),), np.int64)
        _check("age_frames", self.age_frames, (len(self),), np.int64)

    def __len__(self) -> int:
        return len(self.detections)


class AnalyticsKind(StrEnum):
    """DeepStream's names of the rules (gst-nvdsanalytics)."""

    ROI_FILTERING = "roi-filtering"
    OVERCROWDING = "overcrowding"
    LINE_CROSSING = "line-crossing"
    DIRECTION_DETECTION = "direction-detection"


@dataclass(frozen=True, slots=True)
class AnalyticsEvent:
    """A rule came true.

    track_id: None where the rule counts instead of following one object (overcrowding).
    rule: the rule's name in the configuration. value: the count, or the direction in degrees; 1.0 for plain truth.
    """

    kind: AnalyticsKind
    source_id: str
    frame_num: int
    pts_s: float
    track_id: int | None
    rule: str
    value: float


def _check(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {np.dtype(dtype)} of shape {list(shape)}, not {_what(array)}")


def _what(array: npt.NDArray[np.generic]) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
