"""One decoder at a time is made on a card, and no one waits for ever."""

import errno
import fcntl
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock_video.decode.nvcodec import Surface
from penstock_video.sources import shared_work as turns_of
from penstock_video.sources.core_pinning import open_lock
from penstock_video.sources.shared_work import DecoderTurns, MadeInTurn

DEADLINE_S, STUCK_S = 30.0, 0.3
CARD = "0000-1b-00.0"
FILES = [f"decoders-{CARD}.lock", f"decoders-{CARD}.1.lock", f"decoders-{CARD}.2.lock"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the files; of the processes that a test starts, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"penstock-{os.getuid()}"


def nothing() -> None:
    """Meanwhile."""


def at_once() -> Callable[[], None]:
    """Meanwhile, of who is not to wait: on a busy machine it may be called, though not thrice."""
    left = [1, 2]

    def called() -> None:
        if not left:
            pytest.fail("it waits")
        left.pop()

    return called


def program(stuck_s: float = DEADLINE_S, max_wait_s: float = DEADLINE_S) -> DecoderTurns:
    """What another program has of that card, or this one."""
    return DecoderTurns(CARD, stuck_s, max_wait_s)


def hold(reported: "multiprocessing.synchronize.Event") -> None:
    """A process that dies with its turn."""
    with program().taken(nothing):
        reported.set()
        time.sleep(DEADLINE_S)


class Holder:
    """The turn of a file, of a program that is stuck with it."""

    def __init__(self, name: str) -> None:
        descriptor = open_lock(name)
        assert descriptor is not None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._descriptor = descriptor
        self.pass_on()

    def pass_on(self) -> None:
        """Another's turn begins, who is before the others again."""
        os.pwrite(self._descriptor, os.urandom(8), 0)

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def stuck() -> Iterator[Callable[[str], Holder]]:
    """Take a file's turn for the length of the test."""
    with ExitStack() as held:

        def take(name: str) -> Holder:
            holder = Holder(name)
            held.callback(holder.close)
            return holder

        yield take


def turns_are_free() -> bool:
    """Whether no one has the first file's."""
    descriptor = open_lock(FILES[0])
    assert descriptor is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


class Crowd:
    """Threads that each want a turn once. most: how many had one at once. done: how many had one."""

    def __init__(self, programs: list[DecoderTurns]) -> None:
        self.most = self.done = self._inside = 0
        self._lock = threading.Lock()
        threads = [threading.Thread(target=self._run, args=(turns,)) for turns in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)

    def _run(self, turns: DecoderTurns) -> None:
        with turns.taken(nothing):
            with self._lock:
                self._inside += 1
                self.most = max(self.most, self._inside)
            time.sleep(0.005)
            with self._lock:
                self._inside, self.done = self._inside - 1, self.done + 1


def test_turns_do_not_overlap() -> None:
    """Of sixteen threads of four programs that all want one, and each gets one."""
    crowd = Crowd([program() for _ in range(4)] * 4)
    assert (crowd.most, crowd.done) == (1, 16)


def test_cards_have_turns_of_their_own() -> None:
    """Which no other card's camera waits for."""
    with program().taken(nothing), DecoderTurns("0000-1c-00.0", DEADLINE_S).taken(at_once()):
        pass


def test_turn_of_a_process_that_died_is_free() -> None:
    """Without a wait for its holder's timeout; the parent's messages are read meanwhile."""
    context = multiprocessing.get_context("spawn")
    reported = context.Event()
    process = context.Process(target=hold, args=(reported,), daemon=True)
    process.start()
    assert reported.wait(DEADLINE_S)

    with program().taken(process.kill):  # called while it waits
        process.join(DEADLINE_S)
    assert process.exitcode not in (None, 0)


def test_no_one_waits_behind_one_who_is_stuck(stuck: Callable[[str], Holder]) -> None:
    """Who has the same turn for long is passed by; at once by those of the same process who come later."""
    stuck(FILES[0])
    turns, began = program(stuck_s=1.0), time.monotonic()
    with turns.taken(nothing):
        assert time.monotonic() - began >= 1.0
    with turns.taken(at_once()):
        pass


def test_all_behind_one_who_is_stuck_pass_one_by_one(stuck: Callable[[str], Holder]) -> None:
    """Of one program and of many: there is no storm where the turns were to prevent one."""
    stuck(FILES[0])
    crowd = Crowd([program(stuck_s=1.0) for _ in range(8)] * 2)
    assert (crowd.most, crowd.done) == (1, 16)


def test_there_are_three_files_and_then_no_turn(stuck: Callable[[str], Holder], folder: Path) -> None:
    """Behind three that are stuck a camera waits three times, and begins."""
    for name in FILES:
        stuck(name)
    began = time.monotonic()
    with program(STUCK_S).taken(nothing):
        assert time.monotonic() - began >= 3 * STUCK_S
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_one_who_was_stuck_and_goes_on_is_waited_for_again(stuck: Callable[[str], Holder]) -> None:
    """By who passed it by before: it is another turn."""
    holder = stuck(FILES[0])
    turns, attended = program(2 * STUCK_S), 0

    def count() -> None:
        nonlocal attended
        attended += 1

    with turns.taken(nothing):
        pass
    holder.pass_on()
    with turns.taken(count):
        assert attended >= 1


def test_timeout_has_an_end_where_others_go_first(stuck: Callable[[str], Holder], folder: Path) -> None:
    """However many turns pass by; no other file's is waited for then."""
    holder, attended = stuck(FILES[0]), 0

    def others() -> None:
        nonlocal attended
        attended += 1
        holder.pass_on()

    began = time.monotonic()
    with program(stuck_s=0.5, max_wait_s=1.2).taken(others):
        assert time.monotonic() - began >= 1.2
    assert attended >= 2
    assert [path.name for path in folder.iterdir()] == FILES[:1]


def test_timeout_is_one_for_every_wait(stuck: Callable[[str], Holder], folder: Path) -> None:
    """Of two files it is over in the second one."""
    for name in FILES[:2]:
        stuck(name)
    began = time.monotonic()
    with program(STUCK_S, max_wait_s=1.5 * STUCK_S).taken(nothing):
        assert time.monotonic() - began >= 1.5 * STUCK_S
    assert not (folder / FILES[2]).exists()


def test_another_camera_of_the_process_is_waited_for_within_the_timeout() -> None:
    """Before any file; with its parent's messages read meanwhile, and without a turn at the end of the timeout."""
    turns, attended = program(max_wait_s=0.7), 0

    def count() -> None:
        nonlocal attended
        attended += 1

    began = time.monotonic()
    with turns.taken(nothing):
        with turns.taken(count):
            assert time.monotonic() - began >= 0.7
        assert attended >= 2
        assert not turns_are_free()
    assert turns_are_free()


def test_one_thread_of_a_process_looks_at_the_file(
    stuck: Callable[[str], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for that one."""
    stuck(FILES[0])
    looked, flock = set(), fcntl.flock

    def look(descriptor: int, operation: int) -> None:
        looked.add(threading.get_ident())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", look)
    turns, attended, gone = program(), threading.Semaphore(0), threading.Event()

    def wait() -> None:
        def meanwhile() -> None:
            attended.release()
            if gone.is_set():
                raise ConnectionError

        with pytest.raises(ConnectionError), turns.taken(meanwhile):
            pass

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(24):
        assert attended.acquire(timeout=DEADLINE_S)
    seen = len(looked)
    gone.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert seen == 1


def test_what_is_raised_meanwhile_ends_the_wait(stuck: Callable[[str], Holder]) -> None:
    """The parent is gone, say; whether another program is waited for or another camera of this one."""

    def gone() -> None:
        raise ConnectionError

    turns = program()
    with turns.taken(nothing):
        for other in (turns, program()):
            with pytest.raises(ConnectionError), other.taken(gone):
                pass
    with turns.taken(at_once()):
        pass


def test_no_one_waits_where_there_is_no_file(folder: Path) -> None:
    """Its folder is a file, or a link stands in its place."""
    folder.write_text("")
    with program().taken(nothing), program().taken(at_once()):
        pass
    folder.unlink()
    folder.mkdir(mode=0o700)
    (folder / "file").write_text("")
    (folder / FILES[0]).symlink_to(folder / "file")
    with program().taken(nothing), program().taken(at_once()):
        pass


def test_full_disk_ends_no_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is its own all the same, though no one can tell it from the last."""
    monkeypatch.setattr(turns_of, "open_lock", lambda name: os.open("/dev/full", os.O_RDWR))
    with program().taken(nothing):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_system_without_locks_makes_no_one_wait(
    stuck: Callable[[str], Holder], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file system that has none, say; nor does it end a camera."""

    def refuse(*given: object) -> None:
        raise OSError(number, os.strerror(number))

    stuck(FILES[0])
    monkeypatch.setattr(fcntl, "flock", refuse)
    with program().taken(at_once()), program().taken(at_once()):
        pass


def test_turn_that_cannot_be_read_is_not_waited_for(
    stuck: Callable[[str], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one could tell whether its holder is stuck."""

    def refuse(*given: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stuck(FILES[0])
    monkeypatch.setattr(os, "pread", refuse)
    with program().taken(at_once()):
        pass


class Codec:
    """An NvCodec; busy: whether someone had the turn when a packet came."""

    def __init__(self) -> None:
        self.busy: list[bool] = []

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """Looks whether the turn is taken."""
        self.busy.append(not turns_are_free())
        return []

    def flush(self) -> list[Surface]:
        return []

    def close(self) -> None:
        return


def test_only_a_decoders_first_packet_waits() -> None:
    """By which it is made."""
    codec = Codec()
    decoder = MadeInTurn(codec, program(), nothing)
    for stamp in range(3):
        decoder.decode(b"", stamp)
    assert codec.busy == [True, False, False]
