"""Tracker and rules on real detections: against the reference program, and against people who were counted by eye."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from penstock_video.analytics.rules import LineCrossing, Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.track.registry import TrackerOptions, new_tracker
from penstock_video.types import Detections, Frame, FrameAnalytics, Tracks
from tests.deepstream_pipeline.reference import BY_EYE, PAVEMENT_LINE, RIGHTWARDS, SeenFrame, reference

pytestmark = pytest.mark.long
LEFTWARDS = (RIGHTWARDS[1], RIGHTWARDS[0])
RULES = Rules(
    768,
    576,
    line_crossing=(
        LineCrossing("right", PAVEMENT_LINE, RIGHTWARDS),
        LineCrossing("left", PAVEMENT_LINE, LEFTWARDS),
        LineCrossing("both", PAVEMENT_LINE),
    ),
)

Said = tuple[Tracks, FrameAnalytics]


@pytest.fixture(scope="module")
def seen(shared_dir: Path) -> list[SeenFrame]:
    """vtest.avi as far as it was counted by eye."""
    media, models = shared_dir / "media", shared_dir / "models"
    return reference(media / "vtest.avi", models / "FastestDet.onnx", PAVEMENT_LINE, frames=BY_EYE[1])


@pytest.fixture(scope="module")
def said(seen: list[SeenFrame]) -> list[Said]:
    """What our tracker and rules make of the same detections."""
    return list(_said(seen))


def _said(seen: list[SeenFrame]) -> Iterator[Said]:
    tracker, analytics = new_tracker(TrackerOptions()), SourceAnalytics(RULES, ("person",))
    for number, one in enumerate(seen):
        frame = Frame("vtest", number, number / 10, 0.0, 768, 576)
        tracks = tracker.update(frame, Detections(one.boxes, one.score, one.class_id))
        yield tracks, analytics.observe(frame, tracks)


def test_tracks_of_vtest_are_the_reference_programs(seen: list[SeenFrame], said: list[Said]) -> None:
    """The same boxes have identities in every frame, and each identity is one of the library's, used for one class."""
    numbers: dict[int, int] = {}
    for one, (tracks, _) in zip(seen, said, strict=True):
        theirs = {(class_id, xyxy): number for number, class_id, xyxy in one.tracked}
        boxes = [tuple(xyxy) for xyxy in tracks.detections.xyxy.tolist()]
        ours = dict(
            zip(zip(tracks.detections.class_id.tolist(), boxes, strict=True), tracks.track_id.tolist(), strict=True)
        )
        assert ours.keys() == theirs.keys()
        for box, track_id in ours.items():
            assert numbers.setdefault(track_id, theirs[box]) == theirs[box]
    assert len(set(numbers.values())) == len(numbers) > 30


def test_counts_of_vtest_are_the_reference_programs(seen: list[SeenFrame], said: list[Said]) -> None:
    """After every frame, in both directions."""
    keys = ("line-crossing/right", "line-crossing/left")
    assert [tuple(one.counts[key] for key in keys) for _, one in said] == [one.counts for one in seen]
    right, left, to_in, to_out = (
        said[-1][1].counts[f"line-crossing/{name}"] for name in ("right", "left", "both.in", "both.out")
    )
    assert (to_in, to_out) == (left, right)  # the line runs down, so its right hand is the picture's left
    assert right + left == len([event for _, one in said for event in one.events]) / 2


def test_counts_of_vtest_are_those_of_an_eye(said: list[Said]) -> None:
    """Frames 200 to 549 were looked at: eleven cross, and so many are counted, each way."""
    first, last, right, left = BY_EYE
    assert last == len(said)
    counts = [
        [said[number][1].counts[f"line-crossing/{way}"] for way in ("right", "left")]
        for number in (first - 1, last - 1)
    ]
    assert [after - before for before, after in zip(*counts, strict=True)] == [right, left]


def test_identities_of_vtest_are_kept_for_long(said: list[Said]) -> None:
    """Ages rise with the frames, and who is followed is followed for seconds: 30 frames and more for most."""
    oldest: dict[int, int] = {}
    for (before, _), (after, _) in pairwise(said):
        ages = dict(zip(before.track_id.tolist(), before.age_frames.tolist(), strict=True))
        for track_id, age in zip(after.track_id.tolist(), after.age_frames.tolist(), strict=True):
            assert age == ages.get(track_id, age - 1) + 1
            oldest[track_id] = age
    ages_at_end = sorted(oldest.values())
    assert ages_at_end[len(ages_at_end) // 2] >= 30
