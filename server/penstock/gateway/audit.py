"""The audit log: one JSON line per admin action and refused authentication; never a secret."""

import json
import logging
import os
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from penstock.logs import get_logger

OK, CANCELLED = "ok", "cancelled"
MAX_TEXT = 256  # characters of a field
BUFFER_BYTES = 64 << 10  # more than a line, so that each line is one write

log = get_logger("audit")


class AuditLogError(Exception):
    """The audit log's file cannot be opened."""


class AuditLog:
    """Appends lines to a file that processes may share and that may be rotated. Thread-safe. Errors are logged."""

    def __init__(self, path: Path | None) -> None:
        """path: None writes nothing. Raises AuditLogError."""
        try:
            self._file = None if path is None else _AppendedFile(path)
        except OSError as error:
            reason = error.strerror or error
            raise AuditLogError(f"audit_log {path}: cannot be opened ({reason}); name a file to append to") from error

    def record(self, client: str, address: str, action: str, target: str, outcome: str) -> None:
        """client: "" for an anonymous one. outcome: OK, or the reason of the refusal or failure as in metrics."""
        if self._file is None:
            return
        line = format_line(client, address, action, target, outcome, now=datetime.now(UTC))
        try:
            self._file.handle(logging.makeLogRecord({"msg": line}))
        except (OSError, ValueError) as error:
            log.error("cannot write to the audit log; the line is logged here instead", error=str(error), line=line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


NO_AUDIT = AuditLog(None)


def format_line(*fields: str, now: datetime) -> str:
    """The line without its newline. fields: client, address, action, target, outcome."""
    client, address, action, target, outcome = map(_bounded, fields)
    time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"time": time, "client": client or None, "address": address or None}
    return json.dumps(line | {"action": action, "target": target, "outcome": outcome})


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


class _AppendedFile(WatchedFileHandler):
    """Creates its file with mode 0600, and raises errors instead of printing them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", BUFFER_BYTES, self.encoding, opener=_open_private)

    def handleError(self, _: logging.LogRecord) -> None:
        raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOCTTY, 0o600)
