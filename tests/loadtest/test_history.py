"""The runs in a folder of results: their history, and which of them a new run is compared with."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock_load.hardware import checkout_commit
from penstock_load.measure import history
from penstock_load.measure.history import last_run, read_history, summary_of, write_summary
from penstock_load.measure.run_folder import write_run
from penstock_load.report.history_page import render_history
from penstock_load.report.opening import headline
from penstock_load.report.run_series import history_table, series_of_runs
from penstock_load.results import Run
from tests.loadtest.runs import MACHINE, make_run

HOSTILE = '<img src=x onerror="alert(1)">'
Keep = Callable[..., Run]


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Writes a run of that day of November into a folder of its own."""

    def write(name: str, day: int = 21, **changes: object) -> Run:
        run = msgspec.structs.replace(make_run(), began_at=f"2025-11-{day}T08:00:00+00:00", **changes)
        write_run(tmp_path / name, run)
        return run

    return write


def test_last_run_is_the_newest_earlier_one_of_its_kind(keep: Keep, tmp_path: Path) -> None:
    """Other scenarios, models, machines and later runs are not compared with, however new."""
    keep("first", 20)
    keep("second", 22)
    keep("other-scenario", 23, scenario="overload")
    keep("other-model", 23, models=("resnet50",))
    keep("other-machine", 23, machine=msgspec.structs.replace(MACHINE, cores=64), server_hardware="")
    keep("later", 25)
    run = keep("this", 24)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    found = last_run(tmp_path / "this", run)
    assert found is not None
    assert found.name == "second"


def test_first_run_has_no_last_one(keep: Keep, tmp_path: Path) -> None:
    """A run is not compared with itself."""
    assert last_run(tmp_path / "only", keep("only")) is None


def test_large_records_are_not_read(keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of records would take minutes to compare: the rounds' medians are used then."""
    keep("before", 20)
    (tmp_path / "before" / "records.jsonl").write_bytes(b"{}\n" * 10)
    monkeypatch.setattr(history, "MAX_COMPARED_BYTES", 20)
    found = last_run(tmp_path / "this", keep("this", 21))
    assert found is not None
    assert found.records_path is None


def test_history_has_a_row_a_run_the_newest_first(keep: Keep, tmp_path: Path) -> None:
    """Runs with and without a summary are listed alike, and a renamed folder counts by its new name."""
    first, second = keep("first", 20, commit="aaa"), keep("second", 21, commit="bbb")
    write_summary(tmp_path / "second", summary_of(second, "name-before", headline(second)))
    keep("other", 22, scenario="overload")
    rows = read_history(tmp_path, headline, "image-steady")
    assert [(row.name, row.commit) for row in rows] == [("second", "bbb"), ("first", "aaa")]
    p99_ms = next(it.spread.median for it in first.measurements if it.measure == "p99_ms")
    assert (rows[1].p99_ms, rows[1].outcome, rows[1].machine) == (p99_ms, "none", "cpu")


def test_history_is_bounded(keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many runs the newest are read."""
    for day in (20, 21, 22):
        keep(str(day), day)
    monkeypatch.setattr(history, "MAX_RUNS", 2)
    assert [row.name for row in read_history(tmp_path, headline)] == ["22", "21"]


def test_runs_that_cannot_be_compared_are_series_of_their_own(keep: Keep, tmp_path: Path) -> None:
    """Each scenario, model, SLO and machine has its own table; what no run has is no column."""
    keep("a", 20)
    keep("b", 21)
    keep("c", 22, slo_p99_ms=50.0)
    series = series_of_runs(read_history(tmp_path, headline))
    assert [[run.name for run in one.runs] for one in series] == [["c"], ["b", "a"]]
    assert "streams" not in history_table(series[0]).head


def test_history_page_escapes_foreign_text(keep: Keep, tmp_path: Path) -> None:
    """A commit, a server's name or a model that is markup stays text, and the page loads nothing."""
    for day in (20, 21):
        keep(f"x{day}", day, commit=HOSTILE, server=HOSTILE, models=(HOSTILE,), scenario=HOSTILE)
    page = render_history(series_of_runs(read_history(tmp_path, headline)))
    assert "<img src=x" not in page
    assert page.count("data:image/svg+xml") == 2
    assert "http://" not in page


def test_commit_is_that_of_the_folders_checkout(tmp_path: Path) -> None:
    """The commit is named, with a plus when files differ from it; a folder without one has none."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, timeout=30)

    assert checkout_commit(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    commit = checkout_commit(tmp_path)
    assert len(commit) == 12
    (tmp_path / "file").write_text("b")
    assert checkout_commit(tmp_path) == f"{commit}+"


def test_summary_says_that_the_figures_cannot_be_trusted() -> None:
    """A complaint makes the run invalid; without one a missed target is only missed."""
    invalid = msgspec.structs.replace(make_run(), complaints=("its core was full",))
    summary = summary_of(invalid, "a", "FAIL", "other programs kept 1 core busy")
    assert (summary.outcome, summary.is_invalid, summary.note) == ("fail", True, "other programs kept 1 core busy")
    assert not summary_of(make_run(), "b", "PASS").is_invalid
