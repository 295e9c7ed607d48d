"""What is recorded of a run for its page, and that it stays bounded."""

from dataclasses import replace

import numpy as np
import pytest

from penstock_video.detections import Detections, foot_cells
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.poster import PosterChooser
from penstock_video.sinks.run_record import (
    MAX_BINS,
    MAX_SOURCES,
    STAY_LIMITS_S,
    SourceRecord,
    Stays,
    SummaryOptions,
    SummarySink,
    TimeBins,
)
from penstock_video.types import AnalyticsEvent, CrossingDirection, Tracks
from tests.deepstream_pipeline.sinks.results import result


def new_record() -> SourceRecord:
    """Of no frame."""
    return SourceRecord(PosterChooser(Osd().draw))


@pytest.mark.parametrize("days", [0.0005, 0.1, 30])
def test_time_bins_of_any_run_are_bounded_and_lose_nothing(days: float) -> None:
    """A week has as many bins as an hour, only wider ones."""
    bins, steps = TimeBins(), 5000
    for number in range(steps):
        at = bins.at(1e6 + number * days * 86400 / steps)
        at.frames += 1
        at.objects[0] += 2
    assert len(bins) <= MAX_BINS
    assert sum(one.frames for one in bins) == steps
    assert sum(one.objects[0] for one in bins) == 2 * steps
    assert bins.width_s * len(bins) >= days * 86400 * 0.99


def test_time_bins_keep_the_order_of_time() -> None:
    """After merging, the first half of the frames is in the first half of the bins."""
    bins = TimeBins()
    for second in range(900):
        bins.at(float(second)).frames += 1
    counts = [one.frames for one in bins]
    assert set(counts[:-1]) == {8}
    assert sum(counts) == 900


def test_record_counts_each_track_once_by_class() -> None:
    """Also if it is away for a while; detections without a track count as none."""
    record = new_record()
    for number in range(5):
        record.observe(result(number, objects=3))
    untracked = result(5, objects=2)
    ids = np.full(2, -1, np.int64)
    record.observe(replace(untracked, tracks=Tracks(untracked.tracks.detections, ids, untracked.tracks.age_frames)))
    assert {record.label(class_id): number for class_id, number in record.tracks.items()} == {"person": 2, "car": 1}
    assert record.frames == 6


def test_record_has_events_by_counter_over_time() -> None:
    """The two ways over a line are two counters."""
    record = new_record()
    for number, way in ((0, CrossingDirection.IN), (20, CrossingDirection.OUT), (21, CrossingDirection.OUT)):
        event = AnalyticsEvent("line-crossing", "cam", number, number / 10, 1, "door", 1.0, 0, direction=way)
        record.observe(result(number, events=(event,)))
    found = [dict(one.events) for one in record.bins]
    assert found == [{"line-crossing/door.in": 1}, {}, {"line-crossing/door.out": 2}]


def test_stays_are_counted_once_with_their_whole_length() -> None:
    """The event at the threshold is not a stay of its own; a second stay of the same object is."""
    stays = Stays()
    for track_id, seconds in ((1, 2.0), (2, 2.0), (1, 9.0), (1, 2.0), (1, 2.5)):
        stays.observe(track_id, seconds)
    figures = stays.figures()
    assert (figures.number, figures.longest_s) == (3, 9.0)
    assert figures.mean_s == pytest.approx((9 + 2 + 2.5) / 3)
    assert figures.counts[STAY_LIMITS_S.index(5)] == 2
    assert figures.counts[STAY_LIMITS_S.index(10)] == 1


def test_foot_cells_are_those_of_the_middle_of_the_lower_edge() -> None:
    """Feet outside the picture count at its edge; a box of nonsense counts nowhere."""
    boxes = np.array([[0, 0, 20, 50], [90, 0, 110, 100], [-50, 0, -40, 500], [np.nan, 0, 1, 1]], np.float32)
    found = Detections(boxes, np.ones(4, np.float32), np.zeros(4, np.int64))
    rows, columns = foot_cells(found, 200, 100, (10, 20))
    assert rows.tolist() == [5, 9, 9]
    assert columns.tolist() == [1, 10, 0]


def test_record_heat_is_the_time_of_the_feet() -> None:
    """One object in a second of video adds a second in all; a gap in the video adds at most one."""
    record = new_record()
    for number in (*range(11), 1000):
        record.observe(result(number, objects=1))
    assert record.heat.sum() == pytest.approx(2.0)


def test_summary_sink_keeps_a_bounded_number_of_sources() -> None:
    """And what it keeps of each survives the end of the source."""
    sink = SummarySink(SummaryOptions(None), Osd())  # type: ignore[arg-type]
    for number in range(MAX_SOURCES + 5):
        sink.write(result(0, source_id=f"cam{number}", size=(64, 48)))
        sink.end_source(f"cam{number}")
    assert len(sink.records) == MAX_SOURCES
    assert sink.records["cam0"].poster is not None
