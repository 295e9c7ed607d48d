"""The decode process's end of its socket: a thread hears the parent, whatever the decoding thread waits for."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from deepstream_pipeline.sources.messages import (
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
_LAST_S = 5.0  # from the socket's end until the process ends, whatever its decoding thread does
_MOST_CUTS = 16  # waiting


class ParentGone(Exception):
    """The parent closed its end: nobody takes what comes, and the process is to end."""


class Link:
    """What the parent said, and a way to tell it things. send and the waits are the decoding thread's."""

    def __init__(self, link: socket.socket, start: Start, beat: Callable[[], Beat]) -> None:
        """beat() is called by the link's own thread, each second, and sent."""
        self._socket, self._beat = link, beat
        self._changed = threading.Condition()
        self._slots = start.ring_frames
        self._free = list(range(start.ring_frames))
        self._rows: set[int] = set()
        self._wants_images = start.wants_images
        self._is_held = False
        self._cuts: list[Cut] = []
        self._is_closed = False
        self._is_over = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="link", daemon=True)

    def begin(self) -> None:
        """Listen from now on."""
        self._listener.start()

    def end(self) -> None:
        """The decoding thread is done. What the parent sent is read to its end: if it were not, closing the socket
        would be a reset, by which a parent loses what it has not read yet."""
        self._is_over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._listener.join(_LAST_S)

    @property
    def wants_images(self) -> bool:
        return self._wants_images

    def send(self, record: UP) -> None:
        """Waits while the parent takes nothing. Raises ParentGone."""
        try:
            self._socket.sendall(encode(record))
        except OSError:
            raise ParentGone from None

    def cuts(self) -> list[Cut]:
        """The recordings that were asked for since the last call. Raises ParentGone."""
        with self._changed:
            if self._is_closed:
                raise ParentGone
            cuts, self._cuts = self._cuts, []
            return cuts

    def take_slot(self, most: int, most_rows: int | None = None) -> int | None:
        """A free slot of the ring; None where there is none, or so many are the parent's already. most_rows: it is for
        a row, and there are so many of those at most."""
        with self._changed:
            if not self._has_room(most) or (most_rows is not None and len(self._rows) >= most_rows):
                return None
            slot = self._free.pop()
            if most_rows is not None:
                self._rows.add(slot)
            return slot

    def wait_for_slot(self, most: int, timeout_s: float) -> int | None:
        """As take_slot, waiting so long. Raises ParentGone."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(most), timeout_s)
            if self._is_closed:
                raise ParentGone
            return self._free.pop() if self._has_room(most) else None

    def outside(self) -> set[int]:
        """The slots that the parent has."""
        with self._changed:
            return set(range(self._slots)).difference(self._free)

    def wait_for_all_slots(self, timeout_s: float) -> bool:
        """Whether the parent has given back every slot, after so long at most. Raises ParentGone."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._free) == self._slots, timeout_s)
            if self._is_closed:
                raise ParentGone
            return len(self._free) == self._slots

    def wait_while_held(self, timeout_s: float) -> bool:
        """Whether it is still held, after so long. Raises ParentGone."""
        with self._changed:
            if self._is_held and not self._cuts:
                self._changed.wait_for(lambda: self._is_closed or not self._is_held or bool(self._cuts), timeout_s)
            if self._is_closed:
                raise ParentGone
            return self._is_held

    def _has_room(self, most: int) -> bool:
        return bool(self._free) and self._slots - len(self._free) < most

    def _listen(self) -> None:
        """Until the parent closes its end; then the process ends, soon in order, and late whatever holds it."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        due = time.monotonic() + _BEAT_S
        is_there = True
        while is_there:
            has_message = poller.poll(max(due - time.monotonic(), 0.0) * 1000)
            is_there = not has_message or self._hear()
            if time.monotonic() >= due:
                due = time.monotonic() + _BEAT_S
                with suppress(OSError):  # a parent that takes nothing needs no beats
                    self._socket.send(encode(self._beat()), socket.MSG_DONTWAIT)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self._is_over.wait(_LAST_S):
            os._exit(1)

    def _hear(self) -> bool:
        """One message; whether the parent is still there."""
        try:
            message = self._socket.recv(MESSAGE_BYTES + 1)
            record = decode_down(message) if message else None
        except (OSError, msgspec.MsgspecError):
            return False
        if record is None:
            return False
        with self._changed:
            self._apply(record)
            self._changed.notify_all()
        return True

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
