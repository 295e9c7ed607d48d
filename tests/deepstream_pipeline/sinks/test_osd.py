"""What is drawn onto pictures."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol.vision_results import Mask
from penstock.vision.palette import color_of
from penstock_video.analytics.rules import LineCrossing, Rules
from penstock_video.sinks.canvas import Canvas
from penstock_video.sinks.osd import Osd
from penstock_video.types import ByteArray, Detections, FrameResult, Tracks
from tests.deepstream_pipeline.sinks.results import PLAIN, RULES, changed, result


def test_osd_leaves_the_results_picture_as_it_is() -> None:
    """The picture of the result is everybody's: it is drawn onto a copy."""
    reported = result(3)
    assert reported.frame.image is not None
    before = reported.frame.image.copy()
    assert changed(Osd().draw(reported), before) > 500
    assert changed(reported.frame.image, before) == 0


@pytest.mark.parametrize("part", ["has_boxes", "has_labels", "has_trails", "has_rules", "has_title", "has_counters"])
def test_osd_draws_each_part_where_it_is_wanted(part: str) -> None:
    """Each part alone leaves its marks; without any the picture is as it was."""
    for options, is_drawn in ((PLAIN, False), (replace(PLAIN, **{part: True}), True)):
        osd = Osd(options)
        osd.set_source("cam", rules=RULES)
        osd.draw(result(2))
        reported = result(3)
        assert (changed(osd.draw(reported), reported.frame.image) > 0) is is_drawn


def test_osd_box_is_where_the_object_is() -> None:
    """The box's edge lies on the object's corners, in the colour of its identity."""
    reported = result(0, objects=1)
    picture = Osd(replace(PLAIN, has_boxes=True)).draw(reported)
    assert picture is not None
    left, top, right, bottom = (round(v) for v in reported.tracks.detections.xyxy[0].tolist())
    rows, columns = np.nonzero((picture == color_of(1)).all(axis=2))
    assert (columns.min(), columns.max(), rows.min(), rows.max()) == (left, right, top, bottom)


def test_osd_labels_of_a_crowd_can_all_be_read() -> None:
    """Of boxes that lie over each other each label has a place of its own: it adds as much as the first."""
    marks = []
    for count in (1, 2, 3):
        reported = result(0, size=(640, 480), objects=count)
        detections = replace(reported.tracks.detections, xyxy=np.full((count, 4), (200, 150, 260, 300), np.float32))
        crowd = replace(reported, tracks=replace(reported.tracks, detections=detections))
        marks.append(changed(Osd(replace(PLAIN, has_labels=True)).draw(crowd), reported.frame.image))
    assert marks[2] - marks[1] > 0.7 * (marks[1] - marks[0]) > 0.5 * marks[0] > 500


def test_osd_labels_of_a_crowd_are_short_and_do_not_flicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a number of objects on each label is its number only, until there are clearly fewer objects."""
    osd = Osd(replace(PLAIN, has_labels=True))
    texts: list[str] = []
    monkeypatch.setattr(Canvas, "plate", lambda canvas, text, *args, **more: texts.append(text))
    short = []
    for number, objects in enumerate((10, 25, 40, 25, 40, 10)):
        texts.clear()
        osd.draw(result(number, size=(854, 480), objects=objects))
        short.append(all(text.startswith("#") for text in texts))
    assert short == [False, False, True, True, True, False]


def test_osd_places_of_labels_do_not_depend_on_the_order_of_the_tracks() -> None:
    """Who was there first keeps the better place, so that labels do not jump from frame to frame."""
    reported = result(0, size=(640, 480), objects=2)
    tracks = reported.tracks
    boxes = np.array([(200, 150, 260, 300), (220, 150, 280, 300)], np.float32)
    pictures = []
    for order in ([0, 1], [1, 0]):
        detections = Detections(boxes[order], tracks.detections.score[order], tracks.detections.class_id[order])
        turned = Tracks(detections, tracks.track_id[order], tracks.age_frames[order])
        pictures.append(Osd(replace(PLAIN, has_labels=True)).draw(replace(reported, tracks=turned)))
    assert changed(pictures[0], pictures[1]) == 0


def test_osd_label_stays_where_it_stood_in_the_picture_before() -> None:
    """When the one behind has gone, the label of the one in front is where it was, whatever the picture's width."""
    behind, front = (300.0, 120.0, 350.0, 230.0), (290.0, 215.0, 350.0, 340.0)
    two, one = result(0, size=(640, 480), objects=2), result(1, size=(640, 480), objects=1)
    detections = replace(two.tracks.detections, xyxy=np.array([behind, front], np.float32))
    two = replace(two, tracks=replace(two.tracks, detections=detections))
    alone = replace(one.tracks.detections, xyxy=np.array([front], np.float32))
    one = replace(one, tracks=replace(one.tracks, detections=alone, track_id=np.array([2], np.int64)))
    osd = Osd(replace(PLAIN, has_labels=True))
    osd.draw(two)
    for width in (640, 320):
        picture, fresh = osd.draw(one, max_width=width), Osd(osd.options).draw(one, max_width=width)
        assert picture is not None
        assert fresh is not None
        below = slice(341 * width // 640, None)
        assert changed(picture[below], fresh[below]) > 100


def words_of(monkeypatch: pytest.MonkeyPatch, reported: FrameResult, *, is_live: bool) -> list[str]:
    """What is written on the picture."""
    written: list[str] = []
    monkeypatch.setattr(Canvas, "plate", lambda self, text, *args, **options: written.append(text))
    osd = Osd(replace(PLAIN, has_title=True))
    osd.set_source("cam", name="Door", is_live=is_live)
    osd.draw(reported)
    return written


@pytest.mark.parametrize(
    ("is_live", "width", "text"),
    [
        (False, 640, "Door   0:01:05.3"),
        (False, 320, "Door   0:01:05.3"),
        (True, 640, "Door   2027-01-15 08:01:05 UTC"),
        (True, 320, "Door   08:01:05 UTC"),
    ],
)
def test_osd_tells_a_files_position_and_a_cameras_time(
    monkeypatch: pytest.MonkeyPatch, is_live: bool, width: int, text: str
) -> None:
    """The time of day at which a file is read reads as when it was filmed: it is not shown."""
    assert words_of(monkeypatch, result(653, size=(width, 240)), is_live=is_live) == [text]


def test_osd_counts_of_rules_are_not_covered_by_who_passes() -> None:
    """An object's label stands elsewhere, so that both can be read: together they add what each adds alone."""
    reported = result(0, size=(640, 480), objects=1)
    at_the_name = np.array([[322.0, 270.0, 420.0, 400.0]], np.float32)  # the label's first place is the name's
    detections = replace(reported.tracks.detections, xyxy=at_the_name)
    reported = replace(reported, tracks=replace(reported.tracks, detections=detections))
    rules = Rules(640, 480, line_crossing=(LineCrossing("Entry", ((20, 240), (620, 240)), ((320, 80), (320, 160))),))
    marks = {}
    for parts in (("has_rules",), ("has_labels",), ("has_rules", "has_labels")):
        osd = Osd(replace(PLAIN, **dict.fromkeys(parts, True)))
        osd.set_source("cam", rules=rules)
        marks[parts] = changed(osd.draw(reported), reported.frame.image)
    assert marks["has_rules", "has_labels"] >= 0.97 * (marks["has_rules",] + marks["has_labels",])


@pytest.mark.parametrize("ground", [0, 255])
def test_osd_box_shows_on_black_and_on_white(ground: int) -> None:
    """The line or its edge differs from the ground by most of the range."""
    reported = result(0, size=(854, 480), objects=1)
    even = np.full((480, 854, 3), ground, np.uint8)
    picture = Osd(replace(PLAIN, has_boxes=True)).draw(replace(reported, frame=replace(reported.frame, image=even)))
    assert picture is not None
    left, top, _, bottom = (round(side) for side in reported.tracks.detections.xyxy[0].tolist())
    across = picture[(top + bottom) // 2, max(left - 4, 0) : left + 5].astype(int)
    assert np.abs(across.mean(axis=1) - ground).max() > 150


@pytest.mark.parametrize("size", [(320, 240), (64, 48), (321, 241), (1920, 1080), (3840, 2160)])
def test_osd_of_any_size_draws_within_the_picture(size: tuple[int, int]) -> None:
    """Small, odd and huge pictures are drawn on; letters grow with them."""
    osd = Osd()
    osd.set_source("cam", name="A camera with rather a long name", rules=RULES)
    reported = result(1, size=size)
    picture = osd.draw(reported)
    assert picture is not None
    assert picture.shape == (size[1], size[0], 3)
    assert changed(picture, reported.frame.image) > 100


def test_osd_narrower_draws_the_same_things_smaller() -> None:
    """With a limit of the width the picture is scaled first, and what is drawn fits it."""
    reported = result(0, size=(640, 480), objects=1)
    picture = Osd(replace(PLAIN, has_boxes=True)).draw(reported, max_width=320)
    assert picture is not None
    assert picture.shape == (240, 320, 3)
    _, columns = np.nonzero((picture == color_of(1)).all(axis=2))
    left, _, right, _ = reported.tracks.detections.xyxy[0].tolist()
    assert abs(columns.min() - left / 2) <= 1
    assert abs(columns.max() - right / 2) <= 1


def shaped(**shapes: object) -> FrameResult:
    """One object, between (64, 160) and (135, 427) of a picture of 640 x 640."""
    reported = result(0, size=(640, 640), objects=1)
    detections = replace(reported.tracks.detections, xyxy=np.array([[64, 160, 135, 427]], np.float32), **shapes)
    return replace(reported, tracks=replace(reported.tracks, detections=detections), skeleton=((0, 1), (1, 2), (0, 9)))


@pytest.mark.parametrize("max_width", [0, 320])
def test_osd_mask_tints_its_pixels_only(max_width: int) -> None:
    """In the colour of the object, also in a smaller picture; a part outside the picture is left out."""
    reported = shaped(masks=(Mask(640, 640, 600, 400, np.ones((20, 60), np.bool_)),))
    picture = Osd(replace(PLAIN, has_masks=True)).draw(reported, max_width=max_width)
    plain = Osd(PLAIN).draw(reported, max_width=max_width)
    assert picture is not None
    rows, columns = np.nonzero((picture != plain).any(axis=2))
    scale = picture.shape[1] / 640
    assert (columns.min(), columns.max() + 1) == (600 * scale, 640 * scale)
    assert (rows.min(), rows.max() + 1) == (400 * scale, 420 * scale)
    assert len(rows) == 800 * scale**2


def test_osd_turned_box_replaces_the_upright_one() -> None:
    """Its corners are where the angle puts them: here a square on its tip."""
    picture = Osd(replace(PLAIN, has_boxes=True)).draw(
        shaped(xywhr=np.array([[320, 320, 200, 200, np.pi / 4]], np.float32))
    )
    plain = Osd(PLAIN).draw(shaped())
    assert picture is not None
    rows, columns = np.nonzero((picture != plain).any(axis=2))
    tip = 100 * np.sqrt(2)
    assert abs(columns.min() - (320 - tip)) <= 3
    assert abs(rows.max() - (320 + tip)) <= 3
    assert not (picture[220:420, 320] != plain[220:420, 320]).any()  # type: ignore[index]


def test_osd_keypoints_are_joined_by_the_skeleton() -> None:
    """Lines join the keypoints that are seen; one that is not seen, or not there, has none."""
    keypoints = np.array([[[200, 300, 0.9], [300, 300, 0.9], [300, 400, 0.1]]], np.float32)
    picture = Osd(replace(PLAIN, has_boxes=True)).draw(shaped(keypoints=keypoints))
    plain = Osd(replace(PLAIN, has_boxes=True)).draw(shaped())
    assert picture is not None
    rows, columns = np.nonzero((picture != plain).any(axis=2))
    assert 190 < columns.min() < 200 < 250 < columns.max() < 310
    assert rows.max() < 310
    assert (picture[300, 250] == color_of(1)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_osd_with_shapes_of_nonsense_draws_the_box(value: float) -> None:
    """Numbers that no picture has break nothing."""
    points, turned = np.full((1, 3, 3), value, np.float32), np.full((1, 5), value, np.float32)
    masks = (Mask(640, 640, 0, 0, np.ones((0, 0), np.bool_)),)
    assert Osd().draw(shaped(masks=masks, keypoints=points, xywhr=turned)) is not None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_osd_with_boxes_that_no_object_has_draws_the_others(value: float) -> None:
    """A box of nonsense breaks nothing."""
    reported = result(0, objects=2)
    boxes = reported.tracks.detections.xyxy.copy()
    boxes[0, 2] = value
    detections = Detections(boxes, reported.tracks.detections.score, reported.tracks.detections.class_id)
    osd = Osd()
    for number in range(3):
        frame = replace(reported.frame, frame_num=number)
        picture = osd.draw(replace(reported, frame=frame, tracks=replace(reported.tracks, detections=detections)))
    assert picture is not None
    assert (picture == color_of(2)).all(axis=2).any()


def test_osd_asked_twice_draws_once() -> None:
    """A second sink gets the very picture that the first one had drawn."""
    osd, reported = Osd(), result(5)
    first, narrow = osd.draw(reported), osd.draw(reported, max_width=100)
    assert first is osd.draw(reported)
    assert narrow is osd.draw(reported, max_width=100)
    assert osd.draw(result(6)) is not first


def test_osd_trails_end_at_a_cut_and_are_bounded() -> None:
    """What was seen before a cut leaves no trail behind it, and many objects leave no more than are kept."""
    osd = Osd(replace(PLAIN, has_trails=True))
    for number in range(10):
        osd.draw(result(number))
    behind_cut = result(10)
    behind_cut = replace(behind_cut, frame=replace(behind_cut.frame, segment=1))
    assert changed(osd.draw(behind_cut), behind_cut.frame.image) == 0
    for number in range(11, 100):
        reported = result(number, objects=20, size=(64, 48))
        ids = np.arange(20, dtype=np.int64) + number * 20
        osd.draw(replace(reported, tracks=Tracks(reported.tracks.detections, ids, reported.tracks.age_frames)))
    assert len(osd._memories["cam"].trails) <= 512


def test_osd_late_frame_is_drawn_and_leaves_no_trail() -> None:
    """A slow sink that asks for an older frame gets it; the trails do not jump back."""
    osd = Osd()
    for number in (5, 6, 3):
        assert osd.draw(result(number)) is not None
    points = osd._memories["cam"].trails[1]
    assert [round(one[0] * 10) for one in points] == [5, 6]


def test_osd_forgets_a_source_that_is_over() -> None:
    """Sources that come and go leave nothing behind."""
    osd = Osd()
    for number in range(50):
        source_id = f"cam{number}"
        osd.set_source(source_id, name="x", rules=RULES)
        osd.draw(result(0, source_id=source_id, size=(64, 48)))
        osd.forget(source_id)
    assert (osd._memories, osd._titles, osd._rules) == ({}, {}, {})


def test_osd_late_end_of_a_sink_leaves_the_rules_of_a_source_that_came_again() -> None:
    """A slow sink's word that a source is over costs the source of that name that came since no rule."""
    osd = Osd(replace(PLAIN, has_rules=True))
    osd.set_source("cam", rules=RULES)
    osd.draw(result(0))
    osd.drop_pictures("cam")
    reported = result(1)
    assert changed(osd.draw(reported), reported.frame.image) > 0


def test_osd_draws_pictures_of_one_source_one_at_a_time() -> None:
    """Threads of several sinks draw at once: a source's picture waits for the one before, another source's does not."""
    osd = Osd()
    osd.draw(result(0))
    drawn: list[ByteArray | None] = []
    thread = threading.Thread(target=lambda: drawn.append(osd.draw(result(1))))
    with osd._memories["cam"].lock:
        thread.start()
        assert osd.draw(result(1, source_id="other")) is not None
        thread.join(0.1)
        assert drawn == []
    thread.join(30)
    assert len(drawn) == 1
