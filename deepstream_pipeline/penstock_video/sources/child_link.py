"""A camera's end of its socket to the parent, in its own process or in a shared one."""

import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import msgspec

from penstock_video.sources.protocol import (
    DOWN,
    MESSAGE_BYTES,
    UP,
    Beat,
    Cut,
    Hold,
    Release,
    Start,
    Want,
    decode_down,
    encode,
)

_BEAT_S = 1.0
_LAST_S = 5.0  # from the socket's end to the process's, even if its decoding thread hangs
_MOST_CUTS = 16  # queued requests for recordings


class ParentGone(Exception):
    """The parent closed its end, so the process must end."""


class ParentLink(ABC):
    """Messages from and to the parent. send and the waits are for the decoding thread only."""

    def __init__(self, link: socket.socket, start: Start) -> None:
        self._socket = link
        self._changed = threading.Condition()  # with a re-entrant lock
        self._slots = start.ring_frames
        self._free = list(range(start.ring_frames))
        self._rows: set[int] = set()
        self._wants_images = start.wants_images
        self._is_held = False
        self._cuts: list[Cut] = []
        self._is_closed = False

    @abstractmethod
    def begin(self, beat: Callable[[], Beat]) -> None:
        """Starts reading. beat() is sent once a second."""

    @abstractmethod
    def end(self) -> None:
        """Ends the link. Reads unread messages first, since closing would otherwise reset the socket."""

    @property
    def wants_images(self) -> bool:
        return self._wants_images

    def send(self, record: UP) -> None:
        """Sends, and waits while the parent does not read. Raises ParentGone."""
        try:
            self._socket.sendall(encode(record))
        except OSError:
            raise ParentGone from None

    def cuts(self) -> list[Cut]:
        """Recordings requested since the last call. Raises ParentGone."""
        self._look()
        with self._changed:
            if self._is_closed:
                raise ParentGone
            cuts, self._cuts = self._cuts, []
            return cuts

    def take_slot(self, most: int, most_rows: int | None = None) -> int | None:
        """A free slot, or None if there is none or the parent has `most`. most_rows: limit of slots with only a row."""
        with self._changed:
            if not self._may_take(most, most_rows):
                self._look()
            if not self._may_take(most, most_rows):
                return None
            slot = self._free.pop()
            if most_rows is not None:
                self._rows.add(slot)
            return slot

    def wait_for_slot(self, most: int, timeout_s: float) -> int | None:
        """As take_slot, with a timeout. Raises ParentGone."""
        with self._changed:
            self._wait_until(lambda: self._has_room(most), timeout_s)
            if self._is_closed:
                raise ParentGone
            return self._free.pop() if self._has_room(most) else None

    def outside(self) -> set[int]:
        """The slots that the parent owns."""
        with self._changed:
            return set(range(self._slots)).difference(self._free)

    def wait_for_all_slots(self, timeout_s: float) -> bool:
        """Whether the parent freed every slot within the timeout. Raises ParentGone."""
        with self._changed:
            self._wait_until(lambda: len(self._free) == self._slots, timeout_s)
            if self._is_closed:
                raise ParentGone
            return len(self._free) == self._slots

    def wait_while_paused(self, timeout_s: float) -> bool:
        """Whether it is still paused after the timeout. Raises ParentGone."""
        with self._changed:
            if self._is_held and not self._cuts:
                self._wait_until(lambda: not self._is_held or bool(self._cuts), timeout_s)
            if self._is_closed:
                raise ParentGone
            return self._is_held

    def _may_take(self, most: int, most_rows: int | None) -> bool:
        return self._has_room(most) and (most_rows is None or len(self._rows) < most_rows)

    def _has_room(self, most: int) -> bool:
        return bool(self._free) and self._slots - len(self._free) < most

    @abstractmethod
    def _look(self) -> None:
        """Reads the parent's messages, if no other thread does."""

    @abstractmethod
    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Waits, with the lock, for the condition, the parent's end or the timeout."""

    def _hear(self, flags: int = 0) -> bool:
        """Reads one message; returns whether the parent is connected. Raises BlockingIOError."""
        try:
            message = self._socket.recv(MESSAGE_BYTES + 1, flags)
            record = decode_down(message) if message else None
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return False
        if record is None:
            return False
        with self._changed:
            self._apply(record)
            self._changed.notify_all()
        return True

    def _tell_beat(self, beat: Beat) -> None:
        with suppress(OSError):  # a parent that does not read needs no beats
            self._socket.send(encode(beat), socket.MSG_DONTWAIT)

    def _apply(self, record: DOWN) -> None:
        if isinstance(record, Release):
            self._free += [slot for slot in record.slots if 0 <= slot < self._slots and slot not in self._free]
            self._rows.difference_update(record.slots)
        elif isinstance(record, Want):
            self._wants_images = record.images
        elif isinstance(record, Hold):
            self._is_held = record.is_held
        elif isinstance(record, Cut) and len(self._cuts) < _MOST_CUTS:
            self._cuts.append(record)


class ThreadedLink(ParentLink):
    """The link of a process with one camera. The process ends within a timeout after the parent closes its end."""

    def begin(self, beat: Callable[[], Beat]) -> None:
        self._is_over = threading.Event()
        self._listener = threading.Thread(target=self._listen, args=(beat,), name="link", daemon=True)
        self._listener.start()

    def end(self) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._listener.join(_LAST_S)

    def _look(self) -> None:
        """Does nothing: the listener thread reads."""

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        self._changed.wait_for(lambda: self._is_closed or is_so(), timeout_s)

    def _listen(self, beat: Callable[[], Beat]) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        due = time.monotonic() + _BEAT_S
        is_there = True
        while is_there:
            has_message = poller.poll(max(due - time.monotonic(), 0.0) * 1000)
            is_there = not has_message or self._hear()
            if time.monotonic() >= due:
                due = time.monotonic() + _BEAT_S
                self._tell_beat(beat())
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self._is_over.wait(_LAST_S):
            os._exit(1)


class PolledLink(ParentLink):
    """The link of a camera in a shared process, read by its decoding thread while it does not wait for its stream."""

    def begin(self, beat: Callable[[], Beat]) -> None:
        self._beat, self._is_waiting = beat, False
        self._beat_at = time.monotonic() + _BEAT_S
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._look()

    def attend(self) -> None:
        """Reads and sends messages while the thread waits for its turn at the GPU. Raises ParentGone."""
        self._is_waiting = True
        try:
            self._look()
        finally:
            self._is_waiting = False
        if self._is_closed:
            raise ParentGone

    def _look(self) -> None:
        with suppress(BlockingIOError):
            while not self._is_closed:
                self._is_closed = not self._hear(socket.MSG_DONTWAIT)
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            beat = self._beat()
            self._tell_beat(msgspec.structs.replace(beat, is_waiting=True) if self._is_waiting else beat)

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        self._look()
        while not self._is_closed and not is_so() and (left_s := until - time.monotonic()) > 0:
            self._poller.poll(min(left_s, _BEAT_S) * 1000)
            self._look()
