"""What a terminal shows of a running video program."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.logs import LogFormat, configure_logs, get_logger
from penstock_video.cli.progress import TableWatch
from penstock_video.cli.summary import in_bytes
from penstock_video.cli.table import (
    MAX_REASONS,
    MAX_ROWS,
    cut_in_the_middle,
    duration,
    left_s,
    line_of,
    live_table,
    record_of,
    share_done,
    sums,
)
from penstock_video.interfaces import SourceStatistics
from penstock_video.types import SourceState

RUNNING = SourceStatistics("cam", "", "", SourceState.RUNNING, fps=25.0, frames=100, inferred=90)


def drawn(*sources: SourceStatistics, width: int = 100) -> str:
    """The live table as text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(live_table(sources, width))
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
    (replace(RUNNING, frames_total=600, is_loop=True), None),
    (replace(RUNNING, duration_s=30.0, position_s=10.0, is_loop=True), None),
]


@pytest.mark.parametrize(("source", "seconds"), LEFT, ids=range(len(LEFT)))
def test_time_left_goes_by_the_rate_of_the_last_seconds(source: SourceStatistics, seconds: float | None) -> None:
    """By frames where their number is known, else by the position; nothing for cameras and files that began anew."""
    assert left_s(source) == seconds


def test_sums_of_files_last_as_long_as_the_slowest() -> None:
    """The total is unknown if one of them is unknown."""
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
    assert len(lines) == 1 + MAX_ROWS + 1 + 2
    assert lines[1].startswith("cam-190")
    assert lines[2].startswith("cam-150")
    assert lines[-3].startswith("… and 188 more")
    assert "198 of 200 run" in lines[-3]
    assert lines[-2:] == ["cam-190: 401", "cam-150: no frame for 10 s"]


def test_table_shows_no_control_character_and_no_markup() -> None:
    """What a camera says is text."""
    text = drawn(replace(RUNNING, source_id="[bold]x", state=SourceState.STALLED, reason="[red]no\x1b[2J\nframe"))
    assert "[bold]x" in text
    assert "[red]no\\x1b[2J frame" in text


CROWD = (
    replace(RUNNING, source_id="parking-lot-north-entrance-camera-number-1", frames=12345, frames_total=98765,
            fps=123.4, latency_s=0.0414, duration_s=9000.0, drops={"too_old": 4321}),
    replace(RUNNING, source_id="parking-lot-north-entrance-camera-number-2", state=SourceState.RECONNECTING,
            frames=678, fps=0.0, reason="the camera did not answer within ten seconds, and is asked again in four"),
    *(replace(RUNNING, source_id=f"gate-{n}") for n in range(4)),
)  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("width", [45, 60, 80, 100, 120])
def test_table_keeps_its_numbers_whole_however_narrow_it_is(width: int, count: int) -> None:
    """The bar, latency and time left go first, ids are cut in the middle; no line is broken or too long."""
    lines = drawn(*CROWD[:count], width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:1] + lines[0].split()[2:5] == ["source", "frames", "fps", "dropped"]
    words = lines[1].split()
    assert words[0].startswith("pa")
    assert words[0].endswith("1")
    assert {"123.4", "4321"} < set(words)
    assert "12345/98765" in words or "12345" in words
    assert not any("…" in word for line in lines[:count] for word in line.split()[1:])
    if count > 1:
        assert "678" in lines[2].split()
        assert "did not answer" in " ".join(" ".join(lines[count + 2 :]).split())


def test_table_gives_a_wide_terminal_everything() -> None:
    """A whole id, a bar that is not cut."""
    row = drawn(replace(CROWD[0], frames=98764), *CROWD[1:], width=140).splitlines()[1]
    assert CROWD[0].source_id in row
    assert "━" * 15 in row
    assert "41 ms" in row


def test_table_of_many_reasons_does_not_fill_the_screen() -> None:
    """The first few, and how many more."""
    broken = [replace(RUNNING, source_id=f"c{n}", state=SourceState.FAILED, reason="no") for n in range(9)]
    lines = drawn(*broken).splitlines()
    assert lines[-2:] == ["c5: no", "… and 3 more with a reason"]
    assert len(lines) == 1 + 9 + 1 + MAX_REASONS + 1


def test_table_of_a_file_that_begins_anew_shows_no_total() -> None:
    """Neither 614 of 600 frames, nor a bar that is full for ever."""
    looped = replace(RUNNING, frames=614, frames_total=600, is_loop=True)
    row = drawn(looped).splitlines()[1]
    assert row.split() == ["cam", "running", "614", "25.0", "0"]
    assert share_done(replace(looped, frames=300)) is None
    assert "frames_total" not in record_of(looped)
    assert "614/600" not in drawn(replace(looped, is_loop=False))  # whose container is a little wrong


@pytest.mark.parametrize(("width", "text"), [(20, "camera-1"), (7, "cam…a-1"), (6, "cam…-1"), (3, "c…1")])
def test_id_is_cut_in_the_middle(width: int, text: str) -> None:
    """What tells cameras apart stands at their ends."""
    assert cut_in_the_middle("camera-1", width) == text


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
