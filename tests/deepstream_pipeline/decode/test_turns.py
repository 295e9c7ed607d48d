"""One decoder at a time is made on a card, and nobody waits for ever."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from deepstream_pipeline.decode.nvcodec import Surface
from deepstream_pipeline.decode.turns import MadeInTurn, Turns

PATIENCE_S = 30.0


def nothing() -> None:
    """Meanwhile."""


def hold(path: Path, told: "multiprocessing.synchronize.Event") -> None:
    """A process that dies with its turn."""
    with Turns(path).taken(nothing):
        told.set()
        time.sleep(PATIENCE_S)


def test_turns_do_not_overlap(tmp_path: Path) -> None:
    """Of sixteen threads that all want one, and each gets one."""
    inside, most, done = 0, 0, 0
    lock = threading.Lock()

    def run() -> None:
        nonlocal inside, most, done
        with Turns(tmp_path / "a" / "turns", stuck_s=PATIENCE_S).taken(nothing):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.005)
            with lock:
                inside, done = inside - 1, done + 1

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (most, done) == (1, 16)


def test_turn_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    """Without a wait for its holder's patience; whoever waits is attended to meanwhile."""
    path, context = tmp_path / "turns", multiprocessing.get_context("spawn")
    told = context.Event()
    process = context.Process(target=hold, args=(path, told), daemon=True)
    process.start()
    assert told.wait(PATIENCE_S)

    with Turns(path, stuck_s=PATIENCE_S).taken(process.kill):  # called while it waits
        process.join(PATIENCE_S)
    assert process.exitcode not in (None, 0)


def test_nobody_waits_behind_one_who_is_stuck(tmp_path: Path) -> None:
    """Who has the same turn for long is passed by."""
    turns = Turns(tmp_path / "turns", stuck_s=0.3)
    with turns.taken(nothing):
        began = time.monotonic()
        with turns.taken(nothing):
            assert time.monotonic() - began >= 0.3


def test_patience_has_an_end_where_others_go_first(tmp_path: Path) -> None:
    """However many turns pass by."""
    path = tmp_path / "turns"
    with Turns(path).taken(nothing):
        descriptor = os.open(path, os.O_RDWR)
        began, attended = time.monotonic(), 0

        def others() -> None:
            nonlocal attended
            attended += 1
            os.pwrite(descriptor, os.urandom(8), 0)

        with Turns(path, stuck_s=0.5, patience_s=1.2).taken(others):
            assert time.monotonic() - began >= 1.2
        os.close(descriptor)
    assert attended >= 2


def test_what_is_raised_meanwhile_ends_the_wait(tmp_path: Path) -> None:
    """The parent is gone, say."""

    def gone() -> None:
        raise ConnectionError

    turns = Turns(tmp_path / "turns", stuck_s=PATIENCE_S)
    with turns.taken(nothing), pytest.raises(ConnectionError), turns.taken(gone):
        pass


def test_nobody_waits_where_there_is_no_file(tmp_path: Path) -> None:
    """Its folder is a file, or a link stands in its place."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (tmp_path / "file" / "turns", tmp_path / "link"):
        turns = Turns(path, stuck_s=PATIENCE_S)
        with turns.taken(nothing), turns.taken(nothing):
            pass


class Codec:
    """An NvCodec; busy: what its path's turn looked like when a packet came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.busy: list[bool] = []

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """Looks whether the turn is taken."""
        waited = False

        def waits() -> None:
            nonlocal waited
            waited = True

        with Turns(self._path, stuck_s=0.5).taken(waits):
            self.busy.append(waited)
        return []

    def flush(self) -> list[Surface]:
        return []

    def close(self) -> None:
        return


def test_only_a_decoders_first_packet_waits(tmp_path: Path) -> None:
    """By which it is made."""
    codec = Codec(tmp_path / "turns")
    decoder = MadeInTurn(codec, Turns(tmp_path / "turns"), nothing)
    for stamp in range(3):
        decoder.decode(b"", stamp)
    assert codec.busy == [True, False, False]
