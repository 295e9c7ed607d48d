"""A video program with one camera, `yard`, as the pages of the console call it."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
from playwright.sync_api import Page, Route

SIZE = (640, 480)
STREAM = {
    "source_id": "yard", "camera_name": "", "state": "running", "reason": "", "is_frozen": False, "is_live": True,
    "fps": 10.0, "latency_s": 0.065, "drops": {}, "counts": {}, "width": SIZE[0], "height": SIZE[1], "codec": "h264",
    "decoder": "software", "is_recordable": True,
}  # fmt: skip


@dataclass
class FakeVideo:
    """The video program's answers for one camera. rules: its section, as it was saved last."""

    stream: dict[str, Any] = field(default_factory=lambda: dict(STREAM))
    rules: dict[str, Any] = field(default_factory=dict)
    counters: list[dict[str, Any]] = field(default_factory=list)
    probed: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, route: Route) -> None:
        """Answers a call of the page."""
        request, path = route.request, urlsplit(route.request.url).path
        if path.endswith("preview.jpg"):
            picture = cv2.imencode(".jpg", np.full((SIZE[1], SIZE[0], 3), 90, np.uint8))[1].tobytes()
            return route.fulfill(body=picture, content_type="image/jpeg")
        if request.method == "PUT":
            self.rules = request.post_data_json
        series = {"clock": "wall", "began": None, "since": "2026-01-01T00:00:00Z", "series": [], "step_s": 60}
        answers = {
            **{"rules": self.rules, "counters": {"rules": self.counters}, "occupancy": series, "yard": self.stream},
            **{"streams": {"streams": [self.stream]}, "probe": self.probed},
            **{"options": {"uri": "yard.avi", "is_udp": False}},
            **{"events": {"events": self.events, "next": None, "alarm": ""}},
        }
        return route.fulfill(json=answers[path.rpartition("/")[2]])


def routed(page: Page, video: FakeVideo, path: str) -> None:
    """Opens a page of the console, whose calls of the video program are answered by the fake one."""
    page.route("**/video/**", lambda route: video.answer(route))
    page.evaluate("path => { history.pushState(null, '', path); dispatchEvent(new PopStateEvent('popstate')); }", path)
