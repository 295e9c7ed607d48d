"""Sources that come and go, and what the program holds meanwhile."""

import gc
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from penstock_video.sources.sources import Sources
from tests.deepstream_pipeline.sources.parent import COMMAND, NEEDS, OPTIONS, EventLog, camera, clip, running

MODES = ("live", "live?frames=2&fps=200", "segv?frames=2&fps=200", "rubbish", "never_opens", "dies_early")


@dataclass(frozen=True)
class Held:
    """What the program holds."""

    descriptors: int
    threads: int
    processes: int
    rings: int
    resident_bytes: int


def rings_now() -> int:
    """Rings of frames that are mapped; no other program sees them, so those of others do not count."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("penstock-ring")


def _is_decoding(child: psutil.Process) -> bool:
    try:
        return COMMAND[1] in child.cmdline()
    except psutil.NoSuchProcess:  # it has just ended, or is a zombie
        return False


def held_now() -> Held:
    """At this moment, garbage apart."""
    gc.collect()
    me = psutil.Process()
    children = [child for child in me.children() if _is_decoding(child)]
    return Held(
        len(os.listdir("/proc/self/fd")), threading.active_count(), len(children), rings_now(), me.memory_info().rss
    )


def come_and_go(sources: Sources, event_log: EventLog, cycles: int, at_once: int = 10) -> None:
    """So many sources of every kind, added and removed in whatever state they are then; their events are forgotten."""
    for begin in range(0, cycles, at_once):
        names = [f"s{number}" for number in range(begin, min(begin + at_once, cycles))]
        for number, name in enumerate(names):
            make = camera if number % 2 else clip
            mode = MODES[(begin + number) % len(MODES)] if number else "live"
            sources.add(make(mode, name), NEEDS)
        event_log.wait_for("opened", 1, names[0])
        for name in names:
            sources.remove(name)
        for name in names:
            event_log.wait_for("ended", 1, name)
        event_log.forget(names)


def leak_of(cycles: int, warm_up: int) -> tuple[Held, Held]:
    """What is held while one source runs all the time, after a few cycles, and after so many more."""
    event_log = EventLog()
    with running(event_log, replace(OPTIONS, max_opening=10)) as sources:
        sources.add(camera("live?fps=50", "good"), NEEDS)
        event_log.wait_for("frame", 5, "good")
        come_and_go(sources, event_log, warm_up)
        before = held_now()
        come_and_go(sources, event_log, cycles)
        event_log.wait_for("frame", event_log.count("frame", "good") + 5, "good")
        assert len(sources.snapshot()) == 1
        assert sources.snapshot()[0].restarts == 0, event_log.of("state", "good")
        return before, held_now()
