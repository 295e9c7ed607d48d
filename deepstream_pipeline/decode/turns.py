"""Whose turn it is to make a decoder on a card: one at a time, of all programs of this user.

Measured on an H200: a decoder takes 45 to 60 ms to make, however many ask; in turn 24 processes made 360 of them in
half a minute and none failed, all at once most of the 24 failed. So a camera waits for its turn, and says so meanwhile.
The turn is a lock on a file, which the system gives back for whoever dies with it. It is a courtesy: who has waited for
long, or behind one who is stuck, goes on without it.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepstream_pipeline.decode.nvcodec import NvCodec, Surface

STUCK_S = 3.0  # with one turn
PATIENCE_S = 60.0  # a thousand decoders
_LOOK_S, _ATTEND_S = 0.02, 0.2
_TOKEN_BYTES = 8


def turns_path(gpu: int) -> Path:
    """Of a card, for this user's programs."""
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / f"decoders-{gpu}.lock"


class Turns:
    """At one card. Every thread may use it."""

    def __init__(self, path: Path, stuck_s: float = STUCK_S, patience_s: float = PATIENCE_S) -> None:
        """path: of the file; where it cannot be opened nobody waits."""
        self._path, self._stuck_s, self._patience_s = path, stuck_s, patience_s

    @contextmanager
    def taken(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Waits for a turn, which lasts as long as the context. meanwhile: called several times a second; what it
        raises ends the wait."""
        descriptor = self._opened()
        if descriptor is None:
            yield
            return
        try:
            self._await(descriptor, meanwhile)
            yield
        finally:
            os.close(descriptor)

    def _await(self, descriptor: int, meanwhile: Callable[[], None]) -> None:
        now = began = attended = changed = time.monotonic()
        token = os.pread(descriptor, _TOKEN_BYTES, 0)
        while now - began < self._patience_s and now - changed < self._stuck_s:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(descriptor, os.urandom(_TOKEN_BYTES), 0)  # another turn
                return
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if now - attended >= _ATTEND_S:
                attended = now
                meanwhile()
            newest = os.pread(descriptor, _TOKEN_BYTES, 0)
            if newest != token:
                token, changed = newest, now

    def _opened(self) -> int | None:
        try:
            with suppress(FileExistsError):
                self._path.parent.mkdir(mode=0o700)
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
