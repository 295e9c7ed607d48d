"""Who may come in: caps on requests and bytes in flight. Sans-IO."""

from dataclasses import dataclass

from server.core.errors import Overloaded

FULL_RETRY_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of what is in flight at once."""

    max_requests: int = 512
    max_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """What is in flight now."""

    requests: int
    size_bytes: int


class Admission:
    """Counts what is in flight and refuses what would pass a limit."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._requests = 0
        self._size_bytes = 0

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

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(self._requests, self._size_bytes)

    def __repr__(self) -> str:
        return f"<Admission {self._requests}/{self._limits.max_requests} requests, {self._size_bytes} bytes>"
