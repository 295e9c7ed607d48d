"""Identities: kept through gaps and losses, never shared between classes, never used twice."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol.vision_results import Mask
from penstock_video.interfaces import Tracker
from penstock_video.track.bytetrack import ByteTrack
from penstock_video.track.registry import TrackerOptions, TrackerType, new_tracker
from penstock_video.types import Detections, Frame, Tracks, no_detections

Object = tuple[float, float, int, float]  # left, top, class, score
WIDE, HIGH = 30.0, 60.0


def frame_at(number: int, segment: int = 0) -> Frame:
    return Frame("cam", number, number / 10, 0.0, 640, 480, segment=segment)


def seen(*objects: Object) -> Detections:
    boxes = [[left, top, left + WIDE, top + HIGH] for left, top, _, _ in objects]
    return Detections(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array([one[3] for one in objects], np.float32),
        np.array([one[2] for one in objects], np.int64),
    )


def walker(number: int, *, left: float = 100, speed: float = 4, class_id: int = 0, score: float = 0.9) -> Object:
    return (left + speed * number, 200.0, class_id, score)


def walk(tracker: Tracker, numbers: Sequence[int], **walker_is: float) -> list[Tracks]:
    return [tracker.update(frame_at(number), seen(walker(number, **walker_is))) for number in numbers]


def ids(tracks: Sequence[Tracks]) -> list[list[int]]:
    return [one.track_id.tolist() for one in tracks]


@pytest.fixture
def tracker() -> Tracker:
    return new_tracker(TrackerOptions())


def test_detections_without_an_identity_are_beside_the_tracks(tracker: Tracker) -> None:
    """While the probation lasts, and where the score is too low for a new track: each detection is in one of both."""
    said = [tracker.update(frame_at(number), seen(walker(number), (400, 300, 1, 0.3))) for number in range(5)]
    assert [len(one) for one in said] == [0, 0, 1, 1, 1]
    assert [one.untracked.class_id.tolist() for one in said] == [[0, 1]] * 2 + [[1]] * 3
    assert len(tracker.coast(frame_at(5)).untracked) == 0
    assert len(tracker.update(frame_at(6), seen()).untracked) == 0
    tracker.reset()
    tracker.update(frame_at(7), seen(walker(7)))
    assert len(tracker.coast(frame_at(8)).untracked) == 0


class Asking(ByteTrack):
    """Has the library look at every frame, also where nothing is seen and nothing is kept."""

    def _has_nothing(self, detections: Detections) -> bool:
        return False


@pytest.mark.parametrize("probation_age", [1, 2, 3, 5])
def test_frames_without_anything_are_as_if_the_library_had_looked(probation_age: int) -> None:
    """Whatever comes before and after them: the same identities, ages and places."""
    chance = random.Random(probation_age)
    options = TrackerOptions(probation_age=probation_age, max_shadow_tracking_age=4)
    trackers, number, segment, there = (ByteTrack(options), Asking(options)), 0, 0, 0
    for _ in range(600):
        kind = chance.choices(["look", "coast", "cut", "reset"], [80, 15, 2, 3])[0]
        number, segment = number + chance.choice([1, 1, 1, 2, 7]), segment + (kind == "cut")
        frame, score = frame_at(number, segment), chance.choice([0.3, 0.9, 0.9])
        there = chance.choice([0, 0, 1, 2]) if chance.random() < 0.4 else there
        detections = seen(*(walker(0, left=100.0 * place, score=score, class_id=place) for place in range(there)))
        if kind == "reset":
            for one in trackers:
                one.reset()
        ours, theirs = (one.coast(frame) if kind == "coast" else one.update(frame, detections) for one in trackers)
        assert (ours.track_id.tolist(), ours.age_frames.tolist()) == (
            theirs.track_id.tolist(),
            theirs.age_frames.tolist(),
        )
        assert ours.detections.xyxy.tolist() == theirs.detections.xyxy.tolist()
        assert ours.is_estimate is theirs.is_estimate


def test_track_begins_after_its_probation_and_counts_its_age(tracker: Tracker) -> None:
    """Two sightings are not enough for three frames' probation; the age counts from the first of them."""
    tracks = walk(tracker, range(5))
    assert ids(tracks) == [[], [], [1], [1], [1]]
    assert [one.age_frames.tolist() for one in tracks] == [[], [], [3], [4], [5]]
    last = tracks[-1]
    assert (last.detections.xyxy.dtype, last.track_id.dtype, last.age_frames.dtype) == (np.float32, np.int64, np.int64)
    assert last.detections.xyxy.tolist() == [[116, 200, 146, 260]]


@pytest.mark.parametrize(("probation_age", "first"), [(1, 1), (2, 1), (3, 2), (6, 5)])
def test_track_probation_lasts_as_long_as_the_options_say(probation_age: int, first: int) -> None:
    """The frame of the last of so many sightings in a row is the first with the identity."""
    tracks = walk(new_tracker(TrackerOptions(probation_age=probation_age)), range(8))
    assert ids(tracks) == [[]] * first + [[1]] * (8 - first)
    assert tracks[-1].age_frames.tolist() == [8]


def test_track_keeps_its_identity_through_a_gap_of_frames(tracker: Tracker) -> None:
    """Frames that were dropped count as frames that passed: a walker is met where he is by then."""
    tracks = walk(tracker, [*range(10), 22, 23])
    assert ids(tracks)[-2:] == [[1], [1]]
    assert tracks[-1].age_frames.tolist() == [24]


def test_track_not_seen_for_a_while_keeps_its_identity(tracker: Tracker) -> None:
    """It is in no frame's tracks while it is not seen, and then the same."""
    walk(tracker, range(10))
    unseen = [tracker.update(frame_at(number), no_detections()) for number in range(10, 30)]
    assert ids(unseen) == [[]] * 20
    assert ids(walk(tracker, [30])) == [[1]]


@pytest.mark.parametrize(("lost", "expected"), [(5, [1]), (6, [])])
def test_track_not_seen_for_too_long_is_another(lost: int, expected: list[int]) -> None:
    """max_shadow_tracking_age is the number of frames that it may miss."""
    tracker = new_tracker(TrackerOptions(max_shadow_tracking_age=5))
    walk(tracker, range(10), speed=0)
    for number in range(10, 10 + lost):
        tracker.update(frame_at(number), no_detections())
    assert ids(walk(tracker, [10 + lost], speed=0)) == [expected]


def test_classes_never_share_a_track(tracker: Tracker) -> None:
    """A person and a car in one place are two; what changes its class begins anew."""
    for number in range(5):
        both = seen(walker(number), walker(number, class_id=2))
        tracks = tracker.update(frame_at(number), both)
    assert tracks.track_id.tolist() == [1, 2]
    assert tracks.detections.class_id.tolist() == [0, 2]
    turned = tracker.update(frame_at(5), seen(walker(5, class_id=79), walker(5)))
    assert turned.track_id.tolist() == [1]


def test_order_of_detections_does_not_change_the_tracks(tracker: Tracker) -> None:
    """Tracks come by identity, whatever the detector saw first."""
    people = [walker(0, left=left, speed=0) for left in (100, 200, 300, 400)]
    generator = np.random.default_rng(3)
    for number in range(12):
        tracks = tracker.update(frame_at(number), seen(*generator.permutation(people).tolist()))
    place = dict(zip(tracks.track_id.tolist(), tracks.detections.xyxy[:, 0].tolist(), strict=True))
    assert tracks.track_id.tolist() == [1, 2, 3, 4]
    again = tracker.update(frame_at(12), seen(*people))
    assert dict(zip(again.track_id.tolist(), again.detections.xyxy[:, 0].tolist(), strict=True)) == place


def test_reset_forgets_and_uses_no_identity_again(tracker: Tracker) -> None:
    """After a reset the same walker has a new identity, above all earlier ones."""
    walk(tracker, range(5))
    tracker.reset()
    tracker.reset()
    assert ids(walk(tracker, range(5, 9))) == [[], [], [2], [2]]


def test_frame_of_another_segment_begins_anew_by_itself(tracker: Tracker) -> None:
    """A cut, a loop, another resolution: no identity crosses it."""
    walk(tracker, range(5))
    after = [tracker.update(frame_at(number, segment=1), seen(walker(number))) for number in range(5, 9)]
    assert ids(after) == [[], [], [2], [2]]
    assert after[-1].age_frames.tolist() == [4]


def test_frame_number_that_does_not_rise_begins_anew(tracker: Tracker) -> None:
    """A frame number that goes back is a fault of the program, and is not tracked."""
    walk(tracker, range(5))
    assert ids(walk(tracker, range(4))) == [[], [], [2], [2]]


def test_weak_detection_keeps_a_track_and_begins_none() -> None:
    """Below high_threshold a sighting only keeps alive what is known."""
    tracker = new_tracker(TrackerOptions(high_threshold=0.5))
    assert ids(walk(tracker, range(5), score=0.4)) == [[]] * 5
    walk(tracker, range(5, 10))
    assert ids(walk(tracker, range(10, 20), score=0.35)) == [[1]] * 10


def test_coasting_moves_tracks_as_they_moved(tracker: Tracker) -> None:
    """Between looks a walker goes on at his pace, with his last score and class, and ages."""
    walk(tracker, range(10), class_id=3)
    coasted = [tracker.coast(frame_at(number)) for number in (10, 11, 12)]
    assert ids(coasted) == [[1]] * 3
    lefts = [float(one.detections.xyxy[0, 0]) for one in coasted]
    assert lefts == pytest.approx([140, 144, 148], abs=1.5)
    assert [one.age_frames.tolist() for one in coasted] == [[11], [12], [13]]
    assert coasted[0].detections.score.tolist() == pytest.approx([0.9])
    assert coasted[0].detections.class_id.tolist() == [3]
    assert all(one.is_estimate for one in coasted)
    assert ids(walk(tracker, [13], class_id=3)) == [[1]]


def posed(number: int) -> Detections:
    """A person who stands, and a walker. Each has a mask, a keypoint and a oriented box at its centre."""
    found = seen((300.0, 100.0, 0, 0.9), walker(number))
    centres = (found.xyxy[:, :2] + found.xyxy[:, 2:]) / 2
    masks = tuple(Mask(480, 640, int(x), int(y), np.ones((2, 2), np.bool_)) for x, y in centres.tolist())
    keypoints = np.concatenate([centres, np.ones((2, 1), np.float32)], axis=1)[:, np.newaxis]
    xywhr = np.concatenate([centres, np.full((2, 3), 0.5, np.float32)], axis=1)
    return replace(found, masks=masks, keypoints=keypoints, xywhr=xywhr)


def test_track_keeps_the_shapes_of_its_detection(tracker: Tracker) -> None:
    """Masks, keypoints and oriented boxes come in the tracks' order, and move with their boxes while coasting."""
    for number in range(8):
        tracks = tracker.update(frame_at(number), posed(number))
    coasted = tracker.coast(frame_at(8))
    for one, tolerance in ((tracks, 0.6), (coasted, 1.5)):
        detections = one.detections
        assert len(one) == 2
        assert detections.masks is not None
        assert detections.keypoints is not None
        assert detections.xywhr is not None
        centres = (detections.xyxy[:, :2] + detections.xyxy[:, 2:]) / 2
        assert np.allclose(detections.keypoints[:, 0, :2], centres, atol=tolerance)
        assert np.allclose(detections.xywhr[:, :2], centres, atol=tolerance)
        assert np.allclose([(mask.left, mask.top) for mask in detections.masks], centres, atol=tolerance)
    assert coasted.detections.xyxy[:, 0].max() == 300
    assert coasted.detections.xyxy[:, 0].min() == pytest.approx(132, abs=1.5)


def test_coasting_for_longer_than_a_shadow_loses_no_track() -> None:
    """Frames that are not inferred lose no track: the next inference continues the tracks of the last."""
    tracker = new_tracker(TrackerOptions(max_shadow_tracking_age=2))
    walk(tracker, range(5))
    for number in range(5, 15):
        tracker.coast(frame_at(number))
    assert ids(walk(tracker, [15])) == [[1]]
    assert ids([tracker.update(frame_at(number), no_detections()) for number in (16, 17, 18)]) == [[]] * 3
    assert ids(walk(tracker, [19])) == [[]]


def test_coasting_shows_no_object_that_was_not_seen_at_the_last_look(tracker: Tracker) -> None:
    """A lost track is in no coasted frame, and neither is one on probation."""
    walk(tracker, range(10))
    tracker.update(frame_at(10), no_detections())
    coasted = tracker.coast(frame_at(11))
    assert (len(coasted), coasted.is_estimate) == (0, True)


def test_coasting_out_of_the_picture_is_cut_and_then_left_out(tracker: Tracker) -> None:
    """Boxes end at the edges, and who is beyond them is gone from the frame."""
    walk(tracker, range(10), left=520, speed=8)
    coasted = [tracker.coast(frame_at(number)) for number in range(10, 18)]
    assert coasted[2].detections.xyxy[0, 2] == 640
    assert len(coasted[-1]) == 0
    assert all(0 <= value <= 640 for one in coasted for value in one.detections.xyxy.ravel().tolist())


def test_coasting_across_a_cut_shows_no_object(tracker: Tracker) -> None:
    """A cut in a frame that was not inferred is a cut."""
    walk(tracker, range(10))
    assert len(tracker.coast(frame_at(10, segment=1))) == 0
    assert ids(walk(tracker, [11])) == [[]]


def test_ages_of_the_gone_are_forgotten(tracker: Tracker) -> None:
    """Many passers-by leave nothing behind."""
    for number in range(600):
        begin = number // 3 * 3
        tracker.update(frame_at(number), seen((float(begin * 97 % 600), float(begin * 61 % 400), 0, 0.9)))
    assert len(tracker._began) < 60  # type: ignore[attr-defined]


def test_no_tracker_passes_detections_on_without_identity() -> None:
    """Type none: the same boxes, -1 for everybody; a frame without a look has none."""
    tracker = new_tracker(TrackerOptions(type=TrackerType.NONE))
    found = seen(walker(0), walker(0, class_id=1))
    tracks = tracker.update(frame_at(0), found)
    assert tracks.detections is found
    assert (tracks.track_id.tolist(), tracks.age_frames.tolist()) == ([-1, -1], [1, 1])
    assert len(tracker.coast(frame_at(1))) == 0
    tracker.reset()
