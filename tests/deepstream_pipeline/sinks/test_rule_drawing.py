"""How rules are drawn: shapes, names with counts, the panel of counters, and where they may be."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from penstock.vision.lettering import Lettering
from penstock.vision.palette import ALARM
from penstock_video.analytics.rules import LineCrossing, RoiFiltering, Rules
from penstock_video.sinks.canvas import Canvas
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.rule_drawing import FLASH_S
from penstock_video.types import ByteArray, FrameAnalytics, FrameResult
from tests.deepstream_pipeline.sinks.results import PLAIN, RULES, changed, crossing, result


@dataclass(frozen=True)
class Plate:
    """A drawn plate with its text: left, top, right, bottom."""

    text: str
    left: int
    top: int
    right: int
    bottom: int

    def covers(self, other: "Plate") -> bool:
        """Whether a pixel is of both."""
        return min(self.right, other.right) > max(self.left, other.left) and min(self.bottom, other.bottom) > max(
            self.top, other.top
        )


def plates_of(monkeypatch: pytest.MonkeyPatch, osd: Osd, reported: FrameResult) -> list[Plate]:
    """All plates that are drawn for the result."""
    found = []

    def noted(
        self: Lettering, picture: ByteArray, text: str, at: tuple[int, int], *args: object, width: int, **more: object
    ) -> None:
        found.append(Plate(text, *at, at[0] + (width or self.width(text)), at[1] + self.height))

    monkeypatch.setattr(Lettering, "plate", noted)
    osd.draw(reported)
    return found


@pytest.mark.parametrize("size", [(854, 480), (1920, 1080), (320, 240)])
def test_osd_plates_of_a_crowd_stay_in_the_picture_and_cover_no_other(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 people with a hostile class name, beside rules with long names; labels without room are left out."""
    osd = Osd()
    rules = replace(RULES, line_crossing=(LineCrossing("N" * 64, ((20, 120), (300, 120))),))
    osd.set_source("cam", name="A camera with rather a long name " * 3, rules=rules)
    crowd = replace(result(0, size=size, objects=60), labels=("person\n\x1b[31m" * 9, "car"))
    plates = plates_of(monkeypatch, osd, crowd)
    assert len([plate for plate in plates if "#" in plate.text]) >= 8
    for plate in plates:
        assert plate.text.isprintable()
        assert (plate.left >= 0, plate.top >= 0) == (True, True)
        assert (plate.right <= size[0], plate.bottom <= size[1]) == (True, True)
    assert not [pair for pair in itertools.combinations(plates, 2) if pair[0].covers(pair[1])]


@pytest.mark.parametrize(
    ("line", "is_at_in"),
    [
        (((20, 120), (300, 120)), lambda x, y: y > 120),
        (((300, 120), (20, 120)), lambda x, y: y < 120),
        (((160, 20), (160, 220)), lambda x, y: x < 160),
        (((160, 220), (160, 20)), lambda x, y: x > 160),
    ],
)
def test_osd_line_that_counts_both_ways_has_a_count_on_each_side(
    line: tuple[tuple[int, int], tuple[int, int]],
    is_at_in: Callable[[float, float], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`in` is right of the way from its first point to its second, and the arrow points there."""
    osd = Osd(replace(PLAIN, has_rules=True))
    osd.set_source("cam", rules=Rules(320, 240, line_crossing=(LineCrossing("Door", line),)))
    counts = {"line-crossing/Door.in": 3, "line-crossing/Door.out": 5}
    reported = replace(result(0, objects=0), analytics=FrameAnalytics((), counts))
    heads = []
    monkeypatch.setattr(Canvas, "arrow", lambda self, tail, head, color: heads.append(head))
    into, out_of = plates_of(monkeypatch, osd, reported)
    assert (into.text, out_of.text) == ("Door  in 3", "out 5")
    sides = [is_at_in((one.left + one.right) / 2, (one.top + one.bottom) / 2) for one in (into, out_of)]
    assert sides == [True, False]
    assert is_at_in(*heads[0])


def test_osd_panel_has_objects_by_class_and_counts_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the title, several in a line; also of a rule that has no shape in view."""
    osd = Osd(replace(PLAIN, has_title=True, has_counters=True))
    osd.set_source("cam", name="Door", rules=RULES)
    counts = {"line-crossing/Entry": 7, "roi-filtering/Lawn": 2, "overcrowding/Gate": 1}
    reported = replace(result(0, size=(854, 480), objects=3), analytics=FrameAnalytics((), counts))
    texts = [plate.text for plate in plates_of(monkeypatch, osd, reported)]
    assert texts[0].startswith("Door ")
    assert [text.split() for text in texts[1:]] == [["person", "2", "car", "1", "Entry", "7", "Lawn", "2", "Gate", "1"]]


def test_osd_names_of_rules_at_one_place_stand_under_each_other() -> None:
    """As of the two ways over one line: each can be read, so that the second adds as much as the first."""
    line = RULES.line_crossing[0]
    reported, marks = result(0, objects=0), []
    for names in (("A",), ("A", "B"), ("A", "B", "C")):
        osd = Osd(replace(PLAIN, has_rules=True))
        osd.set_source("cam", rules=Rules(320, 240, line_crossing=tuple(replace(line, name=name) for name in names)))
        marks.append(changed(osd.draw(reported), reported.frame.image))
    assert marks[2] - marks[1] > 0.8 * (marks[1] - marks[0]) > 50


def test_osd_of_relative_rules_is_that_of_the_same_pixels() -> None:
    """Shares of the width and the height of the picture."""
    pictures = []
    for across, down in ((1.0, 1.0), (320.0, 240.0)):
        roi = ((0.25 * across, 0.25 * down), (0.75 * across, 0.25 * down), (0.5 * across, 0.75 * down))
        line = LineCrossing("A", ((0.125 * across, 0.5 * down), (0.875 * across, 0.5 * down)))
        osd = Osd(replace(PLAIN, has_rules=True))
        osd.set_source("cam", rules=Rules(roi_filtering=(RoiFiltering("R", roi),), line_crossing=(line,)))
        pictures.append(osd.draw(result(0, objects=0)))
    assert (pictures[0] == pictures[1]).all()
    assert changed(pictures[0], result(0, objects=0).frame.image) > 1000


@pytest.mark.parametrize("bottom", [120.0, 238.0, 240.0, 300.0])
def test_osd_names_of_rules_that_share_a_region_can_all_be_read(bottom: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is inside the picture and covers no other, also if the region ends at or below the lower edge."""
    chips: dict[str, int] = {}
    monkeypatch.setattr(Canvas, "plate", lambda canvas, text, at, *args, **more: chips.update({text: at[1]}))
    region = ((10.0, 40.0), (200.0, 40.0), (200.0, bottom), (10.0, bottom))
    names = ("A", "B", "C", "D")
    osd = Osd(replace(PLAIN, has_rules=True))
    osd.set_source("cam", rules=Rules(320, 240, roi_filtering=tuple(RoiFiltering(name, region) for name in names)))
    osd.draw(result(0, objects=0))
    rows, height = sorted(chips.values()), Canvas(np.zeros((240, 320, 3), np.uint8)).lettering.height
    assert len(rows) == len(names)
    assert (rows[0] >= 0, rows[-1] <= 240 - height) == (True, True)
    assert all(below - above >= height for above, below in itertools.pairwise(rows))


def test_osd_event_flashes_its_line_for_a_second() -> None:
    """A line that was crossed is seen in the colour of alarm, for a while."""
    osd = Osd(replace(PLAIN, has_rules=True))
    osd.set_source("cam", rules=RULES)

    def is_alarmed(number: int, *, has_event: bool) -> bool:
        events = (crossing(number),) if has_event else ()
        picture = osd.draw(result(number, events=events))
        assert picture is not None
        return bool((picture == ALARM).all(axis=2).sum() > 100)

    frames = int(FLASH_S * 10)
    assert not is_alarmed(0, has_event=False)
    assert is_alarmed(1, has_event=True)
    assert is_alarmed(frames, has_event=False)
    assert not is_alarmed(frames + 1, has_event=False)
