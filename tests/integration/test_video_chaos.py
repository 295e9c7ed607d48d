"""Cameras that misbehave, and those beside them. FAULTS 42-44, 46, 47, 49-51, 54-56 in a running program."""

import contextlib
import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.deepstream_pipeline.chaos_proxy import chaos_proxy
from tests.deepstream_pipeline.clips import Picture, write_clip
from tests.deepstream_pipeline.rtsp.cameras import Camera, RtspServer, rtsp_server
from tests.deepstream_pipeline.rtsp.rubbish import Rubbish, rubbish_server
from tests.integration.video_chaos import (
    FPS,
    Count,
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
from tests.integration.video_runs import Place
from tests.support.ports import free_port
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("video-chaos"), pytest.mark.timeout(300), pytest.mark.long]

GOOD, CONTROL = ("good-1", "good-2"), ("control-1", "control-2")
WINDOW_S, WINDOWS = 15.0, 3
SECRET = "s3cr3tpassw0rd"
BACK_S = 60.0  # a pause of back-off, at most 16 s by then, an opening, and a machine that stands still


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the programs of this file run, with one engine."""
    with engine_at(tmp_path_factory.mktemp("e")) as place:
        yield place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of clips and their packets."""
    return tmp_path_factory.mktemp("cameras")


@pytest.fixture(scope="module")
def clip(folder: Path) -> Path:
    """The square that moves, for ever."""
    return spot_clip(folder / "spot.mp4")


@dataclass
class Beside:
    """Good cameras of a program in trouble, and of one that has none, over the same time."""

    program: Program
    control: Program
    names: Sequence[str] = GOOD
    seen: list[str] = field(default_factory=list)

    def window(self) -> tuple[dict[str, Count], dict[str, Count]]:
        """It begins."""
        return counts_of(self.program, self.names), counts_of(self.control, CONTROL)

    def keeps_its_rate(self, began: tuple[dict[str, Count], dict[str, Count]]) -> bool:
        """The window ends. False where the machine stood still, so that the control run lost frames as well."""
        good = rates(began[0], counts_of(self.program, self.names))
        control = rates(began[1], counts_of(self.control, CONTROL))
        self.seen.append(f"good {good}, control {control}, drops {[self.program.stream(n)['drops'] for n in good]}")
        usual = statistics.median(control.values())
        if min(control.values()) < 0.97 * FPS:
            return False
        assert all(abs(rate - usual) <= 0.05 * usual for rate in good.values()), self.seen
        return True

    def expect_rate_kept(self, seconds: float = WINDOW_S) -> None:
        """Within 5 % of the control run, in a window in which that one kept its own."""
        for _ in range(WINDOWS):
            began = self.window()
            time.sleep(seconds)
            if self.keeps_its_rate(began):
                return
        raise AssertionError(f"the machine stood still in every window: {self.seen}")

    def expect_bounded_latency(self, bound_s: float = 1.0) -> None:
        """Of all good frames 99 % within max-latency, half of them within a quarter of it."""
        for name in self.names:
            text = self.program.metrics()
            within = re.search(
                rf'^penstock_video_glass_to_event_seconds_bucket{{le="{bound_s}",source="{name}"}} (\S+)$', text, re.M
            )
            count = re.search(rf'^penstock_video_glass_to_event_seconds_count{{source="{name}"}} (\S+)$', text, re.M)
            assert within is not None, name
            assert count is not None, name
            assert float(within[1]) >= 0.99 * float(count[1]), (name, within[1], count[1])
            latency_s = self.program.stream(name)["latency_s"]
            assert latency_s is not None, name
            assert latency_s < bound_s / 4, (name, latency_s)


@contextlib.contextmanager
def control_run(place: Place, folder: Path, server: RtspServer) -> Iterator[Program]:
    """The same two good cameras, in a program of their own."""
    sources = [source(server.url(f"/{name}"), name) for name in CONTROL]
    with program_at(place, folder, settings_of(sources)) as control:
        yield control
        assert control.stop() == 0, control.text


def good_cameras(clip: Path) -> list[Camera]:
    """Of both programs."""
    return [Camera(f"/{name}", [clip], fps=FPS) for name in (*GOOD, *CONTROL)]


def test_six_of_eight_cameras_misbehave_and_the_others_do_not_notice(
    place: Place, folder: Path, clip: Path, tmp_path: Path
) -> None:
    """One is killed, one stopped, one sends rubbish, one changes its size, one is slow, one refuses the password: the
    two others keep their rate within 5 % of a control run's and their latency under its bound; the six tell what they
    have, and four return by themselves."""
    large = spot_clip(folder / "large.mp4", size=(480, 288))
    odd = [
        Camera("/sizes", [clip, large], fps=FPS),
        Camera("/slow", [clip], fps=FPS),
        Camera("/secret", [clip], fps=FPS, user="ann", password=SECRET),
    ]
    with contextlib.ExitStack() as stack:
        good, others, killed, stopped, spoilt = (
            stack.enter_context(rtsp_server(cameras, folder))
            for cameras in (good_cameras(clip), odd, *([Camera("/a", [clip], fps=FPS)] for _ in range(3)))
        )
        sources = [
            *(source(good.url(f"/{name}"), name) for name in GOOD),
            source(killed.url("/a"), "killed"),
            source(stopped.url("/a"), "stopped"),
            source(spoilt.url("/a"), "rubbish"),
            source(others.url("/sizes"), "sizes"),
            source(others.url("/slow"), "slow"),
            source(others.url("/secret", password=f"not-{SECRET}"), "secret"),
        ]
        program = stack.enter_context(program_at(place, tmp_path / "run", settings_of(sources)))
        control = stack.enter_context(control_run(place, tmp_path / "control", good))
        beside = Beside(program, control)
        control.wait_for_states(dict.fromkeys(CONTROL, "running"))
        fine = {name: "running" for name in program.streams() if name != "secret"}
        program.wait_for_states({**fine, "secret": "auth_failed"})
        others.tell("rate /slow 0.5")
        began = beside.window()
        killed.kill()
        stopped.freeze()
        spoilt.kill()
        with rubbish_server(Rubbish.BYTES, port=spoilt.port) as rubbish:
            seen = Seen(program)
            seen.watch(WINDOW_S)
            if not beside.keeps_its_rate(began):
                beside.expect_rate_kept()
            seen.watch(0.0)
            assert rubbish.connections >= 1
        seen.expect_troubles()
        killed.restart()
        stopped.thaw()
        spoilt.restart()
        program.wait_for_states({**fine, "secret": "auth_failed"}, BACK_S)
        beside.expect_bounded_latency()
        rows = program.streams()
        assert {name: rows[name]["restarts"] for name in ("good-1", "good-2", "sizes", "slow")} == dict.fromkeys(
            ("good-1", "good-2", "sizes", "slow"), 0
        )
        assert all(rows[name]["restarts"] >= 1 for name in ("killed", "stopped", "rubbish"))
        pages = [program.ask("GET", "/v1/streams").body.decode(), program.metrics(), *seen.command_lines()]
        assert program.stop() == 1, program.text  # one of them never let us in
        assert SECRET not in "".join([program.text, *pages])
        assert "Traceback" not in program.text


@dataclass
class Seen:
    """What was seen of each source while its trouble lasted."""

    program: Program
    states: dict[str, set[str]] = field(default_factory=dict)
    sizes: set[tuple[int, int]] = field(default_factory=set)
    slow: list[float] = field(default_factory=list)

    def watch(self, seconds: float) -> None:
        """Once at least, four times a second."""
        until = time.monotonic() + seconds
        while True:
            rows = self.program.streams()
            for name, row in rows.items():
                self.states.setdefault(name, set()).add(row["state"])
            self.sizes.add((rows["sizes"]["width"], rows["sizes"]["height"]))
            self.slow.append(rows["slow"]["fps"])
            if time.monotonic() >= until:
                return
            time.sleep(0.25)

    def expect_troubles(self) -> None:
        """Each the right one."""
        states = self.states
        assert {name: states[name] for name in (*GOOD, "sizes", "slow", "secret")} == {
            **{name: {"running"} for name in (*GOOD, "sizes", "slow")},
            "secret": {"auth_failed"},
        }
        assert "reconnecting" in states["killed"]
        assert "stalled" in states["stopped"]
        assert "reconnecting" in states["rubbish"]
        now = self.program.states()
        assert {now[name] for name in ("killed", "stopped", "rubbish")} <= {"reconnecting", "stalled"}, now
        assert self.sizes >= {(320, 192), (480, 288)}
        assert self.slow[-1] == pytest.approx(FPS / 2, rel=0.3)

    def command_lines(self) -> list[str]:
        """Of all of the program's processes."""
        return [" ".join(each.cmdline()) for each in self.program.family()]


def test_sources_in_every_trouble_keep_to_themselves(place: Place, folder: Path, clip: Path, tmp_path: Path) -> None:
    """A camera that is not there stays connecting; bits that flip on the way mark frames and end nothing; a frozen
    picture is reported and runs on; a runaway is cut; if decode processes die only their stream begins anew."""
    still = write_clip(folder / "still.mp4", frames=20, fps=FPS, gop=10, size=(320, 192), picture=_grey)
    odd = [Camera("/flips", [clip], fps=FPS), Camera("/still", [still], fps=FPS), Camera("/fast", [clip], fps=FPS)]
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(rtsp_server(good_cameras(clip), folder))
        others = stack.enter_context(rtsp_server(odd, folder))
        proxy = stack.enter_context(chaos_proxy(others.port))
        sources = [
            *(source(good.url(f"/{name}"), name) for name in GOOD),
            source(f"rtsp://127.0.0.1:{free_port()}/a", "nowhere"),
            source(f"rtsp://127.0.0.1:{proxy.port}/flips", "flips"),
            source(others.url("/still"), "still", frozen_after=2),
            source(others.url("/fast"), "fast", expected_fps=FPS),
        ]
        sinks = [{"type": "jsonl", "folder": str(tmp_path / "out")}]
        program = stack.enter_context(program_at(place, tmp_path / "run", settings_of(sources, sink=sinks)))
        control = stack.enter_context(control_run(place, tmp_path / "control", good))
        beside = Beside(program, control)
        control.wait_for_states(dict.fromkeys(CONTROL, "running"))
        program.wait_for_states(
            {**dict.fromkeys((*GOOD, "flips", "still", "fast"), "running"), "nowhere": "connecting"}
        )
        began = beside.window()
        proxy.set(flips_a_megabyte=1500.0)
        others.tell("rate /fast 4")
        reasons: set[str] = set()
        wait_for(lambda: _is_cut(program, reasons), 40.0, lambda: (reasons, program.reasons()))
        others.tell("rate /fast 1")
        wait_for(lambda: bool(program.stream("still")["is_frozen"]), 20.0, program.reasons)
        objects = tmp_path / "out" / "objects.jsonl"
        wait_for(lambda: proxy.flipped >= 20 and any(_are_corrupt(objects, "flips")), 40.0, lambda: proxy.flipped)
        if not beside.keeps_its_rate(began):
            beside.expect_rate_kept()
        proxy.calm()
        program.wait_for_states(
            {**dict.fromkeys((*GOOD, "flips", "still", "fast"), "running"), "nowhere": "connecting"}
        )
        assert program.metric("frozen", source="still") == 1.0
        assert program.metric("frozen", source="good-1") == 0.0
        restarts = _restarts(program)
        assert (restarts["good-1"], restarts["good-2"], restarts["still"]) == (0, 0, 0)
        assert restarts["nowhere"] <= 12, "pauses grow"
        _expect_one_restart(program, ("good-1", "good-2", "still"))
        beside.expect_bounded_latency()
        assert program.stop() == 0, program.text
        assert "Traceback" not in program.text
    assert not _are_corrupt(objects, "flips")[-1], "it is over"


def _are_corrupt(objects: Path, name: str) -> list[bool]:
    """Of every frame of this source until now."""
    return [line["is_corrupt"] for line in lines_of(objects) if line["source_id"] == name]


def _grey(number: int, width: int, height: int) -> Picture:
    return np.full((height, width, 3), 90, np.uint8)


def _is_cut(program: Program, reasons: set[str]) -> bool:
    """Whether the runaway's reason was seen by now."""
    reasons.add(program.stream("fast")["reason"])
    return any("are expected" in reason for reason in reasons)


def _restarts(program: Program) -> dict[str, int]:
    return {name: row["restarts"] for name, row in program.streams().items()}


def _expect_one_restart(program: Program, names: Sequence[str]) -> None:
    """A decode process gets SIGSEGV: its source comes back with one restart more, and no other is touched."""
    before = _restarts(program)
    decoders = [each for each in program.family() if "penstock_video.sources.child" in each.cmdline()]
    asked = {name: program.stream(name)["frames"] for name in names}
    victim = _decoder_of(decoders)
    os.kill(victim.pid, signal.SIGSEGV)
    wait_for(lambda: sum(_grown(before, _restarts(program), names).values()) >= 1, 20.0, program.reasons)
    program.wait_for_states(dict.fromkeys(names, "running"), BACK_S)
    grown = _grown(before, _restarts(program), names)
    assert sorted(grown.values()) == [0, 0, 1], grown
    wait_for(lambda: all(program.stream(name)["frames"] > asked[name] for name in names), 20.0, program.reasons)
    assert program.process.poll() is None


def _grown(before: dict[str, int], after: dict[str, int], names: Sequence[str]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in names}


def _decoder_of(decoders: Sequence[psutil.Process]) -> psutil.Process:
    """The oldest: of a source that was never opened anew."""
    return min(decoders, key=lambda each: each.create_time())


def test_cameras_that_come_back_together_are_opened_a_few_at_a_time(
    place: Place, folder: Path, clip: Path, tmp_path: Path
) -> None:
    """Six lose their server at one moment and come back spread over time; another keeps its rate meanwhile."""
    names = [f"cam-{number}" for number in range(6)]
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(rtsp_server(good_cameras(clip), folder))
        lost = stack.enter_context(rtsp_server([Camera(f"/{name}", [clip], fps=FPS) for name in names], folder))
        sources = [source(server.url(f"/{n}"), n) for server, n in [(good, "good-1"), *((lost, n) for n in names)]]
        program = stack.enter_context(program_at(place, tmp_path / "run", settings_of(sources)))
        control = stack.enter_context(control_run(place, tmp_path / "control", good))
        beside = Beside(program, control, ["good-1"])
        control.wait_for_states(dict.fromkeys(CONTROL, "running"))
        program.wait_for_states(dict.fromkeys((*names, "good-1"), "running"))
        began = beside.window()
        lost.restart()
        starts: list[int] = []
        until = time.monotonic() + WINDOW_S
        while time.monotonic() < until:
            starts.append(sum(row["restarts"] for name, row in program.streams().items() if name != "good-1"))
            time.sleep(0.1)
        is_fair = beside.keeps_its_rate(began)
        program.wait_for_states(dict.fromkeys((*names, "good-1"), "running"), BACK_S)
        if not is_fair:
            beside.expect_rate_kept()
        steps = [after - before for before, after in itertools.pairwise(starts)]
        assert max(steps) <= 4, f"all at once: {steps}"
        assert _restarts(program)["good-1"] == 0
        assert program.stop() == 0, program.text
