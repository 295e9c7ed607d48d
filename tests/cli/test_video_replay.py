"""`penstock video replay`: recorded tracks against rules."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from penstock_video.cli import commands as video
from penstock_video.sinks.schemas import ObjectLine, ObjectsLine

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
    assert "│ cam    │ line-crossing/Door.in  │      1 │          1 │" in done.stdout
    assert "│ cam    │ line-crossing/Door.out │      0 │          0 │" in done.stdout
    assert "Door/person" not in done.stdout  # the only class says what the rule says
    assert done.stdout.endswith("1 events in 20 frames\n")


def test_replay_writes_events_as_a_run_does(replay: Replayed, folder: Path) -> None:
    """The lines of events.jsonl; held against themselves they are equal."""
    assert replay("--line", LINE, "--out", "events.jsonl").exit_code == 0
    (line,) = (folder / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["kind"], event["rule"], event["source_id"]) == ("line-crossing", "Door", "cam")
    assert (event["track_id"], event["class_id"], event["label"]) == (7, 1, "person")
    assert (event["direction"], event["score"], event["xyxy"]) == ("in", 0.9, [40.0, 32.0, 50.0, 52.0])
    assert event["time"] == "2027-01-15T08:00:00.800Z"
    done = replay("--rules", "rules.yaml", "--against", "events.jsonl")
    assert (done.exit_code, "1 are equal, 0 missing here, 0 new" in done.stdout) == (0, True)


def test_replay_that_differs_is_exit_code_1(replay: Replayed, folder: Path) -> None:
    """Each difference by name."""
    replay("--line", LINE, "--out", "events.jsonl")
    done = replay("--line", "Exit=0,60,100,60", "--against", "events.jsonl")
    assert done.exit_code == 1
    assert "0 are equal, 1 missing here, 1 new" in done.stdout
    assert "missing: cam frame 8 line-crossing/Door.in, track 7" in done.stdout
    report = json.loads(replay("--line", "Exit=0,60,100,60", "--against", "events.jsonl", "--json").stdout)
    assert (report["events"], report["against"]["is_equal"], len(report["against"]["missing"])) == (1, False, 1)


def test_replay_without_rules_or_files_is_a_sentence(replay: Replayed, folder: Path) -> None:
    """And no traceback."""
    wrong = {
        (): (2, "there are no rules"),
        ("--rules", "no.yaml"): (2, "no.yaml: cannot be read"),
        ("--line", "Door=1,2"): (2, "--line: 'Door=1,2'"),
        ("--line", LINE, "--against", "no.jsonl"): (1, "no.jsonl: No such file"),
        ("--line", LINE, "--against", "rules.yaml"): (1, "rules.yaml: line 1 is no event"),
        ("--line", LINE, "--out", "no/events.jsonl"): (1, "no/events.jsonl: No such file"),
    }
    for words, (code, message) in wrong.items():
        done = replay(*words)
        assert (done.exit_code, done.stdout) == (code, ""), (words, done.output)
        assert done.stderr.startswith(f"penstock: {message}"), done.stderr
    (folder / "rules.yaml").write_text(RULES.replace("class-id: person", "class-id: {person: 1}"))
    done = replay("--rules", "rules.yaml")
    assert (done.exit_code, "rules.yaml:1:" in done.stderr) == (2, True)
    (folder / "objects.jsonl").write_text("{}\n")
    done = replay("--line", LINE)
    assert (done.exit_code, "line 1 is no line of objects.jsonl" in done.stderr) == (1, True)


def test_replay_takes_rules_about_classes_that_the_recording_lacks(replay: Replayed, folder: Path) -> None:
    """The model of the run knew them; here they match nothing, which a note tells once."""
    line = "line: [[0, 50], [100, 50]]"
    door, dogs = f"{{name: Door, {line}, class-id: [person, dog, 7]}}", f"{{name: Dogs, {line}, class-id: dog}}"
    (folder / "rules.yaml").write_text(f"line-crossing: [{door}, {dogs}]\n")
    done = replay("--rules", "rules.yaml", "--json")
    assert done.exit_code == 0, done.output
    note = "penstock: objects.jsonl: no object in it is called 'dog', so that this class matches nothing\n"
    assert done.stderr == note
    report = json.loads(done.stdout)
    assert report["counts"]["cam"]["line-crossing/Dogs.in"] == 0
    assert report["events_by_rule"]["cam"] == {
        "line-crossing/Dogs.in": 0, "line-crossing/Dogs.out": 0,
        "line-crossing/Door.in": 1, "line-crossing/Door.in/person": 1, "line-crossing/Door.out": 0,
    }  # fmt: skip
    (folder / "rules.yaml").write_text(RULES.replace("person", "persn"))
    assert "'persn', so that this class matches nothing; did you mean person?" in replay("--rules", "rules.yaml").stderr


def test_replay_of_an_empty_recording_says_so(replay: Replayed, folder: Path) -> None:
    """Whatever the rules name."""
    (folder / "objects.jsonl").write_bytes(b"")
    for words in (("--rules", "rules.yaml"), ("--line", LINE)):
        done = replay(*words)
        assert (done.exit_code, done.stderr) == (1, "penstock: objects.jsonl: no frames in it\n")


def test_replay_never_writes_over_what_it_reads(replay: Replayed, folder: Path) -> None:
    """By whatever name the file is called; nothing is written then."""
    recorded = (folder / "objects.jsonl").read_bytes()
    (folder / "known.jsonl").write_bytes(b"")
    (folder / "link.jsonl").symlink_to("objects.jsonl")
    os.link(folder / "objects.jsonl", folder / "same.jsonl")
    for out in ("objects.jsonl", "./objects.jsonl", "link.jsonl", "same.jsonl"):
        done = replay("--line", LINE, "--out", out)
        assert (done.exit_code, "that is the file of the recording" in done.stderr) == (2, True), out
    for out, read in (("known.jsonl", "--against"), ("new.jsonl", "--against"), ("rules.yaml", "--rules")):
        words = ("--line", LINE) if read == "--against" else ()
        done = replay(*words, "--out", out, read, str(folder / out))
        assert (done.exit_code, f"that is the file of {read}" in done.stderr) == (2, True), out
    assert (folder / "objects.jsonl").read_bytes() == recorded
    assert (folder / "rules.yaml").read_text() == RULES
    assert not (folder / "new.jsonl").exists()


def test_replay_that_fails_leaves_the_earlier_events(
    replay: Replayed, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails before it writes, or while it does."""
    events = folder / "events.jsonl"
    events.write_text("earlier\n")
    assert replay("--line", LINE, "--out", "events.jsonl", "--against", "rules.yaml").exit_code == 1
    assert events.read_text() == "earlier\n"

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        done = replay("--line", LINE, "--out", "events.jsonl")
    assert (done.exit_code, "events.jsonl: No space left on device" in done.stderr) == (1, True)
    assert events.read_text() == "earlier\n"
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "objects.jsonl", "rules.yaml"]
    events.chmod(0o640)
    assert replay("--line", LINE, "--out", "events.jsonl").exit_code == 0
    assert (json.loads(events.read_text())["rule"], events.stat().st_mode & 0o777) == ("Door", 0o640)


def test_replay_writes_into_a_pipe(replay: Replayed, folder: Path) -> None:
    """Which is no file that another could take the place of."""
    os.mkfifo(folder / "pipe")
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert replay("--line", LINE, "--out", "pipe").exit_code == 0
        assert json.loads(os.read(reader, 4096))["rule"] == "Door"
    finally:
        os.close(reader)
    assert (folder / "pipe").is_fifo()


def test_replay_of_a_run_that_was_killed_uses_what_is_whole(replay: Replayed, folder: Path) -> None:
    """An incomplete last line is skipped with a note; one in the middle is an error."""
    recorded = (folder / "objects.jsonl").read_bytes()
    (folder / "objects.jsonl").write_bytes(recorded[:-30])
    for words in (("--line", LINE), ("--rules", "rules.yaml")):
        done = replay(*words)
        assert (done.exit_code, done.stdout.endswith("1 events in 19 frames\n")) == (0, True), done.output
        assert done.stderr == "penstock: objects.jsonl: line 20, the last one, is cut off; those before it are used\n"
    replay("--line", LINE, "--out", "events.jsonl")
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"line-cr')
    done = replay("--line", LINE, "--against", "events.jsonl")
    assert (done.exit_code, "events.jsonl: line 2, the last one, is cut off" in done.stderr) == (0, True), done.output
    (folder / "objects.jsonl").write_bytes(recorded[:-30] + b"\n")
    assert replay("--line", LINE).exit_code == 1
    (folder / "objects.jsonl").write_bytes(recorded[:-30] + b"\n" + recorded.splitlines(keepends=True)[0])
    assert "line 20 is no line of objects.jsonl" in replay("--line", LINE).stderr
