"""roi-filtering, dwell and overcrowding: who is in a polygon, for how long, and how many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.analytics.rules import Dwell, Overcrowding, RoiFiltering, Rules
from penstock_video.analytics.scene import Area, scaled
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.types import AnalyticsKind
from tests.deepstream_pipeline.analytics.scenes import (
    LABELS,
    SLACK,
    Place,
    event_values,
    events_of,
    frame_at,
    observe,
    straight,
    tracks_at,
)

SQUARE = ((400.0, 400.0), (600.0, 400.0), (600.0, 600.0), (400.0, 600.0))
YARD = Rules(roi_filtering=(RoiFiltering("Yard", SQUARE),))
IN: Place = (500, 500)
OUT: Place = (300, 500)


@pytest.mark.parametrize(
    ("corners", "point", "expected"),
    [
        (SQUARE, (500, 500), True),
        (SQUARE, (399, 500), False),
        (SQUARE, (601, 500), False),
        (SQUARE, (500, 399), False),
        (SQUARE, (500, 601), False),
        (SQUARE[::-1], (500, 500), True),
        (((0, 0), (100, 0), (100, 100), (50, 20), (0, 100)), (50, 50), False),  # a notch
        (((0, 0), (100, 0), (100, 100), (50, 20), (0, 100)), (10, 50), True),
        (((0, 0), (100, 100), (100, 0), (0, 100)), (10, 50), True),  # it crosses itself
        (((0, 0), (100, 100), (100, 0), (0, 100)), (50, 10), False),
        (((0, 50), (50, 0), (100, 50), (50, 100)), (50, 50), True),  # level with two corners
        (((0, 50), (50, 0), (100, 50), (50, 100)), (-10, 50), False),
        (((0, 50), (50, 0), (100, 50), (50, 100)), (110, 50), False),
    ],
)
def test_area_holds_what_lies_in_it(corners, point, expected: bool) -> None:
    """Whatever its shape and the order of its corners."""
    assert Area(np.array(corners, np.float64)).holds(np.array([point], np.float64)).tolist() == [expected]


@given(x=st.floats(0, 1000), y=st.floats(0, 1000))
def test_area_distance_is_that_of_a_square(x: float, y: float) -> None:
    """Inside and outside, the distance to the nearest edge."""
    beside = max(400 - x, 0, x - 600), max(400 - y, 0, y - 600)
    expected = np.hypot(*beside) if any(beside) else min(x - 400, 600 - x, y - 400, 600 - y)
    assert Area(np.array(SQUARE)).distances(np.array([[x, y]])) == pytest.approx([expected], abs=1e-9)


WHOLE = ((0, 0), (1000, 0), (1000, 1000), (0, 1000))  # SIZE, the picture
BEYOND = ((-50, -50), (1200, -50), (1200, 1200), (-50, 1200))
SIDES = ("left", "right", "top", "bottom")
TRIANGLE = ((0, 0), (1000, 500), (0, 1000))
THIRDS = ((0, 0), (1000 / 3, 0), (1000 / 3, 1000), (0, 1000))
BOW_TIE = ((0, 0), (1000, 1000), (1000, 0), (0, 1000))


@pytest.mark.parametrize(
    ("corners", "point", "expected"),
    [
        *((corners, point, True) for corners in (WHOLE, BEYOND) for point in [*WHOLE, (500, 0), (500, 1000)]),
        *((corners, point, True) for corners in (WHOLE, BEYOND) for point in [(0, 500), (1000, 500), (1, 999.9995)]),
        *((WHOLE, point, False) for point in [(-0.01, 500), (1000.01, 500), (500, -0.01), (500, 1000.01)]),
        *((BEYOND, point, True) for point in [(-50, -50), (1200, 1200), (1200, 300), (-20, 1100)]),
        *((BEYOND, point, False) for point in [(-50.01, 0), (1200.01, 0), (0, 1200.01)]),
        *((TRIANGLE, point, True) for point in [(1000, 500), (500, 250), (500, 750), (0, 0), (0, 333)]),
        *((TRIANGLE, point, False) for point in [(500, 249.9), (500, 750.1), (1000.1, 500), (1000, 0), (1000, 1000)]),
        *((THIRDS, point, True) for point in [(333.333, 500), (333.3335, 1000), (0, 0)]),
        *((THIRDS, point, False) for point in [(333.336, 500), (500, 1000)]),
        *((BOW_TIE, point, True) for point in [(500, 500), (250, 250), (0, 0), (1000, 1000), (0, 1000)]),
        *((BOW_TIE, point, False) for point in [(500, 499), (500, 501), (500, 0), (500, 1000)]),
    ],
)
def test_area_holds_its_edges_and_corners_and_nothing_beyond(corners, point, expected: bool) -> None:
    """The border rule holds for polygons inside the picture, at its edges and beyond, in both directions."""
    for turned in (corners, corners[::-1]):
        assert Area(np.array(turned, np.float64)).holds(np.array([point], np.float64)).tolist() == [expected]


@given(x=st.integers(0, 1_000_000), y=st.integers(0, 1_000_000), side=st.sampled_from(SIDES))
def test_area_of_the_whole_picture_holds_every_foot_on_its_edge(x: int, y: int, side: str) -> None:
    """This holds for any config-width and config-height."""
    foot = {"left": (0, y / 1000), "right": (1000, y / 1000), "top": (x / 1000, 0), "bottom": (x / 1000, 1000)}[side]
    for width, height in ((1000, 1000), (1920, 1080), (7, 3)):
        drawn = ((0, 0), (width, 0), (width, height), (0, height))
        area = Area(scaled(drawn, (1000 / width, 1000 / height)))
        assert area.holds(np.array([foot], np.float64)).tolist() == [True]


@pytest.mark.parametrize("kind", ["roi-filtering", "overcrowding", "dwell"])
@pytest.mark.parametrize("foot", [(500, 1000), (0, 1000), (1000, 1000), (0, 500), (1000, 500), (500, 0)])
def test_rule_of_the_whole_picture_counts_an_object_on_its_edge(kind: str, foot: tuple[float, float]) -> None:
    """Every rule with a region counts the same objects, with and without an identity where the rule allows it."""
    rule = {
        "roi-filtering": Rules(roi_filtering=(RoiFiltering("All", WHOLE),)),
        "overcrowding": Rules(overcrowding=(Overcrowding("All", WHOLE, 1, 0.0),)),
        "dwell": Rules(dwell=(Dwell("All", WHOLE),)),
    }[kind]
    for track_id in (1,) if kind == "dwell" else (1, -1):
        [said] = observe(rule, {track_id: [foot]})
        assert said.counts[f"{kind}/All"] == 1


def test_foot_on_an_edge_that_two_regions_share_is_in_both() -> None:
    """It is in no region with inverse-roi."""
    left, right = ((0, 0), (500, 0), (500, 900), (0, 900)), ((500, 0), (1000, 0), (1000, 900), (500, 900))
    regions = (RoiFiltering("Left", left), RoiFiltering("Right", right), RoiFiltering("Out", left, is_inverse=True))
    [said] = observe(Rules(roi_filtering=regions), {1: [(500, 400)]})
    assert said.rules_of == (("Left", "Right"),)


def test_rules_that_share_a_region_both_keep_their_labels() -> None:
    """An object in it has the names of both rules, of the same kind and of two kinds."""
    regions = (RoiFiltering("A", SQUARE), RoiFiltering("B", SQUARE))
    [said] = observe(Rules(roi_filtering=regions, dwell=(Dwell("C", SQUARE),)), {1: [IN]})
    assert said.rules_of == (("A", "B", "C"),)
    assert {key: said.counts[key] for key in ("roi-filtering/A", "roi-filtering/B", "dwell/C")} == {
        "roi-filtering/A": 1,
        "roi-filtering/B": 1,
        "dwell/C": 1,
    }


def test_roi_tells_who_enters_and_leaves_and_counts_who_is_there() -> None:
    """Entering is 1, leaving 0; the count is of now, by class, and the rule holds for those inside."""
    said = observe(YARD, {1: [OUT, IN, IN, OUT], 2: [IN, IN, OUT, OUT]}, class_ids={2: 1})
    assert event_values(said) == [(0, 2, 1.0), (1, 1, 1.0), (2, 2, 0.0), (3, 1, 0.0)]
    assert [one.counts["roi-filtering/Yard"] for one in said] == [1, 2, 1, 0]
    assert said[1].counts["roi-filtering/Yard/car"] == 1
    assert "roi-filtering/Yard/car" not in said[2].counts
    assert [one.rules_of for one in said][:3] == [((), ("Yard",)), (("Yard",), ("Yard",)), (("Yard",), ())]
    assert {event.kind for event in events_of(said)} == {AnalyticsKind.ROI_FILTERING}


def test_roi_inverse_is_about_those_outside() -> None:
    """inverse-roi: who leaves the polygon enters the rule."""
    rules = Rules(roi_filtering=(RoiFiltering("Yard", SQUARE, is_inverse=True),))
    said = observe(rules, {1: [OUT, IN, OUT]})
    assert event_values(said) == [(0, 1, 1.0), (1, 1, 0.0), (2, 1, 1.0)]


def test_roi_of_the_untracked_counts_and_tells_nothing() -> None:
    """Without identities there is a count and no event."""
    said = observe(YARD, {-1: [OUT, IN]})
    assert (event_values(said), said[1].counts["roi-filtering/Yard"], said[1].rules_of) == ([], 1, (("Yard",),))


@given(jitter=st.lists(st.floats(-SLACK + 0.01, SLACK - 0.01), max_size=30))
def test_roi_jitter_on_its_edge_tells_nothing(jitter: list[float]) -> None:
    """Who stands on the edge after entering has entered once."""
    said = observe(YARD, {1: [OUT, IN, *((400 + x, 500) for x in jitter)]})
    assert event_values(said) == [(1, 1, 1.0)]


def test_roi_object_lost_inside_leaves_once_it_is_gone() -> None:
    """A short loss is none; after 5 s, the object has left, and found again it enters."""
    path: list[Place] = [IN, *[None] * 40, IN, *[None] * 60, IN]
    assert event_values(observe(YARD, {1: path})) == [(0, 1, 1.0), (92, 1, 0.0), (102, 1, 1.0)]


def test_roi_cut_ends_every_stay() -> None:
    """Who was inside before a cut has left with its first frame."""
    analytics = SourceAnalytics(YARD, LABELS)
    analytics.observe(frame_at(0), tracks_at({1: IN}))
    said = analytics.observe(frame_at(1, segment=1), tracks_at({2: IN}))
    assert event_values([said]) == [(1, 1, 0.0), (1, 2, 1.0)]


def test_dwell_tells_when_it_is_long_and_when_it_ends() -> None:
    """After after_s once, with the seconds; at the end with all of them; a shorter stay gives no event."""
    rules = Rules(dwell=(Dwell("Bench", SQUARE, after_s=2.0),))
    said = observe(rules, {1: [IN] * 35 + [OUT], 2: [IN] * 10 + [OUT] * 26})
    assert event_values(said) == [(20, 1, 2.0), (35, 1, 3.5)]
    assert [said[number].counts["dwell/Bench"] for number in (19, 20, 34, 35)] == [0, 1, 1, 0]
    assert (said[19].rules_of[0], said[20].rules_of[0]) == ((), ("Bench",))


def test_dwell_by_pts_and_not_by_frames() -> None:
    """With half of the frames missing, the seconds are the same."""
    rules = Rules(dwell=(Dwell("Bench", SQUARE, after_s=2.0),))
    said = observe(rules, {1: [IN] * 12 + [OUT]}, numbers=[*range(0, 24, 2), 35])
    assert event_values(said) == [(20, 1, 2.0), (35, 1, 3.5)]


def test_dwell_of_one_lost_inside_ends_where_it_was_last_seen() -> None:
    """The time unseen before an object is given up is not counted."""
    rules = Rules(dwell=(Dwell("Bench", SQUARE, after_s=1.0),))
    said = observe(rules, {1: [IN] * 31 + [None] * 60, 2: [OUT] * 91})
    assert event_values(said) == [(10, 1, 1.0), (81, 1, 3.0)]


def crowd(*counts: int, time_threshold_s: float = 1.0, numbers: list[int] | None = None):
    """What is said where so many are in the square, frame by frame; threshold 3."""
    rules = Rules(overcrowding=(Overcrowding("Stage", SQUARE, 3, time_threshold_s),))
    paths = {one: [(450 + 10 * one, 500) if one < count else None for count in counts] for one in range(9)}
    return observe(rules, paths, numbers=numbers)


def test_crowd_tells_after_its_time_and_at_its_end() -> None:
    """At the begin the count, at the end 0, without an identity; the rule holds for those inside meanwhile."""
    said = crowd(*[2] * 5, *[4] * 15, *[2] * 10)
    assert event_values(said) == [(15, None, 4.0), (25, None, 0.0)]
    assert [said[number].counts["overcrowding/Stage"] for number in (4, 5, 20)] == [2, 4, 2]
    assert (said[14].rules_of[0], said[15].rules_of[0]) == ((), ("Stage",))


def test_crowd_at_once_where_no_time_is_asked() -> None:
    """time_threshold_s of 0 tells with the first frame."""
    assert event_values(crowd(0, 3, time_threshold_s=0.0)) == [(1, None, 3.0)]


def test_crowd_of_which_one_is_missed_for_a_moment_is_still_one() -> None:
    """Breaks under half a second neither begin the time anew nor end it."""
    assert event_values(crowd(*[3, 3, 3, 2] * 20)) == [(10, None, 3.0)]


def test_crowd_too_short_tells_nothing() -> None:
    """A crowd for less than its time gives no event."""
    assert event_values(crowd(*[3] * 9, *[0] * 9, *[3] * 9)) == []


def test_crowd_ends_at_a_cut() -> None:
    """What was before it is over; the time begins anew."""
    rules = Rules(overcrowding=(Overcrowding("Stage", SQUARE, 1, 1.0),))
    analytics = SourceAnalytics(rules, LABELS)
    said = [analytics.observe(frame_at(number, segment=number // 15), tracks_at({1: IN})) for number in range(30)]
    assert event_values(said) == [(10, None, 1.0), (15, None, 0.0), (25, None, 1.0)]


def test_path_through_a_square_enters_and_leaves_once() -> None:
    """A walk across, with every kind of rule at once, gives events in the order of the kinds."""
    rules = Rules(roi_filtering=YARD.roi_filtering, dwell=(Dwell("Bench", SQUARE),))
    said = observe(rules, {1: straight((300, 500), (700, 500), 41)})
    kinds = [(event.kind.value, event.frame_num, event.value) for event in events_of(said)]
    assert kinds == [("roi-filtering", 11, 1.0), ("dwell", 11, 0.0), ("roi-filtering", 31, 0.0), ("dwell", 31, 2.0)]
