"""Cameras are added in the console, rules drawn with the mouse, and what is counted is what people see."""

import csv
import re
import tomllib
from pathlib import Path

import av
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.console.browser import shown_page
from tests.console.conftest import VIDEO, click_at
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.rtsp.cameras import Camera, rtsp_server
from tests.integration.video_runs import first_frames
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("console")
TRUTH = tomllib.loads((CHECKOUT / "tests" / "deepstream_pipeline" / "vtest_crossings.toml").read_text())
SIZE = (768, 576)
WAIT_MS = 60_000


def camera_film(path: Path) -> Path:
    """The path, to which the first ten seconds of the video were encoded as H.264."""
    with av.open(str(VIDEO)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame, _ in zip(video.decode(video=0), range(100), strict=False)]
    return write_clip(path, frames=100, fps=10, size=SIZE, picture=lambda number, *_: frames[number])


def add_camera(page: Page, address: str, source: str, *, at_its_own_speed: bool = False) -> None:
    """By the form, which shows a picture first; then opens its page. at_its_own_speed: of a file."""
    page.get_by_role("button", name="Add a camera").click()
    form = page.get_by_role("dialog", name="Add a camera")
    form.get_by_label("Address").fill(address)
    form.get_by_label("ID").fill(source)
    if at_its_own_speed:
        form.get_by_label("Play a file in real time").check()
    form.get_by_role("button", name="Test the address").click()
    expect(form.get_by_text("768 × 576")).to_be_visible(timeout=WAIT_MS)
    expect(form.get_by_role("img", name="A frame from this address")).to_be_visible()
    form.get_by_role("button", name="Add camera", exact=True).click()
    page.get_by_role("article", name=source).get_by_role("link", name=source).click()


def counted(row: Locator) -> list[int]:
    """In and out of a line in the list of rules."""
    return [int(number) for number in re.findall(r"(?:in|out) (\d+)", row.inner_text())]


def remove_camera(page: Page, source: str) -> None:
    page.get_by_role("link", name="Streams", exact=True).click()
    page.get_by_role("button", name=f"Remove {source}").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_role("article", name=source)).to_have_count(0, timeout=WAIT_MS)


def test_people_of_a_film_are_counted_as_by_hand(chromium: Browser, video_stack: RunningStack, tmp_path: Path) -> None:
    """Within one in each direction: the line is drawn over the ended film, which then starts over."""
    film = first_frames(tmp_path / "pavement.avi", VIDEO, TRUTH["frames"])
    with shown_page(chromium, f"{video_stack.console_url}streams") as page:
        add_camera(page, str(film), "pavement")
        expect(page.get_by_text("ended", exact=True)).to_be_visible(timeout=WAIT_MS)
        page.get_by_role("button", name="Draw a line").click()
        click_at(page, *((x / SIZE[0], y / SIZE[1]) for x, y in TRUTH["line"]))
        page.get_by_label("Name").fill("Bollard")
        page.get_by_role("button", name="Save").click()
        page.get_by_role("button", name="Start over").click()
        page.get_by_role("dialog").get_by_role("button", name="Start over").click()
        expect(page.get_by_text("ended", exact=True)).to_have_count(0)
        expect(page.get_by_text("ended", exact=True)).to_be_visible(timeout=WAIT_MS)
        into, out = counted(page.get_by_role("listitem").filter(has_text="Bollard"))
        assert abs(into - 5) <= 1
        assert abs(out - 9) <= 1

        counters = page.get_by_role("row", name=re.compile(f"Bollard line-crossing {into} {out} {into + out}"))
        expect(counters).to_be_visible()
        expect(
            page.get_by_role("img", name=re.compile("^Objects at once, by time since the stream's start"))
        ).to_be_visible()
        page.get_by_role("button", name="Heat map").click()
        expect(page.get_by_role("img", name="Heat map: ").locator("rect").first).to_be_visible(timeout=WAIT_MS)

        page.get_by_role("link", name="Events", exact=True).click()
        page.get_by_label("Stream").select_option("pavement")
        page.get_by_role("region", name="Events").get_by_role("button", name="Bollard out").first.click()
        expect(page.get_by_role("dialog").get_by_role("img", name=re.compile("Bollard out: person"))).to_be_visible()
        expect(page.get_by_role("dialog").get_by_role("img")).to_have_js_property("naturalWidth", 768)
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="Export CSV").click()
        rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
        assert [row["direction"] for row in rows].count("in") == into
        assert {row["rule"] for row in rows} == {"Bollard"}
        remove_camera(page, "pavement")


def test_rtsp_camera_gives_an_event_with_picture_and_film(
    chromium: Browser, video_stack: RunningStack, tmp_path: Path
) -> None:
    """A zone is drawn on the live picture of a camera with a password, which the page does not get."""
    camera = Camera("/yard", [camera_film(tmp_path / "yard.mp4")], fps=10, user="viewer", password="secret")
    with rtsp_server([camera], tmp_path) as server, shown_page(chromium, f"{video_stack.console_url}streams") as page:
        add_camera(page, server.url("/yard"), "yard")
        expect(page.get_by_role("img", name="Live picture of yard")).to_be_visible(timeout=WAIT_MS)
        assert "secret" not in page.content()
        page.get_by_role("button", name="Draw a zone").click()
        click_at(page, (0.02, 0.1), (0.98, 0.1), (0.98, 0.95), (0.02, 0.95))
        page.get_by_role("button", name="Finish").click()
        page.get_by_label("Name").fill("Yard")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("listitem").filter(has_text="Yard")).to_contain_text(
            re.compile("[1-9] now"), timeout=WAIT_MS
        )
        page.get_by_role("link", name="Events", exact=True).click()
        page.get_by_label("Stream").select_option("yard")
        clip = page.get_by_role("region", name="Events").get_by_role("button").filter(has_text="clip")
        expect(clip.first).to_be_visible(timeout=WAIT_MS)
        clip.first.click()
        box = page.get_by_role("dialog")
        expect(box.get_by_role("img")).to_be_visible()
        page.wait_for_function("() => document.querySelector('dialog video').duration > 1")
        box.get_by_role("button", name="Close").click()
        remove_camera(page, "yard")
