"""The analytics section: valid content, and the faults of other content."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_video.analytics.config import rules_from
from penstock_video.analytics.rules import (
    NO_RULES,
    DirectionDetection,
    Dwell,
    LineCrossing,
    LineMode,
    Overcrowding,
    RoiFiltering,
    Rules,
    section_of,
)
from penstock_video.errors import RuleRefused

LABELS = ("person", "bicycle", "car", "traffic light")
SQUARE = [[10, 10], [90, 10], [90, 90], [10, 90]]
CORNERS = ((10.0, 10.0), (90.0, 10.0), (90.0, 90.0), (10.0, 90.0))
LINE = [[10, 50], [90, 50]]
DOWN = [[50, 40], [50, 60]]
SIZE = {"config-width": 100, "config-height": 100}


def test_section_of_everything_is_read() -> None:
    """Each key in DeepStream's words, points as pairs."""
    section = SIZE | {
        "roi-filtering": [{"name": "Yard", "roi": SQUARE, "inverse-roi": True, "class-id": "car"}],
        "overcrowding": [
            {"name": "Stage", "roi": SQUARE, "object-threshold": 5, "time-threshold": 1500, "class-id": ["person", 1]}
        ],
        "line-crossing": [
            {"name": "In", "line": LINE, "direction": DOWN, "mode": "strict", "extended": True, "class-id": 0}
        ],
        "direction-detection": [{"name": "South", "direction": DOWN, "mode": "loose", "class-id": -1}],
        "dwell": [{"name": "Bench", "roi": SQUARE, "time-threshold-s": 30}],
    }
    line, down = ((10.0, 50.0), (90.0, 50.0)), ((50.0, 40.0), (50.0, 60.0))
    assert rules_from(section, LABELS) == Rules(
        100,
        100,
        (RoiFiltering("Yard", CORNERS, True, (2,)),),
        (Overcrowding("Stage", CORNERS, 5, 1.5, (0, 1)),),
        (LineCrossing("In", line, down, LineMode.STRICT, True, (0,)),),
        (DirectionDetection("South", down, LineMode.LOOSE),),
        (Dwell("Bench", CORNERS, 30.0),),
    )


QUAD = [[10, 10], [90, 10], [99, 90], [1, 90]]
METRES = [[0, 20], [8, 20], [8, 0.5], [0, 0.5]]


@pytest.mark.parametrize("ground", [{"picture": QUAD, "metres": METRES}, {"metres-per-pixel": 0.05}])
def test_section_with_a_ground_is_read_and_written(ground: dict[str, object]) -> None:
    """Four points and their metres, or one scale."""
    rules = rules_from(SIZE | {"ground": ground}, LABELS)
    assert rules.ground is not None
    assert section_of(rules) == SIZE | {"ground": ground}
    assert rules_from({"ground": None}, LABELS).ground is None


@pytest.mark.parametrize(
    ("ground", "words"),
    [
        (5, r"analytics\.ground: 5: this takes keys and values: picture, metres, metres-per-pixel"),
        ({}, r"analytics\.ground: {}: give four points as picture and metres, or metres-per-pixel"),
        ({"picture": QUAD}, r"give four points as picture and metres"),
        ({"picture": QUAD, "metres": METRES, "metres-per-pixel": 1}, r"give four points as picture and metres"),
        ({"metre-per-pixel": 1}, r"no key 'metre-per-pixel'; did you mean 'metres-per-pixel'\?"),
        ({"metres-per-pixel": 0}, r"analytics\.ground\.metres-per-pixel: 0: this takes metres, above 0"),
        ({"picture": QUAD[:3], "metres": METRES}, r"ground\.picture: .*four points, in their order around an area"),
        ({"picture": [*QUAD[:2], QUAD[3], QUAD[2]], "metres": METRES}, r"ground\.picture: .*in their order"),
        ({"picture": [[10, 10], [50, 10], [90, 10], [50, 90]], "metres": METRES}, r"no three of them on a line"),
        (
            {"picture": [[10, 10], [90, 10], [200, 90], [1, 90]], "metres": METRES},
            r"picture\[2\]: \[200, 90\]: .*outside",
        ),
        ({"picture": QUAD, "metres": [[0, 0]] * 4}, r"ground\.metres: .*four points"),
    ],
)
def test_ground_that_cannot_be_meant_is_refused(ground: object, words: str) -> None:
    """With its place, and what to write."""
    with pytest.raises(RuleRefused, match=words):
        rules_from(SIZE | {"ground": ground}, LABELS)


@pytest.mark.parametrize("size", [{}, SIZE])
def test_section_of_relative_points_is_read_as_they_are(size: dict[str, int]) -> None:
    """All from 0 to 1, also as whole numbers: shares of the picture, whatever config-width says."""
    whole = [[0, 0], [1, 0], [1, 1], [0, 1]]
    section = size | {
        "roi-filtering": [{"name": "All", "roi": whole}],
        "line-crossing": [{"name": "In", "line": "0.1;0.5;0.9;0.5", "direction": [[0.5, 0.4], [0.5, 0.6]]}],
    }
    rules = rules_from(section, LABELS)
    assert rules.line_crossing[0].line == ((0.1, 0.5), (0.9, 0.5))
    assert rules.scale(rules.line_crossing[0].line, 640, 480) == (640, 480)
    assert rules.scale(rules.roi_filtering[0].polygon, 640, 480) == (640, 480)
    assert rules.scale(CORNERS, 640, 480) == ((6.4, 4.8) if size else (1, 1))
    assert rules_from(section_of(rules), LABELS) == rules


def test_section_as_nvdsanalytics_writes_it_is_read() -> None:
    """Points with semicolons, the line's eight numbers with the direction first, class ids with semicolons, 0 and 1."""
    section = {
        "roi-filtering": [{"name": "Y", "roi": "10;10;90;10;90;90;10;90;", "inverse-roi": 0, "class-id": "0;2"}],
        "line-crossing": [{"name": "Exit", "line": "789;672;1084;900;851;773;1203;732", "extended": 1}],
    }
    rules = rules_from(section, LABELS)
    assert rules.roi_filtering == (RoiFiltering("Y", CORNERS, False, (0, 2)),)
    line = LineCrossing("Exit", ((851, 773), (1203, 732)), ((789, 672), (1084, 900)), LineMode.LOOSE, True)
    assert rules.line_crossing == (line,)


@pytest.mark.parametrize("section", [None, {}, {"line-crossing": None}, {"roi-filtering": []}])
def test_section_of_nothing_has_no_rules(section: object) -> None:
    """Nothing said, nothing ruled."""
    assert rules_from(section, LABELS) == NO_RULES


def roi(**more: object) -> dict[str, object]:
    return SIZE | {
        "roi-filtering": [{"name": "Yard", "roi": SQUARE} | {k.replace("_", "-"): v for k, v in more.items()}]
    }


def line(**more: object) -> dict[str, object]:
    return SIZE | {"line-crossing": [{"name": "In", "line": LINE} | more]}


def dwell(**more: object) -> dict[str, object]:
    return {"dwell": [{"name": "D", "roi": SQUARE} | {k.replace("_", "-"): v for k, v in more.items()}]}


def crowd(**more: object) -> dict[str, object]:
    entry = {"name": "S", "roi": SQUARE, "object-threshold": 2} | {k.replace("_", "-"): v for k, v in more.items()}
    return {"overcrowding": [entry]}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ([], r"analytics: \[\].*keys and values"),
        ({"line-crosing": []}, r"analytics: there is no key 'line-crosing'; did you mean 'line-crossing'\?"),
        ({"roi_filtering": []}, r"did you mean 'roi-filtering'\?"),
        ({"roi-filtering": {"name": "a"}}, r"analytics\.roi-filtering: .*a list of rules"),
        ({"roi-filtering": ["Yard"]}, r"analytics\.roi-filtering\[0\]: 'Yard'.*keys and values: name, roi"),
        ({"config-width": 100}, r"analytics: .*give both or neither"),
        ({"config-width": "100"}, r"analytics\.config-width: '100': .*pixels"),
        (SIZE | {"dwell": [{"roi": SQUARE}]}, r"analytics\.dwell\[0\]: name is missing"),
        (roi(name=5), r"roi-filtering\[0\]\.name: 5: .*quotes"),
        (roi(name="a/b"), r"roi-filtering\[0\]\.name: 'a/b': .*no \"/\""),
        (roi(name=" "), r"name: ' ': "),
        (roi(roi=None), r"roi-filtering\[0\]: roi is missing"),
        (roi(roi=5), r"roi-filtering\[0\]\.roi: 5: points are written"),
        (roi(roi=[[1, 2], [3, 4]]), r"roi: .*three corners"),
        (roi(roi=[[1, 1], [2, 2], [3, 3]]), r"roi: .*no area"),
        (roi(roi=[[5, 5]] * 4), r"roi: .*no area"),
        (roi(roi=[[1, 1], [2, 2, 2], [3, 3]]), r"roi\[1\]: \[2, 2, 2\]: a point is \[x, y\]"),
        (roi(roi=[[1, 1], [2, "x"], [3, 3]]), r"roi\[1\]: 'x': .*a number"),
        (roi(roi=[[1, 1], [2, float("nan")], [3, 3]]), r"roi\[1\]: nan: .*finite"),
        (roi(roi=[[1, 1], [2, 10**400], [3, 3]]), r"roi\[1\]: 1000.*finite"),
        (roi(roi=[[1, 1], [True, 9], [3, 3]]), r"roi\[1\]: True: .*a number"),
        (roi(roi=[[1, 1], [101, 1], [50, 50]]), r"roi\[1\]: \[101, 1\]: that is outside the 100 x 100 picture"),
        (roi(roi=[[1, 1], [9, -1], [50, 50]]), r"roi\[1\]: \[9, -1\]: that is outside"),
        (roi(roi="1;2;3"), r"roi: '1;2;3': 3 numbers are no pairs"),
        (roi(roi="1;2;x;4;5;6"), r"numbers with \";\" between"),
        (roi(roi="1;2;inf;4;5;6"), r"roi: inf: .*finite"),
        (roi(inverse_roi="maybe"), r"inverse-roi: 'maybe': this takes true or false"),
        (roi(inverse_rio=True), r"no key 'inverse-rio'; did you mean 'inverse-roi'"),
        (roi(class_id="perzon"), r"class-id: 'perzon': the model has no such class; did you mean 'person'\?"),
        (roi(class_id=4), r"class-id: 4: the model has classes 0 to 3"),
        (roi(class_id=[0, -2]), r"class-id: -2: a class is its number or its label"),
        (roi(class_id=True), r"class-id: True: "),
        (line(line=[[5, 5], [5, 5]]), r"line-crossing\[0\]\.line: .*put them apart"),
        (line(line=SQUARE), r"line: .*two points"),
        (line(direction=[[5, 5], [5, 5.5]]), r"direction: .*put them apart"),
        (line(direction=[[5, 5], [50, 5]]), r"direction: .*parallel to the line"),
        (line(line=[[0.1, 0.5], [0.9, 50]]), r"line: 0\.1: .*either all pixels, or all from 0 to 1"),
        (roi(roi=[[0, 0.5], [1, 1], [50, 0]]), r"roi: 0\.5: .*either all pixels"),
        (line(line=[[0.1, 0.5], [0.9, 0.5]], direction=DOWN), r"direction: .*both in pixels, or both from 0 to 1"),
        (line(line=[[0.1, 0.5], [0.1004, 0.5]]), r"line: .*put them apart"),
        (roi(roi=[[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]]), r"roi: .*no area"),
        (line(line="1;2;3;4;5;6;7;8", direction=DOWN), r"line: .*eight numbers hold the direction"),
        (line(mode="strickt"), r"mode: 'strickt': modes are loose, balanced, strict; did you mean 'strict'\?"),
        (line(mode=[1]), r"mode: \[1\]: modes are"),
        (crowd(object_threshold=0), r"object-threshold: 0: .*1 or more"),
        (crowd(object_threshold=2.5), r"object-threshold: 2.5: .*whole number"),
        (crowd(object_threshold=None), r"overcrowding\[0\]: object-threshold is missing"),
        (crowd(time_threshold=-1), r"time-threshold: -1.*milliseconds, 0 or more"),
        (crowd(time_threshold="2s"), r"time-threshold: '2s': .*a number"),
        (dwell(time_threshold_s=-1), r"time-threshold-s: -1.*seconds, 0 or more"),
        (dwell(time_threshold=200), r"dwell\[0\]\.time-threshold: 200: .*takes seconds; write time-threshold-s: 0\.2$"),
        (dwell(time_threshold=90000), r"time-threshold: 90000: .*write time-threshold-s: 90$"),
        (dwell(time_threshold="2s"), r"time-threshold: '2s': .*a number"),
        ({"dwell": [{"name": "a", "roi": SQUARE}] * 2}, r"dwell\[1\]\.name: 'a': another rule of dwell has that name"),
        (
            SIZE | {"line-crossing": [{"name": name, "line": LINE} for name in ("a", "a.in")]},
            r"line-crossing\[1\]\.name: 'a\.in': another rule of line-crossing has that name, or a counter of that",
        ),
    ],
)  # fmt: skip
def test_section_that_cannot_be_meant_is_refused(section: object, words: str) -> None:
    """With the key's path, the value and the fix."""
    with pytest.raises(RuleRefused) as caught:
        rules_from(section, LABELS)
    assert re.search(words, caught.value.message), caught.value.message


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("line-crossing", {"name": "a", "line": [[0, 0], [5, 5]]}),
        ("direction-detection", {"name": "a", "direction": [[0, 0], [5, 5]]}),
        ("dwell", {"name": "a", "roi": SQUARE}),
    ],
)
def test_rule_that_needs_tracks_is_refused_without_a_tracker(kind: str, rule: dict[str, object]) -> None:
    """Each such kind is refused, with its place in the file and both remedies."""
    assert rules_from({kind: [rule]}, LABELS) != Rules()
    with pytest.raises(RuleRefused) as caught:
        rules_from({kind: [rule]}, LABELS, has_tracker=False)
    assert caught.value.message.startswith(f"analytics.{kind}[0]: {kind} needs tracks")
    assert "tracker's type is none; set tracker type bytetrack, or remove the rule" in caught.value.message


def test_rules_that_count_in_one_frame_are_taken_without_a_tracker() -> None:
    """Objects in a region can be counted without an identity."""
    section = roi() | crowd()
    assert rules_from(section, LABELS, has_tracker=False) == rules_from(section, LABELS)


def test_section_refused_names_where_it_stands() -> None:
    """The path begins where the section does."""
    with pytest.raises(RuleRefused, match=r"^source\[2\]\.analytics\.dwel"):
        rules_from({"dwell": 5}, LABELS, where="source[2].analytics.dwel")
    with pytest.raises(RuleRefused, match="labels are not known here"):
        rules_from(roi(class_id="person"), ())


def test_section_without_labels_takes_numbers() -> None:
    """Where the model is not known yet, its classes are numbers."""
    assert rules_from(roi(class_id=[90, 1]), ()).roi_filtering[0].class_ids == (1, 90)


NO_KINDS = ("config_width", "config_height", "ground")
names = st.text(
    st.characters(codec="utf-8", exclude_characters="/", exclude_categories=("C", "Z")), min_size=1, max_size=9
)
coordinate = st.just(0.0) | st.integers(4, 400).map(lambda n: n / 4)
points = st.tuples(coordinate, coordinate)
shares = st.tuples(st.integers(0, 100).map(lambda n: n / 100), st.integers(0, 100).map(lambda n: n / 100))
class_ids = st.lists(st.integers(0, 3), unique=True, max_size=3).map(lambda ids: tuple(sorted(ids)))
times = st.integers(0, 10**6).map(lambda ms: ms / 1000)
segments = st.tuples(points, points).filter(lambda two: abs(two[0][0] - two[1][0]) + abs(two[0][1] - two[1][1]) > 2)
segments |= st.tuples(shares, shares).filter(lambda two: two[0] != two[1])
lines = st.builds(
    LineCrossing, names, segments, st.none(), st.sampled_from(LineMode), st.booleans(), class_ids
)  # fmt: skip
rule_sets = st.builds(
    Rules,
    st.just(100),
    st.just(100),
    st.lists(st.builds(RoiFiltering, names, st.just(CORNERS), st.booleans(), class_ids), max_size=2),
    st.lists(st.builds(Overcrowding, names, st.just(CORNERS), st.integers(1, 99), times, class_ids), max_size=2),
    st.lists(lines, max_size=2),
    st.lists(st.builds(DirectionDetection, names, segments, st.sampled_from(LineMode), class_ids), max_size=2),
    st.lists(st.builds(Dwell, names, st.just(CORNERS), times, class_ids), max_size=2),
)


@settings(max_examples=20)
@given(rules=rule_sets)
def test_section_of_rules_reads_as_the_same_rules(rules: Rules) -> None:
    """section_of is rules_from's inverse, in plain JSON."""
    kinds = {kind: getattr(rules, kind) for kind in Rules.__dataclass_fields__ if kind not in NO_KINDS}
    unique = {kind: tuple({rule.name: rule for rule in listed}.values()) for kind, listed in kinds.items()}
    rules = Rules(100, 100, **unique)
    assert rules_from(section_of(rules), LABELS) == rules
