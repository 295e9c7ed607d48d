"""Drawings of results: every kind is where it belongs, captions can be read, hostile numbers end in no error."""

import numpy as np
import pytest

from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLine,
    TextLines,
)
from penstock.vision.captions import CaptionedBox, position_captions
from penstock.vision.drawing import color_of, draw_boxes, draw_captions, draw_lines, draw_result
from penstock.vision.lettering import Picture
from penstock.vision.palette import INK

PALETTE = [color_of(number) for number in range(3)]


def grey(width: int = 640, height: int = 480) -> Picture:
    """An even picture."""
    return np.full((height, width, 3), 128, np.uint8)


def changed(picture: Picture, drawn: Picture) -> tuple[int, int, int, int]:
    """x1 y1 x2 y2 of what is not as it was."""
    rows, columns = np.nonzero(np.any(picture != drawn, axis=2))
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


def test_draw_boxes_puts_the_line_on_the_box() -> None:
    """The edges have the class's colour, the inside and the rest are untouched."""
    drawn = grey()
    draw_boxes(drawn, [CaptionedBox((100.0, 200.0, 300.0, 400.0), "person 0.91", 1)])
    for x, y in ((100, 300), (300, 300), (200, 200), (200, 400)):
        assert tuple(drawn[y, x]) == PALETTE[1]
    assert tuple(drawn[300, 200]) == (128, 128, 128)
    assert tuple(drawn[100, 100]) == (128, 128, 128)


@pytest.mark.parametrize(
    ("width", "height", "xyxy"),
    [
        (640, 480, (100.0, 200.0, 300.0, 400.0)),
        (640, 480, (0.0, 0.0, 50.0, 50.0)),
        (640, 480, (600.0, 2.0, 640.0, 480.0)),
        (640, 480, (-20.0, 470.0, 700.0, 500.0)),
        (4000, 3000, (3900.0, 2900.0, 4000.0, 3000.0)),
        (40, 30, (1.0, 1.0, 39.0, 29.0)),
    ],
    ids=["inside", "corner", "right edge", "outside", "large", "tiny"],
)
def test_draw_captions_is_legible_wherever_the_box_is(
    width: int, height: int, xyxy: tuple[float, float, float, float]
) -> None:
    """The caption stays in the picture, dark on its own filled background."""
    drawn = grey(width, height)
    draw_captions(drawn, [CaptionedBox(xyxy, "person 0.91", 0)])
    is_ink = np.all(np.abs(drawn.astype(int) - INK) < 60, axis=2)
    is_background = np.all(drawn == PALETTE[0], axis=2)
    assert is_ink.sum() > 20
    rows, columns = np.nonzero(is_ink)
    around = is_background[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert around.mean() > 0.3


def test_position_captions_in_a_crowd_hide_no_box() -> None:
    """Of people shoulder to shoulder none lies under a caption; the strongest keep theirs, in small letters."""
    crowd = [(40.0 + 14 * n, 100.0 + 20 * row, 52.0 + 14 * n, 132.0 + 20 * row) for row in (0, 2) for n in range(20)]
    boxes = [CaptionedBox(xyxy, "person 0.91", 0) for xyxy in crowd]
    placed = position_captions(grey(), boxes)
    places = [one[1] for one in placed if one is not None]
    assert 4 < len(places) < 40
    for left, top, right, bottom in crowd:
        for place in places:
            width = min(right, place.right) - max(left, place.left)
            height = min(bottom, place.bottom) - max(top, place.top)
            assert max(0.0, width) * max(0.0, height) <= 0.1 * 12 * 32
    (alone,) = position_captions(grey(), [CaptionedBox((100.0, 100.0, 400.0, 400.0), "person 0.91", 0)])
    assert placed[0] is not None
    assert alone is not None
    assert placed[0][0].text_px < alone[0].text_px


def test_draw_lines_stands_in_the_upper_left_corner() -> None:
    """The lines of a classifier lie under each other, each on a colour of its own."""
    drawn = grey()
    draw_lines(drawn, [("cat 0.71", PALETTE[0]), ("dog 0.20", PALETTE[1])])
    left, top, right, bottom = changed(grey(), drawn)
    assert (left, top) == (0, 0)
    assert right < 200
    assert bottom < 100
    assert {tuple(drawn[2, 1]), tuple(drawn[bottom - 1, 1])} == {PALETTE[0], PALETTE[1]}


def detections(*xyxy: tuple[float, float, float, float], **more: object) -> Detections:
    """Boxes of classes 0, 1, 2 … with falling scores."""
    count = len(xyxy)
    score = np.linspace(0.9, 0.5, count, dtype=np.float32)
    return Detections(np.array(xyxy, np.float32).reshape(-1, 4), score, np.arange(count), **more)  # type: ignore[arg-type]


def test_draw_result_masks_are_half_transparent() -> None:
    """A mask's pixels are the mean of picture and colour; pixels beside it keep theirs."""
    mask = Mask(480, 640, 110, 210, np.ones((20, 30), np.bool_))
    drawn = grey()
    draw_result(drawn, detections((100, 200, 300, 400), masks=(mask,)), ["person"])
    expected = [64 + value // 2 for value in PALETTE[0]]
    assert drawn[220, 120].tolist() == expected
    assert drawn[220, 150].tolist() == [128, 128, 128]


def test_draw_result_mask_outside_the_picture_is_cut() -> None:
    """A mask that reaches over the picture's edges is drawn where it is inside."""
    drawn = grey(40, 30)
    mask = Mask(30, 40, -5, -5, np.ones((60, 10), np.bool_))
    draw_result(drawn, detections((20, 2, 39, 29), masks=(mask,)), [])
    assert drawn[20, 2].tolist() == [64 + value // 2 for value in PALETTE[0]]
    assert drawn[20, 6].tolist() == [128, 128, 128]


def test_draw_result_joins_keypoints_by_the_skeleton() -> None:
    """Lines join visible keypoints only; a pair that names a missing keypoint is left out."""
    keypoints = np.array([[[100, 100, 0.9], [200, 100, 0.9], [200, 300, 0.1]]], np.float32)
    drawn = grey()
    found = detections((50, 50, 400, 400), keypoints=keypoints)
    draw_result(drawn, found, [], skeleton=((0, 1), (1, 2), (0, 7)))
    assert drawn[100, 150].tolist() == list(PALETTE[0])
    assert drawn[200, 200].tolist() == [128, 128, 128]
    assert drawn[100, 100].tolist() == list(PALETTE[0])
    assert drawn[300, 200].tolist() == [128, 128, 128]


def test_draw_result_turned_box_replaces_the_upright_one() -> None:
    """The outline runs through the turned corners: a square turned by 45 degrees has its corner above its centre."""
    xywhr = np.array([[200, 200, 100, 100, np.pi / 4]], np.float32)
    half = 50 * np.sqrt(2)
    drawn = grey()
    draw_result(drawn, detections((200 - half, 200 - half, 200 + half, 200 + half), xywhr=xywhr), [""])
    assert drawn[165, 165].tolist() == list(PALETTE[0])  # the middle of a side
    assert drawn[200 - 70, 200].tolist() == list(PALETTE[0])
    assert drawn[180, 130].tolist() == [128, 128, 128]  # the left side of the upright box


def test_draw_result_turned_box_turns_clockwise() -> None:
    """A wide box with a positive angle falls to the right, as in pictures whose y axis points down."""
    drawn = grey()
    xywhr = np.array([[300, 240, 200, 4, np.pi / 6]], np.float32)
    draw_result(drawn, detections((213, 190, 387, 290), xywhr=xywhr), [])
    x, y = 300 + 80 * np.cos(np.pi / 6), 240 + 80 * np.sin(np.pi / 6)
    assert drawn[round(y), round(x)].tolist() != [128, 128, 128]
    assert drawn[round(480 - y), round(x)].tolist() == [128, 128, 128]


def test_draw_result_text_has_its_polygon_and_its_words() -> None:
    """A line with a place gets an outline; one without is written into the corner."""
    polygon = np.array([[100, 100], [300, 120], [300, 160], [100, 140]], np.float32)
    drawn = grey()
    draw_result(drawn, TextLines((TextLine("EXIT", 0.9, polygon),)), [])
    assert drawn[120, 100].tolist() == list(PALETTE[0])
    assert drawn[5, 5].tolist() == [128, 128, 128]
    draw_result(drawn, TextLines((TextLine("EXIT", 0.9),)), [])
    assert drawn[1, 1].tolist() == list(PALETTE[0])


def test_draw_result_segmentation_colours_classes_and_names_the_largest_first() -> None:
    """Every class has its colour, and the legend begins with the largest class."""
    small = Mask(480, 640, 600, 400, np.ones((10, 10), np.bool_))
    large = Mask(480, 640, 300, 100, np.ones((200, 200), np.bool_))
    drawn = grey()
    draw_result(drawn, SegmentationMap(480, 640, np.array([1, 2]), (small, large)), ["", "car", "road"])
    assert drawn[405, 605].tolist() == [64 + value // 2 for value in PALETTE[1]]
    assert drawn[200, 400].tolist() == [64 + value // 2 for value in PALETTE[2]]
    assert drawn[1, 1].tolist() == list(PALETTE[2])


def test_draw_result_depth_is_brighter_for_high_values() -> None:
    """Depth replaces the picture; an even depth and one of another size are drawn, too."""
    drawn = grey()
    draw_result(drawn, DepthMap(np.tile(np.linspace(-3, 9, 640, dtype=np.float32), (480, 1))), [])
    assert drawn[0, 0].sum() < 50 < 400 < drawn[0, 639].sum()
    draw_result(drawn, DepthMap(np.full((10, 10), 7, np.float32)), [])
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize(
    "result",
    [
        Classes(np.array([0.9, 0.1], np.float32), np.array([1, 5])),
        Embedding(np.ones(512, np.float32)),
        TextLines(tuple(TextLine("x" * 500, 0.5) for _ in range(200))),
    ],
    ids=["classes", "embedding", "long text"],
)
def test_draw_result_writes_lines_into_the_corner(result: Classes | Embedding | TextLines) -> None:
    """What has no place in the picture is written; lines that do not fit are left out."""
    drawn = grey()
    draw_result(drawn, result, ["dog", "cat"])
    assert drawn[1, 1].tolist() == list(PALETTE[0])


def test_draw_result_of_nothing_changes_nothing() -> None:
    """Empty results of each kind leave the picture as it is."""
    drawn = grey()
    nothing = SegmentationMap(480, 640, np.zeros(0, np.int64), ())
    for result in (detections(), Classes(np.zeros(0, np.float32), np.zeros(0, np.int64)), TextLines(()), nothing):
        draw_result(drawn, result, [])
    assert np.array_equal(drawn, grey())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -1e38])
def test_draw_result_hostile_numbers_are_no_error(value: float) -> None:
    """Numbers that no picture has are drawn at its edges or not at all, without a warning."""
    drawn = grey(64, 48)
    keypoints = np.full((2, 3, 3), value, np.float32)
    xywhr = np.full((2, 5), 3.0, np.float32)
    xywhr[0, :4] = value
    found = detections((value, value, value, value), (1, 2, value, value), keypoints=keypoints, xywhr=xywhr)
    draw_result(drawn, found, [], skeleton=((0, 1),))
    draw_result(drawn, detections((value, value, 3, 4)), [])
    draw_result(drawn, TextLines((TextLine("é", 0.5, np.full((4, 2), value, np.float32)),)), [])


def test_draw_result_many_boxes_takes_little_time_for_captions() -> None:
    """A thousand boxes are all drawn; only the first two hundred may have captions."""
    boxes = [(float(x), float(y), x + 15.0, y + 15.0) for y in range(0, 1920, 60) for x in range(0, 1920, 60)]
    drawn = np.zeros((1920, 1920, 3), np.uint8)
    draw_result(drawn, detections(*boxes), [])
    assert (drawn[1860 + 8, 1860] > 0).any()
    assert not drawn[1830:1850, 1860:].any()


def test_draw_lines_with_control_characters_shows_a_mark() -> None:
    """A label's line break or half a character pair is drawn as a question mark; other scripts stay as they are."""
    drawn, expected = grey(), grey()
    draw_lines(drawn, [("a\nb\ud800 车", PALETTE[0])])
    draw_lines(expected, [("a?b? 车", PALETTE[0])])
    assert np.array_equal(drawn, expected)
