"""`penstock video replay`: recorded tracks against rules."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from deepstream_pipeline.sinks.schemas import ObjectLine, ObjectsLine
from server.commands import video

RULES = "line-crossing: [{name: Door, line: [[0, 50], [100, 50]], class-id: person}]\n"
LINE = "Door=0,50,100,50"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With objects.jsonl, in which one person walks down the picture and a car stands, and rules.yaml."""
    monkeypatch.setenv("COLUMNS", "200")
    lines = [
        ObjectsLine(
            source_id="cam", frame_num=number, pts_s=number / 10, time="2027-01-15T08:00:00.800Z",
            width=100, height=100, segment=0, is_inferred=True, is_corrupt=False,
            objects=(
                ObjectLine(7, number + 1, 1, "person", 0.9, (40.0, number * 4.0, 50.0, number * 4.0 + 20)),
                ObjectLine(8, number + 1, 2, "car", 0.9, (10.0, 10.0, 30.0, 30.0)),
            ),
        )
        for number in range(20)
    ]  # fmt: skip
    (tmp_path / "objects.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (tmp_path / "rules.yaml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Replayed = Callable[..., Result]


@pytest.fixture
def replay(folder: Path) -> Replayed:
    """`penstock video replay objects.jsonl WORDS…`."""
    return lambda *words: CliRunner().invoke(video.app, ["replay", "objects.jsonl", *words])


def test_replay_tells_counts_by_rule(replay: Replayed) -> None:
    """A class may be named; the recording knows its labels."""
    done = replay("--rules", "rules.yaml")
    assert done.exit_code == 0, done.output
    assert "│ cam    │ line-crossing/Door        │      1 │          1 │" in done.stdout
    assert "│ cam    │ line-crossing/Door/person │      1 │          1 │" in done.stdout
    assert done.stdout.endswith("1 events in 20 frames\n")


def test_replay_writes_events_as_a_run_does(replay: Replayed, folder: Path) -> None:
    """The lines of events.jsonl; held against themselves they are equal."""
    assert replay("--line", LINE, "--out", "events.jsonl").exit_code == 0
    (line,) = (folder / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["kind"], event["rule"], event["source_id"]) == ("line-crossing", "Door", "cam")
    assert (event["track_id"], event["class_id"], event["label"]) == (7, 1, "person")
    assert event["time"] == "2027-01-15T08:00:00.800Z"
    done = replay("--rules", "rules.yaml", "--against", "events.jsonl")
    assert (done.exit_code, "1 are equal, 0 missing here, 0 new" in done.stdout) == (0, True)


def test_replay_that_differs_is_exit_code_1(replay: Replayed, folder: Path) -> None:
    """Each difference by name."""
    replay("--line", LINE, "--out", "events.jsonl")
    done = replay("--line", "Exit=0,60,100,60", "--against", "events.jsonl")
    assert done.exit_code == 1
    assert "0 are equal, 1 missing here, 1 new" in done.stdout
    assert "missing: cam frame 8 line-crossing/Door, track 7" in done.stdout
    told = json.loads(replay("--line", "Exit=0,60,100,60", "--against", "events.jsonl", "--json").stdout)
    assert (told["events"], told["against"]["is_equal"], len(told["against"]["missing"])) == (1, False, 1)


def test_replay_without_rules_or_files_is_a_sentence(replay: Replayed, folder: Path) -> None:
    """And no traceback."""
    wrong = {
        (): (2, "there are no rules"),
        ("--rules", "no.yaml"): (2, "no.yaml: cannot be read"),
        ("--line", "Door=1,2"): (2, "--line: 'Door=1,2'"),
        ("--line", LINE, "--against", "no.jsonl"): (1, "no.jsonl: No such file"),
        ("--line", LINE, "--against", "rules.yaml"): (1, "rules.yaml: a line is no event"),
        ("--line", LINE, "--out", "no/events.jsonl"): (1, "no/events.jsonl: No such file"),
    }
    for words, (code, told) in wrong.items():
        done = replay(*words)
        assert (done.exit_code, done.stdout) == (code, ""), (words, done.output)
        assert done.stderr.startswith(f"penstock: {told}"), done.stderr
    (folder / "rules.yaml").write_text(RULES.replace("person", "persn"))
    done = replay("--rules", "rules.yaml")
    assert (done.exit_code, "rules.yaml:1:" in done.stderr, "did you mean 'person'?" in done.stderr) == (2, True, True)
    (folder / "objects.jsonl").write_text("{}\n")
    done = replay("--line", LINE)
    assert (done.exit_code, "line 1 is no line of objects.jsonl" in done.stderr) == (1, True)
