"""The parent's end of one source's decoding: messages without waiting, and the memory that its frames lie in."""

import errno
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec

from deepstream_pipeline.sources.messages import (
    DOWN,
    MESSAGE_BYTES,
    UP,
    Release,
    Start,
    decode_up,
    encode,
)
from deepstream_pipeline.sources.ring import Ring, RingSize, new_ring

MAX_WAITING = 64  # messages for a process that does not read
_AT_ONCE = 64  # messages taken of one process before the others have their turn


class BrokenPromise(Exception):
    """The process sent what it must not, or does not read. The text is for people."""


class Line(ABC):
    """One run of one source, in a process of its own or in one that several cameras share. Of one thread.

    ring: its frames, alive for as long as arrays of it are. pidfd: readable once the run is over, -1 where the system
    has no such thing. is_lost: whether it ended with the process of others, and through no fault that is known as its
    own.
    """

    pidfd = -1
    is_lost = False

    def __init__(self, start: Start, name: str) -> None:
        """`_theirs`, the other end of the socket, and `_ring_fd` are for who runs it, and closed by `_hand_over`."""
        if len(encode(start)) > MESSAGE_BYTES:
            raise OSError(errno.EMSGSIZE, "the address, or what the network wants, is too long for one message")
        size = RingSize(start.ring_frames, start.slot_bytes)
        self._ring_fd = new_ring(size, name)
        with ExitStack() as opened:
            self.ring = Ring(self._ring_fd, size)
            opened.callback(self.ring.close)
            self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.pop_all()
        self.socket.setblocking(False)
        self._waiting: deque[bytes] = deque([encode(start)])
        self._released: list[int] = []
        self.has_hung_up = False

    def _handed_over(self) -> None:
        """What the other side has now is closed here. The ring's memory is mapped; a descriptor less for each."""
        self._theirs.close()
        self.ring.close()

    @property
    @abstractmethod
    def pid(self) -> int:
        """Of the process that it runs in."""

    @abstractmethod
    def kill(self) -> None:
        """It is to end, whether it runs, hangs or is stopped: what it says is not heard any more."""

    @abstractmethod
    def condemn(self) -> None:
        """It broke a promise: its process is not to be trusted, and is ended now."""

    @abstractmethod
    def exit_text(self) -> str | None:
        """How it ended, as "was ended by SIGSEGV"; None while it runs."""

    @abstractmethod
    def is_reaped(self, timeout_s: float) -> bool:
        """Whether it is over within the time; nothing of it is left then but this end."""

    def close(self) -> None:
        """Its descriptors, once. The ring's memory goes with the last array of it."""
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    @property
    def is_behind(self) -> bool:
        """Whether messages wait for it to read."""
        return bool(self._waiting or self._released)

    def send(self, record: DOWN) -> None:
        """Never waits: what it does not take now goes with `flush`. Raises BrokenPromise where too much waits."""
        if len(self._waiting) >= MAX_WAITING:
            raise BrokenPromise("its process does not read what it is told")
        self._waiting.append(encode(record))
        self.flush()

    def release(self, slots: list[int]) -> None:
        """These slots may be written again; in one message with others that wait."""
        self._released += slots
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it is taken now."""
        if not self._waiting and not self._released:
            return
        try:
            self._send_waiting()
        except (BrokenPipeError, ConnectionResetError):  # that it is gone we hear elsewhere
            self._waiting.clear()
            self._released = []

    def _send_waiting(self) -> None:
        with suppress(BlockingIOError):
            while self._waiting:
                self.socket.send(self._waiting[0])
                self._waiting.popleft()
            if self._released:
                self.socket.send(encode(Release(tuple(self._released))))
                self._released = []

    def receive(self) -> Iterator[UP | None]:
        """What it sent so far, a bounded number at once; None, last, where it hung up. Raises BrokenPromise."""
        for _ in range(_AT_ONCE):
            try:
                message = self.socket.recv(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once, where it left what we sent unread: what it sent is still there
                continue
            if not message:
                self.has_hung_up = True
                yield None
                return
            yield _decoded(message)

    def ask_to_end(self) -> None:
        """It sees its socket's end, finishes what it writes, and ends."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)


def _decoded(message: bytes) -> UP:
    if len(message) > MESSAGE_BYTES:
        raise BrokenPromise("its process sent a message that is too long")
    try:
        record: UP = decode_up(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenPromise(f"its process sent what is no message: {error}") from error
    return record
