"""`penstock video check`: what would run, or all that is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock_video.cli import commands as video
from tests.deepstream_pipeline.clips import write_clip

GOOD = """
source:
  - {uri: "rtsp://viewer:hush@192.0.2.10/1?token=hush", camera_id: door}
  - {uri: clip.mp4, loop: true}
primary-gie: {model: people, interval: 2}
secondary-gie: {model: googlenet}
sink:
  - {type: jsonl, folder: out}
  - {type: redis, url: "redis://:hush@r:6379/0"}
analytics: {line-crossing: [{name: Door, line: 0;5;9;5}]}
"""
Check = Callable[..., Result]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """`penstock video check CONFIG.yaml` of a text, beside a file that is no video."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "clip.mp4").write_bytes(b"no video")

    def call(text: str, *words: str) -> Result:
        (tmp_path / "cameras.yaml").write_text(text)
        return CliRunner().invoke(video.app, ["check", str(tmp_path / "cameras.yaml"), *words])

    return call


def test_check_of_good_settings_tells_what_would_run(check: Check) -> None:
    """Sources with their rules, models, sinks, engine; exit code 0; nothing of a password; nothing is opened."""
    done = check(GOOD)
    assert done.exit_code == 0, done.output
    for part in ("door", "clip.mp4, looped", "line-crossing/Door", "people, one frame in 3", "secondary: googlenet"):
        assert part in done.stdout
    gpu = "GPU 0, 16 sources a process on a core of its own, hand-over: auto"
    assert f"if a GPU decodes: {gpu}" in done.stdout
    assert "sink: redis redis://…@r:6379/0 penstock" in done.stdout
    assert "hush" not in done.output


def test_check_tells_who_is_to_decode_each_source_where_one_says_so(check: Check) -> None:
    """A column more; where all leave it to auto there is none."""
    done = check(GOOD.replace("loop: true", "decoder: nvdec"))
    assert done.exit_code == 0, done.output
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    assert ("auto" in rows["door"], "nvdec" in rows["clip"]) == (True, True)
    assert "decoder" not in check(GOOD).stdout


def test_check_as_json_is_one_object(check: Check) -> None:
    """For programs, on one line."""
    report = json.loads(check(GOOD, "--json").stdout)
    assert (report["is_valid"], report["exit_code"], report["model"]) == (True, 0, "people")
    assert [source["source_id"] for source in report["sources"]] == ["door", "clip"]
    assert (report["sources"][0]["decoder"], report["gpu"]["hand_over"]) == ("auto", "auto")
    assert report["sources"][1]["rules"] == ["line-crossing/Door"]
    assert report["gpu"]["pin_processes"] is True
    assert "hush" not in json.dumps(report)


def test_check_of_bad_settings_tells_every_fault(check: Check) -> None:
    """Exit code 1, a line each with its place."""
    done = check(GOOD.replace("loop: true", "lop: true").replace("type: redis", "type: reddis"))
    lines = done.stderr.splitlines()
    assert (done.exit_code, done.stdout, len(lines)) == (1, "", 3)
    assert "cameras.yaml:4:21: source[1].lop: unknown key; did you mean loop?" in lines[0]
    assert "sink[1].type is 'reddis': did you mean redis?" in lines[1]
    assert lines[2] == "penstock: 2 faults in the settings"
    report = json.loads(check("source: []", "--json").stdout)
    assert [fault["text"] for fault in report["faults"]][-1].startswith("primary-gie.model: is missing")


def test_check_of_one_fault_is_one_line(check: Check) -> None:
    """As every command's error."""
    done = check(GOOD + "osd: 5\n")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("penstock: ")


def test_check_with_probe_opens_every_source(check: Check, tmp_path: Path) -> None:
    """What can be opened is described, what cannot is exit code 1."""
    write_clip(tmp_path / "good.mp4", frames=5, fps=10, size=(64, 48))
    text = "source: [{uri: good.mp4}, {uri: clip.mp4}]\nprimary-gie: {model: people}\n"
    done = check(text, "--probe")
    assert done.exit_code == 1, done.output
    assert "64x48 h264, 10 fps" in done.stdout
    report = json.loads(check(text, "--probe", "--json").stdout)
    assert (report["exit_code"], report["sources"][0]["opened"]) == (1, "64x48 h264, 10 fps")
    assert "fault" in report["sources"][1]
