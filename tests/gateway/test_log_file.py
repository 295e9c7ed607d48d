"""The log of a stack: what its processes append, and what is read back."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from penstock.log_file import MAX_LINE_BYTES, LogFile, LogFilter, LogPosition, lines_after, newest_lines
from penstock.logs import LOG_FOLDER_VARIABLE, LogFormat, also_log_to_stack, configure_logs, get_logger, log_to_stack
from tests.support.stack import CHECKOUT

ALL = LogFilter()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The log's folder; the logger and the environment are restored."""
    monkeypatch.setenv(LOG_FOLDER_VARIABLE, "")
    (tmp_path / "logs").mkdir()
    yield tmp_path / "logs"
    structlog.reset_defaults()


def write(log: LogFile, event: str, level: str = "info", **fields: object) -> None:
    log(None, "", {"event": event, "level": level, "timestamp": "2026-11-29T03:00:00.000001Z", **fields})


def events(folder: Path, wanted: LogFilter = ALL, limit: int = 100) -> list[str]:
    return [line.event for line in newest_lines(folder, wanted, limit).lines]


def test_log_has_the_lines_of_all_processes_of_a_stack(folder: Path) -> None:
    """The parent's and a child's lines, with role, process and fields; only the owner can read the file."""
    configure_logs(LogFormat.TEXT)
    log_to_stack(folder)
    get_logger("stack").info("starting", port=8000)
    code = (
        "from penstock.logs import *; configure_logs(LogFormat.JSON); also_log_to_stack('worker 1');"
        "get_logger('rest').error('failed', path='/v2', why={'a': 1})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT, stderr=subprocess.DEVNULL)
    parent, child = newest_lines(folder, ALL, 10).lines
    assert (parent.process, parent.pid, parent.component, parent.level) == ("up", os.getpid(), "stack", "info")
    assert (parent.event, parent.fields) == ("starting", {"port": "8000"})
    assert (child.process, child.level, child.fields) == ("worker 1", "error", {"path": "/v2", "why": "{'a': 1}"})
    assert parent.time < child.time
    assert stat.S_IMODE((folder / "1.jsonl").stat().st_mode) == 0o600


def test_log_outside_of_a_stack_is_not_written(folder: Path) -> None:
    """A command that no stack started logs to standard error only."""
    configure_logs(LogFormat.TEXT)
    also_log_to_stack("gateway")
    get_logger("rest").info("alone")
    assert not list(folder.iterdir())


def test_log_never_grows_beyond_two_files(folder: Path) -> None:
    """Two writers fill many files; both go on in the newest, and no line of the last file is lost."""
    writers = [LogFile(folder, f"worker {index}", max_file_bytes=2000) for index in (1, 2)]
    for number in range(200):
        write(writers[number % 2], f"line {number}")
    files = sorted(folder.iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size < 2000 + 400 for file in files)
    kept = events(folder)
    assert kept == [f"line {number}" for number in range(200 - len(kept), 200)]


def test_log_of_a_process_that_slept_goes_on_in_the_newest_file(folder: Path) -> None:
    """Its own file was removed meanwhile."""
    sleeper, writer = (LogFile(folder, "worker", max_file_bytes=500) for _ in range(2))
    write(sleeper, "first")
    for number in range(50):
        write(writer, f"line {number}")
    write(sleeper, "awake")
    assert events(folder)[-1] == "awake"


def test_log_line_is_bounded_and_keeps_the_end_of_a_traceback(folder: Path) -> None:
    """A long value loses its middle; a line with too many values loses them, and says so."""
    log = LogFile(folder, "gateway")
    write(log, "failed", exception="Traceback " + "x" * 9000 + "ValueError: the cause")
    write(log, "many", **{f"field_{index}": "\x00" * 2000 for index in range(20)})
    long, many = newest_lines(folder, ALL, 2).lines
    assert long.fields["exception"].startswith("Traceback ")
    assert long.fields["exception"].endswith("ValueError: the cause")
    assert set(many.fields) == {"shortened"}
    assert all(len(line) < MAX_LINE_BYTES for line in (folder / "1.jsonl").read_bytes().splitlines())


def test_log_that_cannot_be_written_disturbs_nothing(folder: Path, tmp_path: Path) -> None:
    """No folder, or a link in place of the file: the line is dropped, and the processor passes it on."""
    entry = {"event": "lost", "level": "info"}
    assert LogFile(tmp_path / "absent", "gateway")(None, "", dict(entry)) == entry
    (tmp_path / "precious").write_text("")
    (folder / "1.jsonl").symlink_to(tmp_path / "precious")
    assert LogFile(folder, "gateway")(None, "", dict(entry)) == entry
    assert (tmp_path / "precious").read_text() == ""


def test_log_line_cut_off_by_a_full_disk_spoils_no_later_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torn line is skipped, and the next begins on a line of its own."""
    log, whole = LogFile(folder, "gateway"), os.write
    write(log, "before")
    monkeypatch.setattr(os, "write", lambda file, text: whole(file, text[:20]))
    write(log, "torn")
    monkeypatch.undo()
    write(log, "after")
    assert events(folder) == ["before", "after"]


def test_newest_lines_match_level_time_and_text(folder: Path) -> None:
    """A level shows more severe ones, too; a text is found in event and fields, in any case."""
    log = LogFile(folder, "gateway")
    write(log, "model loaded", model="Street")
    write(log, "probe", level="debug", component="engine")
    write(log, "call failed", level="error", reason="timeout")
    assert events(folder, LogFilter("warning")) == ["call failed"]
    assert events(folder, LogFilter(text="STREET")) == ["model loaded"]
    assert events(folder, LogFilter(text="engine: probe")) == ["probe"]
    assert events(folder, LogFilter(since="2026-11-29T03:00:00.000002Z")) == []
    assert events(folder, limit=2) == ["probe", "call failed"]
    assert newest_lines(folder / "absent", ALL, 5).lines == ()


def test_lines_after_a_position_follow_the_log_through_new_files(folder: Path) -> None:
    """Each line comes once and in order, in pages, though files are replaced; a line not yet complete is awaited."""
    log = LogFile(folder, "gateway", max_file_bytes=4000)
    at, seen = LogPosition(), []
    for number in range(60):
        write(log, f"line {number}")
        if number % 7 == 0:
            while (page := lines_after(folder, at, ALL, 3)).lines:
                seen += [line.event for line in page.lines]
                at = LogPosition.parse(str(page.next))
    assert seen == [f"line {number}" for number in range(57)]
    newest = max(folder.iterdir(), key=lambda file: int(file.stem))
    with newest.open("ab") as file:
        file.write(b'{"level":"info"')
    rest = lines_after(folder, at, ALL, 100)
    assert [line.event for line in rest.lines] == ["line 57", "line 58", "line 59"]
    assert lines_after(folder, rest.next, ALL, 100) == type(rest)((), rest.next)


def test_position_of_an_earlier_stack_begins_the_log_anew(folder: Path) -> None:
    """Its number or offset is beyond this log's: everything is shown instead of nothing."""
    write(LogFile(folder, "gateway"), "new")
    for position in (LogPosition(9, 5), LogPosition(1, 10_000)):
        assert [line.event for line in lines_after(folder, position, ALL, 5).lines] == ["new"]


@pytest.mark.parametrize("text", ["", "1", "1-", "-1-2", "1-2-3", "a-b", "1-" + "9" * 30])
def test_malformed_position_is_refused(text: str) -> None:
    """A cursor comes from a client."""
    with pytest.raises(ValueError, match="not a position in the log"):
        LogPosition.parse(text)
