"""The log: one line an event, whatever is in it."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from penstock.logs import LogFormat, configure_logs, get_logger


@pytest.fixture
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines_of(log_format: LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logs(log_format, level, stream)
    return stream


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("log_format", LogFormat)
def test_log_of_a_clients_text_stays_one_line(log_format: LogFormat) -> None:
    """Line breaks and control characters, in a value or in the event, cannot forge a second line."""
    stream = lines_of(log_format)
    get_logger("rest").info("request failed", path="/v2\n2026-11-21T00:00:00.000Z info\x1b[2J")
    get_logger("rest").info("the model says\n2026-11-21T00:00:00.000Z info    engine: all is well\x1b[2J")
    assert stream.getvalue().count("\n") == 2
    assert "\x1b" not in stream.getvalue()


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("log_format", LogFormat)
def test_log_of_an_exception_holds_its_trace_in_one_line(log_format: LogFormat) -> None:
    """Ours and the libraries': what is logged as an exception says where it came from."""
    stream = lines_of(log_format)
    try:
        raise ValueError("the cause")
    except ValueError:
        get_logger("grpc").exception("a call failed")
        logging.getLogger("asyncio").exception("a task failed")
    first, second = stream.getvalue().splitlines()
    for line in (first, second):
        assert "the cause" in line
        assert "test_logs.py" in line


@pytest.mark.usefixtures("_restored")
def test_log_as_json_is_one_object_a_line() -> None:
    """What collectors read: level, event, component and every field by its name."""
    stream = lines_of(LogFormat.JSON)
    get_logger("stack").warning("gateway died", code=-9)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["event"], line["component"], line["code"]) == ("warning", "gateway died", "stack", -9)


@pytest.mark.usefixtures("_restored")
def test_log_below_its_level_is_silent() -> None:
    """Debug lines are dropped by default."""
    stream = lines_of(LogFormat.TEXT)
    get_logger("rest").debug("request refused", reason="invalid")
    assert stream.getvalue() == ""
    stream = lines_of(LogFormat.TEXT, "debug")
    get_logger("rest").debug("request refused", reason="invalid")
    assert stream.getvalue().endswith(" rest: request refused reason=invalid\n")


@pytest.mark.usefixtures("_restored")
def test_log_as_text_reads_as_time_level_component_and_event() -> None:
    """What a person looks for stands in front; a value is quoted where it is not one word."""
    stream = lines_of(LogFormat.TEXT)
    get_logger("engine").warning("engine is down", reason="no answer", port=9000, models="a,b")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning engine: engine is down "
        r"reason='no answer' port=9000 models=a,b\n",
        stream.getvalue(),
    )


class Gone(io.StringIO):
    """A pipe whose reader left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.usefixtures("_restored")
def test_unreadable_log_loses_only_its_line() -> None:
    """A closed reader or a full disk is no error for the code that logs."""
    configure_logs(LogFormat.TEXT, stream=Gone())
    get_logger("core").info("joined")
    logging.getLogger("library").warning("said")
