"""The Events page in a real browser with a real event store: list, snapshot, filter, objects, occupancy."""

import csv
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Route, expect

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.interfaces import SourceStatistics
from penstock_video.metrics import VideoMetrics
from penstock_video.store.reader import EventArchive, EventReader
from penstock_video.types import SourceState
from tests.console.browser import WIDTHS, horizontal_overflow, serious_findings
from tests.console.conftest import Show
from tests.deepstream_pipeline.api.asking import ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline
from tests.deepstream_pipeline.sinks.results import result
from tests.deepstream_pipeline.store.stores import a_store, crossed, is_set_up, result_with

pytestmark = pytest.mark.xdist_group("console")
EVENTS = 2_000
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a video API with 2,000 events; the newest has a picture."""
    folder = tmp_path_factory.mktemp("events")
    writer = a_store(folder)
    is_set_up(writer, is_live=False)
    for number in range(EVENTS - 1):
        made = result_with(number, crossed(number, direction="in" if number % 2 else "out"))
        writer.write(replace(made, analytics=replace(made.analytics, counts={"objects/person": 2})))
    writer.write(result(EVENTS, size=(640, 480), events=(crossed(EVENTS),)))
    writer.close()
    pipeline = FakePipeline()
    pipeline.sources["cam"] = SourceStatistics("cam", "", "", SourceState.RUNNING)
    archive = EventArchive(EventReader(folder), None, str)
    server = ApiServer(pipeline, pipeline, VideoMetrics(), ApiOptions(port=0), archive)
    server.start()
    yield server.url
    server.stop(2.0)


@contextmanager
def events_page(show: Show, store: str, path: str = "", **options: object) -> Iterator[Page]:
    """The page; the test's store answers its calls to the video program."""

    def answer(route: Route) -> None:
        parts = urlsplit(route.request.url)
        path = parts.path.removeprefix("/video") + (f"?{parts.query}" if parts.query else "")
        found = ask(store, "GET", path, headers={})
        route.fulfill(status=found.status, headers={"content-type": found.headers["content-type"]}, body=found.body)

    with show("/models", **options) as page:
        page.route("**/video/**", answer)
        page.get_by_role("link", name="Events", exact=True).click()
        if path:
            page.get_by_role("navigation", name="Event views").get_by_role("link", name=path).click()
        yield page


def test_event_opens_with_its_picture(show: Show, store: str) -> None:
    """The newest event is first with its snapshot; a click shows it at full size."""
    with events_page(show, store) as page:
        first = page.get_by_role("region", name="Events").get_by_role("button").first
        expect(first).to_contain_text("door in")
        expect(first.locator("img.thumb")).to_be_visible()
        first.click()
        picture = page.get_by_role("dialog").get_by_role("img", name="door in: person #1")
        expect(picture).to_be_visible()
        page.wait_for_function("document.querySelector('dialog img').naturalWidth === 640")


def test_long_list_has_few_rows_in_the_document_and_reaches_its_end(show: Show, store: str) -> None:
    """Scrolling loads further pages, and rows out of sight are removed."""
    with events_page(show, store) as page:
        region = page.get_by_role("region", name="Events")
        expect(page.get_by_role("status").filter(has_text="200 or more")).to_be_visible()
        for loaded in range(400, EVENTS + 1, 200):
            region.evaluate("box => { box.scrollTop = box.scrollHeight; }")
            expect(page.get_by_role("status").filter(has_text=str(loaded))).to_be_visible()
            assert region.get_by_role("listitem").count() < 40
            assert region.evaluate("box => box.scrollTop") > 0, "loading a page keeps the place"
        region.evaluate("box => { box.scrollTop = box.scrollHeight; }")
        expect(region.locator(f"li[aria-posinset='{EVENTS}']")).to_be_visible()


def test_filter_chooses_events_and_the_export_has_the_same(show: Show, store: str) -> None:
    """The list and the CSV export apply the same filter; an unknown class shows an empty list."""
    with events_page(show, store) as page:
        page.get_by_label("Class").fill("unicorn")
        page.keyboard.press("Enter")
        expect(page.get_by_text("No events", exact=True)).to_be_visible()
        page.get_by_label("Class").fill("person")
        page.keyboard.press("Enter")
        link = page.get_by_role("link", name="Export CSV")
        expect(link).to_have_attribute("href", "/video/v1/events.csv?label=person")
        answer = ask(store, "GET", str(link.get_attribute("href")).removeprefix("/video"))
        assert len(list(csv.DictReader(io.StringIO(answer.body.decode())))) == EVENTS


def test_key_without_the_role_sees_which_one_is_needed(show: Show) -> None:
    """Not a list that is empty, with a command that would not help."""
    with show("/events") as page:
        page.route("**/video/v1/**", lambda route: route.fulfill(status=403, json={"error": "not allowed"}))
        page.reload()
        expect(page.get_by_text("This list needs the role read")).to_be_visible()
        expect(page.get_by_text("penstock video run")).to_have_count(0)


def test_objects_are_found_by_class_and_zone(show: Show, store: str) -> None:
    """The filter selects objects by class and by zone."""
    with events_page(show, store, "Objects") as page:
        rows = page.get_by_role("region", name="Objects").get_by_role("button")
        expect(rows).to_have_count(2)
        page.get_by_label("Class").fill("car")
        page.get_by_label("Zone or line").fill("Yard")
        page.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("car #2")


def test_occupancy_has_counters_and_a_heat_map(show: Show, store: str) -> None:
    """The view shows counters and a heat map of the selected stream."""
    with events_page(show, store, "Occupancy") as page:
        expect(page.get_by_role("table").get_by_role("row").filter(has_text="line-crossing")).to_be_visible()
        expect(page.get_by_text("Where objects stood")).to_be_visible()


def test_times_of_a_film_are_read_as_on_a_clock(show: Show, store: str) -> None:
    """The chart ends where the film is now, and a position has its minutes and seconds."""
    with events_page(show, store, "Occupancy") as page:
        chart = page.get_by_role("img", name="Objects at once, by time since the stream's start")
        expect(chart.locator(".tick.start, .tick.middle, .tick.end").filter(has_text=":")).to_have_text(
            ["0:00", "1:40", "3:20"]
        )
        page.get_by_role("navigation", name="Event views").get_by_role("link", name="Events").click()
        page.get_by_role("region", name="Events").get_by_role("button").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("3:20.0 after the stream's start, frame 2000")


def test_names_from_rules_are_text(show: Show, store: str, tmp_path: Path) -> None:
    """A rule, a label or an error that looks like HTML is shown as it is."""
    event = {
        **ask(store, "GET", "/v1/events/1").json, "rule": HOSTILE, "label": HOSTILE, "source_id": HOSTILE, "id": 1,
    }  # fmt: skip
    with show("/models") as page:
        page.route("**/video/v1/streams", lambda route: route.fulfill(json={"streams": []}))
        body = {"events": [event], "next": None, "alarm": HOSTILE}
        page.route("**/video/v1/events?**", lambda route: route.fulfill(json=body))
        page.get_by_role("link", name="Events", exact=True).click()
        expect(page.get_by_role("alert").filter(has_text=HOSTILE)).to_be_visible()
        expect(page.get_by_role("button").filter(has_text=HOSTILE)).to_be_visible()
        assert page.locator("img[src=x]").count() == 0


def test_page_without_the_video_program_shows_how_to_start_it(show: Show) -> None:
    """The page names the problem and shows a command to copy."""
    with show("/events") as page:
        expect(page.get_by_text("The video program is not running")).to_be_visible()
        expect(page.get_by_role("button", name=re.compile("Copy: .*penstock up --video"))).to_be_visible()


@pytest.mark.parametrize("path", ["", "Objects", "Occupancy"])
def test_page_fits_every_width_and_is_accessible(path: str, show: Show, store: str) -> None:
    """Nothing is wider than the window; axe-core finds nothing serious, light and dark."""
    for width in WIDTHS:
        scheme = "dark" if width == WIDTHS[1] else "light"
        with events_page(show, store, path, width=width, scheme=scheme) as page:
            ready = page.get_by_role("region").first if path != "Occupancy" else page.get_by_text("Where objects stood")
            expect(ready).to_be_visible()
            assert horizontal_overflow(page) == 0
            assert serious_findings(page) == []
