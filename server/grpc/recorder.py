"""What the gRPC front tells of its calls."""

from typing import Protocol


class CallRecorder(Protocol):
    """Counts calls; server.metrics.Metrics is one."""

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """An inference was answered. model: a bounded label."""
        ...

    def rejected(self, reason: str) -> None:
        """The gateway refused or failed a call itself. reason: an error class's stable word."""
        ...

    def cancelled(self, protocol: str) -> None:
        """A client went away before its answer."""
        ...


class RefusalsOnly:
    """Of a core: its fronts have counted what it is asked."""

    def __init__(self, record: CallRecorder) -> None:
        self._record = record

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """Counted elsewhere."""

    def rejected(self, reason: str) -> None:
        """What the core refused, no front counts."""
        self._record.rejected(reason)

    def cancelled(self, protocol: str) -> None:
        """Counted elsewhere."""
