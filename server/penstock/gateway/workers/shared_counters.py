"""Lock-free counters that a gateway's processes share in mapped memory. Each number has one writer."""

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path

from penstock.gateway.auth.rate_limiter import ClientUsage
from penstock.gateway.in_flight import InFlightCounts

PAGE_NAME = "limits"
CORE = 0  # its column
MAX_PROCESSES = 65  # the core, and the most workers that the settings allow
_NUMBER_BYTES = 8


class CounterRow(IntEnum):
    """Rows of the page. LASTING_ROWS survive a process's replacement. BEATS: four per second, 0 before the first."""

    REQUESTS = 0
    SIZE_BYTES = 1
    RECEIVING_BYTES = 2
    CONNECTIONS = 3
    DECODES_WAITING = 4
    DECODER_RESTARTS = 5
    SPANS_DROPPED = 6
    BEATS = 7
    GRPC_CONNECTIONS = 8


LASTING_ROWS = frozenset((CounterRow.DECODER_RESTARTS, CounterRow.SPANS_DROPPED))


def _map_file(path: Path, size_bytes: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(handle, size_bytes)
        return mmap.mmap(handle, size_bytes)
    finally:
        os.close(handle)


class CounterPage:
    """Rows of numbers with a column for each process: 0 for the core, otherwise the worker's number."""

    def __init__(self, path: Path) -> None:
        """Creates a missing file. Raises OSError."""
        self._map = _map_file(path, len(CounterRow) * MAX_PROCESSES * _NUMBER_BYTES)
        self._numbers = memoryview(self._map).cast("q")

    def read(self, row: CounterRow, column: int) -> int:
        return self._numbers[row * MAX_PROCESSES + column]

    def write(self, row: CounterRow, column: int, number: int) -> None:
        """Call it only in the column's own process, or if there is none."""
        self._numbers[row * MAX_PROCESSES + column] = number

    def total(self, row: CounterRow) -> int:
        start = row * MAX_PROCESSES
        return sum(self._numbers[start : start + MAX_PROCESSES])

    def clear(self, column: int) -> None:
        """Clears the column after its process ended."""
        for row in CounterRow:
            if row not in LASTING_ROWS:
                self.write(row, column, 0)

    def close(self) -> None:
        self._numbers.release()
        self._map.close()


class SharedCounts(InFlightCounts):
    """One process's counts of requests in flight, and the sums over all processes."""

    def __init__(self, page: CounterPage, column: int) -> None:
        super().__init__()
        self._page = page
        self._column = column

    def add(self, requests: int, size_bytes: int) -> None:
        super().add(requests, size_bytes)
        self._page.write(CounterRow.REQUESTS, self._column, self.requests)
        self._page.write(CounterRow.SIZE_BYTES, self._column, self.size_bytes)

    def receive(self, size_bytes: int) -> None:
        """Adds to this process's bytes of incomplete bodies."""
        super().receive(size_bytes)
        self._page.write(CounterRow.RECEIVING_BYTES, self._column, self.receiving_bytes)

    def totals(self) -> tuple[int, int]:
        return self._page.total(CounterRow.REQUESTS), self._page.total(CounterRow.SIZE_BYTES)

    def total_receiving_bytes(self) -> int:
        """Bytes of incomplete bodies in all processes."""
        return self._page.total(CounterRow.RECEIVING_BYTES)


def core_counts(page: CounterPage) -> SharedCounts:
    """Counts of a starting core, which clears those of its predecessor."""
    page.clear(CORE)
    return SharedCounts(page, CORE)


TABLE_NAME = "quotas"
SLOTS = 2048
PROBES = 16
_NAME_BYTES = 104
_HEAD = struct.Struct("=Qd")  # the name's hash, 0 in an unused slot, and when its bucket is full again
_NAME = struct.Struct(f"=Q{_NAME_BYTES}s")
_HEAD_NUMBERS = (_HEAD.size + _NAME.size) // 8


class _QuotaRow(IntEnum):
    REQUESTS = 0
    SIZE_BYTES = 1
    RECEIVING_BYTES = 2


_SLOT_NUMBERS = _HEAD_NUMBERS + len(_QuotaRow) * MAX_PROCESSES
_SLOT_BYTES = _SLOT_NUMBERS * 8


class QuotaTable:
    """Client quotas as seen by one process. column: as in CounterPage."""

    def __init__(self, path: Path, column: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates a missing file. Raises OSError."""
        self._clock = clock
        self._map = _map_file(path, SLOTS * _SLOT_BYTES)
        self._numbers = memoryview(self._map).cast("q")
        self._column = column
        self._used: dict[str, int] = {}  # slots where this process has requests in flight

    def others(self, name: str) -> ClientUsage:
        """The client's usage in other processes."""
        slot = self._used.get(name)
        if slot is None:
            slot = self._find(name)
        if slot is None:
            return ClientUsage()
        return ClientUsage(
            *(self._sum(slot, row) - self._numbers[self._place(slot, row) + self._column] for row in _QuotaRow)
        )

    def note(self, name: str, held: ClientUsage) -> None:
        """Stores the client's usage in this process."""
        slot = self._used.get(name)
        if slot is None:
            slot = self._claim(name, self._clock())
            if slot is None:
                return
            self._used[name] = slot
        for row, number in zip(_QuotaRow, (held.requests, held.size_bytes, held.receiving_bytes), strict=True):
            self._numbers[self._place(slot, row) + self._column] = number
        if held.is_idle:
            del self._used[name]

    def full_again(self, name: str) -> float:
        """When the client's bucket is full again (monotonic seconds); 0 if no token was taken."""
        slot = self._find(name)
        return 0.0 if slot is None else float(_HEAD.unpack_from(self._map, slot * _SLOT_BYTES)[1])

    def set_full_again(self, name: str, at: float) -> None:
        """Stores when the client's bucket is full again (monotonic seconds)."""
        slot = self._claim(name, self._clock())
        if slot is not None:
            _HEAD.pack_into(self._map, slot * _SLOT_BYTES, _hash_of(name), at)

    def in_flight(self) -> Iterator[tuple[str, int]]:
        """Names of clients with requests in flight in any process, as in _shown_name, and their number."""
        for slot in range(SLOTS):
            requests = self._sum(slot, _QuotaRow.REQUESTS)
            if requests:
                size, name = _NAME.unpack_from(self._map, slot * _SLOT_BYTES + _HEAD.size)
                yield name[:size].decode(), requests

    def clear(self, column: int) -> None:
        """Clears the column after its process ended."""
        for slot in range(SLOTS):
            if self._numbers[slot * _SLOT_NUMBERS]:
                for row in _QuotaRow:
                    self._numbers[self._place(slot, row) + column] = 0

    def _find(self, name: str) -> int | None:
        wanted = _hash_of(name)
        return next((slot for slot in _probed(wanted) if self._hash_in(slot) == wanted), None)

    def _claim(self, name: str, now: float) -> int | None:
        """The client's slot; otherwise an unused or idle one, which becomes the client's."""
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
        return not taken or (full_again <= now and not any(self._sum(slot, row) for row in _QuotaRow))

    def _hash_in(self, slot: int) -> int:
        found: int = _HEAD.unpack_from(self._map, slot * _SLOT_BYTES)[0]
        return found

    def _sum(self, slot: int, row: _QuotaRow) -> int:
        start = self._place(slot, row)
        return sum(self._numbers[start : start + MAX_PROCESSES])

    @staticmethod
    def _place(slot: int, row: _QuotaRow) -> int:
        return slot * _SLOT_NUMBERS + _HEAD_NUMBERS + row * MAX_PROCESSES


def _hash_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def _shown_name(name: str) -> bytes:
    """The name as stored. A long one is truncated and gets its hash as a suffix, to stay distinct."""
    encoded = name.encode()
    if len(encoded) <= _NAME_BYTES:
        return encoded
    suffix = b"~%016x" % _hash_of(name)
    return encoded[: _NAME_BYTES - len(suffix)].decode(errors="ignore").encode() + suffix


def _probed(wanted: int) -> Iterator[int]:
    return ((wanted + step) % SLOTS for step in range(PROBES))


def core_quota_table(run_dir: Path) -> QuotaTable:
    """Table of a starting core, which clears its predecessor's column."""
    table = QuotaTable(run_dir / TABLE_NAME, CORE)
    table.clear(CORE)
    return table


HEARTBEAT_LOOK_S = 0.5
SILENCE_S = 10.0
_MOST_OF_A_LOOK_S = 2 * HEARTBEAT_LOOK_S


class Heartbeats:
    """Finds processes that hang. Call `look` each HEARTBEAT_LOOK_S. Suspended time does not count. Sans-IO."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}  # last beat of each, and seconds since then
        self._looked_at: float | None = None

    def look(self, beats: Mapping[int, int], now: float) -> dict[int, float]:
        """Newly hanging processes and their seconds of silence. beats: by worker number; 0 if it has not begun."""
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _MOST_OF_A_LOOK_S)
        self._looked_at = now
        hanging: dict[int, float] = {}
        for index, beat in beats.items():
            last, silent_s = self._seen.get(index, (0, 0.0))
            silent_s = silent_s + passed_s if beat and beat == last else 0.0
            if silent_s >= SILENCE_S:
                hanging[index] = silent_s
                silent_s = 0.0
            self._seen[index] = beat, silent_s
        return hanging
