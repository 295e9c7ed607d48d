"""What the REST front tells of its requests."""

from typing import Protocol


class RequestRecorder(Protocol):
    """Counts requests; server.metrics.Metrics is one."""

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """An inference request was answered. model: a bounded label."""
        ...

    def rejected(self, reason: str) -> None:
        """The gateway refused or failed a request itself. reason: an error class's stable word."""
        ...

    def cancelled(self, protocol: str) -> None:
        """A client went away before its answer."""
        ...
