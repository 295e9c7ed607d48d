"""Who may come in: caps on requests and bytes in flight, on bodies on their way, and unread answers. Sans-IO."""

from dataclasses import dataclass

from server.core.errors import Overloaded

FULL_RETRY_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of what is in flight at once.

    max_bytes: of the requests in flight and the answers that wait for their readers; and once more, of the bodies that
    are still on their way, so that slow senders do not keep others out.
    """

    max_requests: int = 1024
    max_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """What is in flight now. size_bytes: of requests, and of answers that wait for their readers."""

    requests: int
    size_bytes: int
    receiving_bytes: int = 0


class Counts:
    """What this process has in flight. Elsewhere others may count, too: see server.local.limits_page."""

    __slots__ = ("receiving_bytes", "requests", "size_bytes")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0
        self.receiving_bytes = 0

    def add(self, requests: int, size_bytes: int) -> None:
        """So much more is in flight; less where it is negative."""
        self.requests += requests
        self.size_bytes += size_bytes

    def receive(self, size_bytes: int) -> None:
        """So many bytes more of bodies are on their way; fewer where it is negative."""
        self.receiving_bytes += size_bytes

    def totals(self) -> tuple[int, int]:
        """Requests and bytes that the limits are held against."""
        return self.requests, self.size_bytes

    def total_receiving_bytes(self) -> int:
        """The same of bodies on their way."""
        return self.receiving_bytes


class Admission:
    """Counts what is in flight and refuses what would pass a limit."""

    def __init__(self, limits: AdmissionLimits, counts: Counts | None = None) -> None:
        """counts: where they are kept, if others keep theirs beside them."""
        self._limits = limits
        self._counts = counts or Counts()

    def enter(self, size_bytes: int) -> None:
        """Take a place; every enter that returned is owed one leave. Raises Overloaded where there is none."""
        requests, held_bytes = self._counts.totals()
        if requests >= self._limits.max_requests:
            raise Overloaded(
                f"{requests} requests in flight (limit {self._limits.max_requests}); "
                f"retry after {FULL_RETRY_AFTER_S} s",
                retry_after_s=FULL_RETRY_AFTER_S,
            )
        if requests and held_bytes + size_bytes > self._limits.max_bytes:
            raise Overloaded(
                f"{held_bytes} bytes in flight and {size_bytes} more asked (limit {self._limits.max_bytes}); "
                f"retry after {FULL_RETRY_AFTER_S} s",
                retry_after_s=FULL_RETRY_AFTER_S,
            )
        self._counts.add(1, size_bytes)

    def leave(self, size_bytes: int) -> None:
        """Give the place of an enter with the same size back."""
        self._counts.add(-1, -size_bytes)

    def receive(self, size_bytes: int, *, before: int) -> None:
        """So many bytes of a body have come, more will follow; `received` gives them back.

        before: bytes of the same body that came earlier. Raises Overloaded at the limit, though not for a body that
        is alone.
        """
        receiving_bytes = self._counts.total_receiving_bytes()
        if receiving_bytes + size_bytes > self._limits.max_bytes and receiving_bytes > before:
            raise Overloaded(
                f"{receiving_bytes} bytes of bodies are on their way (limit {self._limits.max_bytes}); "
                f"retry after {FULL_RETRY_AFTER_S} s",
                retry_after_s=FULL_RETRY_AFTER_S,
            )
        self._counts.receive(size_bytes)

    def received(self, size_bytes: int) -> None:
        """These bytes are of a body that is whole now, or gone."""
        self._counts.receive(-size_bytes)

    def hold(self, size_bytes: int) -> None:
        """So many bytes of an answer wait for their reader; no new request comes in while that passes the limit."""
        self._counts.add(0, size_bytes)

    def release(self, size_bytes: int) -> None:
        """Bytes that were held are read, or thrown away."""
        self._counts.add(0, -size_bytes)

    def statistics(self) -> AdmissionStatistics:
        """What is in flight now, of all who count together."""
        requests, size_bytes = self._counts.totals()
        return AdmissionStatistics(requests, size_bytes, self._counts.total_receiving_bytes())

    def __repr__(self) -> str:
        requests, size_bytes = self._counts.totals()
        return f"<Admission {requests}/{self._limits.max_requests} requests, {size_bytes} bytes>"
