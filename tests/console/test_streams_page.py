"""The Streams page in a real browser: cameras are added, and lines and zones drawn on the live picture."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.console.browser import TIMEOUT_MS, shown_page
from tests.console.conftest import VIDEO, Show, click_at
from tests.support.http import call
from tests.support.stack import RunningStack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("console")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def square(video_stack: RunningStack) -> Iterator[RunningStack]:
    """The stack with the camera `square`, a film without an end, which is removed afterwards."""
    url = f"{video_stack.console_url}video/v1/streams"
    camera = {"uri": str(VIDEO), "source_id": "square", "is_realtime": True, "is_loop": True}
    added = call("POST", url, json.dumps(camera).encode(), {"content-type": "application/json"})
    assert added.status == 201, added.body
    yield video_stack
    remove_square(video_stack)


def remove_square(stack: RunningStack) -> None:
    """Removes the camera if it is there, and waits until its process has ended."""
    url = f"{stack.console_url}video/v1/streams/square"
    assert call("DELETE", url).status in (204, 404, 409)  # 409: it is being removed
    wait_for(lambda: call("GET", url).status == 404, 20, "the camera is removed")


def rules_of(stack: RunningStack, source: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(
        call("GET", f"{stack.console_url}video/v1/streams/{source}/rules").body
    )
    return found


def test_without_a_video_program_the_command_is_shown(show: Show) -> None:
    """The page shows the command that starts the video program."""
    with show("/streams") as page:
        expect(page.get_by_text("penstock up --video")).to_be_visible()
        expect(page.get_by_role("button", name="Add a camera")).to_be_disabled()


def test_video_program_that_starts_is_said_to_start(show: Show) -> None:
    """While its process runs and does not answer yet; no command is shown then."""
    with show("/models") as page:
        report = {"video_fault": "", "processes": [{"role": "up"}, {"role": "video"}]}
        page.route("**/gateway/v1/system", lambda route: route.fulfill(json=report))
        for title in ("Streams", "Events"):
            page.get_by_role("link", name=title, exact=True).click()
            expect(page.get_by_text("The video program is starting")).to_be_visible()
            expect(page.get_by_text("penstock up --video")).to_have_count(0)


def test_command_of_a_checkout_has_its_path(show: Show) -> None:
    """As the console's own program lies, since it may not be on the search path."""
    with show("/models") as page:
        page.route("**/addresses", lambda route: route.fulfill(json={"program": ".venv/bin/penstock"}))
        page.get_by_role("link", name="Streams", exact=True).click()
        expect(page.get_by_text(".venv/bin/penstock up --video", exact=True)).to_be_visible()


def test_why_the_video_program_cannot_run_is_shown(show: Show) -> None:
    """As the stack reports it: one sentence, which is text."""
    fault = f"video.yaml:3:5: source[0].{HOSTILE}: there is no such key"
    with show("/models") as page:
        report = {"video_fault": fault}
        page.route("**/gateway/v1/system", lambda route: route.fulfill(json=report))
        page.get_by_role("link", name="Streams", exact=True).click()
        expect(page.get_by_text(fault)).to_be_visible()


def test_camera_is_tested_and_added_and_the_counter_of_its_line_moves(
    chromium: Browser, video_stack: RunningStack
) -> None:
    """A camera is added by the form, its line is drawn by mouse, and both are saved; its name is shown as text."""
    with shown_page(chromium, f"{video_stack.console_url}streams") as page:
        page.get_by_role("button", name="Add a camera").click()
        form = page.get_by_role("dialog", name="Add a camera")
        form.get_by_label("Address").fill("/no/such/file.mp4")
        form.get_by_label("ID").fill("square")
        form.get_by_label("Name", exact=True).fill(HOSTILE)
        form.get_by_role("button", name="Test the address").click()
        expect(form.get_by_role("alert")).to_contain_text("is not there", timeout=TIMEOUT_MS)
        form.get_by_label("Address").fill(str(VIDEO))
        form.get_by_label("Play a file in real time").check()
        form.get_by_label("Loop a file").check()
        form.get_by_role("button", name="Test the address").click()
        expect(form.get_by_text("768 × 576")).to_be_visible(timeout=TIMEOUT_MS)
        form.get_by_role("button", name="Add camera", exact=True).click()
        expect(page.get_by_text("Saved to the settings file.")).to_be_visible(timeout=TIMEOUT_MS)
        tile = page.get_by_role("article", name="square")
        expect(tile.get_by_text("running")).to_be_visible(timeout=TIMEOUT_MS)
        expect(tile.locator("img")).to_be_visible(timeout=TIMEOUT_MS)
        tile.get_by_role("link", name=HOSTILE).click()
        expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()

        expect(page.locator(".stream-picture img")).to_be_visible(timeout=TIMEOUT_MS)
        page.get_by_role("button", name="Draw a line").click()
        click_at(page, (0.05, 0.45), (0.95, 0.45))
        page.get_by_label("Name").fill("Street")
        page.get_by_role("button", name="Save").click()
        row = page.get_by_role("listitem").filter(has_text="Street")
        expect(row).to_contain_text(re.compile(r"in [1-9]|out [1-9]"), timeout=60_000)
    (line,) = rules_of(video_stack, "square")["line-crossing"]
    assert line["name"] == "Street"
    assert line["line"] == [
        [pytest.approx(0.05, abs=0.01), pytest.approx(0.45, abs=0.01)],
        pytest.approx([0.95, 0.45], abs=0.01),
    ]
    assert "Street" in (video_stack.home / "video.yaml").read_text()
    remove_square(video_stack)


def test_zone_is_drawn_edited_by_keys_and_deleted(chromium: Browser, square: RunningStack) -> None:
    """The points move with the arrow keys; a zone takes the rule that is chosen for it."""
    with shown_page(chromium, f"{square.console_url}streams/square") as page:
        page.get_by_role("button", name="Draw a zone").click(timeout=TIMEOUT_MS)
        page.get_by_role("button", name="Place it in the middle").click()
        page.get_by_label("Name").fill("Yard")
        page.get_by_label("Rule").select_option("overcrowding")
        page.get_by_label("Objects or more").fill("3")
        page.get_by_label("Classes").fill("person")
        page.get_by_role("button", name="Point 1 of").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Shift+ArrowDown")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("listitem").filter(has_text="Yard")).to_be_visible()
        (zone,) = rules_of(square, "square")["overcrowding"]
        assert (zone["object-threshold"], zone["class-id"]) == (3, "person")
        assert zone["roi"] == [[0.31, 0.401], [0.7, 0.4], [0.7, 0.8], [0.3, 0.8]]
        page.get_by_role("button", name="Delete Yard").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_role("listitem").filter(has_text="Yard")).to_have_count(0)
    assert "overcrowding" not in rules_of(square, "square")


def test_camera_is_paused_resumed_edited_and_removed(chromium: Browser, square: RunningStack) -> None:
    """The buttons of its tile say what they do next; the address is kept when only the name changes."""
    with shown_page(chromium, f"{square.console_url}streams", width=390) as page:
        tile = page.get_by_role("article", name="square")
        tile.get_by_role("button", name="Pause").click(timeout=TIMEOUT_MS)
        expect(tile.get_by_role("button", name="Resume")).to_be_visible(timeout=TIMEOUT_MS)
        tile.get_by_role("button", name="Resume").click()
        expect(tile.get_by_text("running")).to_be_visible(timeout=TIMEOUT_MS)
        tile.get_by_role("button", name="Edit").click()
        form = page.get_by_role("dialog", name="Edit square")
        form.get_by_label("Name", exact=True).fill("Market")
        form.get_by_role("button", name="Save without test").click()
        expect(tile.get_by_role("link", name="Market")).to_be_visible(timeout=TIMEOUT_MS)
        tile.get_by_role("button", name="Remove").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        expect(page.get_by_text("No cameras yet")).to_be_visible(timeout=TIMEOUT_MS)
    assert "Market" not in Path(square.home / "video.yaml").read_text()
