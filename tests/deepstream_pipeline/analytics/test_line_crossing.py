"""line-crossing: each real crossing counts once."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.analytics.evaluators import LineCrossingEvaluator
from penstock_video.analytics.rules import LineCrossing, LineMode, Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from tests.deepstream_pipeline.analytics.scenes import (
    LABELS,
    SLACK,
    Place,
    event_values,
    frame_at,
    observe,
    straight,
    tracks_at,
)

ACROSS = ((500.0, 200.0), (500.0, 800.0))  # a line from top to bottom
RIGHT, LEFT = ((0.0, 0.0), (100.0, 0.0)), ((100.0, 0.0), (0.0, 0.0))
KEY = "line-crossing/Gate"


def gate(*, direction=RIGHT, **more) -> Rules:
    return Rules(line_crossing=(LineCrossing("Gate", ACROSS, direction, **more),))


def count(rules: Rules, path: Sequence[Place]) -> int:
    counts = observe(rules, {1: path})[-1].counts
    return counts[KEY] if KEY in counts else counts[f"{KEY}.in"] + counts[f"{KEY}.out"]


THROUGH = straight((400, 500), (600, 500), 11)


@pytest.mark.parametrize(
    ("name", "rules", "path", "expected"),
    [
        ("its way", gate(), THROUGH, 1),
        ("against it", gate(), THROUGH[::-1], 0),
        ("against it, the other rule", gate(direction=LEFT), THROUGH[::-1], 1),
        ("either way, there", gate(direction=None), THROUGH, 1),
        ("either way, back", gate(direction=None), THROUGH[::-1], 1),
        ("there and back", gate(direction=None), THROUGH + THROUGH[::-1], 2),
        ("past its end", gate(), straight((400, 900), (600, 900), 11), 0),
        ("past its end, extended", gate(is_extended=True), straight((400, 900), (600, 900), 11), 1),
        ("just on its end", gate(), straight((400, 800), (600, 800), 11), 1),
        ("just past its end", gate(), straight((400, 801), (600, 801), 11), 0),
        ("aslant through its end", gate(), straight((400, 740), (600, 840), 11), 1),
        ("aslant past its end", gate(), straight((400, 760), (600, 860), 11), 0),
        ("up to it", gate(), straight((400, 500), (500, 500), 11), 0),
        ("a little beyond it", gate(), straight((400, 500), (500 + SLACK - 0.1, 500), 11), 0),
        ("clearly beyond it", gate(), straight((400, 500), (500 + SLACK + 0.1, 500), 11), 1),
        ("begins on it", gate(), straight((500, 500), (600, 500), 11), 0),
        ("in one step", gate(), [(400, 500), (600, 500)], 1),
        ("in one step through it, landing past its end", gate(), [(400, 700), (600, 860)], 1),
        ("in one step past its end, from beside it", gate(), [(400, 700), (600, 940)], 0),
        ("around its end and back", gate(direction=LEFT), [(400, 900), (600, 900), (600, 500), (400, 500)], 1),
        ("along it, then over", gate(), [(490, 300), (498, 300), (500, 600), (502, 700), (520, 700)], 1),
        ("along it beyond its end, then over", gate(), [(490, 700), (499, 700), (499, 850), (501, 850), (520, 850)], 0),
        ("lost at it", gate(), [*THROUGH[:5], None, None, None, None, *THROUGH[8:]], 1),
    ],
)  # fmt: skip
def test_line_crossed_counts_what_is_meant(name: str, rules: Rules, path: Sequence[Place], expected: int) -> None:
    """Sides, ends, extension and direction decide as documented."""
    assert count(rules, path) == expected, name


@pytest.mark.parametrize("degrees", range(-80, 81, 20))
@pytest.mark.parametrize("mode", LineMode)
def test_line_crossed_aslant_counts_as_its_mode_allows(mode: LineMode, degrees: int) -> None:
    """loose takes every crossing to the direction's side, balanced those up to 60 degrees off, strict up to 30."""
    way = math.radians(degrees)
    far = (100 * math.cos(way), 100 * math.sin(way))
    path = straight((500 - far[0], 500 - far[1]), (500 + far[0], 500 + far[1]), 21)
    most = {LineMode.LOOSE: 90, LineMode.BALANCED: 60.01, LineMode.STRICT: 30}[mode]
    assert count(gate(mode=mode), path) == (abs(degrees) <= most)


def test_line_event_carries_who_and_the_count() -> None:
    """The event comes with the frame that shows the object clearly beyond, and has the cumulative count."""
    said = observe(gate(), {7: THROUGH, 8: [None, *THROUGH]}, class_ids={7: 1, 8: 0})
    assert event_values(said) == [(6, 7, 1.0), (7, 8, 2.0)]
    assert said[6].events[0].class_id == 1
    assert (said[6].rules_of, said[7].rules_of) == ((("Gate",), ()), ((), ("Gate",)))
    assert said[-1].counts == {KEY: 2, f"{KEY}/car": 1, f"{KEY}/person": 1, "objects/person": 1}


@pytest.mark.parametrize(
    ("line", "path", "way"),
    [
        (((200, 500), (800, 500)), straight((500, 400), (500, 600), 11), "in"),  # to the right, and down
        (((200, 500), (800, 500)), straight((500, 600), (500, 400), 11), "out"),
        (((800, 500), (200, 500)), straight((500, 400), (500, 600), 11), "out"),  # its points are swapped
        (((500, 800), (500, 200)), straight((400, 500), (600, 500), 11), "in"),  # up, and to the right
        (ACROSS, straight((600, 500), (400, 500), 11), "in"),  # down, and to the left
        (((300, 300), (700, 700)), straight((600, 400), (400, 600), 11), "in"),
    ],
)
def test_line_without_direction_counts_in_from_its_left_to_its_right(line, path: Sequence[Place], way: str) -> None:
    """Seen from the first point towards the second; the event says which, with the object's box and score."""
    said = observe(Rules(line_crossing=(LineCrossing("Gate", line),)), {7: path}, class_ids={7: 1})
    counts = {"in": 0, "out": 0} | {way: 1}
    assert {key: said[-1].counts[f"{KEY}.{key}"] for key in counts} == counts
    assert said[-1].counts[f"{KEY}.{way}/car"] == 1
    assert KEY not in said[-1].counts
    ((number, event),) = [(number, event) for number, one in enumerate(said) for event in one.events]
    x, y = path[number] or (0, 0)
    assert (event.direction, event.value, event.score) == (way, 1.0, 0.9)
    assert event.xyxy == (x - 15, y - 40, x + 15, y)


def test_line_with_a_direction_has_one_counter_and_its_events_none() -> None:
    """DeepStream's form: a rule a way."""
    said = observe(gate(), {7: THROUGH})
    assert [event.direction for one in said for event in one.events] == [None]


def test_line_of_classes_ignores_the_others() -> None:
    """class_ids name whom the rule is about."""
    said = observe(gate(class_ids=(1,)), {1: THROUGH, 2: THROUGH}, class_ids={1: 0, 2: 1})
    assert event_values(said) == [(6, 2, 1.0)]


def test_line_object_found_beyond_under_another_identity_counts_nothing() -> None:
    """One that is lost before the line and one that appears behind it are two objects."""
    said = observe(gate(), {1: THROUGH[:5], 2: [None] * 6 + THROUGH[6:]})
    assert event_values(said) == []


def test_line_object_without_identity_is_not_followed() -> None:
    """track_id -1 stands for many."""
    assert event_values(observe(gate(), {-1: THROUGH})) == []


def test_line_object_gone_leaves_no_memory() -> None:
    """What a rule remembers of an object goes with it: 500 passers-by later, only the last are known."""
    rule = LineCrossing("Gate", ACROSS)
    analytics = SourceAnalytics(Rules(line_crossing=(rule,)), LABELS)
    watch = analytics._watches[0][2]
    assert isinstance(watch, LineCrossingEvaluator)
    for number in range(500):
        said = analytics.observe(frame_at(number, fps=1), tracks_at({number: (400, 500)}))
        assert len(watch) <= 7
    assert len(analytics._presence) <= 7
    assert (said.counts[f"{KEY}.in"], said.counts[f"{KEY}.out"]) == (0, 0)


def test_line_cut_forgets_the_sides() -> None:
    """After a cut the same number, were it given again, would be another object."""
    analytics = SourceAnalytics(gate(), LABELS)
    analytics.observe(frame_at(0), tracks_at({1: (400, 500)}))
    said = analytics.observe(frame_at(1, segment=1), tracks_at({1: (600, 500)}))
    assert said.counts[KEY] == 0


offset = st.floats(-300, 300).filter(lambda x: abs(x) > SLACK + 0.01)


@given(xs=st.lists(offset, min_size=1, max_size=30), ys=st.floats(250, 750))
def test_line_any_way_counts_each_change_of_sides(xs: list[float], ys: float) -> None:
    """Back and forth in any steps: as many to the right as the path has changes that way, and the counts never fall."""
    both = Rules(line_crossing=(LineCrossing("R", ACROSS, RIGHT), LineCrossing("L", ACROSS, LEFT)))
    said = observe(both, {1: [(500 + x, ys) for x in xs]})
    steps = list(itertools.pairwise(xs))
    assert said[-1].counts["line-crossing/R"] == sum(before < 0 < after for before, after in steps)
    assert said[-1].counts["line-crossing/L"] == sum(after < 0 < before for before, after in steps)
    for key in ("line-crossing/R", "line-crossing/L"):
        counts = [one.counts[key] for one in said]
        assert counts == sorted(counts)


@given(jitter=st.lists(st.floats(-SLACK + 0.01, SLACK - 0.01), max_size=40), side=st.sampled_from([-50, 50]))
def test_line_jitter_on_it_counts_nothing(jitter: list[float], side: float) -> None:
    """An object that waits on the line and goes back does not count; one that goes on counts once."""
    rules = gate(direction=None)
    waiting: list[Place] = [(500 + side, 500), *((500 + x, 500) for x in jitter)]
    assert count(rules, [*waiting, (500 + side, 500)]) == 0
    assert count(rules, [*waiting, (500 - side, 500)]) == 1


@given(
    path=st.lists(st.tuples(st.integers(0, 1000), st.integers(40, 1000)), min_size=2, max_size=15),
    scale=st.sampled_from([0.5, 2.0, 4.0]),
)
def test_line_in_a_larger_picture_counts_the_same(path: list[tuple[int, int]], scale: float) -> None:
    """Points of the configured picture are scaled to the source's: the same scene in another size counts the same."""
    line = LineCrossing("Gate", ((480.0, 210.0), (530.0, 790.0)), RIGHT, LineMode.BALANCED)
    rules = Rules(1000, 1000, line_crossing=(line,))
    large: list[Place] = [(x * scale, y * scale) for x, y in path]
    size = (int(1000 * scale), int(1000 * scale))
    assert event_values(observe(rules, {1: large}, size=size, box=(30 * scale, 40 * scale))) == event_values(
        observe(rules, {1: path})
    )


@given(kept=st.sets(st.integers(0, 40)))
def test_line_frames_missing_changes_no_count(kept: set[int]) -> None:
    """Dropped frames lose no crossing of one who keeps his identity."""
    path = [*straight((400, 500), (600, 500), 20), *straight((600, 500), (300, 500), 22)]
    numbers = sorted(kept | {0, 19, 41})
    said = observe(gate(direction=None), {1: [path[number] for number in numbers]}, numbers=numbers)
    assert (said[-1].counts[f"{KEY}.in"], said[-1].counts[f"{KEY}.out"]) == (1, 1)
