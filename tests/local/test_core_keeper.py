"""A program leaves the cores that the cards' interrupts keep busy, with all that it started."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from server.local import core_keeper
from server.local.card_interrupts import CALM_S, MANY_PER_S, Interrupts
from server.local.core_keeper import SETTLE_LOOKS, CoreKeeper, kept_off_interrupts
from tests.local.own_sys import OwnSys

ALL = sorted(os.sched_getaffinity(0))
PATIENCE_S = 60.0
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
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def family() -> Iterator[Family]:
    """Ended afterwards."""
    found = Family()
    yield found
    found.end()


def test_all_that_run_anywhere_leave_a_crowded_core_and_come_back(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread of every process below; who has chosen a core keeps it. Each change is told once."""
    monkeypatch.setattr(core_keeper, "LEAST_CORES", 2)
    card, anywhere, others, chosen = OwnSys(tmp_path), tuple(ALL), tuple(ALL[1:]), {(ALL[0],)}
    keeper = CoreKeeper(family.process.pid, Interrupts(tmp_path), 0.0)
    with capture_logs() as lines:
        card.count(ALL[0], int(MANY_PER_S))
        keeper.look(2.0)
        assert family.cores() == [{anywhere}, {anywhere}, chosen]
        card.count(ALL[0], int(3 * MANY_PER_S))
        keeper.look(4.0)
        keeper.look(5.0)
        assert family.cores() == [{others}, {others}, chosen]
        keeper.look(4.0 + CALM_S)
        assert family.cores() == [{anywhere}, {anywhere}, chosen]
    assert [line["cores"] for line in lines] == [str(ALL[0]), "none"]


def test_who_chooses_to_run_anywhere_later_is_moved_too(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode process that leaves a core of its own, say: some looks later. At the end all have all cores again."""
    monkeypatch.setattr(core_keeper, "LEAST_CORES", 2)
    card = OwnSys(tmp_path)
    keeper = CoreKeeper(family.process.pid, Interrupts(tmp_path), 0.0)
    card.count(ALL[0], 1_000_000)
    keeper.look(1.0)
    os.sched_setaffinity(family.pids[2], set(ALL))
    for look in range(SETTLE_LOOKS):
        keeper.look(2.0 + look)
    assert family.cores() == [{tuple(ALL[1:])}] * 3
    keeper.give_back()
    assert family.cores() == [{tuple(ALL)}] * 3


def test_no_more_cores_are_left_than_one_of_a_few(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts that wander, or come to many cores, squeeze nobody onto the rest."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    card = OwnSys(tmp_path)
    keeper = CoreKeeper(family.process.pid, Interrupts(tmp_path), 0.0)
    monkeypatch.undo()
    card.count(5, 1_000_000)
    keeper.look(1.0)
    assert keeper.kept == {0, 1, 2, 3, 4, 6, 7}
    card.count(6, 1_000_000)
    keeper.look(2.0)
    assert keeper.kept == set(range(8))


def test_few_cores_are_all_wanted(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are all cores left where each of them is crowded."""
    card = OwnSys(tmp_path)
    keeper = CoreKeeper(family.process.pid, Interrupts(tmp_path), 0.0)
    card.count(ALL[0], 1_000_000)
    monkeypatch.setattr(core_keeper, "LEAST_CORES", len(ALL) + 1)
    keeper.look(1.0)
    monkeypatch.setattr(core_keeper, "LEAST_CORES", len(ALL))
    for core in ALL:
        card.count(core, 1_000_000)
    keeper.look(2.0)
    assert family.cores()[0] == {tuple(ALL)}


def test_process_that_is_gone_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keeper finds nothing to move."""
    monkeypatch.setattr(core_keeper, "LEAST_CORES", 2)
    card, family = OwnSys(tmp_path), Family()
    keeper = CoreKeeper(family.process.pid, Interrupts(tmp_path), 0.0)
    family.end()
    card.count(ALL[0], 1_000_000)
    keeper.look(1.0)
    assert keeper.kept == set(ALL[1:])


def test_without_nvidias_driver_nothing_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With it a thread does, again and again whatever fails, for as long as the context lasts."""
    looked = threading.Semaphore(0)

    def fail(keeper: CoreKeeper, now: float) -> None:
        looked.release()
        raise OSError("the driver is going away")

    monkeypatch.setattr(core_keeper, "Interrupts", lambda: Interrupts(tmp_path))
    with kept_off_interrupts():
        assert "cores" not in [thread.name for thread in threading.enumerate()]
    OwnSys(tmp_path)
    monkeypatch.setattr(core_keeper, "LOOK_S", 0.01)
    monkeypatch.setattr(CoreKeeper, "look", fail)
    with kept_off_interrupts():
        assert looked.acquire(timeout=PATIENCE_S)
        assert looked.acquire(timeout=PATIENCE_S)
    assert "cores" not in [thread.name for thread in threading.enumerate()]
