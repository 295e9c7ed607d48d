"""ByteTrack of the library `trackers`, behind our seam.

The library is given frame numbers as its time, so that a gap in them counts as the frames that passed. Classes are kept
apart by their place: each class's boxes lie in a strip of their own, far from the others', where they overlap with
none of them. So one association a frame serves all classes and no track ever changes its class.
"""

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from trackers.core.bytetrack.tracker import ByteTrackTracker

from deepstream_pipeline.track.kalman import CornerKalman
from deepstream_pipeline.track.options import TrackerOptions
from deepstream_pipeline.track.overlap import Overlap
from deepstream_pipeline.types import Detections, Frame, IntArray, Tracks, no_tracks

if TYPE_CHECKING:
    import supervision

Array = npt.NDArray[np.float64]

_STRIP = 1e6  # pixels from one class to the next; wider than any picture
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

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        """Those of the detections that have an identity."""
        self._come_to(frame)
        self._library.maximum_time_without_update = max(self._most_unseen, self._coasted + 1)
        self._coasted = 0
        self._looks.append(frame.frame_num)
        self._shown = no_tracks() if self._has_nothing(detections) else self._looked(frame, detections)
        return self._shown

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
        still = Detections(xyxy[kept].astype(np.float32), seen.score[kept], seen.class_id[kept])
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
        row, track_id = found.row[order], given[order] + self._first_id
        ages = self._ages(track_id.tolist())
        seen = Detections(detections.xyxy[row], detections.score[row], detections.class_id[row])
        return Tracks(seen, track_id, np.array(ages, np.int64))

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
