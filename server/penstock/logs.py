"""The program's logger: lines for people, or JSON, on standard error."""

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from penstock.log_file import LogFile


class LogFormat(StrEnum):
    """text: `time level component: event key=value …`, for people and grep. json: one object per line."""

    TEXT = "text"
    JSON = "json"


_BARE = re.compile(r"[\w.:/+,@%-]+")
_MILLISECONDS = len("2026-11-21T03:41:13.010")


def configure_logs(log_format: LogFormat, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends all log lines of this process to the stream (default: standard error), escaped against forged lines."""
    renderer: Any = structlog.processors.JSONRenderer() if log_format is LogFormat.JSON else _render_text
    target = stream if stream is not None else sys.stderr
    threshold = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Lossy(target))),
        cache_logger_on_first_use=False,
    )
    handler = _ToStructlog()
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


LOG_FOLDER_VARIABLE = "PENSTOCK_LOG_FOLDER"  # of the stack, for its processes
PROCESS_VARIABLE = "PENSTOCK_PROCESS"  # of the gateway's processes: their role
PARENT = "up"  # role of the parent process


def log_to_stack(folder: Path) -> None:
    """For the parent process of a stack: creates its log, and lets later child processes find it."""
    with suppress(OSError):  # a full disk: the stack runs without this log
        folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[LOG_FOLDER_VARIABLE] = str(folder)
    also_log_to_stack(PARENT)


def also_log_to_stack(process: str) -> None:
    """Appends this process's later lines also to the log of the stack that it belongs to, if there is one.

    process: its role in the stack. Call it after configure_logs.
    """
    if (folder := stack_log_folder()) is not None:
        processors = [each for each in structlog.get_config()["processors"] if not isinstance(each, LogFile)]
        structlog.configure(processors=[*processors[:-1], LogFile(folder, process), processors[-1]])


def stack_log_folder() -> Path | None:
    """The folder of the log of the stack that this process belongs to."""
    folder = os.environ.get(LOG_FOLDER_VARIABLE)
    return Path(folder) if folder else None


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a component."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger


def _render_text(_: object, __: str, entry: MutableMapping[str, Any]) -> str:
    time, level = str(entry.pop("timestamp")).rstrip("Z")[:_MILLISECONDS] + "Z", str(entry.pop("level"))
    head = f"{time} {level:<7} {entry.pop('component', 'penstock')}: {_printable(str(entry.pop('event')))}"
    return " ".join([head, *(f"{key}={_shown(str(value))}" for key, value in entry.items())])


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _shown(value: str) -> str:
    """The value, quoted unless it is a single word."""
    return value if _BARE.fullmatch(value) else repr(value)


class _Lossy:
    """A stream that drops lines that cannot be written: its reader is gone, or the disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class _ToStructlog(logging.Handler):
    """Forwards libraries' records to our logger."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = get_logger(record.name)
        if record.exc_info and record.exc_info[1] is not None:
            logger.log(record.levelno, f"{record.getMessage()}: {record.exc_info[1]!r}", exc_info=record.exc_info)
        else:
            logger.log(record.levelno, record.getMessage())
