"""The event store over HTTP: pages, pictures, clips, exports and series."""

import csv
import io
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet
import pytest

from penstock_video.api import events
from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.interfaces import SourceStatistics
from penstock_video.metrics import VideoMetrics
from penstock_video.sinks.recordings import FinishedRecording
from penstock_video.sinks.schemas import iso_time
from penstock_video.store.reader import EventArchive, EventReader
from penstock_video.types import FrameAnalytics, SourceState
from tests.deepstream_pipeline.api.asking import Answer, ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, serving
from tests.deepstream_pipeline.sinks.results import UNIX_S, crossing, result
from tests.deepstream_pipeline.store.stores import a_store, crossed, is_set_up, result_with

CLIP = bytes(range(256)) * 40
EVENTS = 25


@dataclass
class Site:
    """A server over a store with events of one source. alarm: what the store says is wrong."""

    url: str
    folder: Path
    pipeline: FakePipeline
    alarm: str = ""

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return ask(self.url, "GET", path, headers=headers or {})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """25 crossings of a door, the first with a picture and a clip; the 26th event is about a crowd."""
    folder = tmp_path_factory.mktemp("store")
    store, recordings = a_store(folder / "events"), folder / "recordings"
    is_set_up(store)
    for number in range(EVENTS):
        event = crossed(number, direction="in" if number % 5 else "out")
        store.write(result(number, events=(event,), has_image=number == 0))
    store.write(result_with(EVENTS, crossing(EVENTS, track_id=None)))
    store.write(replace(result_with(EVENTS + 1), analytics=FrameAnalytics((), {"roi-filtering/Yard": 2})))
    store.note_clip(
        FinishedRecording("cam", str(recordings / "cam-1.mp4"), UNIX_S, 5.0, 1.0, (crossed(0, direction="out"),), "")
    )
    store.close()
    recordings.mkdir()
    (recordings / "cam-1.mp4").write_bytes(CLIP)
    pipeline = FakePipeline()
    site = Site("", folder, pipeline)
    archive = EventArchive(EventReader(folder / "events"), recordings, lambda: site.alarm)
    server = ApiServer(pipeline, pipeline, VideoMetrics(), ApiOptions(port=0), archive)
    server.start()
    site.url = server.url
    yield site
    server.stop(2.0)


@pytest.fixture
def site(made: Site) -> Site:
    """With one running source."""
    made.pipeline.reset()
    made.pipeline.sources["cam"] = SourceStatistics(
        "cam", "", "", SourceState.RUNNING, counts={"roi-filtering/Yard": 2}
    )
    made.alarm = ""
    return made


def test_event_has_what_a_list_shows(site: Site) -> None:
    """And paths of its picture and clip, which are null without one."""
    newest, second = site.get("/v1/events?limit=2").json["events"]  # type: ignore[misc]
    assert (newest["kind"], newest["xyxy"], newest["snapshot"]) == ("overcrowding", None, None)
    assert second == {
        "id": 25, "time": iso_time(UNIX_S + 2.4), "source_id": "cam", "kind": "line-crossing", "rule": "door",
        "direction": "in", "label": "person", "class_id": 0, "track_id": 1, "value": 1.0, "score": 0.875,
        "xyxy": [10.0, 20.0, 30.0, 60.0], "width": 320, "height": 240, "frame_num": 24, "pts_s": 2.4,
        "snapshot": None, "clip": None, "clip_offset_s": None,
    }  # fmt: skip
    assert site.get("/v1/events/25").json == second


def test_pages_end_with_the_oldest_event(site: Site) -> None:
    """`next` is `after` of the next page, and null at the end."""
    after, seen = "", []
    while True:
        page = site.get(f"/v1/events?limit=10{after}").json
        seen += [one["id"] for one in page["events"]]  # type: ignore[attr-defined]
        if page["next"] is None:
            break
        after = f"&after={quote(str(page['next']))}"
    assert seen == list(range(26, 0, -1))


def test_list_says_why_nothing_is_stored_now(site: Site) -> None:
    """As long as the disk is full, for a person who wonders where the events are."""
    site.alarm = "/x/events.sqlite: database or disk is full; events are lost"
    assert site.get("/v1/events?limit=1").json["alarm"] == site.alarm


REFUSED = {
    "/v1/events?limit=0": "limit: '0' is not taken; a whole number from 1 to 1000 is needed",
    "/v1/events?limit=1001": "limit: '1001' is not taken; a whole number from 1 to 1000 is needed",
    "/v1/events?since=yesterday": "since: 'yesterday' is not taken; a time is needed, such as 2026-11-28T09:30:00Z",
    "/v1/events?until=-1": "until: '-1' is not taken; a time is needed",
    "/v1/events?after=x": "after: a text of 1 characters is not taken; the `next` of the page before is needed",
    "/v1/events?source_id=a/../b": "source_id: 'a/../b' is not taken; ",
    "/v1/events?lable=person": "lable: there is no such field; did you mean label?",
    "/v1/events.csv?limit=1000001": "limit: ",
    "/v1/tracks?zone=": "zone: a text of 0 characters is not taken",
    "/v1/events/0": "event_id: ",
    "/v1/streams/cam/occupancy?step_s=61": "step_s: ",
    "/v1/streams/cam/occupancy?since=2&until=1": "since is after until; swap them",
}


@pytest.mark.parametrize("path", REFUSED)
def test_parameter_that_is_wrong_is_named_with_what_is_needed(path: str, site: Site) -> None:
    """400, before anything is read."""
    answer = site.get(path)
    assert answer.status == 400, answer.body
    assert answer.error.startswith(REFUSED[path])


def test_times_are_iso_8601_or_seconds(site: Site) -> None:
    """UTC, if they name no zone."""
    for since in (UNIX_S + 2.35, iso_time(UNIX_S + 2.35), iso_time(UNIX_S + 2.35).rstrip("Z")):
        assert len(site.get(f"/v1/events?since={since}&kind=line-crossing").json["events"]) == 1  # type: ignore[arg-type]


def test_hostile_values_are_values(site: Site) -> None:
    """A filter is never part of the query's text."""
    for value in ("' OR 1=1 --", 'door"; DROP TABLE events', "%", "\u0000", "🚪" * 50):
        assert site.get(f"/v1/events?rule={quote(value)}").json["events"] == []
    assert len(site.get("/v1/events?rule=door").json["events"]) == EVENTS  # type: ignore[arg-type]


def test_snapshot_is_a_jpeg_and_an_event_without_one_says_so(site: Site) -> None:
    """404 also for an event that is not there."""
    answer = site.get("/v1/events/1/snapshot.jpg")
    assert (answer.status, answer.headers["content-type"], answer.body[:2]) == (200, "image/jpeg", b"\xff\xd8")
    assert site.get("/v1/events/2/snapshot.jpg").error == "event 2 has no snapshot"
    assert site.get("/v1/events/99").error.startswith("no event 99; old events are removed")


def test_clip_is_served_in_ranges_so_that_a_browser_can_seek(site: Site) -> None:
    """206 with the bytes that are asked for."""
    event = site.get("/v1/events/1").json
    assert (event["clip"], event["clip_offset_s"]) == ("/v1/events/1/clip.mp4", 5.0)
    whole = site.get("/v1/events/1/clip.mp4")
    assert (whole.status, whole.headers["accept-ranges"], whole.body) == (200, "bytes", CLIP)
    part = site.get("/v1/events/1/clip.mp4", {"range": "bytes=1000-1999"})
    assert (part.status, part.headers["content-range"]) == (206, f"bytes 1000-1999/{len(CLIP)}")
    assert part.body == CLIP[1000:2000]
    assert site.get("/v1/events/1/clip.mp4", {"range": "bytes=99999-"}).status == 416


def test_clip_that_was_removed_is_404_and_a_link_is_not_followed(site: Site) -> None:
    """The quota of recordings deletes files; and a link beside them could name any file."""
    path = site.folder / "recordings" / "cam-1.mp4"
    path.rename(path.with_suffix(".kept"))
    try:
        assert site.get("/v1/events/1/clip.mp4").error == "the recording of event 1 was removed"
        os.symlink("/etc/passwd", path)
        assert site.get("/v1/events/1/clip.mp4").status == 404
    finally:
        path.with_suffix(".kept").replace(path)
    assert site.get("/v1/events/2/clip.mp4").error.startswith("event 2 has no recording")


def test_csv_has_every_event_and_is_safe_in_a_spreadsheet(site: Site, tmp_path: Path) -> None:
    """A rule named like a formula is text."""
    answer = site.get("/v1/events.csv?limit=1000")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.body.decode())))
    assert [int(row["id"]) for row in rows] == list(range(26, 0, -1))
    assert (rows[1]["rule"], rows[1]["direction"], rows[1]["x2"], rows[0]["x2"]) == ("door", "in", "30.0", "")
    store = a_store(tmp_path)
    store.write(result_with(0, replace(crossed(0), rule='=HYPERLINK("http://evil")')))
    store.write(result_with(1, replace(crossed(1), rule="\uff1d1+1")))
    store.close()
    archive = EventArchive(EventReader(tmp_path), None, str)
    server = ApiServer(site.pipeline, site.pipeline, VideoMetrics(), ApiOptions(port=0), archive)
    server.start()
    full_width, row = csv.DictReader(io.StringIO(ask(server.url, "GET", "/v1/events.csv").body.decode()))
    server.stop(2.0)
    assert row["rule"] == '\'=HYPERLINK("http://evil")'
    assert full_width["rule"] == "'\uff1d1+1"


def test_parquet_has_the_same_rows_with_types(site: Site) -> None:
    """Numbers are numbers, and empty cells null."""
    answer = site.get("/v1/events.parquet?kind=line-crossing")
    assert answer.status == 200
    table = pyarrow.parquet.read_table(io.BytesIO(answer.body))
    assert table.num_rows == EVENTS
    assert table["score"].to_pylist()[0] == 0.875
    assert table["clip"].to_pylist()[-1] == "cam-1.mp4"


def test_parquet_without_its_library_is_501_with_the_install_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base installation has no pyarrow."""
    monkeypatch.setattr("penstock_video.api.events.has_parquet", lambda: False)
    answer = site.get("/v1/events.parquet")
    assert (answer.status, answer.error) == (501, "Parquet needs pyarrow: pip install 'penstock[parquet]'")


def test_tracks_are_searched_by_class_and_zone(site: Site) -> None:
    """With the picture of their newest event."""
    found = site.get("/v1/tracks?label=person&zone=door").json["tracks"]
    assert isinstance(found, list)
    assert [(one["track_id"], one["event_id"], one["snapshot"]) for one in found] == [(1, 25, None)]
    assert found[0]["zones"] == ["Yard", "door"]
    assert site.get("/v1/tracks?label=dog").json == {"tracks": [], "next": None}


def test_counters_are_in_out_and_current(site: Site) -> None:
    """Also of a rule that had no event yet."""
    rules = site.get(f"/v1/streams/cam/counters?since=0&until={UNIX_S + 60}").json["rules"]
    assert rules == [
        {"kind": "line-crossing", "rule": "door", "events": 25, "in": 20, "out": 5, "current": None},
        {"kind": "overcrowding", "rule": "Entry", "events": 1, "in": 0, "out": 0, "current": None},
        {"kind": "roi-filtering", "rule": "Yard", "events": 0, "in": 0, "out": 0, "current": 2},
    ]


def test_occupancy_and_heat_map_are_series_of_the_source(site: Site) -> None:
    """In the time range that is asked for."""
    span = f"since={UNIX_S - 60}&until={UNIX_S + 60}"
    found = site.get(f"/v1/streams/cam/occupancy?{span}").json
    assert (found["clock"], found["step_s"]) == ("wall", 60)
    series = {(one["kind"], one["rule"]): one["points"] for one in found["series"]}  # type: ignore[attr-defined]
    assert [(one["events"], one["in"], one["out"]) for one in series["line-crossing", "door"]] == [(25, 20, 5)]
    heat = site.get(f"/v1/streams/cam/heatmap?{span}").json
    assert (heat["columns"], heat["rows"]) == (64, 36)
    assert sum(map(sum, heat["seconds"])) == pytest.approx(2 * 2.6, abs=0.2)  # type: ignore[arg-type]
    assert site.get("/v1/streams/nosuch/occupancy").status == 404


def test_run_without_a_store_says_how_to_get_one() -> None:
    """409 for each route."""
    with serving(FakePipeline()) as server:
        for path in ("/v1/events", "/v1/events/1", "/v1/events.csv", "/v1/tracks", "/v1/streams/cam/heatmap"):
            answer = ask(server.url, "GET", path)
            assert (answer.status, answer.error) == (409, "this run stores no events; start it without `--events off`")


def test_openapi_has_every_route_of_the_store(site: Site) -> None:
    """With its parameters."""
    document = site.get("/openapi.json").json
    paths = document["paths"]
    assert isinstance(paths, dict)
    names = {path for path in paths if re.match(r"/v1/(events|tracks)|.*/(occupancy|heatmap|counters)$", path)}
    assert len(names) == 10
    listed = {one["name"] for one in paths["/v1/events"]["get"]["parameters"]}
    assert listed == {"source_id", "rule", "kind", "label", "since", "until", "limit", "after"}


def test_exports_that_begin_together_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two run, and the others get 503 at once; afterwards there is room again."""
    is_free = threading.Event()

    def waiting(*_: object) -> Iterator[list[object]]:
        assert is_free.wait(20.0)
        yield []

    with monkeypatch.context() as patched, ThreadPoolExecutor(5) as clients:
        patched.setattr(events, "pages", waiting)
        asked = [clients.submit(site.get, "/v1/events.csv") for _ in range(5)]
        refused = list(islice(as_completed(asked, timeout=8.0), 3))
        is_free.set()
        assert [one.result().status for one in refused] == [503] * 3
        assert "limit 2" in refused[0].result().error
        assert [one.result().status for one in asked if one not in refused] == [200, 200]
    assert site.get("/v1/events.csv").status == 200
