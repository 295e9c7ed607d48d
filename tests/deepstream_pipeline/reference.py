"""The video program in one page, without it: what PyAV, OpenCV, onnxruntime and the tracking library say of a clip.

Written from FastestDet's own description and the documented meaning of a line, one step after the other, and slow on
purpose. Tests hold `penstock video run` against it: equal boxes, equal identities up to their numbers, equal counts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import av
import cv2
import numpy as np
import numpy.typing as npt
import onnxruntime

if TYPE_CHECKING:
    from trackers import ByteTrackTracker

Array = npt.NDArray[np.float64]
Segment = tuple[tuple[float, float], tuple[float, float]]

# Across the pavement of vtest.avi (768 x 576), right of the tripod, and the way to the right.
PAVEMENT_LINE: Segment = ((580.0, 180.0), (580.0, 420.0))
RIGHTWARDS: Segment = ((500.0, 300.0), (600.0, 300.0))
# Counted by eye, on the frames: who crosses that line in frames 200 to 549, to the right and to the left. One goes
# there and comes back; another turns on it.
BY_EYE = (200, 550, 5, 6)

SIDE, SCORE, OVERLAP = 352, 0.65, 0.45  # pixels; pre-cluster-threshold and nms-iou-threshold of its config.pbtxt
TREMBLE = 0.05  # of a box's diagonal: nearer to the line than that, a foot is on no side of it
PROBATION, SHADOW, LEAST_OVERLAP, HIGH = 3, 30, 0.1, 0.5  # the tracker's options


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """Of one frame. boxes: (n, 4) of every detection. tracked: of those with an identity (track_id, class_id, xyxy).

    counts: crossings so far, (along the direction, against it).
    """

    boxes: npt.NDArray[np.float32]
    score: npt.NDArray[np.float32]
    class_id: npt.NDArray[np.int64]
    tracked: tuple[tuple[int, int, tuple[float, ...]], ...]
    counts: tuple[int, int]


def reference(
    clip: Path, model_path: Path, line: Segment, direction: Segment = RIGHTWARDS, *, frames: int = 0
) -> list[SeenFrame]:
    """Every frame of the clip, or its first so many. direction: which way counts as along."""
    return list(watch(pictures(clip, frames), model_path, line, direction))


def pictures(clip: Path, frames: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
    """BGR."""
    with av.open(str(clip)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if frames and number >= frames:
                return
            yield frame.to_ndarray(format="bgr24")


def watch(
    shown: Iterator[npt.NDArray[np.uint8]], model_path: Path, line: Segment, direction: Segment
) -> Iterator[SeenFrame]:
    """The pictures through detector, tracker and line."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
    follower, counter = Follower(), LineCounter(line, direction)
    for picture in shown:
        boxes, score, class_id = detect(session, picture)
        tracked = follower.follow(boxes, score, class_id)
        counter.see(tracked)
        yield SeenFrame(boxes, score, class_id, tracked, (counter.along, counter.against))


def detect(
    session: onnxruntime.InferenceSession, picture: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """(xyxy in the picture's pixels, score, class_id), the best first."""
    small = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    row = (small.astype(np.float64) * 0.00392156862745098).astype(np.float32).transpose(2, 0, 1)[None]
    (grid,) = session.run(None, {"input.1": np.ascontiguousarray(row)})
    found = []
    for y in range(grid.shape[2]):
        for x in range(grid.shape[3]):
            cell = grid[0, :, y, x]
            class_id = int(cell[5:].argmax())
            score = float(cell[0] ** np.float32(0.6) * cell[5 + class_id] ** np.float32(0.4))
            if score > SCORE:
                middle = (x + math.tanh(cell[1])) / grid.shape[3], (y + math.tanh(cell[2])) / grid.shape[2]
                half = [1 / (1 + math.exp(-side)) / 2 for side in cell[3:5]]
                box = (middle[0] - half[0], middle[1] - half[1], middle[0] + half[0], middle[1] + half[1])
                found.append((score, class_id, box))
    found.sort(key=lambda one: -one[0])
    kept: list[tuple[float, int, tuple[float, ...]]] = []
    for one in found:
        if all(one[1] != other[1] or overlap(one[2], other[2]) <= OVERLAP for other in kept):
            kept.append(one)
    height, width = picture.shape[:2]
    size = np.array([width, height, width, height], np.float64)
    boxes = (np.array([box for _, _, box in kept]).reshape(-1, 4) * size).clip(0, size).astype(np.float32)
    return boxes, np.array([one[0] for one in kept], np.float32), np.array([one[1] for one in kept], np.int64)


def overlap(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
    """Intersection over union."""
    width = min(ours[2], theirs[2]) - max(ours[0], theirs[0])
    height = min(ours[3], theirs[3]) - max(ours[1], theirs[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (ours, theirs)]
    return shared / (sum(areas) - shared)


class Follower:
    """The library's ByteTrack as it is, one for each class, at a frame a step."""

    def __init__(self) -> None:
        self._trackers: dict[int, ByteTrackTracker] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def follow(
        self, boxes: npt.NDArray[np.float32], score: npt.NDArray[np.float32], class_id: npt.NDArray[np.int64]
    ) -> tuple[tuple[int, int, tuple[float, ...]], ...]:
        """(track_id, class_id, xyxy) of those with an identity."""
        import supervision  # 2 s of CPU, which only the tests of tracks need
        from trackers import ByteTrackTracker

        for one in set(class_id.tolist()) - set(self._trackers):
            self._trackers[one] = ByteTrackTracker(
                lost_track_buffer=SHADOW, frame_rate=30.0, track_activation_threshold=HIGH,
                minimum_consecutive_frames=PROBATION, minimum_iou_threshold=LEAST_OVERLAP, high_conf_det_threshold=HIGH,
            )  # fmt: skip
        tracked = []
        for one, tracker in self._trackers.items():
            rows = class_id == one
            found = tracker.update(
                supervision.Detections(xyxy=boxes[rows], confidence=score[rows], class_id=class_id[rows])
            )
            for xyxy, track_id in zip(found.xyxy.tolist(), found.tracker_id, strict=True):
                if track_id >= 0:
                    number = self._numbers.setdefault((one, int(track_id)), len(self._numbers) + 1)
                    tracked.append((number, one, tuple(xyxy)))
        return tuple(tracked)


@dataclass
class LineCounter:
    """Who was clearly on one side with its foot and is now clearly on the other, having met the line between its ends.

    along, against: the direction.
    """

    line: Segment
    direction: Segment
    along: int = 0
    against: int = 0
    _sides: dict[int, int] = field(default_factory=dict)
    _last: dict[int, tuple[float, float]] = field(default_factory=dict)
    _met: dict[int, float] = field(default_factory=dict)

    def see(self, tracked: tuple[tuple[int, int, tuple[float, ...]], ...]) -> None:
        """The next frame."""
        for track_id, _, (left, top, right, bottom) in tracked:
            foot = ((left + right) / 2, bottom)
            if track_id in self._last and _side_of(foot, self.line) * _side_of(self._last[track_id], self.line) <= 0:
                self._met[track_id] = _where(self._last[track_id], foot, self.line)
            self._last[track_id] = foot
            if abs(_side_of(foot, self.line)) < TREMBLE * math.hypot(right - left, bottom - top):
                continue
            side = 1 if _side_of(foot, self.line) > 0 else -1
            if self._sides.setdefault(track_id, side) != side:
                self._sides[track_id] = side
                if 0 <= self._met[track_id] <= 1:
                    self._count(side)

    def _count(self, side: int) -> None:
        (from_x, from_y), (to_x, to_y) = self.direction
        (x, y) = self.line[0]
        ahead = _side_of((x + to_x - from_x, y + to_y - from_y), self.line)
        if ahead * side > 0:
            self.along += 1
        else:
            self.against += 1


def _side_of(point: tuple[float, float], line: Segment) -> float:
    """Its distance to the line, positive on one side."""
    (x1, y1), (x2, y2) = line
    return ((x2 - x1) * (point[1] - y1) - (y2 - y1) * (point[0] - x1)) / math.dist(*line)


def _where(before: tuple[float, float], after: tuple[float, float], line: Segment) -> float:
    """Where the way from before to after meets the line, in lengths of it from its start."""
    share = _side_of(before, line) / (_side_of(before, line) - _side_of(after, line) or 1.0)
    point = [one + share * (other - one) for one, other in zip(before, after, strict=True)]
    (x1, y1), (x2, y2) = line
    return ((point[0] - x1) * (x2 - x1) + (point[1] - y1) * (y2 - y1)) / math.dist(*line) ** 2
