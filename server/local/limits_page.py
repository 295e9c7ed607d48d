"""What is in flight in every process of one gateway: a page of memory that all map, each writing its own column only.

No lock is needed: a number has one writer, and is written and read at once. Sums may be a request old.
"""

import mmap
import os
from enum import IntEnum
from pathlib import Path

from server.admission import Counts

PAGE_NAME = "limits"
CORE = 0  # its column
MAX_PROCESSES = 65  # the core, and as many fronts as the settings allow
_NUMBER_BYTES = 8


class Row(IntEnum):
    """What is counted. LASTING ones go on where a process was replaced; the others are those of the running one.

    BEATS: of a front's event loop, one each quarter of a second; 0 until its first.
    """

    REQUESTS = 0
    SIZE_BYTES = 1
    RECEIVING_BYTES = 2
    CONNECTIONS = 3
    DECODES_WAITING = 4
    DECODER_RESTARTS = 5
    SPANS_DROPPED = 6
    BEATS = 7
    GRPC_CONNECTIONS = 8


LASTING = frozenset((Row.DECODER_RESTARTS, Row.SPANS_DROPPED))


class LimitsPage:
    """Rows of numbers, a column a process: 0 is the core's, a front's is its number."""

    def __init__(self, path: Path) -> None:
        """Makes the file where it is not there. Raises OSError."""
        size_bytes = len(Row) * MAX_PROCESSES * _NUMBER_BYTES
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, size_bytes)
            self._map = mmap.mmap(handle, size_bytes)
        finally:
            os.close(handle)
        self._numbers = memoryview(self._map).cast("q")

    def read(self, row: Row, column: int) -> int:
        """One number."""
        return self._numbers[row * MAX_PROCESSES + column]

    def write(self, row: Row, column: int, number: int) -> None:
        """By the column's own process, or when there is none."""
        self._numbers[row * MAX_PROCESSES + column] = number

    def total(self, row: Row) -> int:
        """Of all processes."""
        start = row * MAX_PROCESSES
        return sum(self._numbers[start : start + MAX_PROCESSES])

    def clear(self, column: int) -> None:
        """The column's process is gone, and with it whatever it had in flight."""
        for row in Row:
            if row not in LASTING:
                self.write(row, column, 0)

    def close(self) -> None:
        """Unmap it."""
        self._numbers.release()
        self._map.close()


class SharedCounts(Counts):
    """One process's counts of what is in flight, beside those of the others."""

    def __init__(self, page: LimitsPage, column: int) -> None:
        super().__init__()
        self._page = page
        self._column = column

    def add(self, requests: int, size_bytes: int) -> None:
        """To this process's own."""
        super().add(requests, size_bytes)
        self._page.write(Row.REQUESTS, self._column, self.requests)
        self._page.write(Row.SIZE_BYTES, self._column, self.size_bytes)

    def receive(self, size_bytes: int) -> None:
        """To this process's own bodies on their way."""
        super().receive(size_bytes)
        self._page.write(Row.RECEIVING_BYTES, self._column, self.receiving_bytes)

    def totals(self) -> tuple[int, int]:
        """Requests and bytes in flight, of all processes."""
        return self._page.total(Row.REQUESTS), self._page.total(Row.SIZE_BYTES)

    def total_receiving_bytes(self) -> int:
        """Of all processes."""
        return self._page.total(Row.RECEIVING_BYTES)


def core_counts(page: LimitsPage) -> SharedCounts:
    """Of a core that begins: what a former one had in flight is gone."""
    page.clear(CORE)
    return SharedCounts(page, CORE)
