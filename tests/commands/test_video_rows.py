"""What a terminal shows of a running video program."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from deepstream_pipeline.types import SourceState, SourceStatistics
from server.commands.video_rows import MAX_ROWS, duration, left_s, line_of, live_table, sums
from server.commands.video_summary import in_bytes
from server.commands.video_watch import TableWatch
from server.logs import LogFormat, configure_logs, get_logger

RUNNING = SourceStatistics("cam", "", "", SourceState.RUNNING, fps=25.0, frames=100, inferred=90)


def drawn(*sources: SourceStatistics, width: int = 100) -> str:
    """The live table as text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(live_table(sources))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


LEFT = [
    (replace(RUNNING, frames_total=600), 20.0),
    (replace(RUNNING, duration_s=30.0, position_s=10.0), 8.0),
    (replace(RUNNING, frames_total=600, fps=0.0), None),
    (replace(RUNNING, frames_total=600, is_live=True), None),
    (RUNNING, None),
    (replace(RUNNING, frames_total=99), 0.0),
    (replace(RUNNING, frames_total=50), None),
    (replace(RUNNING, frames_total=600, state=SourceState.ENDED), 0.0),
]


@pytest.mark.parametrize(("source", "seconds"), LEFT, ids=range(len(LEFT)))
def test_time_left_goes_by_the_rate_of_the_last_seconds(source: SourceStatistics, seconds: float | None) -> None:
    """By frames where their number is known, else by the position; nothing for cameras and files that began anew."""
    assert left_s(source) == seconds


def test_sums_of_files_last_as_long_as_the_slowest() -> None:
    """And nobody knows where one of them is not known."""
    slow, fast = replace(RUNNING, frames_total=600), replace(RUNNING, frames_total=200)
    assert sums([slow, fast]).left_s == 20.0
    assert sums([slow, RUNNING]).left_s is None
    assert (sums([slow, fast]).frames, sums([slow, fast]).fps) == (200, 50.0)


def test_table_of_one_source_is_one_row() -> None:
    """State, frames of how many, rate, drops, latency, time left; no row of sums."""
    source = replace(RUNNING, frames_total=600, drops={"too_old": 2, "corrupt": 1}, latency_s=0.0414)
    head, row = drawn(source).splitlines()
    assert head.split() == ["source", "state", "frames", "fps", "dropped", "latency", "left"]
    assert [word for word in row.split() if "━" not in word] == [
        *("cam", "running", "100/600", "25.0", "3", "41", "ms", "20", "s")
    ]


def test_table_of_many_sources_shows_those_in_trouble_first() -> None:
    """At most twelve rows, then how many more, then the sums: it fits a terminal."""
    sources = [replace(RUNNING, source_id=f"cam-{number}") for number in range(200)]
    sources[150] = replace(sources[150], state=SourceState.RECONNECTING, reason="no frame for 10 s")
    sources[190] = replace(sources[190], state=SourceState.AUTH_FAILED, reason="401")
    lines = drawn(*sources).splitlines()
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[1].startswith("cam-190")
    assert lines[2].startswith("cam-150")
    assert lines[-1].startswith("… and 188 more")
    assert "198 of 200 run" in lines[-1]


def test_table_shows_no_control_character_and_no_markup() -> None:
    """What a camera says is text."""
    text = drawn(replace(RUNNING, source_id="[bold]x", state=SourceState.STALLED, reason="[red]no\x1b[2J\nframe"))
    assert "[bold]x" in text
    assert "[red]no\\x1b[2J frame" in text


def test_line_of_many_in_trouble_names_the_first() -> None:
    """And counts the others."""
    sources = [replace(RUNNING, source_id=f"c{n}", state=SourceState.STALLED) for n in range(6)]
    assert line_of(sources, 65).endswith("; c0 stalled; c1 stalled; c2 stalled; c3 stalled; 2 more in trouble")
    assert line_of([RUNNING], 65) == "1:05: 1 of 1 running, 100 frames, 25.0 fps, 0 dropped"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (185, "3:05"), (3723, "1:02:03")])
def test_duration_is_as_people_write_it(seconds: float, text: str) -> None:
    """Seconds, then minutes, then hours."""
    assert duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5 * 10**12, "5000.0 GB")])
def test_size_is_as_people_write_it(size: int, text: str) -> None:
    """Of a file."""
    assert in_bytes(size) == text


def test_log_lines_scroll_above_the_table() -> None:
    """A warning of a camera stays, and does not tear the table apart."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with TableWatch(console) as watch:
        watch.show([RUNNING])
        configure_logs(LogFormat.TEXT, "warning", stream=watch.log_stream)
        get_logger("video").warning("a source is lost", source="cam")
        watch.show([RUNNING])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "warning video: a source is lost source=cam" in text
    assert text.index("a source is lost") < text.rindex("running")
