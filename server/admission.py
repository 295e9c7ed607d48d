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

    max_requests: int = 512
    max_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """What is in flight now. size_bytes: of requests, and of answers that wait for their readers."""

    requests: int
    size_bytes: int
    receiving_bytes: int = 0


class Admission:
    """Counts what is in flight and refuses what would pass a limit."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._requests = 0
        self._size_bytes = 0
        self._receiving_bytes = 0

    def enter(self, size_bytes: int) -> None:
        """Take a place; every enter that returned is owed one leave. Raises Overloaded where there is none."""
        if self._requests >= self._limits.max_requests:
            raise Overloaded(
                f"{self._requests} requests in flight (limit {self._limits.max_requests}); "
                f"retry after {FULL_RETRY_AFTER_S} s",
                retry_after_s=FULL_RETRY_AFTER_S,
            )
        if self._requests and self._size_bytes + size_bytes > self._limits.max_bytes:
            raise Overloaded(
                f"{self._size_bytes} bytes in flight and {size_bytes} more asked (limit {self._limits.max_bytes}); "
                f"retry after {FULL_RETRY_AFTER_S} s",
                retry_after_s=FULL_RETRY_AFTER_S,
            )
        self._requests += 1
        self._size_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """Give the place of an enter with the same size back."""
        self._requests -= 1
        self._size_bytes -= size_bytes

    def receive(self, size_bytes: int, *, before: int) -> None:
        """So many bytes of a body have come, more will follow; `received` gives them back.

        before: bytes of the same body that came earlier. Raises Overloaded at the limit, though not for a body that
        is alone.
        """
        total_bytes = self._receiving_bytes + size_bytes
        if total_bytes > self._limits.max_bytes and self._receiving_bytes > before:
            raise Overloaded(
                f"{self._receiving_bytes} bytes of bodies are on their way (limit {self._limits.max_bytes}); "
                f"retry after {FULL_RETRY_AFTER_S} s",
                retry_after_s=FULL_RETRY_AFTER_S,
            )
        self._receiving_bytes = total_bytes

    def received(self, size_bytes: int) -> None:
        """These bytes are of a body that is whole now, or gone."""
        self._receiving_bytes -= size_bytes

    def hold(self, size_bytes: int) -> None:
        """So many bytes of an answer wait for their reader; no new request comes in while that passes the limit."""
        self._size_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Bytes that were held are read, or thrown away."""
        self._size_bytes -= size_bytes

    def statistics(self) -> AdmissionStatistics:
        """What is in flight now."""
        return AdmissionStatistics(self._requests, self._size_bytes, self._receiving_bytes)

    def __repr__(self) -> str:
        return f"<Admission {self._requests}/{self._limits.max_requests} requests, {self._size_bytes} bytes>"
