"""Lines and zones are drawn on a camera's picture by drags and clicks; what is drawn is visible while it is drawn."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browser import shown_page
from tests.console.conftest import Show, click_at
from tests.console.fake_video import FakeVideo, routed
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("console")


@contextmanager
def drawing(page: Page, kind: str) -> Iterator[FakeVideo]:
    """The page of the camera `yard`, after a click on the button that draws."""
    video = FakeVideo()
    routed(page, video, "/streams/yard")
    page.get_by_role("button", name=kind).click()
    page.wait_for_function("[...document.images].every(image => image.complete)")  # what is loaded moves the picture
    page.locator("svg.overlay.drawing").element_handle().wait_for_element_state("stable")
    yield video


def at(page: Page, x: float, y: float) -> tuple[float, float]:
    """A place in the picture, in CSS pixels of the page."""
    box = page.locator("svg.overlay").bounding_box()
    assert box is not None
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def save(page: Page, name: str) -> None:
    page.get_by_label("Name").fill(name)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("listitem").filter(has_text=name)).to_be_visible()


def test_line_is_dragged_and_its_side_in_is_shown_before_it_is_saved(show: Show) -> None:
    """From end to end; the first end, the line to the pointer and the arrow are visible during the drag."""
    with show("/models") as page, drawing(page, "Draw a line") as video:
        page.mouse.move(*at(page, 0.2, 0.5))
        page.mouse.down()
        page.mouse.move(*at(page, 0.8, 0.5), steps=4)
        expect(page.locator("circle.corner")).to_have_count(1)
        expect(page.locator("polyline.selected")).to_have_attribute("points", "128.0,240.0 512.0,240.0")
        expect(page.locator("svg.overlay text", has_text="in")).to_have_attribute("x", "320")
        assert float(page.locator(".way-name").get_attribute("y") or 0) > 240, "in is down, as the line goes right"
        page.mouse.up()
        save(page, "Gate")
    (line,) = video.rules["line-crossing"]
    assert line["line"] == [pytest.approx([0.2, 0.5], abs=0.005), pytest.approx([0.8, 0.5], abs=0.005)]


def test_line_is_drawn_by_a_finger(chromium: Browser, console_stack: RunningStack) -> None:
    """A touch that moves draws the line."""
    with (
        shown_page(chromium, f"{console_stack.console_url}models", width=390, has_touch=True) as page,
        drawing(page, "Draw a line") as video,
    ):
        page.locator("svg.overlay").scroll_into_view_if_needed()
        finger = page.context.new_cdp_session(page)
        for kind, points in (("Start", [at(page, 0.3, 0.2)]), ("Move", [at(page, 0.3, 0.8)]), ("End", [])):
            touches = [{"x": x, "y": y} for x, y in points]
            finger.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": touches})
        save(page, "Gate")
    (line,) = video.rules["line-crossing"]
    assert line["line"] == [pytest.approx([0.3, 0.2], abs=0.01), pytest.approx([0.3, 0.8], abs=0.01)]


def test_corners_of_a_zone_are_visible_while_it_is_drawn(show: Show) -> None:
    """Each clicked corner is a dot, with a line to the pointer; a double click sets one corner."""
    with show("/models") as page, drawing(page, "Draw a zone") as video:
        click_at(page, (0.2, 0.2), (0.2, 0.2))
        expect(page.locator("circle.corner")).to_have_count(1)
        page.mouse.move(*at(page, 0.8, 0.2))
        expect(page.locator("polyline.selected")).to_have_attribute("points", "128.0,96.0 512.0,96.0")
        click_at(page, (0.8, 0.2), (0.8, 0.8))
        page.get_by_role("button", name="Finish").click()
        save(page, "Yard")
    (zone,) = video.rules["roi-filtering"]
    assert len(zone["roi"]) == 3


def test_rule_without_a_name_is_not_sent(show: Show) -> None:
    """The form says what is missing, marks the field, and keeps the line."""
    with show("/models") as page, drawing(page, "Draw a line") as video:
        page.get_by_role("button", name="Place it in the middle").click()
        expect(page.locator("label", has_text="Name *")).to_be_visible()
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert").filter(has_text="Give the rule a name.")).to_be_visible()
        expect(page.get_by_label("Name")).to_be_focused()
        assert video.rules == {}
        save(page, "Gate")
    assert [rule["name"] for rule in video.rules["line-crossing"]] == ["Gate"]
