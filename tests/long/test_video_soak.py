"""Twenty minutes of cameras that come, go and misbehave: nothing grows, no stream starves, nothing is left.

VIDEO_SOAK_S says how long, VIDEO_SOAK_SEED with which dice, VIDEO_CYCLES how many sources come and go.
"""

import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deepstream_pipeline.brokers import RedisBroker, redis_broker
from tests.deepstream_pipeline.rtsp.cameras import Camera, rtsp_server
from tests.integration.video_chaos import (
    FPS,
    LINE,
    Program,
    counts_of,
    engine_at,
    lines_of,
    program_at,
    rates,
    settings_of,
    source,
    spot_clip,
)
from tests.integration.video_cycles import Held, come_and_go, cycling, expect_same, own_bytes, settled, shared_bytes
from tests.integration.video_flat import Sample, expect_flat
from tests.integration.video_runs import Place
from tests.integration.video_troubles import MARK, Troubles, Viewers, viewers
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

DURATION_S = float(os.environ.get("VIDEO_SOAK_S", "1200"))
SEED = int(os.environ.get("VIDEO_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
CYCLES = int(os.environ.get("VIDEO_CYCLES", "1000"))
WARM_UP_S = min(120.0, DURATION_S / 4)
STEADY = ("steady-1", "steady-2", "steady-3")
TROUBLED = 3  # servers that are killed, stopped, and replaced by rubbish


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the programs of this file run, with one engine."""
    with engine_at(tmp_path_factory.mktemp("e")) as place:
        yield place


def test_a_thousand_sources_added_and_removed_over_the_api_leave_nothing(place: Place, tmp_path: Path) -> None:
    """Fault 53 in a running program: what it holds is what it held, and a source that stays keeps its rate."""
    with cycling(place, tmp_path) as (program, uris):
        come_and_go(program, uris, min(CYCLES, 100), stays="stays")
        before, began = settled(program), counts_of(program, ["stays"])
        come_and_go(program, uris, CYCLES, stays="stays")
        rate = rates(began, counts_of(program, ["stays"]))["stays"]
        expect_same(program, before)
        assert rate >= 0.95 * FPS
        program.stop()
    assert "Traceback" not in program.text


@dataclass
class Soak:
    """A program with steady and troubled cameras, in a place with its engine."""

    place: Place
    program: Program
    troubles: Troubles

    @property
    def names(self) -> list[str]:
        """Of the sources that are there all the time."""
        return [*STEADY, *self.troubles.names]

    def window(self, seconds: float) -> tuple[float, Viewers]:
        """Troubles and viewers for so long: what the slowest steady camera gave, as a share, and what viewers saw."""
        with viewers(self.program, STEADY, SEED) as seen:
            before, until = counts_of(self.program, STEADY), time.monotonic() + seconds
            while time.monotonic() < until:
                self.troubles.one()
                self.troubles.wait(2.0)
            rate = min(rates(before, counts_of(self.program, STEADY)).values()) / FPS
        return rate, seen

    def quiet(self) -> Held:
        """What is held when only those of the settings are there and run, and the broker has what it should."""
        program = self.program
        self.troubles.clear()
        wait_for(lambda: set(program.streams()) == set(self.names), 60.0, program.streams)
        program.wait_for_states(dict.fromkeys(self.names, "running"), 90.0)
        wait_for(lambda: program.metric("sink_queue_results") < 100, 60.0, program.metrics)
        wait_for(lambda: MARK not in program.metrics(), 20.0, program.metrics)
        return settled(program, looks=4)

    def sample(self, minute: float, held: Held, rate: float, previews: int) -> Sample:
        """Of this moment, at which so much is held."""
        family, everyone = {each.pid for each in self.program.family()}, self.place.processes()
        engine_bytes = sum(own_bytes(pid) for pid in everyone if pid not in family)
        shared = sum(map(shared_bytes, everyone))
        return Sample(minute, held, engine_bytes, self.place.shared_memory(), shared, rate, previews)


def soak_at(stack: contextlib.ExitStack, place: Place, folder: Path) -> tuple[Soak, RedisBroker]:
    """Until the stack ends. Each server is one process; the steady cameras share one that nothing befalls."""
    clip = spot_clip(folder / "spot.mp4")
    (folder / "redis").mkdir()
    redis = stack.enter_context(redis_broker(folder / "redis"))
    good = stack.enter_context(rtsp_server([Camera(f"/{name}", [clip], fps=FPS) for name in STEADY], folder))
    servers = [stack.enter_context(rtsp_server([Camera("/a", [clip], fps=FPS)], folder)) for _ in range(TROUBLED)]
    sources = [source(good.url(f"/{name}"), name, rtsp_reconnect_interval=10) for name in STEADY]
    sources += [source(server.url("/a"), f"troubled-{number}") for number, server in enumerate(servers)]
    sinks = [
        {"type": "jsonl", "folder": str(folder / "out")},
        {"type": "redis", "url": redis.url, "what": "both", "max-length": 1000},
    ]
    settings = settings_of(sources, sink=sinks, analytics=LINE)
    program = stack.enter_context(program_at(place, folder / "run", settings))
    uris = [str(clip), good.url("/steady-1"), "rtsp://127.0.0.1:9/none", servers[0].url("/nothing")]
    return Soak(place, program, Troubles(program, servers, redis, uris, random.Random(SEED))), redis


def test_minutes_of_cameras_that_come_go_and_misbehave_leave_the_program_as_it_was(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory, threads, descriptors, processes and shared memory are flat whenever it is quiet, the steady cameras keep
    their rate and are never begun anew, every camera comes back, and it ends in order."""
    samples: list[Sample] = []
    shared = place.shared_memory()
    with contextlib.ExitStack() as stack:
        soak, redis = soak_at(stack, place, tmp_path)
        program, troubles = soak.program, soak.troubles
        soak.quiet()
        began = time.monotonic()
        while (minute := (time.monotonic() - began) / 60) * 60 < DURATION_S:
            rate, seen = soak.window(max(15.0, min(45.0, DURATION_S / 12)))
            held = soak.quiet()
            if minute * 60 >= WARM_UP_S:
                samples.append(soak.sample((time.monotonic() - began) / 60, held, rate, seen.pictures))
            with capsys.disabled():
                newest = samples[-1] if samples else held
                print(f"{minute * 60:.0f} s, seed {SEED}: {newest} {dict(seen.answers)} {dict(troubles.done)}")  # noqa: T201
        restarts = {name: row["restarts"] for name, row in program.streams().items()}
        assert redis.arrived(1)
        code = program.stop()
        wait_for(lambda: place.shared_memory() == shared, 10.0, place.shared_memory)
    assert code == 0, program.text[-3000:]
    assert "Traceback" not in program.text
    expect_flat(samples)
    assert troubles.gave > 0, "no added stream ever gave a frame"
    assert not any(restarts[name] for name in STEADY), restarts
    assert all(restarts[name] for name in troubles.hit), (restarts, troubles.hit)
    expect_no_frame_twice(tmp_path / "out" / "objects.jsonl")


def expect_no_frame_twice(path: Path) -> None:
    """Each steady camera's lines are there, in their order."""
    numbers: dict[str, list[int]] = {name: [] for name in STEADY}
    for line in lines_of(path):
        if line["source_id"] in numbers:
            numbers[line["source_id"]].append(line["frame_num"])
    for name, came in numbers.items():
        assert len(came) > 100, name
        assert all(later > earlier for earlier, later in itertools.pairwise(came)), name
