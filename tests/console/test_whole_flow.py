"""What a person does with a new stack, in one browser: a model, a picture, two cameras, rules, events, a load test."""

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from penstock.gateway.auth.api_keys import digest_of, new_secret
from penstock.protocol.identity import Role
from tests.console.browser import shown_page
from tests.console.conftest import SHORT_CLIPS, VIDEO, WITH_CONSOLE, click_at, sample_picture
from tests.console.test_counting import SIZE, TRUTH, WAIT_MS, add_camera, camera_film, counted
from tests.console.test_system_page import log_in
from tests.deepstream_pipeline.rtsp.cameras import Camera, rtsp_server
from tests.support.ports import free_port
from tests.support.pulled_models import SOURCE, pull_model
from tests.support.stack import RunningStack, start_stack, stop_stack

pytestmark = [pytest.mark.xdist_group("console"), pytest.mark.long]
SECRET = new_secret()
LINE = tuple((x / SIZE[0], y / SIZE[1]) for x, y in TRUTH["line"])


@pytest.fixture(scope="module", params=["without keys", "with keys"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningStack, bool]]:
    """A stack with YOLOX-Nano and the video program, and whether it requires a key."""
    if not (SOURCE.is_dir() and VIDEO.is_file()):
        pytest.skip(f"no real inputs: {SOURCE} or {VIDEO} is absent")
    home = tmp_path_factory.mktemp("flow")
    pull_model(home, "yolox-nano")
    (home / "video.yaml").write_text(SHORT_CLIPS)
    has_keys = request.param == "with keys"
    access: tuple[str, ...] = ()
    if has_keys:
        roles = ", ".join(f'"{role}"' for role in Role)
        (home / "access.toml").write_text(f'[keys.all]\nsha256 = "{digest_of(SECRET)}"\nroles = [{roles}]\n')
        access = ("--access-file", str(home / "access.toml"))
    video = ("--video", "--video-port", str(free_port()), "--allow-outbound", "127.0.0.1")
    running = start_stack(home, *WITH_CONSOLE, *video, *access)
    running.wait_for_log("control API")
    yield running, has_keys
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def go(page: Page, title: str) -> None:
    page.get_by_role("link", name=title, exact=True).click()
    expect(page.get_by_role("heading", level=1).first).to_contain_text(title)


def add_a_model(page: Page) -> None:
    """A file is looked at, and added under its own name."""
    go(page, "Models")
    page.get_by_role("button", name="Add a model").click()
    box = page.get_by_role("dialog", name="Add a model")
    box.get_by_label("Drop an ONNX file").set_input_files(SOURCE / "ultraface_rfb320.onnx")
    expect(box.get_by_text("can be served")).to_be_visible(timeout=WAIT_MS)
    box.get_by_role("button", name="Add", exact=True).click()
    expect(box.get_by_text("ultraface_rfb320 is served.")).to_be_visible(timeout=WAIT_MS)
    box.get_by_role("link", name="Try it").click()
    expect(page.get_by_label("Model")).to_have_value("ultraface_rfb320")


def try_a_picture(page: Page) -> None:
    go(page, "Try")
    page.get_by_label("Model").select_option("yolox-nano")
    page.locator("input[type=file]").set_input_files(sample_picture())
    expect(page.get_by_text("2 objects · yolox-nano, version 1")).to_be_visible(timeout=WAIT_MS)


def count_in_a_film(page: Page) -> None:
    """A camera whose source is a file, a line and a zone on it, and the counters that move."""
    go(page, "Streams")
    add_camera(page, str(VIDEO), "pavement", at_its_own_speed=True)
    expect(page.get_by_role("img", name="Live picture of pavement")).to_be_visible(timeout=WAIT_MS)
    page.get_by_role("button", name="Draw a line").click()
    click_at(page, *LINE)
    page.get_by_label("Name").fill("Bollard")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Draw a zone").click()
    click_at(page, (0.02, 0.1), (0.98, 0.1), (0.98, 0.95), (0.02, 0.95))
    page.get_by_role("button", name="Finish").click()
    page.get_by_label("Name").fill("All of it")
    page.get_by_role("button", name="Save").click()
    zone = page.get_by_role("listitem").filter(has_text="All of it")
    expect(zone).to_contain_text(re.compile("[1-9] now"), timeout=WAIT_MS)
    line = page.get_by_role("listitem").filter(has_text="Bollard")
    expect(line).to_contain_text(re.compile("(in|out) [1-9]"), timeout=WAIT_MS)
    assert sum(counted(line)) > 0


def watch_a_camera(page: Page, address: str) -> None:
    """A real RTSP server's stream, with its live picture."""
    go(page, "Streams")
    add_camera(page, address, "yard")
    expect(page.get_by_role("img", name="Live picture of yard")).to_be_visible(timeout=WAIT_MS)
    go(page, "Streams")
    for name in ("yard", "pavement"):
        expect(page.get_by_role("article", name=name).get_by_text("running")).to_be_visible(timeout=WAIT_MS)


def open_an_event_and_export(page: Page) -> None:
    go(page, "Events")
    page.get_by_label("Rule").fill("Bollard")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Events").get_by_role("button", name="Bollard").first.click()
    expect(page.get_by_role("dialog").get_by_role("img").first).to_have_js_property("naturalWidth", SIZE[0])
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Export CSV").click()
    rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
    assert {(row["rule"], row["source_id"]) for row in rows} == {("Bollard", "pavement")}


def run_a_load_test(page: Page) -> None:
    """Live figures while it runs, and a report after it was stopped."""
    go(page, "Load")
    page.get_by_label("Scenario", exact=True).select_option("image-burst")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("img", name="Latency: p50")).to_be_visible(timeout=WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.frame_locator("iframe[title=Report]").locator(".verdict")).to_be_visible(timeout=WAIT_MS)


def test_person_uses_everything(chromium: Browser, stack: tuple[RunningStack, bool], tmp_path: Path) -> None:
    """With a key, which is entered once, and without: each step shows what it should."""
    running, has_keys = stack
    yard = Camera("/yard", [camera_film(tmp_path / "yard.mp4")], fps=10, user="viewer", password="secret")
    with rtsp_server([yard], tmp_path) as server, shown_page(chromium, running.console_url) as page:
        if has_keys:
            log_in(page, SECRET)
        steps: tuple[Callable[[Page], None], ...] = (
            *(add_a_model, try_a_picture, count_in_a_film, lambda shown: watch_a_camera(shown, server.url("/yard"))),
            *(open_an_event_and_export, run_a_load_test),
        )
        for step in steps:
            step(page)
        go(page, "System")
        expect(page.get_by_role("row").filter(has_text="decoder").first).to_be_visible()
