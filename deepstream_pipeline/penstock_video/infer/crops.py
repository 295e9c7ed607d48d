"""Secondary models: which tracked objects are classified, their crops as rows, and their classes. Sans-IO."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import prepare
from penstock.vision.spec import ColorFormat, PrepareSpec
from penstock_video.infer.network import Network
from penstock_video.types import ByteArray, ClassScore, Frame, RowArray, Tracks

GROWN = 1.5  # an object whose side grew by this factor is classified again, since more of it is visible
FORGET_AFTER_FRAMES = 300  # frames without the object, after which its track is forgotten
AGAIN_AFTER_FRAMES = 10  # if the model did not answer
MAX_KNOWN = 4096  # tracks of one source with stored classes
MAX_CROPS = 256  # of one frame; the largest come first


@dataclass(frozen=True, slots=True)
class SecondaryOptions:
    """class_ids: classes of objects to classify, empty for all (operate-on-class-ids). min_width, min_height: in source
    pixels (input-object-min-width, -height). reinfer_interval: frames until an object is classified again; 0 for once,
    unless it grows (secondary-reinfer-interval)."""

    class_ids: frozenset[int] = frozenset()
    min_width: int = 0
    min_height: int = 0
    reinfer_interval: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Crop:
    """One object as the network's row."""

    track_id: int
    row: RowArray


@dataclass(slots=True)
class _Known:
    """State of a track. seen_at, looked_at, due_at: frame numbers; due_at: None for never. side: its larger side at the
    last classification. is_asked: an answer is pending."""

    looked_at: int
    seen_at: int
    side: float
    is_asked: bool = True
    due_at: int | None = None
    classes: tuple[ClassScore, ...] = ()


class SecondaryPlan:
    """State of one source and one secondary model. Frames come in order."""

    def __init__(self, options: SecondaryOptions) -> None:
        self._options = options
        self._known: dict[int, _Known] = {}
        self._segment: int | None = None

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
            row = crop_row(image, box, network.prepare_spec)
            if row is None:
                continue
            track_id = int(tracks.track_id[index])
            former = self._known.get(track_id)
            known = _Known(frame.frame_num, frame.frame_num, _side(box[2:] - box[:2]))
            known.classes = former.classes if former is not None else ()
            self._known[track_id] = known
            crops.append(Crop(track_id, row))
        return crops

    def take(self, crop: Crop, classes: tuple[ClassScore, ...]) -> None:
        """Stores the model's answer. Empty if it failed: then the former one stays, and the object is soon retried."""
        known = self._known.get(crop.track_id)
        if known is None:
            return
        known.is_asked = False
        pause = self._options.reinfer_interval if classes else AGAIN_AFTER_FRAMES
        known.due_at = known.looked_at + pause if pause else None
        known.classes = classes or known.classes

    def attributes(self, tracks: Tracks) -> tuple[tuple[ClassScore, ...], ...]:
        """The last answer for each track; empty if there is none."""
        found = (self._known.get(int(track_id)) for track_id in tracks.track_id)
        return tuple(known.classes if known is not None else () for known in found)

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


def crop_row(image: ByteArray, xyxy: Sequence[float] | np.ndarray, spec: PrepareSpec) -> RowArray | None:
    """The network's input for this part of the image, (H, W, 3) uint8 RGB; None if it lies outside."""
    height, width = image.shape[:2]
    left, top = max(int(np.floor(xyxy[0])), 0), max(int(np.floor(xyxy[1])), 0)
    right, bottom = min(int(np.ceil(xyxy[2])), width), min(int(np.ceil(xyxy[3])), height)
    if right <= left or bottom <= top:
        return None
    pixels = _in_color(image[top:bottom, left:right], spec.color)
    row, _ = prepare(DecodedImage(pixels, right - left, bottom - top), spec)
    return row


def _in_color(pixels: ByteArray, color: ColorFormat) -> ByteArray:
    if color is ColorFormat.RGB:
        return np.ascontiguousarray(pixels)
    code = cv2.COLOR_RGB2BGR if color is ColorFormat.BGR else cv2.COLOR_RGB2GRAY
    converted: ByteArray = cv2.cvtColor(pixels, code)
    return converted


def _side(size: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> float:
    return float(size.max())
