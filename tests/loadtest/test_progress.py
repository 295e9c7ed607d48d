"""The progress of a run as lines of a file."""

from pathlib import Path

import msgspec
import pytest

from penstock.protocol.load_reports import LoadProgress
from penstock_load.cli import progress
from penstock_load.cli.output import QuietWatch
from penstock_load.cli.progress import ProgressWatch
from penstock_load.results import LiveView
from tests.loadtest.runs import make_phase, make_records


def view(**changes: object) -> LiveView:
    """A moment of a phase."""
    made = LiveView(
        phase="steady",
        phase_number=2,
        phase_count=4,
        round=1,
        rounds=3,
        elapsed_s=7.0,
        seconds=20.0,
        offered_per_s=60.0,
        sent=400,
        ok=390,
        refused=4,
        failed=1,
        timeouts=0,
        in_flight=5,
        rate_per_s=58.25,
        slo_p99_ms=250.0,
        generator_lag_ms=0.1,
        p50_ms=20.0,
        p99_ms=61.5,
    )
    return msgspec.structs.replace(made, **changes)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines_of(path: Path) -> list[LoadProgress]:
    return [msgspec.json.decode(line, type=LoadProgress) for line in path.read_bytes().splitlines()]


def test_file_has_a_line_a_second_and_every_text(tmp_path: Path) -> None:
    """Views come twice a second; every other one is written, and notes and results of phases in between."""
    path, clock = tmp_path / "progress.jsonl", Clock()
    with ProgressWatch(path, QuietWatch(), clock) as watch:
        for half_seconds in range(6):
            clock.now_s = 100.0 + half_seconds / 2
            watch.show(view(p99_ms=float(half_seconds)))
        watch.note("two lines\nare one")
        watch.phase_done(make_phase(make_records()))
    lines = lines_of(path)
    assert [(line.at_s, line.p99_ms) for line in lines[:3]] == [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0)]
    assert (lines[0].phase, lines[0].ok_per_s, lines[0].refused) == ("steady", 58.25, 4)
    assert lines[3].text == "two lines are one"
    assert lines[4].text.startswith("round 1 steady: ")


def test_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the run, the file ends at some point."""
    monkeypatch.setattr(progress, "MAX_LINES", 3)
    with ProgressWatch(tmp_path / "progress.jsonl", QuietWatch()) as watch:
        for number in range(5):
            watch.note(str(number))
    assert [line.text for line in lines_of(tmp_path / "progress.jsonl")] == ["0", "1", "2"]


def test_disk_that_is_full_does_not_end_the_run() -> None:
    """Lines are lost, the measurement is not."""
    with ProgressWatch(Path("/dev/full"), QuietWatch()) as watch:
        watch.note("a")
        watch.show(view())
