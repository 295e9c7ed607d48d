"""Where labels stand beside their boxes."""

from itertools import combinations

from deepstream_pipeline.sinks.canvas import Pixel
from deepstream_pipeline.sinks.labels import LabelPlaces

PICTURE, HEIGHT, WIDTH = (640, 360), 20, 90


def overlap(first: Pixel, second: Pixel) -> bool:
    """Whether two labels there cover each other."""
    return abs(first[0] - second[0]) < WIDTH and abs(first[1] - second[1]) < HEIGHT


def test_labels_of_one_place_go_above_inside_below_and_down_the_box() -> None:
    """In that order; who finds none free is told so, and gets the first."""
    places = LabelPlaces(PICTURE, HEIGHT)
    taken = [places.take((200, 100), (240, 170), WIDTH) for _ in range(10)]
    left = [((200, 80), True), ((200, 100), True), ((200, 170), True), ((200, 120), True), ((200, 140), True)]
    assert taken[:5] == left
    assert taken[5:] == [((200, 80), False)] * 5


def test_label_that_has_no_room_on_the_right_ends_at_its_boxs_right_edge() -> None:
    """Between neighbours one goes left, one goes right."""
    places = LabelPlaces(PICTURE, HEIGHT)
    for _ in range(5):
        places.take((270, 100), (310, 170), WIDTH)
    assert places.take((200, 100), (240, 170), WIDTH) == ((240 - WIDTH, 80), True)


def test_labels_that_are_free_cover_none_and_lie_in_the_picture() -> None:
    """Of a crowd at every edge of the picture, and whatever boxes there are."""
    places = LabelPlaces(PICTURE, HEIGHT)
    boxes = [((x, y), (x + 25, y + 60)) for y in range(-30, 350, 95) for x in range(-40, 640, 33)]
    boxes += [((-5000, -5000), (5000, 5000)), ((300, 200), (200, 100)), ((639, 359), (639, 359))]
    taken = [places.take(*box, WIDTH) for box in boxes]
    free = [at for at, is_free in taken if is_free]
    assert len(free) > len(boxes) * 0.7
    assert not any(overlap(*pair) for pair in combinations(free, 2))
    for (x, y), _ in taken:
        assert 0 <= x <= PICTURE[0] - WIDTH
        assert 0 <= y <= PICTURE[1] - HEIGHT


def test_label_wider_than_the_picture_begins_at_its_edge() -> None:
    """There is nothing better."""
    assert LabelPlaces((50, 30), HEIGHT).take((40, 25), (45, 28), WIDTH) == ((0, 5), True)
