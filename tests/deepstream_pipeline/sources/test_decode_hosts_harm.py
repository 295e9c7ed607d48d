"""Decode processes for a card that are killed and stopped at random while cameras come, go and pause."""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from penstock_video.sources import decode_host as hosts
from penstock_video.sources.options import GpuSources
from penstock_video.sources.sources import Sources
from penstock_video.types import Frame, PreparedFrame, SourceState
from tests.deepstream_pipeline.sources.cycles import rings_now
from tests.deepstream_pipeline.sources.parent import NEEDS, EventLog, camera
from tests.deepstream_pipeline.sources.test_decode_hosts import DEEP, LIVE, QUICK
from tests.deepstream_pipeline.sources.test_device_rows import FakeRing

HARM_S, STEADY = 8.0, [f"steady{number}" for number in range(6)]
MODES = (
    *(LIVE, LIVE, "on_device", "on_no_card", "live?frames=3&fps=50", "segv?frames=10&fps=25", "silent?frames=2"),
    *("never_opens", "needs_cpu?fps=25", "unavailable", "rubbish", "stubborn", "hangs?frames=2"),
)
ENDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP)


class Rings:
    """Memory of a card that is none; how much of it is there now."""

    def __init__(self) -> None:
        self.made: list[FakeRing] = []

    def new(self, frames: int, row_bytes: int) -> FakeRing:
        """One more."""
        self.made.append(FakeRing(frames, row_bytes))
        return self.made[-1]

    @property
    def open(self) -> int:
        """How many of them were not closed."""
        return sum(not ring.is_closed for ring in self.made)


class Harm:
    """Each step is one thing that happens; which, is chance."""

    def __init__(self, sources: Sources, seed: int) -> None:
        self.names: list[str] = []
        self._sources, self._chance, self._added = sources, random.Random(seed), 0

    def step(self) -> None:
        """A camera comes, goes, is paused or resumed, or a process is ended or stopped."""
        chance, sources = self._chance, self._sources
        what = chance.choice(("come", "come", "go", "pause", "resume", "end"))
        pids = [process.pid for process in sources.processes() if process.decoder == "nvdec"]
        if what == "come" and len(self.names) < 8:
            self._added += 1
            self.names.append(f"s{self._added}")
            sources.add(camera(chance.choice(MODES), self.names[-1], **QUICK), NEEDS)
        elif what == "go" and self.names:
            sources.remove(self.names.pop(chance.randrange(len(self.names))))
        elif what == "end" and pids:
            with suppress(ProcessLookupError):  # it ended a moment ago
                os.kill(chance.choice(pids), chance.choice(ENDS))
        elif self.names:
            (sources.pause if what == "pause" else sources.resume)(chance.choice(self.names))


def is_steady(sources: Sources) -> bool:
    """Whether no one is left but those that stay, and they run."""
    found = {one.source_id: one.state for one in sources.snapshot()}
    return found == dict.fromkeys(STEADY, SourceState.RUNNING)


class Holder(EventLog):
    """Keeps one frame of twenty, whatever becomes of its process meanwhile, until `let_go`."""

    is_over = False

    def on_frame(self, prepared: PreparedFrame) -> None:
        if not self.is_over and prepared.frame.frame_num % 20 == 7:
            self.frames.append(prepared)
            self._note("frame", prepared.frame.source_id, prepared.frame)
        else:
            super().on_frame(prepared)

    def let_go(self, kept: int) -> None:
        """Of all but so many."""
        while len(self.frames) > kept:
            self.frames.pop(0).release()


def test_random_harm_leaves_every_camera_running_and_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six cameras stay: each runs again afterwards, its frames in order; no descriptor, process, ring of either memory
    or thread is left at the end."""
    monkeypatch.setattr(hosts, "_ALL_LEFT_S", 0.5)
    monkeypatch.setattr(hosts, "LEAVE_MARGIN_S", 0.1)
    before, rings, event_log = (rings_now(), len(os.listdir("/proc/self/fd"))), Rings(), Holder()
    others = set(psutil.Process().children())  # of tests before
    gpu = replace(DEEP.gpu or GpuSources(), new_device_ring=rings.new)
    sources = Sources(replace(DEEP, ring_frames=8, gpu=gpu, max_opening=4), event_log)
    sources.start()
    try:
        for name in STEADY:
            sources.add(camera(LIVE, name, **QUICK), NEEDS)
        harm = Harm(sources, seed=10)
        until = time.monotonic() + HARM_S
        while time.monotonic() < until:
            harm.step()
            event_log.let_go(kept=10)
            time.sleep(0.1)
        event_log.is_over = True  # what it would keep from now on no one gives back
        for name in harm.names:
            sources.remove(name)
        event_log.wait(lambda: is_steady(sources))
        assert sources.faults == 0
        for name in STEADY:
            event_log.wait_for("frame", event_log.count("frame", name) + 5, name)
            came = [frame.frame_num for frame in event_log.of("frame", name) if isinstance(frame, Frame)]
            assert came == sorted(set(came))
    finally:
        event_log.let_go(kept=0)
        assert sources.close(10.0)
    event_log.events.clear()
    assert (set(psutil.Process().children()) - others, rings.open) == (set(), 0)
    assert (rings_now(), len(os.listdir("/proc/self/fd"))) <= before
