"""The search for the number of streams that a video program holds."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from penstock_load import main as streams_session
from penstock_load.clients.client import Endpoint
from penstock_load.clients.control import Stream
from penstock_load.main import SessionError, measured, run_streams, trial_of
from penstock_load.measure.buckets import Buckets
from penstock_load.phase_runner import RunOptions
from penstock_load.results import LiveView, Measurement, PhaseResult
from penstock_load.scenario import ScenarioError, read_scenario, with_stream
from penstock_load.search import StreamSearch, Trial


class RecordingWatch:
    """A watch that records the events it receives."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def show(self, view: LiveView) -> None:
        raise AssertionError("a search has no phases to show")

    def phase_done(self, result: PhaseResult) -> None:
        raise AssertionError("a search has no phases")


BOUNDS = (0.1, 1.0, 10.0, float("inf"))
FPS = 30.0


class VideoProgram:
    """Its control API, as it answers where so many streams are held and more are late."""

    def __init__(self, holds: int) -> None:
        self.holds = holds
        self.began: dict[str, float] = {}
        self.bodies: list[dict[str, object]] = []
        self.slow, self.good = 0, 0
        self.may_answer = asyncio.Event()  # that a stream was added
        self.may_answer.set()
        self._last = 0.0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/streams", self._list)
        app.router.add_post("/v1/streams", self._add)
        app.router.add_delete("/v1/streams/{name}", self._remove)
        app.router.add_get("/metrics", self._metrics)
        return app

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.began[body["source_id"]] = self.now
        await self.may_answer.wait()
        return web.json_response({"source_id": body["source_id"]}, status=201)

    async def _remove(self, request: web.Request) -> web.Response:
        self.began.pop(request.match_info["name"], None)
        return web.Response(status=204)

    async def _list(self, _: web.Request) -> web.Response:
        rows = []
        for name, began in self.began.items():
            seconds = self.now - began + 1.0
            frames = int(seconds * 1000)
            rows.append(Stream(name, "running", fps=FPS, frames=frames, inferred=frames, height=720, codec="h264"))
            rows[-1].position_s = seconds
        return web.json_response({"streams": [msgspec.to_builtins(row) for row in rows]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.good += 1000
        if len(self.began) > self.holds:
            self.slow += 1000
        both = self.good + self.slow
        lines = [
            f'penstock_video_glass_to_event_seconds_bucket{{source="{name}",le="{bound}"}} {count}'
            for name in self.began
            for bound, count in zip(BOUNDS, (self.good, self.good, both, both), strict=True)
        ]
        return web.Response(text="\n".join([*lines, ""]))


@pytest.fixture
def program() -> VideoProgram:
    return VideoProgram(holds=5)


@pytest.fixture
async def url(program: VideoProgram, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(streams_session, "SETTLE_S", 0.0)
    runner = web.AppRunner(program.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def order(url: str, folder: Path, *, seconds: float = 0.2, most: int = 64) -> RunOptions:
    scenario = with_stream(read_scenario("video-streams"), "street.mp4")
    phase = msgspec.structs.replace(scenario.phases[0], seconds=seconds, streams=most)
    return RunOptions(
        scenario=msgspec.structs.replace(scenario, phases=(phase,)),
        target=Endpoint(http_url=url, grpc_address=""),
        folder=folder,
    )


def by_name(found: Iterable[Measurement]) -> dict[str, float]:
    return {one.measure: one.spread.median for one in found}


@pytest.mark.parametrize(("holds", "most"), [(0, 64), (1, 64), (5, 64), (16, 16), (40, 64), (64, 64), (63, 64)])
def test_search_finds_the_number_that_is_held(holds: int, most: int) -> None:
    """Whatever it is, with few trials: none twice."""
    search, tried = StreamSearch(most), []
    while (count := search.next_count()) is not None:
        tried.append(count)
        search.record(count, is_held=count <= holds)
    assert search.held == min(holds, most)
    assert len(set(tried)) == len(tried) <= 12


@pytest.mark.parametrize(
    ("trial", "complaint"),
    [
        (Trial(2, 900.0, 0.0, 1.0, 60.0), ""),
        (Trial(2, 1200.0, 0.0, 1.0, 60.0), "p99 1200 ms"),
        (Trial(2, float("nan"), 0.0, 1.0, 0.0), "p99 nan ms"),
        (Trial(2, 90.0, 0.02, 1.0, 60.0), "2.0% of the frames dropped"),
        (Trial(2, 90.0, 0.0, 0.8, 48.0), "the slowest stream played 80% of the time"),
        (Trial(2, 90.0, 0.0, 1.0, 60.0, "a stream is failed: gone"), "a stream is failed: gone"),
    ],
)
def test_number_of_streams_is_held_within_latency_losses_and_time(trial: Trial, complaint: str) -> None:
    """Late results, dropped frames and a stream that falls behind each are a reason, in words."""
    assert trial.complaint(1000.0) == complaint


def test_trial_counts_what_came_between_two_looks() -> None:
    """Drops by the frames decoded meanwhile; the slowest stream's time."""
    before = {"a": Stream("a", "running", frames=100, inferred=100), "b": Stream("b", "running", drops={"too_old": 7})}
    after = {
        "a": Stream("a", "running", frames=160, inferred=158, drops={"too_old": 2}, position_s=2.0),
        "b": Stream("b", "running", frames=40, inferred=30, drops={"too_old": 7}, position_s=1.5),
    }
    trial = trial_of(before, after, Buckets(((0.1, 100), (float("inf"), 100))), 2.0)
    assert (trial.dropped_share, trial.played_share, trial.rate) == (0.02, 0.75, 44.0)


async def test_streams_are_added_until_they_come_late(program: VideoProgram, url: str, tmp_path: Path) -> None:
    """The number that was held is a figure under the name of its size and rate, and no stream is left."""
    run = await run_streams(order(url, tmp_path), RecordingWatch())
    assert not run.complaints
    found = by_name(run.measurements)
    assert (found["streams_held"], found["streams_720p30_h264"]) == (5.0, 5.0)
    assert found["streams_per_core"] == 5.0 / run.machine.cores
    assert program.began == {}
    assert {(body["uri"], body["is_loop"], body["is_realtime"]) for body in program.bodies} == {
        ("street.mp4", True, True)
    }
    assert json.loads(msgspec.json.encode(run))["scenario"] == "video-streams"


async def test_search_that_is_stopped_leaves_no_stream(program: VideoProgram, url: str, tmp_path: Path) -> None:
    """Ctrl-C takes out what was added, also if no answer has come yet, and the run says that it was stopped."""
    program.may_answer.clear()
    search = asyncio.create_task(run_streams(order(url, tmp_path, seconds=60.0), RecordingWatch()))
    async with asyncio.timeout(30):
        while not program.began:
            await asyncio.sleep(0.01)
    search.cancel()
    run = await search
    program.may_answer.set()
    assert program.began == {}
    assert run.complaints
    assert run.measurements == ()


async def test_search_where_no_video_program_runs_says_so(tmp_path: Path) -> None:
    """One sentence, before anything is added."""
    with pytest.raises(SessionError, match="nothing answers"):
        await run_streams(order("http://127.0.0.1:9", tmp_path), RecordingWatch())


def test_streams_of_another_size_have_the_plain_figures_only() -> None:
    """A number of streams speaks of its own size and rate."""
    stream = Stream("a", "running", fps=25.0, height=576, codec="h264")
    assert by_name(measured([(3, stream), (5, stream)], 0)) == {"streams_held": 4.0}


def test_scenario_of_streams_without_a_uri_says_what_to_give() -> None:
    """The names of the reader's cameras are unknown; other scenarios have no streams."""
    with pytest.raises(ScenarioError, match="--stream URI"):
        with_stream(read_scenario("video-streams"), "")
    with pytest.raises(ScenarioError, match="image-steady has none"):
        with_stream(read_scenario("image-steady"), "cam.mp4")
