"""One logger for the whole program: key=value lines (or JSON) on standard error."""

import logging
import sys
from enum import StrEnum
from typing import Any, TextIO

import structlog


class LogFormat(StrEnum):
    """text: key=value for people and grep. json: one object a line for collectors."""

    TEXT = "text"
    JSON = "json"


_KEYS = ("timestamp", "level", "event")


def configure_logs(log_format: LogFormat, level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log line of this process, the libraries' too, to the stream (standard error by default).

    Values are quoted and control characters escaped, so that a client's text cannot forge a line.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format is LogFormat.JSON
        else structlog.processors.KeyValueRenderer(key_order=list(_KEYS), drop_missing=True, repr_native_str=True)
    )
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
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    handler = _ToStructlog()
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a part of the program."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger


class _ToStructlog(logging.Handler):
    """Libraries' records, as our lines."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = get_logger(record.name)
        if record.exc_info and record.exc_info[1] is not None:
            logger.log(record.levelno, f"{record.getMessage()}: {record.exc_info[1]!r}", exc_info=record.exc_info)
        else:
            logger.log(record.levelno, record.getMessage())
