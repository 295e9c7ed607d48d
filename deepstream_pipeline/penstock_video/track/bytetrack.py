"""ByteTrack of the library `trackers` as a Tracker, with a scalar Kalman filter and box overlap in double precision."""

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from trackers.core.bytetrack.tracker import ByteTrackTracker
from trackers.utils.iou import BaseIoU
from trackers.utils.kalman_filter import KalmanFilter
from trackers.utils.state_representations import XYXYStateEstimator

from penstock_video.track.registry import TrackerOptions
from penstock_video.types import Detections, Frame, IntArray, Tracks, no_tracks

if TYPE_CHECKING:
    import supervision


Array = npt.NDArray[np.float64]

_NOMINAL_STEP = 0.004  # frames; so near to one frame the library takes a step for one
_UNTUNED = KalmanFilter(8, 4)  # its noise is what the library's tracklets scale to their own


class CornerKalman(XYXYStateEstimator):
    """What the library asks of a state estimator; `ahead` is ours."""

    def __init__(self, bbox: Array) -> None:
        self.kf = _UNTUNED
        self._place: list[float] = bbox.tolist()
        self._speed = [0.0, 0.0, 0.0, 0.0]
        self._pp, self._pv, self._vv = 1.0, 0.0, 1.0
        self._noise = self._noise_position = self._noise_speed = 1.0

    def set_kf_covariances(
        self,
        measurement_noise: Array | None = None,
        process_noise: Array | None = None,
        state_covariance: Array | None = None,
    ) -> None:
        """Takes matrices that treat all corners alike, as the library's ByteTrack makes them."""
        if measurement_noise is not None:
            self._noise = float(measurement_noise[0, 0])
        if process_noise is not None:
            self._noise_position, self._noise_speed = float(process_noise[0, 0]), float(process_noise[4, 4])
        if state_covariance is not None:
            self._pp, self._pv = float(state_covariance[0, 0]), float(state_covariance[0, 4])
            self._vv = float(state_covariance[4, 4])

    def predict(self, frame_step: float = 1.0, frame_rate: float | None = None) -> None:
        """Moved on by so many frames."""
        step = frame_step
        self._place = [place + step * speed for place, speed in zip(self._place, self._speed, strict=True)]
        self._pp += step * (2 * self._pv + step * self._vv)
        self._pv += step * self._vv
        if abs(step - 1) <= _NOMINAL_STEP:
            self._pp += self._noise_position
            self._vv += self._noise_speed
            return
        grown = self._noise_speed * step * step
        self._pp += grown * step * step / 4
        self._pv += grown * step / 2
        self._vv += grown

    def update(self, bbox: Array | None) -> None:
        """Drawn towards what was seen."""
        if bbox is None:
            return
        whole = self._pp + self._noise
        gain, speed_gain = self._pp / whole, self._pv / whole
        missed = [seen - place for seen, place in zip(bbox.tolist(), self._place, strict=True)]
        self._place = [place + gain * miss for place, miss in zip(self._place, missed, strict=True)]
        self._speed = [speed + speed_gain * miss for speed, miss in zip(self._speed, missed, strict=True)]
        self._vv -= speed_gain * self._pv
        self._pv *= 1 - gain
        self._pp *= 1 - gain

    def state_to_bbox(self) -> Array:
        """(4,) xyxy, as it is now."""
        return np.array(self._place)

    def ahead(self, frames: int) -> list[float]:
        """xyxy, as it will be so many frames on; the filter stays as it is."""
        return [place + frames * speed for place, speed in zip(self._place, self._speed, strict=True)]


class Overlap(BaseIoU):
    """Intersection over union."""

    def _compute(self, boxes_1: Array, boxes_2: Array) -> Array:
        ours, theirs = boxes_1[:, None], boxes_2[None]
        low = np.maximum(ours[..., :2], theirs[..., :2])
        sides = np.minimum(ours[..., 2:], theirs[..., 2:])
        sides -= low
        np.maximum(sides, 0, out=sides)
        shared: Array = sides[..., 0] * sides[..., 1]
        union = _area(boxes_1)[:, None] + _area(boxes_2)[None] - shared
        return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _area(boxes: Array) -> Array:
    area: Array = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return area


_STRIP = 1e6  # pixels from one class to the next; wider than any picture
_NO_ROWS: IntArray = np.empty(0, np.int64)
_FRAMES_A_SECOND = 30  # in the library's lost_track_buffer, which counts frames of 1/30 s


class _Seen:
    """What the library reads of its Detections, without the price of supervision's: rows go in, come out in its order.

    tracker_id: the library's own of each row, -1 for none; set by it.
    """

    __slots__ = ("confidence", "row", "tracker_id", "xyxy")

    def __init__(self, xyxy: Array, confidence: npt.NDArray[np.float32], row: IntArray) -> None:
        self.xyxy, self.confidence, self.row = xyxy, confidence, row
        self.tracker_id: IntArray | None = None

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, rows: IntArray) -> "_Seen":
        return _Seen(self.xyxy, self.confidence, self.row[rows])


class ByteTrack:
    """Identities count from 1 and are never used again, also after a reset. Tracks come in the order of their id.

    A frame's tracks are what the detector saw of those whose probation is over; one that it does not see is kept
    unseen and in no frame's tracks until it is seen again. Raises ValueError for a frame_num that does not rise.
    """

    def __init__(self, options: TrackerOptions) -> None:
        self._most_unseen = options.max_shadow_tracking_age + 1  # frames from one sighting to the next
        self._library = ByteTrackTracker(
            lost_track_buffer=self._most_unseen * _FRAMES_A_SECOND,
            frame_rate=1.0,
            track_activation_threshold=options.activation_threshold,
            minimum_consecutive_frames=options.probation_age,
            minimum_iou_threshold=options.minimum_iou,
            high_conf_det_threshold=options.high_threshold,
            state_estimator_class=CornerKalman,
            iou=Overlap(),
        )
        self._looks: deque[int] = deque(maxlen=max(options.probation_age, 2))
        self._began: dict[int, int] = {}
        self._segment = 0
        self._frame_num = -1
        self._first_id = self._next_id = 1
        self._coasted = 0
        self._shown = no_tracks()
        self._rows = _NO_ROWS

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """Those of the detections that have an identity; untracked: those whose probation is not over, and those with
        a score too low for a new track."""
        self._come_to(frame)
        self._rows = _NO_ROWS
        self._library.maximum_time_without_update = max(self._most_unseen, self._coasted + 1)
        self._coasted = 0
        self._looks.append(frame.frame_num)
        self._shown = no_tracks() if self._has_nothing(detections) else self._looked(frame, detections)
        is_untracked = np.ones(len(detections), bool)
        is_untracked[self._rows] = False
        return replace(self._shown, untracked=detections.select(is_untracked)) if is_untracked.any() else self._shown

    def coast(self, frame: Frame) -> Tracks:
        """The tracks of the last look, each where its Kalman filter has it by now, cut at the picture's edges.

        Scores are the last ones; who has left the picture is left out.
        """
        self._come_to(frame)
        self._coasted += 1
        shown = self._shown
        if not len(shown):
            return replace(shown, is_estimate=True)
        seen, frames = shown.detections, frame.frame_num - self._looks[-1]
        filters = {tracklet.tracker_id + self._first_id: tracklet.state_estimator for tracklet in self._library.tracks}
        boxes = [cast(CornerKalman, filters[track_id]).ahead(frames) for track_id in shown.track_id.tolist()]
        moved = np.array(boxes)
        moved -= (seen.class_id * _STRIP)[:, None]
        xyxy = moved.clip(0, (frame.width, frame.height, frame.width, frame.height))
        kept = (xyxy[:, 2] > xyxy[:, 0]) & (xyxy[:, 3] > xyxy[:, 1])
        still = seen if kept.all() else seen.select(kept)
        still = still.moved(moved[kept], xyxy[kept].astype(np.float32))
        return Tracks(still, shown.track_id[kept], shown.age_frames[kept] + frames, is_estimate=True)

    def reset(self) -> None:
        """Forget every track; the next one has an identity that was never used."""
        self._library.reset()
        self._first_id = self._next_id
        self._looks.clear()
        self._began.clear()
        self._coasted = 0
        self._shown = no_tracks()

    def _come_to(self, frame: Frame) -> None:
        """Another segment begins anew, and so does a frame_num that does not rise."""
        if frame.segment != self._segment or frame.frame_num <= self._frame_num:
            self.reset()
        self._segment, self._frame_num = frame.segment, frame.frame_num

    def _has_nothing(self, detections: Detections) -> bool:
        """Whether nothing is seen and nothing is kept: the library says nothing then, and remembers nothing."""
        return not len(detections) and not self._library.tracks

    def _looked(self, frame: Frame, detections: Detections) -> Tracks:
        """What the library makes of them."""
        strip = detections.class_id * _STRIP
        seen = _Seen(detections.xyxy + strip[:, None], detections.score, np.arange(len(detections)))
        found = self._library.update(cast("supervision.Detections", seen), timestamp=float(frame.frame_num))
        return self._known(detections, found) if isinstance(found, _Seen) else no_tracks()

    def _known(self, detections: Detections, found: _Seen) -> Tracks:
        """Those with an identity, in its order."""
        given = cast(IntArray, found.tracker_id)
        order = np.argsort(given)[np.count_nonzero(given < 0) :]
        if not len(order):
            return no_tracks()
        self._rows = row = found.row[order]
        track_id = given[order] + self._first_id
        ages = self._ages(track_id.tolist())
        return Tracks(detections.select(row), track_id, np.array(ages, np.int64))

    def _ages(self, track_ids: list[int]) -> list[int]:
        """Frames since each began; one that is new here was seen in the whole of its probation."""
        began = self._began
        for track_id in track_ids:
            if track_id not in began:
                began[track_id] = self._looks[0]
                self._next_id = max(self._next_id, track_id + 1)
        if len(began) > len(self._library.tracks):
            alive = {tracklet.tracker_id + self._first_id for tracklet in self._library.tracks}
            self._began = began = {track_id: first for track_id, first in began.items() if track_id in alive}
        return [self._frame_num + 1 - began[track_id] for track_id in track_ids]
