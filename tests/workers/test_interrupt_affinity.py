"""Keeping programs off cores that GPU interrupts keep busy."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from penstock.gateway.workers import interrupt_affinity
from penstock.gateway.workers.interrupt_affinity import (
    BUSY_PER_S,
    CALM_PER_S,
    CALM_S,
    MANY_PER_S,
    SETTLE_LOOKS,
    AffinityController,
    Interrupts,
    InterruptWatch,
    avoid_interrupted_cores,
    mostly_interrupted,
)
from tests.workers.own_sys import OwnSys


def test_counts_of_all_lines_of_a_card_are_added(tmp_path: Path) -> None:
    """By core; a line of another device counts for nothing."""
    first, second = OwnSys(tmp_path, "42"), OwnSys(tmp_path, "43")
    first.count(3, 10)
    second.count(3, 5)
    second.count(0, 1)
    other = tmp_path / "kernel/irq/7"
    other.mkdir()
    (other / "per_cpu_count").write_text("9,9\n")
    found = Interrupts(tmp_path).by_core()
    assert {core: count for core, count in found.items() if count} == {3: 15, 0: 1}


def test_system_without_a_card_has_none(tmp_path: Path) -> None:
    """And a line that went away since, or says what is no number, is none either."""
    assert Interrupts(tmp_path).by_core() == {}
    OwnSys(tmp_path).count(1, 2)
    seen = Interrupts(tmp_path)
    path = tmp_path / "kernel/irq/42/per_cpu_count"
    path.write_text("many\n")
    assert seen.by_core() == {}
    path.unlink()
    assert seen.by_core() == {}


def test_folder_that_is_not_for_us_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that hides it: nothing starts less for that."""

    def refuse(self: Path, *_: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    OwnSys(tmp_path).count(1, 2)
    for look in ("glob", "is_dir"):
        monkeypatch.setattr(Path, look, refuse)
    seen = Interrupts(tmp_path)
    assert not seen.has_cards
    assert seen.by_core() == {}


def test_counters_that_begin_again_are_no_calm() -> None:
    """The system's have 32 bits."""
    watch = InterruptWatch(0.0, {2: 2**32 - 100})
    assert watch.busy(1.0, {2: 8900}) == {2}


def test_core_is_busy_by_its_rate_since_the_last_look() -> None:
    """Not by what was before; a core that was not known had none."""
    watch = InterruptWatch(10.0, {0: 1_000_000, 1: 0})
    at_most = int(2 * BUSY_PER_S)
    assert watch.busy(12.0, {0: 1_000_000 + at_most, 1: at_most + 1, 2: at_most + 1}) == {1, 2}
    assert watch.busy(13.0, {0: 2_000_000, 1: at_most + 1, 2: at_most + 1}) == {0}
    assert watch.busy(13.0, {0: 2_000_000, 1: at_most + 1, 2: at_most + 1}) == frozenset()


def test_core_is_crowded_until_it_was_calm_for_a_while() -> None:
    """A full core answers few interrupts: that they become fewer is no reason to come back."""
    watch, count = InterruptWatch(0.0, {3: 0}), 0
    for now, rate, expected in (
        (1.0, MANY_PER_S, frozenset()),
        (2.0, MANY_PER_S + 1, {3}),
        (3.0, CALM_PER_S + 1, {3}),
        (4.0, 0, {3}),
        (3.0 + CALM_S - 1, 0, {3}),
        (3.0 + CALM_S, 0, frozenset()),
        (4.0 + CALM_S, CALM_PER_S + 1, frozenset()),
    ):
        count += math.ceil(rate * (now - watch._seen_at))
        assert watch.crowded(now, {3: count}) == expected, now


def test_core_with_a_good_part_of_all_will_have_the_next() -> None:
    """Where there were none at all, nothing is known of any."""
    assert mostly_interrupted({0: 12, 5: 900, 6: 88, 7: 0}) == {5}
    assert mostly_interrupted({0: 0, 1: 0}) == frozenset()
    assert mostly_interrupted({}) == frozenset()


ALL = sorted(os.sched_getaffinity(0))
TIMEOUT_S = 60.0
# A process with a second thread, a child that runs anywhere, and one that has chosen the first core.
FAMILY = """
import os, subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
anywhere = subprocess.Popen(wait, stdin=subprocess.PIPE)
chosen = subprocess.Popen(wait, stdin=subprocess.PIPE)
os.sched_setaffinity(chosen.pid, {int(sys.argv[1])})
print(anywhere.pid, chosen.pid, flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="this machine has one core for us")


class Family:
    """Running. pids: itself, its child that runs anywhere, the one that has chosen the first core."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            (sys.executable, "-c", FAMILY, str(ALL[0])), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        anywhere, chosen = map(int, self.process.stdout.readline().split())
        self.pids = (self.process.pid, anywhere, chosen)

    def cores(self) -> list[set[tuple[int, ...]]]:
        """Of each process: what its threads may run on."""
        return [
            {tuple(sorted(os.sched_getaffinity(int(task)))) for task in os.listdir(f"/proc/{pid}/task")}
            for pid in self.pids
        ]

    def end(self) -> None:
        """With its children."""
        children = psutil.Process(self.process.pid).children()
        self.process.kill()
        for child in children:
            child.kill()
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def family() -> Iterator[Family]:
    """Ended afterwards."""
    found = Family()
    yield found
    found.end()


def test_all_that_run_anywhere_leave_a_crowded_core_and_come_back(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread of every process below; chosen cores are kept. Each change is reported once."""
    monkeypatch.setattr(interrupt_affinity, "LEAST_CORES", 2)
    card, anywhere, others, chosen = OwnSys(tmp_path), tuple(ALL), tuple(ALL[1:]), {(ALL[0],)}
    affinity = AffinityController(family.process.pid, Interrupts(tmp_path), 0.0)
    with capture_logs() as lines:
        card.count(ALL[0], int(MANY_PER_S))
        affinity.look(2.0)
        assert family.cores() == [{anywhere}, {anywhere}, chosen]
        card.count(ALL[0], int(3 * MANY_PER_S))
        affinity.look(4.0)
        affinity.look(5.0)
        assert family.cores() == [{others}, {others}, chosen]
        affinity.look(4.0 + CALM_S)
        assert family.cores() == [{anywhere}, {anywhere}, chosen]
    assert [line["cores"] for line in lines] == [str(ALL[0]), "none"]


def test_who_chooses_to_run_anywhere_later_is_moved_too(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode process that leaves a core of its own, say: some looks later. At the end all have all cores again."""
    monkeypatch.setattr(interrupt_affinity, "LEAST_CORES", 2)
    card = OwnSys(tmp_path)
    affinity = AffinityController(family.process.pid, Interrupts(tmp_path), 0.0)
    card.count(ALL[0], 1_000_000)
    affinity.look(1.0)
    os.sched_setaffinity(family.pids[2], set(ALL))
    for look in range(SETTLE_LOOKS):
        affinity.look(2.0 + look)
    assert family.cores() == [{tuple(ALL[1:])}] * 3
    affinity.give_back()
    assert family.cores() == [{tuple(ALL)}] * 3


def test_no_more_cores_are_left_than_one_of_a_few(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts that wander, or come to many cores, crowd no process onto the rest."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    card = OwnSys(tmp_path)
    affinity = AffinityController(family.process.pid, Interrupts(tmp_path), 0.0)
    monkeypatch.undo()
    card.count(5, 1_000_000)
    affinity.look(1.0)
    assert affinity.kept == {0, 1, 2, 3, 4, 6, 7}
    card.count(6, 1_000_000)
    affinity.look(2.0)
    assert affinity.kept == set(range(8))


def test_process_that_is_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller finds nothing to move."""
    monkeypatch.setattr(interrupt_affinity, "LEAST_CORES", 2)
    card, family = OwnSys(tmp_path), Family()
    affinity = AffinityController(family.process.pid, Interrupts(tmp_path), 0.0)
    family.end()
    card.count(ALL[0], 1_000_000)
    affinity.look(1.0)
    assert affinity.kept == set(ALL[1:])


def test_without_nvidias_driver_nothing_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With it a thread does, again and again whatever fails, for as long as the context lasts."""
    looked = threading.Semaphore(0)

    def fail(affinity: AffinityController, now: float) -> None:
        looked.release()
        raise OSError("the driver is going away")

    monkeypatch.setattr(interrupt_affinity, "Interrupts", lambda: Interrupts(tmp_path))
    with avoid_interrupted_cores():
        assert "cores" not in [thread.name for thread in threading.enumerate()]
    OwnSys(tmp_path)
    monkeypatch.setattr(interrupt_affinity, "LOOK_S", 0.01)
    monkeypatch.setattr(AffinityController, "look", fail)
    with avoid_interrupted_cores():
        assert looked.acquire(timeout=TIMEOUT_S)
        assert looked.acquire(timeout=TIMEOUT_S)
    assert "cores" not in [thread.name for thread in threading.enumerate()]
