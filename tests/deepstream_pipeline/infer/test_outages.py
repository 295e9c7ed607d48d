"""An engine that goes away in the middle of a run: what the log says of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock_video.infer import clients as outages
from penstock_video.infer.clients import BACK, GONE
from penstock_video.infer.options import EngineAddress
from tests.deepstream_pipeline.infer.fake_core import FakeCore, engine_at
from tests.support.waiting import wait_for


def test_engine_that_goes_and_comes_back_is_logged_twice_in_plain_words(tmp_path: Path) -> None:
    """The engine, the reason and what happens to the frames; no internal terms, and no line at the end of the run."""
    core = FakeCore(tmp_path)
    place = EngineAddress(core.folder, "http://127.0.0.1:8000", "127.0.0.1:8001")
    with capture_logs() as lines, engine_at(place):
        core.die()
        wait_for(lambda: any(line["event"] == GONE for line in lines))
        core.revive()
        wait_for(lambda: any(line["event"] == BACK for line in lines))
    core.end()
    logged = [
        line for line in lines if line["log_level"] != "debug" and line.get("component") in ("video", "core_client")
    ]
    assert [line["event"] for line in logged] == [GONE, BACK]
    assert [line["log_level"] for line in logged] == ["warning"] * 2
    assert {line["engine"] for line in logged} == {"the stack at http://127.0.0.1:8000"}
    assert logged[0]["reason"] == "it was stopped, or starts again"


class _Over(Exception):
    """There is nothing more to see."""


class Blinking:
    """A line that is up, or not, look by look."""

    reason = "it was stopped, or starts again"

    def __init__(self, looks: list[bool]) -> None:
        self._looks = iter(looks)

    @property
    def is_up(self) -> bool:
        for look in self._looks:
            return look
        raise _Over


LOOKS = {"back by the next look": ([True, False, True, True], []), "away": ([False, False, False, True], [GONE, BACK])}


@pytest.mark.parametrize("situation", LOOKS)
def test_engine_that_is_back_by_the_next_poll_is_not_logged(situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that is started again costs a moment: no person has to do anything."""
    looks, logged = LOOKS[situation]
    line: Any = Blinking(looks)
    monkeypatch.setattr(outages, "LOOK_S", 0.0)
    with capture_logs() as lines, pytest.raises(_Over):
        asyncio.run(outages.log_outages(line, "its own"))
    assert [one["event"] for one in lines] == logged


PLACES = {
    "its own": EngineAddress(Path("/run"), "http://127.0.0.1:41", "127.0.0.1:42", is_own=True),
    "the stack at http://127.0.0.1:8000": EngineAddress(Path("/run"), "http://127.0.0.1:8000", "127.0.0.1:8001"),
    "the gateway at https://gpu": EngineAddress(None, "https://gpu", "gpu:444"),
}


@pytest.mark.parametrize(("title", "place"), PLACES.items())
def test_engine_has_a_title_for_people(title: str, place: EngineAddress) -> None:
    """Of two stacks that run, which one it is."""
    assert place.title == title
