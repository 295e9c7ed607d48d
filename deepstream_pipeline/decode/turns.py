"""Whose turn it is to make a decoder on a card: one at a time, of all programs of this user.

Measured on an H200: a decoder takes 45 to 60 ms to make, however many ask; in turn 24 processes made 360 of them in
half a minute and none failed, all at once most of the 24 failed. So a camera waits for its turn, and says so meanwhile.
The turn is a lock on a file, which the system gives back for whoever dies with it; within a process one thread at a
time looks at it. Who has waited for long behind one turn, whose holder must be stuck, waits for another file's, so that
all who do still come one by one. It is a courtesy: after the last file, after a minute in all, or where the system has
no lock for us, a camera goes on without it.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from deepstream_pipeline.decode.lock_files import open_lock
from deepstream_pipeline.decode.nvcodec import NvCodec, Surface

STUCK_S = 3.0  # with one turn
PATIENCE_S = 60.0  # a thousand decoders
_LOOK_S, _ATTEND_S = 0.02, 0.2
_TOKEN_BYTES = 8


class Turns:
    """At one card: one object a process, which every thread may use."""

    def __init__(self, card: str, stuck_s: float = STUCK_S, patience_s: float = PATIENCE_S) -> None:
        """card: what all programs call it (`Device.bus_id`), as a part of the files' names; where they cannot be opened
        nobody waits for another process."""
        self._names = [f"decoders-{card}{number}.lock" for number in ("", ".1", ".2")]
        self._stuck_s, self._patience_s = stuck_s, patience_s
        self._foremost = threading.Lock()  # of this process, who looks at the files
        self._passed: dict[str, bytes] = {}  # a file's turn behind which one of us has waited for long

    @contextmanager
    def taken(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Waits for a turn, which lasts as long as the context. meanwhile: called several times a second; what it
        raises ends the wait."""
        wait = _Wait(self._patience_s, meanwhile)
        with ExitStack() as held:
            if self._is_foremost(wait):
                held.callback(self._foremost.release)
                self._take(held, wait)
            yield

    def _is_foremost(self, wait: "_Wait") -> bool:
        """False where the patience is over before."""
        while not self._foremost.acquire(timeout=_ATTEND_S):
            wait.attend()
            if wait.is_over:
                return False
        return True

    def _take(self, held: ExitStack, wait: "_Wait") -> None:
        """Returns with a turn, or without where there is none to be had."""
        for name in self._names:
            descriptor = open_lock(name)
            if descriptor is None:
                return
            held.callback(os.close, descriptor)
            if not self._is_passing_by(name, descriptor, wait):
                return

    def _is_passing_by(self, name: str, descriptor: int, wait: "_Wait") -> bool:
        """Whether who has the turn is stuck with it. False: it is ours, or we go on without any."""
        turn, since = None, wait.attend()
        while not _is_ours(descriptor):
            newest = _turn_of(descriptor)
            if newest is None or wait.is_over:
                return False
            if newest != turn:
                turn, since = newest, wait.now
            if newest == self._passed.get(name) or wait.now - since >= self._stuck_s:
                self._passed[name] = newest
                return True
            time.sleep(_LOOK_S)
            wait.attend()
        return False


class _Wait:
    """A camera's, for whatever it waits. now: when it last looked at the clock."""

    def __init__(self, patience_s: float, meanwhile: Callable[[], None]) -> None:
        self.now = self._attended = time.monotonic()
        self._until, self._meanwhile = self.now + patience_s, meanwhile

    @property
    def is_over(self) -> bool:
        return self.now >= self._until

    def attend(self) -> float:
        """Now; with a call of meanwhile where the last was a while ago."""
        self.now = time.monotonic()
        if self.now - self._attended >= _ATTEND_S:
            self._attended = self.now
            self._meanwhile()
        return self.now


def _is_ours(descriptor: int) -> bool:
    """Whether the turn is, or the system has no locks to wait for."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    with suppress(OSError):  # a full disk: it is ours all the same
        os.pwrite(descriptor, os.urandom(_TOKEN_BYTES), 0)  # another turn
    return True


def _turn_of(descriptor: int) -> bytes | None:
    """What tells one turn from the next; None where it cannot be read."""
    try:
        return os.pread(descriptor, _TOKEN_BYTES, 0)
    except OSError:
        return None


class MadeInTurn:
    """An NvCodec, whose first packet, which is what makes it on the card, waits for its turn."""

    def __init__(self, codec: NvCodec, turns: Turns, meanwhile: Callable[[], None]) -> None:
        self._codec, self._turns, self._meanwhile = codec, turns, meanwhile
        self._is_made = False

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """As the codec does."""
        if self._is_made:
            return self._codec.decode(data, stamp)
        with self._turns.taken(self._meanwhile):
            surfaces = self._codec.decode(data, stamp)
        self._is_made = True
        return surfaces

    def flush(self) -> list[Surface]:
        """As the codec does."""
        return self._codec.flush()

    def close(self) -> None:
        """As the codec does."""
        self._codec.close()
