"""Limits of requests and bytes in flight, of incomplete bodies, and of unread responses. Sans-IO."""

from dataclasses import dataclass

from penstock.protocol.errors import Overloaded

FULL_RETRY_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class InFlightLimits:
    """Limits of one gateway. max_bytes: of requests and unread responses, and separately of incomplete bodies."""

    max_requests: int = 1024
    max_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class InFlightStatistics:
    """Current counts. size_bytes: of requests and unread responses."""

    requests: int
    size_bytes: int
    receiving_bytes: int = 0


class InFlightCounts:
    """Counts of this process. For counts of several, see penstock.gateway.workers.shared_counters."""

    __slots__ = ("receiving_bytes", "requests", "size_bytes")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0
        self.receiving_bytes = 0

    def add(self, requests: int, size_bytes: int) -> None:
        """Adds to the counts; negative values subtract."""
        self.requests += requests
        self.size_bytes += size_bytes

    def receive(self, size_bytes: int) -> None:
        """Adds bytes of incomplete bodies; negative values subtract."""
        self.receiving_bytes += size_bytes

    def totals(self) -> tuple[int, int]:
        """Requests and bytes to compare with the limits."""
        return self.requests, self.size_bytes

    def total_receiving_bytes(self) -> int:
        """Bytes of incomplete bodies to compare with the limit."""
        return self.receiving_bytes


class InFlightLimiter:
    """Counts what is in flight and rejects what would exceed a limit."""

    def __init__(self, limits: InFlightLimits, counts: InFlightCounts | None = None) -> None:
        """counts: shared with other processes, if given."""
        self._limits = limits
        self._counts = counts or InFlightCounts()

    def enter(self, size_bytes: int) -> None:
        """Takes a slot until `leave`. Raises Overloaded if there is none."""
        requests, held_bytes = self._counts.totals()
        if requests >= self._limits.max_requests:
            raise _full(f"{requests} requests in flight (limit {self._limits.max_requests})")
        if requests and held_bytes + size_bytes > self._limits.max_bytes:
            raise _full(f"{held_bytes} bytes in flight and {size_bytes} more asked (limit {self._limits.max_bytes})")
        self._counts.add(1, size_bytes)

    def leave(self, size_bytes: int) -> None:
        """Releases the slot of an `enter` with the same size."""
        self._counts.add(-1, -size_bytes)

    def receive(self, size_bytes: int, *, before: int) -> None:
        """Counts received bytes of an incomplete body. before: counted earlier. Raises Overloaded above the limit."""
        receiving_bytes = self._counts.total_receiving_bytes()
        if receiving_bytes + size_bytes > self._limits.max_bytes and receiving_bytes > before:
            raise _full(f"{receiving_bytes} bytes of bodies are on their way (limit {self._limits.max_bytes})")
        self._counts.receive(size_bytes)

    def received(self, size_bytes: int) -> None:
        """Subtracts the bytes of a body that is complete or was dropped."""
        self._counts.receive(-size_bytes)

    def hold(self, size_bytes: int) -> None:
        """Counts the bytes of an unread response; new requests are rejected while this exceeds the limit."""
        self._counts.add(0, size_bytes)

    def release(self, size_bytes: int) -> None:
        """Subtracts the bytes of a response that was read or dropped."""
        self._counts.add(0, -size_bytes)

    def statistics(self) -> InFlightStatistics:
        """Current counts, of all processes that share them."""
        requests, size_bytes = self._counts.totals()
        return InFlightStatistics(requests, size_bytes, self._counts.total_receiving_bytes())

    def __repr__(self) -> str:
        requests, size_bytes = self._counts.totals()
        return f"<Admission {requests}/{self._limits.max_requests} requests, {size_bytes} bytes>"


def _full(what: str) -> Overloaded:
    return Overloaded(f"{what}; retry after {FULL_RETRY_AFTER_S} s", retry_after_s=FULL_RETRY_AFTER_S)
