"""The console bench's streams and events."""

from pathlib import Path

import pytest

from loadtest.bench.console.video_api import COUNTER, MadeStreams, fill
from penstock_video.errors import UnknownSource
from penstock_video.store.reader import EventReader, Filter


def test_store_of_the_bench_has_its_events_with_pictures(tmp_path: Path) -> None:
    """As the Events page reads them."""
    fill(tmp_path / "events", 50, 3)
    reader = EventReader(tmp_path / "events")
    found = reader.events(Filter(limit=100))
    assert len(found) == 50
    assert {event.source_id for event in found} == {"cam-000", "cam-001", "cam-002"}
    assert found[0].snapshot_id is not None
    assert (reader.snapshot(found[0].snapshot_id) or b"").startswith(b"\xff\xd8")


def test_streams_of_the_bench_count_the_pictures_that_were_sent() -> None:
    """Under an ID that is not listed."""
    made = MadeStreams(3)
    assert [one.source_id for one in made.statistics()] == ["cam-000", "cam-001", "cam-002"]
    made.wait("cam-001", -1, 1.0)
    assert made.source(COUNTER).frames == 1
    with pytest.raises(UnknownSource):
        made.source("cam-003")
