"""A source's analytics as a whole: directions, scaling, changes of rules, and what it remembers."""

from dataclasses import replace

import pytest

from penstock_video.analytics import scene
from penstock_video.analytics.rules import DirectionDetection, LineCrossing, LineMode, RoiFiltering, Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.types import no_tracks
from tests.deepstream_pipeline.analytics.scenes import LABELS, event_values, frame_at, observe, straight, tracks_at

LINE = LineCrossing("Gate", ((500.0, 0.0), (500.0, 1000.0)))
NORTH = ((500.0, 500.0), (500.0, 400.0))


@pytest.mark.parametrize(
    ("end", "mode", "degrees"),
    [
        ((500, 300), LineMode.STRICT, 90.0),
        ((600, 300), LineMode.STRICT, 63.435),
        ((650, 300), LineMode.STRICT, None),
        ((650, 300), LineMode.BALANCED, 53.13),
        ((350, 300), LineMode.BALANCED, 126.87),
        ((900, 300), LineMode.BALANCED, None),
        ((900, 300), LineMode.LOOSE, 26.565),
        ((900, 520), LineMode.LOOSE, None),
        ((500, 700), LineMode.LOOSE, None),
        ((500, 500), LineMode.LOOSE, None),
    ],
)
def test_direction_of_a_walk_counts_as_its_mode_allows(end, mode: LineMode, degrees: float | None) -> None:
    """Once, when it begins, with the direction in degrees: 0 to the right, 90 up."""
    rules = Rules(direction_detection=(DirectionDetection("North", NORTH, mode),))
    said = observe(rules, {1: straight((500, 500), end, 11)})
    found = event_values(said)
    if degrees is None:
        assert found == []
    else:
        assert [(track_id, value) for _, track_id, value in found] == [(1, pytest.approx(degrees, abs=0.01))]
        assert said[-1].counts["direction-detection/North/person"] == 1


def test_direction_of_a_walker_who_stops_and_goes_on_is_reported_again() -> None:
    """Standing still ends it; trembling does not begin it."""
    rules = Rules(direction_detection=(DirectionDetection("North", NORTH),))
    still = [(500, 300 + tremble) for tremble in [1, -1] * 10]
    said = observe(rules, {1: [*straight((500, 500), (500, 300), 11), *still, *straight((500, 300), (500, 100), 11)]})
    assert [number for number, _, _ in event_values(said)] == [1, 32]
    assert [said[number].counts["direction-detection/North"] for number in (10, 25, 40)] == [1, 0, 1]


def test_counts_of_a_frame_without_rules_are_its_objects_by_class() -> None:
    """What is there now, also where nothing is asked of it."""
    said = observe(Rules(), {1: [(10, 50)], 2: [(90, 50)], 3: [(200, 50)], 4: [(300, 50)]}, class_ids={2: 1, 3: 7})
    assert said[0].counts == {"objects/person": 2, "objects/car": 1, "objects/class 7": 1}
    assert SourceAnalytics(Rules(), LABELS).observe(frame_at(0), no_tracks()).counts == {}


def test_rules_are_scaled_to_the_sources_size_and_at_its_change() -> None:
    """config-width and -height: a line at a quarter of the picture is there in every resolution."""
    rules = Rules(400, 100, line_crossing=(LineCrossing("Gate", ((100.0, 0.0), (100.0, 100.0))),))
    analytics = SourceAnalytics(rules, LABELS)
    assert len(event_values(observe(analytics, {1: [(220, 500), (280, 500)]}))) == 1
    assert len(event_values(observe(analytics, {2: [(220, 500), (280, 500)]}, first=2, size=(2000, 1000)))) == 0
    assert len(event_values(observe(analytics, {3: [(470, 500), (530, 500)]}, first=4, size=(2000, 1000)))) == 1


def test_relative_rules_follow_the_picture_when_its_size_changes() -> None:
    """A line and a zone from 0 to 1 are at the same place in every resolution, also after a change in the stream."""
    gate = LineCrossing("Gate", ((0.25, 0.0), (0.25, 1.0)))
    left = RoiFiltering("Left", ((0.0, 0.0), (0.25, 0.0), (0.25, 1.0), (0.0, 1.0)))
    analytics = SourceAnalytics(Rules(400, 100, roi_filtering=(left,), line_crossing=(gate,)), LABELS)
    for number, (size, edge) in enumerate((((1000, 1000), 250), ((2000, 1000), 500), ((640, 360), 160)), 1):
        path = [(edge + 30, 300), (edge - 30, 300)]
        said = observe(analytics, {number: path}, first=2 * number, size=size)[-1]
        assert said.counts["line-crossing/Gate.in"] == number
        assert said.counts["roi-filtering/Left"] == 1


def test_rules_changed_keep_the_counts_of_those_that_stay() -> None:
    """A rule that is the same goes on counting and knows who is where; another of its name begins at 0."""
    other = LineCrossing("Other", ((700.0, 0.0), (700.0, 1000.0)))
    analytics = SourceAnalytics(Rules(line_crossing=(LINE, other)), LABELS)
    observe(analytics, {1: [(400, 500), (800, 500)], 2: [(400, 500), (450, 500)]})
    moved = LineCrossing("Other", ((701.0, 0.0), (701.0, 1000.0)))
    changed = analytics.changed(Rules(line_crossing=(moved, LINE)))
    said = observe(changed, {2: [(800, 500)]}, first=2)[0]
    assert said.counts["line-crossing/Gate.out"] == 2
    assert said.counts["line-crossing/Other.out"] == 0


def test_other_stream_goes_on_counting_and_knows_no_earlier_object() -> None:
    """After a restart an object with a known identity, on the other side of the line, has not crossed it."""
    analytics = SourceAnalytics(Rules(line_crossing=(LINE,)), LABELS)
    observe(analytics, {1: [(400, 500), (800, 500)], 2: [(400, 500), (450, 500)]})
    analytics.restart()
    said = observe(analytics, {2: [(800, 500), (820, 500)], 3: [(400, 500), (800, 500)]})
    assert [one.counts["line-crossing/Gate.out"] for one in said] == [1, 2]


def test_frame_that_was_not_inferred_decides_nothing() -> None:
    """An estimate over a line crosses nothing; counts and lasting rules are those of the last look."""
    yard = RoiFiltering("Yard", ((0.0, 0.0), (600.0, 0.0), (600.0, 1000.0), (0.0, 1000.0)))
    analytics = SourceAnalytics(Rules(roi_filtering=(yard,), line_crossing=(LINE,)), LABELS)
    observe(analytics, {1: [(400, 500)], 2: [(490, 500)]})
    seen = observe(analytics, {1: [(510, 500)], 2: [(490, 500)]}, first=1)[0]
    assert seen.rules_of == (("Yard", "Gate"), ("Yard",))
    guessed = replace(tracks_at({2: (700, 500), 1: (700, 500)}), is_estimate=True)
    said = analytics.observe(frame_at(2), guessed)
    assert (said.events, said.counts, said.rules_of) == ((), seen.counts, (("Yard",), ("Yard",)))
    assert observe(analytics, {1: [(510, 500)], 2: [(490, 500)]}, first=3)[0].events == ()


def test_rules_changed_in_their_picture_begin_anew() -> None:
    """The same points of another configured picture are another place."""
    analytics = SourceAnalytics(Rules(line_crossing=(LINE,)), LABELS)
    observe(analytics, {1: [(400, 500), (800, 500)]})
    said = observe(analytics.changed(Rules(2000, 2000, line_crossing=(LINE,))), {1: [(800, 500)]}, first=2)
    assert said[0].counts["line-crossing/Gate.out"] == 0


def test_objects_beyond_all_measure_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many identities a tracker makes in a second, what is remembered has a bound."""
    monkeypatch.setattr(scene, "MOST_OBJECTS", 50)
    analytics = SourceAnalytics(Rules(roi_filtering=(RoiFiltering("All", ((0, 0), (1000, 0), (1000, 1000))),)), LABELS)
    for number in range(100):
        analytics.observe(frame_at(number, fps=100), tracks_at({number * 10 + one: (900, 500) for one in range(10)}))
        assert len(analytics._presence) <= 60
