"""A decode process of several cameras has a core for itself where there is one; nothing fails where there is none."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.gateway.workers.interrupt_affinity import Interrupts
from penstock_video.sources.core_pinning import pin_to_own_core
from penstock_video.sources.options import SHARED_DECODER, GpuSources
from tests.deepstream_pipeline.sources.parent import DEADLINE_S, NEEDS, EventLog, camera, one, running
from tests.deepstream_pipeline.sources.test_decode_hosts import DEEP, LIVE
from tests.workers.own_sys import OwnSys

LOOK_S = 0.02
ALL = sorted(os.sched_getaffinity(0))
TWO = ALL[:2]

needs_two_cores = pytest.mark.skipif(len(ALL) < 2, reason="this machine has one core for us")


class Taker:
    """A process that took a core, or none. reported: what it says of itself."""

    def __init__(self, folder: Path, cores: str) -> None:
        """folder: of temporary files, and of what stands for /sys."""
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.deepstream_pipeline.sources.core_taker", cores, str(folder / "sys")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        assert self._process.stdout is not None
        self.event_log: dict[str, Any] = json.loads(self._process.stdout.readline())

    def leave(self) -> list[list[int]]:
        """Its core; the cores of each of its threads afterwards."""
        return self._say(b"\n")

    def where(self) -> list[list[int]]:
        """The cores of each of its threads."""
        return self._say(b"where\n")

    def _say(self, line: bytes) -> list[list[int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        tasks: list[list[int]] = json.loads(self._process.stdout.readline())["tasks"]
        return tasks

    def kill(self) -> None:
        """It dies, and gives nothing back by itself."""
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Callable[..., Taker]]:
    """Start a process that takes one of the cores: (the cores that there are)."""
    with ExitStack() as started:

        def start(cores: list[int]) -> Taker:
            taker = Taker(tmp_path, ",".join(map(str, cores)))
            started.callback(taker.kill)
            return taker

        yield start


def wait_until(taker: Taker, cores: list[int], meanwhile: Callable[[], None]) -> None:
    """All its threads may run on these cores, and on no other. meanwhile: done again and again."""
    until = time.monotonic() + DEADLINE_S
    while set(map(tuple, taker.where())) != {tuple(cores)}:
        meanwhile()
        assert time.monotonic() < until, taker.where()
        time.sleep(LOOK_S)


def locks(folder: Path) -> Path:
    """Where they lie, below the folder of temporary files."""
    return folder / f"penstock-{os.getuid()}"


@needs_two_cores
def test_two_processes_get_two_cores_and_a_third_is_left_alone(take: Callable[..., Taker]) -> None:
    """Each is on its own and on no other; who comes when all are taken runs on all of them."""
    first, second, third = (take(TWO).event_log for _ in range(3))
    assert sorted([first["core"], second["core"]]) == TWO
    assert (first["cores"], second["cores"]) == ([first["core"]], [second["core"]])
    assert (third["core"], third["cores"], third["later"]) == (None, TWO, TWO)


@needs_two_cores
def test_core_of_a_process_that_died_is_free_again(take: Callable[..., Taker]) -> None:
    """For the next one, however it died."""
    first, second = take(TWO), take(TWO)
    first.kill()
    assert take(TWO).event_log["core"] == first.event_log["core"]
    second.kill()
    assert take(TWO).event_log["core"] == second.event_log["core"]


@needs_two_cores
def test_core_that_is_left_is_free_and_its_process_runs_anywhere(take: Callable[..., Taker]) -> None:
    """With every thread that it has by then, and a second time nothing more."""
    first = take(TWO)
    assert set(map(tuple, first.leave())) == {tuple(TWO)}
    assert sorted(take(TWO).event_log["core"] for _ in TWO) == TWO


def test_threads_that_start_later_are_on_the_core_and_programs_have_no_hold_of_it(take: Callable[..., Taker]) -> None:
    """A driver's thread, too; a program that the process starts would else keep the core after its end."""
    event_log = take(TWO).event_log
    assert event_log["later"] == [event_log["core"]]
    assert ".lock" not in event_log["given_on"]


@needs_two_cores
def test_core_that_a_card_interrupts_is_the_last_to_be_taken(take: Callable[..., Taker], tmp_path: Path) -> None:
    """What it had so far says where the next ones come."""
    OwnSys(tmp_path / "sys").count(TWO[0], 5000)
    assert take(TWO).event_log["core"] == TWO[1]
    assert take(TWO).event_log["core"] == TWO[0]


@needs_two_cores
def test_process_moves_from_a_core_that_interrupts_come_to_and_another_may_have_it(
    take: Callable[..., Taker], tmp_path: Path
) -> None:
    """With all its threads; where no other core is free it runs on all but that one."""
    card = OwnSys(tmp_path / "sys")
    card.count(TWO[0], 1)
    taker = take(TWO)
    assert taker.event_log["core"] == TWO[1]
    wait_until(taker, TWO[:1], lambda: card.count(TWO[1], 100_000))
    other = take(TWO)
    assert other.event_log["core"] == TWO[1]
    wait_until(taker, TWO[1:], lambda: card.count(TWO[0], 100_000))
    assert take(TWO).event_log["core"] == TWO[0]
    assert set(map(tuple, other.where())) == {(TWO[1],)}


def test_lock_that_cannot_be_had_leaves_the_process_as_it_is(take: Callable[..., Taker], tmp_path: Path) -> None:
    """A link in its file's place is not followed; a file may stand where the folder would."""
    (tmp_path / "elsewhere").write_text("")
    locks(tmp_path).mkdir(mode=0o700)
    for core in TWO:
        (locks(tmp_path) / f"core-{core}.lock").symlink_to(tmp_path / "elsewhere")
    assert (take(TWO).event_log["core"], take(TWO).event_log["cores"]) == (None, TWO)
    for link in locks(tmp_path).iterdir():
        link.unlink()
    locks(tmp_path).rmdir()
    locks(tmp_path).write_text("")
    assert (take(TWO).event_log["core"], take(TWO).event_log["cores"]) == (None, TWO)


def test_no_folder_for_temporary_files_leaves_the_process_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container whose file system is read-only, say."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert pin_to_own_core(Interrupts(tmp_path)) is None
    assert sorted(os.sched_getaffinity(0)) == ALL


def test_cores_are_tried_in_an_order_of_chance_and_none_is_kept_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs that do not see each other's locks seldom meet; who is refused its core leaves it to others."""
    tried: list[int] = []

    def refuse(pid: int, cores: set[int]) -> None:
        tried.extend(cores)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert pin_to_own_core(Interrupts(tmp_path)) is None
    assert pin_to_own_core(Interrupts(tmp_path)) is None
    assert sorted(tried[:64]) == sorted(tried[64:]) == list(range(64))
    assert tried[:64] != tried[64:], "one in 64!"
    for path in locks(tmp_path).iterdir():
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert (locks(tmp_path).stat().st_mode & 0o777, len(list(locks(tmp_path).iterdir()))) == (0o700, 64)


def begin_a_camera(control: socket.socket) -> None:
    """One that is over before it gets a message; until it is, by which time the process serves."""
    (ours, theirs), ring, (end, write_end) = socket.socketpair(), os.memfd_create("ring"), os.pipe()
    ours.close()
    socket.send_fds(control, [b"camera"], [theirs.fileno(), ring, write_end])
    theirs.close()
    os.close(ring)
    os.close(write_end)
    assert len(os.read(end, 1)) == 1
    os.close(end)


@pytest.mark.parametrize("pinned", ["1", "0"], ids=["reported", "off"])
def test_real_process_is_on_one_core_if_configured(pinned: str, tmp_path: Path) -> None:
    """With every thread that its libraries started; off, it is as it was started, and has made no file."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            (*SHARED_DECODER, "0", pinned, str(os.getpid()), str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        )
        begin_a_camera(ours)
        cores = set()
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # the camera's thread, which ends
                cores.add(tuple(sorted(os.sched_getaffinity(int(task.name)))))
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(DEADLINE_S) == 0
    assert len(cores) == 1
    assert len(next(iter(cores))) == (1 if pinned == "1" else len(ALL))
    assert locks(tmp_path).exists() is (pinned == "1")


@pytest.mark.parametrize("is_pinned", [True, False])
def test_process_of_several_cameras_is_reported_what_was_set(is_pinned: bool) -> None:
    """By its command line, behind the card's number."""
    event_log, gpu = EventLog(), replace(DEEP.gpu or GpuSources(), has_pinned_processes=is_pinned, device=3)
    with running(event_log, replace(DEEP, gpu=gpu)) as sources:
        sources.add(camera(LIVE), NEEDS)
        event_log.wait_for("opened")
        pid = one(sources, "a").pid
        assert pid is not None
        assert psutil.Process(pid).cmdline()[-4:-2] == ["3", str(int(is_pinned))]
    assert GpuSources().has_pinned_processes
