"""Where labels stand beside their boxes."""

from itertools import combinations

from penstock_video.sinks.canvas import LabelLayout, LabelPosition, Pixel, neighbours

PICTURE, HEIGHT, WIDTH = (640, 360), 20, 90


def taken_of(place: LabelPosition | None) -> Pixel | None:
    """Where it is; None without a free position."""
    return None if place is None else place.at


def overlap(first: Pixel, second: Pixel) -> bool:
    """Whether two labels there cover each other."""
    return abs(first[0] - second[0]) < WIDTH and abs(first[1] - second[1]) < HEIGHT


def test_labels_of_one_place_go_above_below_and_inside_down_the_box() -> None:
    """In that order; without a free position there is none."""
    places = LabelLayout(PICTURE, HEIGHT)
    taken = [taken_of(places.take(((200, 100), (240, 170)), WIDTH)) for _ in range(10)]
    assert taken[:5] == [(200, 80), (200, 170), (200, 100), (200, 120), (200, 140)]
    assert taken[5:] == [None] * 5


def test_label_that_has_no_room_on_the_right_ends_at_its_boxs_right_edge() -> None:
    """Between neighbours one goes left, one goes right."""
    places = LabelLayout(PICTURE, HEIGHT)
    for _ in range(5):
        places.take(((270, 100), (310, 170)), WIDTH)
    assert taken_of(places.take(((200, 100), (240, 170)), WIDTH)) == (240 - WIDTH, 80)


def test_labels_that_are_free_cover_none_and_lie_in_the_picture() -> None:
    """Of a crowd at every edge of the picture, and whatever boxes there are."""
    places = LabelLayout(PICTURE, HEIGHT)
    boxes = [((x, y), (x + 25, y + 60)) for y in range(-30, 350, 95) for x in range(-40, 640, 33)]
    boxes += [((-5000, -5000), (5000, 5000)), ((300, 200), (200, 100)), ((639, 359), (639, 359))]
    taken = [taken_of(places.take(box, WIDTH)) for box in boxes]
    free = [at for at in taken if at is not None]
    assert len(free) > len(boxes) * 0.7
    assert not any(overlap(*pair) for pair in combinations(free, 2))
    for x, y in free:
        assert 0 <= x <= PICTURE[0] - WIDTH
        assert 0 <= y <= PICTURE[1] - HEIGHT


def test_label_wider_than_the_picture_begins_at_its_edge() -> None:
    """There is nothing better."""
    assert taken_of(LabelLayout((50, 30), HEIGHT).take(((40, 25), (45, 28)), WIDTH)) == (0, 5)


def test_label_stands_where_it_hides_no_one_else() -> None:
    """A head behind the box's upper edge sends it to the other edge, then below; a rim that it touches does not."""
    box = ((200, 100), (240, 170))
    behind, left, rim = ((230, 40), (270, 100)), ((160, 40), (190, 100)), ((285, 40), (330, 100))
    for others, place in (
        ((rim,), (200, 80)),
        ((behind,), (200, 170)),
        ((((250, 40), (290, 100)),), (240 - WIDTH, 80)),
        ((behind, left), (200, 170)),
    ):
        assert taken_of(LabelLayout(PICTURE, HEIGHT).take(box, WIDTH, others)) == place


def test_label_in_a_dense_group_hides_the_least() -> None:
    """Where every place covers someone, the one that covers least of them is taken."""
    box, crowd = ((200, 100), (240, 170)), ((100, 20), (340, 168))
    for other, place in ((((240, 150), (340, 200)), (150, 170)), (((100, 168), (340, 180)), (200, 170))):
        assert taken_of(LabelLayout(PICTURE, HEIGHT).take(box, WIDTH, (crowd, other))) == place


def test_label_stays_at_its_side_of_the_box_while_it_can() -> None:
    """Who was in its way went by: it does not jump back and forth. Inside the box it stays no longer than it must."""
    box, behind = ((200, 100), (240, 170)), ((205, 40), (235, 100))
    first = LabelLayout(PICTURE, HEIGHT).take(box, WIDTH, [behind])
    assert (first.at, first.side) == ((200, 170), ("below", "left"))
    assert LabelLayout(PICTURE, HEIGHT).take(box, WIDTH, former=first.side) == first
    below = ((205, 165), (235, 210))
    assert LabelLayout(PICTURE, HEIGHT).take(box, WIDTH, [below], former=first.side).side == ("above", "left")
    at_the_lower_edge = LabelLayout(PICTURE, HEIGHT).take(((200, 300), (240, 359)), WIDTH, [((150, 250), (290, 299))])
    assert (at_the_lower_edge.at, at_the_lower_edge.side) == ((200, 340), None)
    places = LabelLayout(PICTURE, HEIGHT)
    inside = [places.take(box, WIDTH) for _ in range(4)][2]
    assert inside.side is None
    assert LabelLayout(PICTURE, HEIGHT).take(box, WIDTH, former=inside.side).side == ("above", "left")


def test_neighbours_are_those_that_a_label_could_cover() -> None:
    """Up to a label's width beside the box and its height above and below it, whatever the order; never itself."""
    middle, right, far = ((200, 100), (240, 170)), ((320, 100), (360, 170)), ((340, 100), (380, 170))
    above, higher = ((200, 40), (240, 90)), ((200, 20), (240, 70))
    assert neighbours([far, middle, right], WIDTH, HEIGHT) == [[right], [right], [middle, far]]
    assert neighbours([above, higher, middle], WIDTH, HEIGHT) == [[higher, middle], [above], [above]]
    assert neighbours([middle, middle], WIDTH, HEIGHT) == [[middle], [middle]]
    assert neighbours([], WIDTH, HEIGHT) == []


def test_neighbours_of_a_dense_crowd_are_bounded() -> None:
    """Five hundred boxes at one place cost no more than some each."""
    crowd = [((200, 100), (240, 170))] * 500
    assert max(map(len, neighbours(crowd, WIDTH, HEIGHT))) <= 16
