"""Secondary models: which tracked objects they look at, their crops as rows, and their results. Sans-IO."""

from dataclasses import dataclass

import cv2
import numpy as np

from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import Geometry, prepare
from penstock.vision.spec import ColorFormat, PrepareSpec
from penstock_video.infer.calls import CropResult
from penstock_video.infer.network import Network
from penstock_video.types import ByteArray, ClassScore, FloatArray, Frame, RowArray, Tracks

GROWN = 1.5  # an object whose side grew by this factor is classified again, since more of it is visible
FORGET_AFTER_FRAMES = 300  # frames without the object, after which its track is forgotten
AGAIN_AFTER_FRAMES = 10  # if the model did not answer
MAX_KNOWN = 4096  # tracks of one source with stored classes
MAX_CROPS = 256  # of one frame; the largest come first


@dataclass(frozen=True, slots=True)
class SecondaryOptions:
    """class_ids: classes of objects to look at, empty for all (operate-on-class-ids). min_width, min_height: in source
    pixels (input-object-min-width, -height). reinfer_interval: frames until an object is classified again; 0 for once,
    unless it grows (secondary-reinfer-interval)."""

    class_ids: frozenset[int] = frozenset()
    min_width: int = 0
    min_height: int = 0
    reinfer_interval: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Crop:
    """One object as the network's row. xyxy: (4,) float32, its box in the frame. left, top: of the crop, in the frame's
    pixels."""

    track_id: int
    row: RowArray
    geometry: Geometry
    xyxy: FloatArray
    left: int
    top: int

    def in_box(self, keypoints: FloatArray) -> FloatArray:
        """Keypoints (k, 3) of the crop, with x and y as fractions of the object's box."""
        points = keypoints.copy()
        points[:, :2] += (self.left, self.top) - self.xyxy[:2]
        points[:, :2] /= self.xyxy[2:] - self.xyxy[:2]
        return points


@dataclass(slots=True)
class _Known:
    """State of a track. seen_at, looked_at, due_at: frame numbers; due_at: None for never. side: its larger side at the
    last classification. is_asked: an answer is pending. keypoints: (k, 3), as Crop.in_box gives them."""

    looked_at: int
    seen_at: int
    side: float
    is_asked: bool = True
    due_at: int | None = None
    classes: tuple[ClassScore, ...] = ()
    keypoints: FloatArray | None = None


class SecondaryPlan:
    """State of one source and one secondary model. Frames come in order."""

    def __init__(self, options: SecondaryOptions) -> None:
        self._options = options
        self._known: dict[int, _Known] = {}
        self._segment: int | None = None
        self._has_keypoints = False

    def due(self, frame: Frame, tracks: Tracks) -> list[int]:
        """Indices of tracks to classify, the largest first: new, grown or due ones without a pending answer."""
        if frame.segment != self._segment:  # trackers reuse no identity: this only frees memory
            self._segment = frame.segment
            self._known = {key: known for key, known in self._known.items() if known.is_asked}
        self._forget(frame.frame_num)
        sizes = tracks.detections.xyxy[:, 2:] - tracks.detections.xyxy[:, :2]
        found = [index for index in range(len(tracks)) if self._is_due(frame, tracks, index, sizes)]
        found.sort(key=lambda index: -float(sizes[index].prod()))
        return found[:MAX_CROPS]

    def cut(self, network: Network, image: ByteArray, frame: Frame, tracks: Tracks) -> list[Crop]:
        """Crops of due tracks, which then count as classified; call `take` for each. image: (H, W, 3) uint8 RGB."""
        crops: list[Crop] = []
        for index in self.due(frame, tracks):
            box = tracks.detections.xyxy[index]
            track_id = int(tracks.track_id[index])
            crop = cut_out(image, track_id, box, network.prepare_spec)
            if crop is None:
                continue
            known = _Known(frame.frame_num, frame.frame_num, _side(box[2:] - box[:2]))
            if (previous := self._known.get(track_id)) is not None:
                known.classes, known.keypoints = previous.classes, previous.keypoints
            self._known[track_id] = known
            crops.append(crop)
        return crops

    def take(self, crop: Crop, result: CropResult) -> None:
        """Stores the model's answer. Empty if it failed: then the former one stays, and the object is soon retried."""
        known = self._known.get(crop.track_id)
        if known is None:
            return
        known.is_asked = False
        pause = self._options.reinfer_interval if result else AGAIN_AFTER_FRAMES
        known.due_at = known.looked_at + pause if pause else None
        known.classes = result.classes or known.classes
        if result.keypoints is not None:
            known.keypoints, self._has_keypoints = crop.in_box(result.keypoints), True

    def attributes(self, tracks: Tracks) -> tuple[tuple[ClassScore, ...], ...]:
        """The last answer for each track; empty if there is none. A vector is given once."""
        found = [self._known.get(track_id) for track_id in tracks.track_id.tolist()]
        attributes = tuple(known.classes if known is not None else () for known in found)
        for known in found:
            if known is not None and known.classes and known.classes[0].vector:
                known.classes = ()
        return attributes

    def keypoints(self, tracks: Tracks) -> FloatArray | None:
        """(n, k, 3) in pixels of the frame, moved with the boxes; score 0 without an answer. None if none has."""
        found = [self._known.get(track_id) for track_id in tracks.track_id.tolist()] if self._has_keypoints else []
        known = {
            index: one.keypoints for index, one in enumerate(found) if one is not None and one.keypoints is not None
        }
        if not known:
            return None
        points = np.zeros((len(tracks), *next(iter(known.values())).shape), np.float32)
        points[list(known)] = list(known.values())
        corners, opposite = np.split(tracks.detections.xyxy[:, np.newaxis], 2, axis=2)
        points[..., :2] = corners + points[..., :2] * (opposite - corners)
        return points

    def _is_due(
        self, frame: Frame, tracks: Tracks, index: int, sizes: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
    ) -> bool:
        options, (width, height) = self._options, sizes[index]
        known = self._known.get(int(tracks.track_id[index]))
        if known is not None:
            known.seen_at = frame.frame_num
        if options.class_ids and int(tracks.detections.class_id[index]) not in options.class_ids:
            return False
        if width < max(options.min_width, 1) or height < max(options.min_height, 1):
            return False
        if known is None:
            return len(self._known) < MAX_KNOWN
        if known.is_asked:
            return False
        if known.due_at is not None and frame.frame_num >= known.due_at:
            return True
        return _side(sizes[index]) >= GROWN * known.side

    def _forget(self, frame_num: int) -> None:
        gone = [
            key
            for key, known in self._known.items()
            if frame_num - known.seen_at > FORGET_AFTER_FRAMES and not known.is_asked
        ]
        for key in gone:
            del self._known[key]


def cut_out(image: ByteArray, track_id: int, xyxy: FloatArray, spec: PrepareSpec) -> Crop | None:
    """The object in the image, (H, W, 3) uint8 RGB, as the network's input; None if it lies outside."""
    height, width = image.shape[:2]
    left, top = max(int(np.floor(xyxy[0])), 0), max(int(np.floor(xyxy[1])), 0)
    right, bottom = min(int(np.ceil(xyxy[2])), width), min(int(np.ceil(xyxy[3])), height)
    if right <= left or bottom <= top:
        return None
    pixels = _in_color(image[top:bottom, left:right], spec.color)
    row, geometry = prepare(DecodedImage(pixels, right - left, bottom - top), spec)
    return Crop(track_id, row, geometry, xyxy, left, top)


def _in_color(pixels: ByteArray, color: ColorFormat) -> ByteArray:
    if color is ColorFormat.RGB:
        return np.ascontiguousarray(pixels)
    code = cv2.COLOR_RGB2BGR if color is ColorFormat.BGR else cv2.COLOR_RGB2GRAY
    converted: ByteArray = cv2.cvtColor(pixels, code)
    return converted


def _side(size: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> float:
    return float(size.max())
