"""What each caller has asked of all processes of one gateway together: a table in memory that all map, without a lock.

A caller has a slot, found by its name's hash; in it each process writes numbers of its own, and all of them when the
caller's bucket of requests will be full again. Two processes that take from one bucket at the same moment may count
one request for two: a microsecond's chance, and no more than that is lost by it. A caller that finds no slot is
counted by each process alone.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

from server.access.quotas import Held
from server.local.limits_page import CORE, MAX_PROCESSES

TABLE_NAME = "quotas"
SLOTS = 2048
PROBES = 16
_NAME_BYTES = 104
_HEAD = struct.Struct("=Qd")  # the name's hash, 0 of a slot that nobody has had, and when its bucket is full again
_NAME = struct.Struct(f"=Q{_NAME_BYTES}s")
_HEAD_NUMBERS = (_HEAD.size + _NAME.size) // 8


class _Row(IntEnum):
    REQUESTS = 0
    SIZE_BYTES = 1
    RECEIVING_BYTES = 2


_SLOT_NUMBERS = _HEAD_NUMBERS + len(_Row) * MAX_PROCESSES
_SLOT_BYTES = _SLOT_NUMBERS * 8


class QuotaTable:
    """The table as one process sees it. column: the process's own, as on the page of limits."""

    def __init__(self, path: Path, column: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes the file where it is not there. Raises OSError."""
        self._clock = clock
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, SLOTS * _SLOT_BYTES)
            self._map = mmap.mmap(handle, SLOTS * _SLOT_BYTES)
        finally:
            os.close(handle)
        self._numbers = memoryview(self._map).cast("q")
        self._column = column
        self._used: dict[str, int] = {}  # slots in which this process has something in flight

    def others(self, name: str) -> Held:
        """What the caller has in flight in other processes."""
        slot = self._used.get(name)
        if slot is None:
            slot = self._find(name)
        if slot is None:
            return Held()
        return Held(*(self._sum(slot, row) - self._own(slot, row) for row in _Row))

    def note(self, name: str, held: Held) -> None:
        """What the caller has in flight in this process."""
        slot = self._used.get(name)
        if slot is None:
            slot = self._claim(name, self._clock())
            if slot is None:
                return
            self._used[name] = slot
        for row, number in zip(_Row, (held.requests, held.size_bytes, held.receiving_bytes), strict=True):
            self._numbers[self._place(slot, row) + self._column] = number
        if held.is_idle:
            del self._used[name]

    def full_again(self, name: str) -> float:
        """When the caller's bucket has all its tokens again; 0 where nobody has taken any."""
        slot = self._find(name)
        return 0.0 if slot is None else float(_HEAD.unpack_from(self._map, slot * _SLOT_BYTES)[1])

    def set_full_again(self, name: str, at: float) -> None:
        """A token was taken. at: monotonic seconds."""
        slot = self._claim(name, self._clock())
        if slot is not None:
            _HEAD.pack_into(self._map, slot * _SLOT_BYTES, _hash_of(name), at)

    def in_flight(self) -> Iterator[tuple[str, int]]:
        """Names of clients with requests in flight, and how many, in all processes. See _shown_name."""
        for slot in range(SLOTS):
            requests = self._sum(slot, _Row.REQUESTS)
            if requests:
                size, name = _NAME.unpack_from(self._map, slot * _SLOT_BYTES + _HEAD.size)
                yield name[:size].decode(), requests

    def clear(self, column: int) -> None:
        """That process is gone, and with it whatever it had in flight."""
        for slot in range(SLOTS):
            if self._numbers[slot * _SLOT_NUMBERS]:
                for row in _Row:
                    self._numbers[self._place(slot, row) + column] = 0

    def _find(self, name: str) -> int | None:
        wanted = _hash_of(name)
        return next((slot for slot in _probed(wanted) if self._hash_in(slot) == wanted), None)

    def _claim(self, name: str, now: float) -> int | None:
        """The caller's slot, or one that nobody needs now, made its own."""
        wanted = _hash_of(name)
        free: int | None = None
        for slot in _probed(wanted):
            if self._hash_in(slot) == wanted:
                return slot
            if free is None and self._is_free(slot, now):
                free = slot
        if free is not None:
            encoded = _shown_name(name)
            _NAME.pack_into(self._map, free * _SLOT_BYTES + _HEAD.size, len(encoded), encoded)
            _HEAD.pack_into(self._map, free * _SLOT_BYTES, wanted, 0.0)
        return free

    def _is_free(self, slot: int, now: float) -> bool:
        taken, full_again = _HEAD.unpack_from(self._map, slot * _SLOT_BYTES)
        return not taken or (full_again <= now and not any(self._sum(slot, row) for row in _Row))

    def _hash_in(self, slot: int) -> int:
        found: int = _HEAD.unpack_from(self._map, slot * _SLOT_BYTES)[0]
        return found

    def _own(self, slot: int, row: _Row) -> int:
        return self._numbers[self._place(slot, row) + self._column]

    def _sum(self, slot: int, row: _Row) -> int:
        start = self._place(slot, row)
        return sum(self._numbers[start : start + MAX_PROCESSES])

    @staticmethod
    def _place(slot: int, row: _Row) -> int:
        return slot * _SLOT_NUMBERS + _HEAD_NUMBERS + row * MAX_PROCESSES


def _hash_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def _shown_name(name: str) -> bytes:
    """The name as stored in the table. A long one is truncated and gets its hash as a suffix, to stay distinct."""
    encoded = name.encode()
    if len(encoded) <= _NAME_BYTES:
        return encoded
    suffix = b"~%016x" % _hash_of(name)
    return encoded[: _NAME_BYTES - len(suffix)].decode(errors="ignore").encode() + suffix


def _probed(wanted: int) -> Iterator[int]:
    return ((wanted + step) % SLOTS for step in range(PROBES))


def core_board(run_dir: Path) -> QuotaTable:
    """Of a core that begins: what a former one had in flight is gone."""
    table = QuotaTable(run_dir / TABLE_NAME, CORE)
    table.clear(CORE)
    return table
