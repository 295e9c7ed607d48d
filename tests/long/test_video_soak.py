"""Twenty minutes of cameras that come, go and misbehave: nothing grows, nobody starves, nothing is left.

VIDEO_SOAK_S says how long, VIDEO_SOAK_SEED with which dice, VIDEO_CYCLES how many sources come and go.
"""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests.deepstream_pipeline.brokers import redis_broker
from tests.deepstream_pipeline.rtsp.cameras import Camera, RtspServer, rtsp_server
from tests.deepstream_pipeline.rtsp.rubbish import Rubbish, rubbish_server
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
    wait_until,
)
from tests.integration.video_cycles import Held, come_and_go, cycling, expect_same, held_by, settled
from tests.integration.video_runs import Place
from tests.integration.web import call

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

DURATION_S = float(os.environ.get("VIDEO_SOAK_S", "1200"))
SEED = int(os.environ.get("VIDEO_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
CYCLES = int(os.environ.get("VIDEO_CYCLES", "1000"))
WARM_UP_S = min(120.0, DURATION_S / 4)
MIB = 1 << 20
MAX_SLOPE_MIB_A_MINUTE = 1.0
STEADY = ("steady-1", "steady-2", "steady-3")
TROUBLED = 3  # servers that are killed, stopped, and replaced by rubbish
GUESTS = 6  # that are added and removed


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
class Troubles:
    """What happens by chance, one thing at a time; undone after some seconds."""

    program: Program
    servers: list[RtspServer]
    guests: list[str]
    dice: random.Random
    done: Counter[str] = field(default_factory=Counter)
    present: dict[str, str] = field(default_factory=dict)

    def one(self) -> None:
        """The next one."""
        ways: list[Callable[[], None]] = [self.add, self.remove, self.kill, self.freeze, self.rubbish, self.pause]
        way = self.dice.choices(ways, weights=(4, 3, 1, 1, 1, 1))[0]
        way()
        self.done[way.__name__] += 1

    def add(self) -> None:
        if len(self.present) >= GUESTS:
            self.remove()
        name = f"guest-{self.done['add']}-{self.dice.randrange(1 << 16)}"
        row = {"source_id": name, "uri": self.dice.choice(self.guests), "is_loop": True, "is_realtime": True}
        answer = self.program.ask("POST", "/v1/streams", row | {"reconnect_interval_s": 2, "open_timeout_s": 4})
        assert answer.status == 201, answer.body
        self.present[name] = row["uri"]

    def remove(self) -> None:
        if self.present:
            name = self.dice.choice(sorted(self.present))
            assert self.program.ask("DELETE", f"/v1/streams/{name}").status == 204
            del self.present[name]

    def kill(self) -> None:
        server = self.dice.choice(self.servers)
        server.kill()
        self.wait(8.0)
        server.restart()

    def freeze(self) -> None:
        server = self.dice.choice(self.servers)
        server.freeze()
        self.wait(8.0)
        server.thaw()

    def rubbish(self) -> None:
        server = self.dice.choice(self.servers)
        server.kill()
        with rubbish_server(self.dice.choice([Rubbish.BYTES, Rubbish.RTP, Rubbish.HANGUP]), port=server.port):
            self.wait(8.0)
        server.restart()

    def pause(self) -> None:
        name = f"troubled-{self.dice.randrange(TROUBLED)}"
        assert self.program.ask("POST", f"/v1/streams/{name}/pause").status == 204
        self.wait(3.0)
        assert self.program.ask("POST", f"/v1/streams/{name}/resume").status == 204

    def wait(self, most_s: float) -> None:
        time.sleep(self.dice.uniform(1.0, most_s))

    def clear(self) -> None:
        """Nobody but those of the settings is there."""
        while self.present:
            self.remove()


class Viewers:
    """Two who look at previews, hang up and come again."""

    def __init__(self, program: Program, seed: int) -> None:
        self.pictures = 0
        self._program, self._over = program, threading.Event()
        self._threads = [threading.Thread(target=self._look, args=(seed + n,), daemon=True) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30.0)
        assert not any(thread.is_alive() for thread in self._threads), "a preview hangs"

    def _look(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._over.wait(dice.uniform(0.2, 2.0)):
            with contextlib.suppress(OSError):
                answer = call("GET", f"{self._program.url}/v1/streams/{dice.choice(STEADY)}/preview.jpg")
                self.pictures += answer.status == 200


@dataclass
class Samples:
    """What was held, after the warm-up. fewest: frames a second of the slowest steady source, window by window."""

    minutes: list[float] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    fewest: list[float] = field(default_factory=list)

    def slope(self) -> float:
        """MiB a minute."""
        return float(np.polyfit(self.minutes, [each.pss_bytes / MIB for each in self.held], 1)[0])


def shared_memory(place: Place) -> int:
    """Files in /dev/shm of the place's stacks, told from those of any other by the names of their run directories."""
    runs = [path.name.removeprefix("run-") for path in place.temp.glob("penstock-*/run-*")]
    return sum(any(run in name for run in runs) for name in os.listdir("/dev/shm"))


def quiet(program: Program, troubles: Troubles) -> None:
    """Only those of the settings are there, and run."""
    troubles.clear()
    names = [*STEADY, *(f"troubled-{number}" for number in range(TROUBLED))]
    wait_until(lambda: set(program.streams()) == set(names), 60.0, program.told)
    program.wait_for_states(dict.fromkeys(names, "running"), 90.0)


def test_minutes_of_cameras_that_come_go_and_misbehave_leave_the_program_as_it_was(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory, threads, descriptors, processes and shared memory are flat whenever it is quiet, the steady cameras keep
    their rate all the time, and it ends in order."""
    clip = spot_clip(tmp_path / "spot.mp4")
    (tmp_path / "redis").mkdir()
    samples = Samples()
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(rtsp_server([Camera(f"/{name}", [clip], fps=FPS) for name in STEADY], tmp_path))
        servers = [stack.enter_context(rtsp_server([Camera("/a", [clip], fps=FPS)], tmp_path)) for _ in range(TROUBLED)]
        redis = stack.enter_context(redis_broker(tmp_path / "redis"))
        sources = [source(good.url(f"/{name}"), name) for name in STEADY]
        sources += [source(server.url("/a"), f"troubled-{number}") for number, server in enumerate(servers)]
        sinks = [
            {"type": "jsonl", "folder": str(tmp_path / "out")},
            {"type": "redis", "url": redis.url, "what": "both", "max-length": 1000},
        ]
        program = stack.enter_context(
            program_at(place, tmp_path / "run", settings_of(sources, sink=sinks, analytics=LINE))
        )
        guests = [str(clip), good.url("/steady-1"), "rtsp://127.0.0.1:9/none", servers[0].url("/nothing")]
        troubles = Troubles(program, servers, guests, random.Random(SEED))
        viewers = Viewers(program, SEED)
        stack.callback(viewers.close)
        quiet(program, troubles)
        began = time.monotonic()
        while (now := time.monotonic() - began) < DURATION_S:
            counts, until = counts_of(program, STEADY), time.monotonic() + max(15.0, min(45.0, DURATION_S / 12))
            while time.monotonic() < until:
                troubles.one()
                troubles.wait(2.0)
            samples.fewest.append(min(rates(counts, counts_of(program, STEADY)).values()))
            quiet(program, troubles)
            if now >= WARM_UP_S:
                samples.minutes.append(now / 60)
                samples.held.append(settled(program))
                samples.shared.append(shared_memory(place))
            with capsys.disabled():
                print(f"{now:.0f} s, seed {SEED}: {dict(troubles.done)}, {held_by(program)}, {samples.fewest[-1]:.2f}")  # noqa: T201
        viewers.close()
        code = program.stop()
    assert code == 0, program.text[-3000:]
    assert "Traceback" not in program.text
    assert viewers.pictures > 0
    expect_flat(samples)
    assert {line["source_id"] for line in lines_of(tmp_path / "out" / "objects.jsonl")} >= set(STEADY)


def expect_flat(samples: Samples) -> None:
    """The last third is as the first third was."""
    third = max(len(samples.held) // 3, 1)
    first, last = samples.held[:third], samples.held[-third:]
    assert max(each.threads for each in last) <= max(each.threads for each in first) + 3
    assert max(each.descriptors for each in last) <= max(each.descriptors for each in first) + 8
    assert max(each.processes for each in last) <= max(each.processes for each in first)
    assert max(each.rings for each in last) <= max(each.rings for each in first)
    assert max(samples.shared[-third:]) <= max(samples.shared[:third])
    assert float(np.median(samples.fewest)) >= 0.95 * FPS, samples.fewest
    assert min(samples.fewest) >= 0.7 * FPS, f"somebody starves: {samples.fewest}"
    grown = (last[-1].pss_bytes - first[0].pss_bytes) / MIB
    assert samples.slope() < MAX_SLOPE_MIB_A_MINUTE or grown < 16.0, f"{samples.slope():.2f} MiB a minute, {grown:.0f}"
