"""Detections and tracks of one frame."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import BoolArray, Mask


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """Detections of one frame. xyxy: (n, 4) float32, corners in source pixels. score: (n,) float32 in [0, 1]. class_id:
    (n,) int64. masks, keypoints (n, k, 3), xywhr (n, 5): as in protocol/vision_results, None if the model has none."""

    xyxy: FloatArray
    score: FloatArray
    class_id: IntArray
    masks: tuple[Mask, ...] | None = None
    keypoints: FloatArray | None = None
    xywhr: FloatArray | None = None

    def __post_init__(self) -> None:
        _check("xyxy", self.xyxy, (len(self), 4), np.float32)
        _check("score", self.score, (len(self),), np.float32)
        _check("class_id", self.class_id, (len(self),), np.int64)
        if self.masks is not None and len(self.masks) != len(self):
            raise ValueError(f"{len(self)} detections have {len(self.masks)} masks")
        if self.keypoints is not None:
            _check("keypoints", self.keypoints, (len(self), *self.keypoints.shape[1:2], 3), np.float32)
        if self.xywhr is not None:
            _check("xywhr", self.xywhr, (len(self), 5), np.float32)

    def __len__(self) -> int:
        return len(self.xyxy)

    def select(self, rows: IntArray | BoolArray) -> "Detections":
        """Some of the detections: by their indices, or by (n,) bool."""
        masks = self.masks
        if masks is not None:
            masks = tuple(masks[row] for row in np.arange(len(self))[rows].tolist())
        return Detections(
            self.xyxy[rows],
            self.score[rows],
            self.class_id[rows],
            masks,
            None if self.keypoints is None else self.keypoints[rows],
            None if self.xywhr is None else self.xywhr[rows],
        )

    def moved(self, boxes: npt.NDArray[np.float64], xyxy: FloatArray) -> "Detections":
        """The same objects at xyxy; masks, keypoints and oriented boxes are moved to the centres of boxes (n, 4).

        Masks move by whole pixels, and end at the picture's edge.
        """
        masks, keypoints, xywhr = self.masks, self.keypoints, self.xywhr
        if masks is None and keypoints is None and xywhr is None:
            return Detections(xyxy, self.score, self.class_id)
        shift = (boxes[:, :2] + boxes[:, 2:] - self.xyxy[:, :2] - self.xyxy[:, 2:]).astype(np.float32) / 2
        if masks is not None:
            masks = tuple(_shifted(mask, *step) for mask, step in zip(masks, np.rint(shift).tolist(), strict=True))
        if keypoints is not None:
            keypoints = keypoints.copy()
            keypoints[..., :2] += shift[:, np.newaxis]
        if xywhr is not None:
            xywhr = xywhr.copy()
            xywhr[:, :2] += shift
        return Detections(xyxy, self.score, self.class_id, masks, keypoints, xywhr)


def foot_cells(detections: Detections, width: int, height: int, grid: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """Rows and columns of the objects' feet in a grid (rows, columns) over a picture of this size, in pixels.

    A foot is the middle of a box's lower edge. Those outside the picture count at its edge; non-finite ones are left
    out.
    """
    boxes = detections.xyxy
    feet = np.stack([boxes[:, 3] / max(height, 1), (boxes[:, 0] + boxes[:, 2]) / 2 / max(width, 1)], axis=1)
    feet = feet[np.isfinite(feet).all(axis=1)]
    cells = (np.clip(feet, 0.0, 0.999_999) * grid).astype(np.int64)
    return cells[:, 0], cells[:, 1]


def _shifted(mask: Mask, right: float, down: float) -> Mask:
    left, top = mask.left + int(right), mask.top + int(down)
    bits = mask.bits[max(-top, 0) : max(mask.height - top, 0), max(-left, 0) : max(mask.width - left, 0)]
    return Mask(mask.height, mask.width, max(left, 0), max(top, 0), bits)


@cache
def no_detections() -> Detections:
    """Detections of an empty frame."""
    return Detections(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """Detections of one frame with their track identities. track_id: (n,) int64, unique per source while the program
    runs. age_frames: (n,) int64, frames since the track began, 1 for a new one. is_estimate: the frame was not
    inferred. untracked: the frame's other detections; no rule counts them."""

    detections: Detections
    track_id: IntArray
    age_frames: IntArray
    is_estimate: bool = False
    untracked: Detections = field(default_factory=no_detections)

    def __post_init__(self) -> None:
        _check("track_id", self.track_id, (len(self),), np.int64)
        _check("age_frames", self.age_frames, (len(self),), np.int64)

    def __len__(self) -> int:
        return len(self.detections)


@cache
def no_tracks() -> Tracks:
    """Tracks of an empty frame."""
    return Tracks(no_detections(), np.empty(0, np.int64), np.empty(0, np.int64))


def _check(name: str, array: npt.NDArray[np.generic], shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {np.dtype(dtype)} of shape {list(shape)}, not {what_is(array)}")


def what_is(array: npt.NDArray[np.generic]) -> str:
    """Its dtype and shape, for an error."""
    return f"{array.dtype} of shape {list(array.shape)}"
