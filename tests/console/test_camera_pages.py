"""What the form of a camera and its page say, in words of the page, not of the API."""

import pytest
from playwright.sync_api import expect

from tests.console.conftest import Show
from tests.console.fake_video import STREAM, FakeVideo, routed

pytestmark = pytest.mark.xdist_group("console")
OLD_FILM = {
    "width": 768, "height": 576, "fps": 10.0, "codec": "msmpeg4v2", "is_live": False, "duration_s": 79.5, "jpeg": "",
    "is_recordable": False,
}  # fmt: skip
IDS = {
    "rtsp://viewer:p@ss@192.0.2.10:554/Streaming/101?a=b": "192.0.2.10-101",
    "/srv/films/Film of the yard.avi": "Film-of-the-yard",
    "rtsp://camera.example": "camera.example",
}


def test_camera_gets_an_id_from_its_address_and_needs_one(show: Show) -> None:
    """The user's own ID stays; without one the form asks for it before anything is sent."""
    with show("/models") as page:
        routed(page, FakeVideo(probed=OLD_FILM), "/streams")
        page.get_by_role("button", name="Add a camera").click()
        form = page.get_by_role("dialog", name="Add a camera")
        form.get_by_role("button", name="Add camera without test").click()
        expect(form.get_by_role("alert")).to_have_text("Enter the camera's address.")
        for address, suggested in IDS.items():
            form.get_by_label("Address").fill(address)
            expect(form.get_by_label("ID")).to_have_value(suggested)
        form.get_by_label("ID").fill("..")
        form.get_by_label("Address").fill("/other.avi")
        expect(form.get_by_label("ID")).to_have_value("..")
        form.get_by_role("button", name="Add camera without test").click()
        expect(form.get_by_role("alert")).to_contain_text("begins with no dot")
        form.get_by_label("ID").fill("")
        form.get_by_role("button", name="Add camera without test").click()
        expect(form.get_by_role("alert")).to_have_text("Give the camera an ID.")
        form.get_by_role("button", name="Test the address").click()
        expect(form.get_by_role("status")).to_contain_text(
            "Events of this camera will have no film: packets of msmpeg4v2 do not fit into MP4."
        )


def test_event_of_a_camera_that_cannot_be_recorded_says_why_it_has_no_film(show: Show) -> None:
    """In the event's dialog, where the film would be."""
    event = {
        "id": 1, "rule": "Gate", "kind": "overcrowding", "direction": None, "label": None, "track_id": None, "value": 3,
        "score": None, "snapshot": None, "clip": None, "source_id": "yard", "time": "2026-01-01T00:00:00Z",
        "pts_s": 115.6, "frame_num": 1156,
    }  # fmt: skip
    with show("/models") as page:
        video = FakeVideo({**STREAM, "is_recordable": False, "codec": "msmpeg4v2"}, events=[event])
        routed(page, video, "/events")
        expect(page.get_by_role("status").filter(has_text="1 event")).to_be_visible()
        page.get_by_role("region", name="Events").get_by_role("button").click()
        expect(page.get_by_role("dialog")).to_contain_text("packets of msmpeg4v2 do not fit into MP4")
        expect(page.get_by_role("dialog")).to_contain_text("1:55.6 after the stream's start, frame 1156")


def test_paused_camera_has_no_rate_and_counters_without_a_direction_no_zero(show: Show) -> None:
    """What is not measured, or not counted, is not shown as a number."""
    counters = [
        {"kind": "line-crossing", "rule": "Gate", "events": 3, "in": 2, "out": 1, "current": None},
        {"kind": "overcrowding", "rule": "Crowd", "events": 4, "in": 0, "out": 0, "current": 1},
    ]
    with show("/models") as page:
        routed(page, FakeVideo({**STREAM, "state": "paused"}, counters=counters, probed=OLD_FILM), "/streams/yard")
        expect(page.get_by_text("0 dropped")).to_be_visible()
        expect(page.get_by_text("fps")).to_have_count(0)
        expect(page.get_by_role("row", name="Gate line-crossing 2 1 3 –")).to_be_visible()
        expect(page.get_by_role("row", name="Crowd overcrowding – – 4 1")).to_be_visible()
