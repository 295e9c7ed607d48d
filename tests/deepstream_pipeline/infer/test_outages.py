"""An engine that goes away in the middle of a run: what the log says of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from deepstream_pipeline.infer import outages
from deepstream_pipeline.infer.outages import BACK, GONE
from deepstream_pipeline.infer.place import EnginePlace
from tests.deepstream_pipeline.infer.fake_core import FakeCore, engine_at, until


def test_engine_that_goes_and_comes_back_is_told_twice_in_plain_words(tmp_path: Path) -> None:
    """Which, why, and what becomes of the frames; nobody reads of fronts and cores, nor of the end of the run."""
    core = FakeCore(tmp_path)
    place = EnginePlace(core.folder, "http://127.0.0.1:8000", "127.0.0.1:8001")
    with capture_logs() as lines, engine_at(place):
        core.die()
        until(lambda: any(line["event"] == GONE for line in lines))
        core.revive()
        until(lambda: any(line["event"] == BACK for line in lines))
    core.end()
    told = [line for line in lines if line["log_level"] != "debug" and line.get("component") in ("video", "front")]
    assert [line["event"] for line in told] == [GONE, BACK]
    assert [line["log_level"] for line in told] == ["warning"] * 2
    assert {line["engine"] for line in told} == {"the stack at http://127.0.0.1:8000"}
    assert told[0]["reason"] == "it was stopped, or starts again"


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
def test_engine_that_is_back_by_the_next_look_is_not_told(situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that is started again costs a moment: no person has to do anything."""
    looks, told = LOOKS[situation]
    line: Any = Blinking(looks)
    monkeypatch.setattr(outages, "LOOK_S", 0.0)
    with capture_logs() as lines, pytest.raises(_Over):
        asyncio.run(outages.tell_outages(line, "its own"))
    assert [one["event"] for one in lines] == told


PLACES = {
    "its own": EnginePlace(Path("/run"), "http://127.0.0.1:41", "127.0.0.1:42", is_own=True),
    "the stack at http://127.0.0.1:8000": EnginePlace(Path("/run"), "http://127.0.0.1:8000", "127.0.0.1:8001"),
    "the gateway at https://gpu": EnginePlace(None, "https://gpu", "gpu:444"),
}


@pytest.mark.parametrize(("title", "place"), PLACES.items())
def test_engine_has_a_title_for_people(title: str, place: EnginePlace) -> None:
    """Of two stacks that run, which one it is."""
    assert place.title == title
