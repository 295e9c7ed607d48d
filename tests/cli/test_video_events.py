"""`penstock video events` lists and exports what a run stored."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.cli.commands import app
from penstock_video.metrics import VideoMetrics
from penstock_video.sinks.schemas import iso_time
from penstock_video.store.reader import EventArchive, EventReader
from tests.deepstream_pipeline.api.pipeline import FakePipeline
from tests.deepstream_pipeline.sinks.results import UNIX_S
from tests.deepstream_pipeline.store.stores import a_store, crossed, result_with

EVENTS = 30


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with 30 crossings."""
    folder = tmp_path_factory.mktemp("out")
    store = a_store(folder / "events")
    for number in range(EVENTS):
        store.write(result_with(number, crossed(number, direction="in" if number % 3 else "out")))
    store.close()
    return folder


@pytest.fixture(scope="module")
def url(out: Path) -> Iterator[str]:
    """A running program with the same store."""
    pipeline, archive = FakePipeline(), EventArchive(EventReader(out / "events"), None, str)
    server = ApiServer(pipeline, pipeline, VideoMetrics(), ApiOptions(port=0), archive)
    server.start()
    yield server.url
    server.stop(2.0)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["events", *map(str, words)])


def test_table_has_the_newest_events(out: Path) -> None:
    """A screen of them; from the output folder or the store's own."""
    for folder in (out, out / "events"):
        shown = run(folder)
        assert shown.exit_code == 0, shown.output
        assert iso_time(UNIX_S + 2.9) in shown.stdout
        assert shown.stdout.count("line-crossing") == 20


def test_csv_and_parquet_have_every_event_that_fits(out: Path, tmp_path: Path) -> None:
    """The same rows in both."""
    assert run(out, "--csv", tmp_path / "e.csv", "--since", iso_time(UNIX_S + 1.0)).exit_code == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "e.csv").read_text())))
    assert [int(row["frame_num"]) for row in rows] == list(range(29, 9, -1))
    assert run(out, "--parquet", tmp_path / "e.parquet", "--since", iso_time(UNIX_S + 1.0)).exit_code == 0
    table = pyarrow.parquet.read_table(tmp_path / "e.parquet")
    assert table["frame_num"].to_pylist() == list(range(29, 9, -1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.csv", "e.parquet"]


def test_counts_are_a_row_for_each_rule_and_minute(out: Path) -> None:
    """With in and out."""
    rows = list(csv.DictReader(io.StringIO(run(out, "--what", "counts", "--csv", "-").stdout)))
    door = [row for row in rows if row["rule"] == "door"]
    assert [sum(int(row[name]) for row in door) for name in ("events", "in", "out")] == [30, 20, 10]


def test_running_program_gives_the_same_lines_as_its_folder(out: Path, url: str) -> None:
    """Events and tracks, page by page."""
    for what in ("events", "tracks"):
        here, there = (run(*place, "--json", "--what", what) for place in ((out,), ("--url", url)))
        assert there.exit_code == 0, there.output
        assert here.stdout == there.stdout
        assert len(json.loads(here.stdout.splitlines()[0])) > 10


REFUSED = {
    ("/nowhere",): "no events are stored in /nowhere: give the folder of a run's --out or --events-folder",
    ("--url", "http://127.0.0.1:9"): "http://127.0.0.1:9: no valid response (NewConnectionError)",
    ("--url", "127.0.0.1:8010"): "give a URL such as http://127.0.0.1:8010",
    ("--url", "http://127.0.0.1:9", "--what", "counts"): "counts are read from a folder",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_read_is_one_sentence(words: tuple[str, ...]) -> None:
    """With what to do, and no traceback."""
    refused = run(*words)
    assert refused.exit_code in (1, 2)
    assert REFUSED[words] in refused.stderr


def test_parquet_without_its_library_names_the_install_line(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read."""
    monkeypatch.setattr("penstock_video.cli.events.has_parquet", lambda: False)
    assert "Parquet needs pyarrow: pip install 'penstock[parquet]'" in run(out, "--parquet", "x").stderr
