"""`penstock video run` with a program that decodes nothing: what it says, what it leaves, how it ends."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from penstock_video.cli import commands as video
from penstock_video.cli.engine import EngineUnavailable
from penstock_video.cli.run import exit_code
from penstock_video.cli.summary import Summary, file_lines, say_summary
from penstock_video.interfaces import SourceStatistics
from penstock_video.settings.models import VideoSettings
from penstock_video.sources.lifecycle import TAKEN_OUT
from penstock_video.types import SourceState
from tests.cli.video_program import FakeProgram, no_engine
from tests.support.stack import CHECKOUT

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clip."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`penstock video run WORDS…` in this process, with a FakeProgram of these options; kept: collects the programs."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(video.app, name="video")

    def call(*words: object, kept: list[FakeProgram] | None = None, **options: Any) -> Result:
        def program_of(settings: VideoSettings, place: object, api: object) -> FakeProgram:
            program = FakeProgram(settings, **options)
            if kept is not None:
                kept.append(program)
            return program

        monkeypatch.setattr(video, "engine_for", lambda *_, **__: no_engine())
        monkeypatch.setattr(video, "program_of", program_of)
        port = () if "--api-port" in words else ("--api-port", 0)
        return CliRunner().invoke(app, ["video", "run", *map(str, (*words, *port))])

    return call


def test_run_of_a_file_ends_with_a_summary(run: Run) -> None:
    """Frames, drops, counts by rule and the files with their sizes; exit code 0."""
    kept: list[FakeProgram] = []
    options = {
        "counts": {"line-crossing/Door": 12, "objects/person": 5},
        "events": {"line-crossing/Door": 12, "line-crossing/Door/person": 12},
        "drops": {"too_old": 3, "corrupt": 0},
    }
    done = run("--source", "clip.mp4", "--model", "m", "--out", "out", "--sink", "jsonl", kept=kept, **options)
    assert done.exit_code == 0, done.output
    assert "ended" in done.stdout
    assert "3 too_old" in done.stdout
    assert "corrupt" not in done.stdout
    assert "objects/person" not in done.stdout
    assert "line-crossing/Door │     12 │         12" in done.stdout  # although no sink writes events
    assert "Door/person" not in done.stdout  # the only class says what the rule says
    assert "out/annotated.mp4  4.1 kB" in done.stdout
    assert "100 frames in" in done.stdout
    engine = "engine: the gateway at http://127.0.0.1:9"
    assert done.stderr == f"1 source, model m, {engine}; control API http://127.0.0.1:8010\n"
    assert len(kept[0].stopped) == 1


def test_run_with_out_alone_writes_the_video_its_poster_and_both_lists(run: Run) -> None:
    """The README's command."""
    kept: list[FakeProgram] = []
    assert run("--source", "clip.mp4", "--model", "m", "--out", "out", kept=kept).exit_code == 0
    kinds = [type(sink).__name__ for sink in kept[0].settings.sinks]
    assert kinds == ["AnnotatedOptions", "JsonlOptions", "PosterOptions"]
    assert {getattr(sink, "folder", None) for sink in kept[0].settings.sinks} == {Path("out")}


def test_run_as_json_is_lines_and_nothing_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress and, last, the summary."""
    monkeypatch.setattr("penstock_video.cli.progress.LINE_EVERY_S", 0.0)
    done = run("--source", "clip.mp4", "--model", "m", "--out", "out", "--sink", "jsonl", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["start", *["progress"] * 3, "summary"]
    assert lines[0] == {
        "kind": "start", "sources": 1, "elsewhere": 0, "model": "m",
        "engine": "the gateway at http://127.0.0.1:9", "api_url": "http://127.0.0.1:8010",
    }  # fmt: skip
    assert lines[1]["sources"][0]["state"] == "running"
    assert done.stderr == ""
    assert (lines[-1]["exit_code"], lines[-1]["sources"][0]["frames"]) == (0, 100)
    assert lines[-1]["files"] == [{"path": "out/annotated.mp4", "size_bytes": 4096}]


def test_run_in_a_pipe_says_a_line_each_few_seconds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, with the ids of sources that do not run."""
    monkeypatch.setattr("penstock_video.cli.progress.LINE_EVERY_S", 0.0)
    states = {"cam-2": (SourceState.RECONNECTING, "no frame for 10 s")}
    done = run("--source", "clip.mp4", "--source", "rtsp://cam/2", "--model", "m", states=states)
    assert "1 of 2 running" in done.stderr
    assert "33 frames" not in done.stdout
    assert "; cam-2 reconnecting (no frame for 10 s)" in done.stderr
    quiet = run("--source", "clip.mp4", "--model", "m", "--no-progress")
    assert "running" not in quiet.stderr


@pytest.mark.parametrize(
    ("state", "code"), [(SourceState.FAILED, 1), (SourceState.AUTH_FAILED, 1), (SourceState.ENDED, 0)]
)
def test_run_with_a_source_that_failed_is_exit_code_1(run: Run, state: SourceState, code: int) -> None:
    """With its reason, beside what came of the others."""
    states = {"cam-2": (state, "401 Unauthorized")}
    done = run("--source", "clip.mp4", "--source", "rtsp://cam/2", "--model", "m", states=states)
    assert done.exit_code == code
    assert ("cam-2 failed: 401 Unauthorized" in done.stdout) == bool(code)


def test_run_that_no_engine_answered_is_exit_code_1(run: Run) -> None:
    """Frames without one result are no success."""
    done = run("--source", "clip.mp4", "--model", "m", drops={"infer_failed": 100}, states={})
    assert done.exit_code == 0
    statistics = FakeProgram.statistics

    def without_results(program: FakeProgram) -> tuple[Any, ...]:
        return tuple(replace(source, inferred=0) for source in statistics(program))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeProgram, "statistics", without_results)
        done = run("--source", "clip.mp4", "--model", "m", drops={"infer_failed": 100})
    assert (done.exit_code, "clip failed: no frame got a usable answer from the engine" in done.stdout) == (1, True)


@pytest.mark.parametrize("reason", ["infer_failed", "refused"])
def test_source_of_which_no_frame_was_inferred_has_failed(reason: str) -> None:
    """FAULTS 86: this holds if the engine fails every time, gives unusable answers, or refuses."""
    source = SourceStatistics("cam", "", "clip.mp4", SourceState.ENDED, frames=9, drops={reason: 9})
    assert exit_code([source], 0) == 1
    assert exit_code([replace(source, inferred=1)], 0) == 0


def test_run_that_cannot_start_is_one_sentence(run: Run) -> None:
    """Of the program's own; for programs in JSON, too."""
    done = run("--source", "clip.mp4", "--model", "m", refusal="m does not say how it sees images")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "penstock: m does not say how it sees images\n")
    done = run("--source", "clip.mp4", "--model", "m", "--json", refusal="no")
    assert json.loads(done.stdout) == {"kind": "summary", "exit_code": 1, "error": "no"}


def test_run_whose_api_has_no_port_fails_before_an_engine_starts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting an engine takes half a minute; a port in use or a missing key is reported before that."""
    asked: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("tests.cli.test_video_run.no_engine", lambda: asked.append(1))
        words = ["--source", "clip.mp4", "--model", "m", "--api-port", taken.getsockname()[1]]
        done = run(*words)
    assert (done.exit_code, asked) == (1, [])
    assert f"port {words[-1]} (Address already in use); choose another, or port 0 (its port: --api-port" in done.stderr
    Path("all.yaml").write_text("api: {host: 0.0.0.0}\n")
    assert "PENSTOCK_VIDEO_API_KEY" in run("all.yaml", *words[:4]).stderr
    assert asked == []


def test_run_without_an_engine_shows_its_last_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, whatever they hold, then the sentence."""

    @contextmanager
    def none(*_: object, **__: object) -> Any:
        raise EngineUnavailable("the engine ended at once, with code 2; it said:", ["a\x1b[31mred", "b"])
        yield

    call = run("--source", "clip.mp4", "--model", "m")
    assert call.exit_code == 0
    monkeypatch.setattr(video, "engine_for", none)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(video.app, name="video")
    words = ["video", "run", "--source", "clip.mp4", "--model", "m", "--api-port", "0"]
    done = CliRunner().invoke(app, words)
    printed = "    a\\x1b[31mred\n    b\npenstock: the engine ended at once, with code 2; it said:\n"
    assert (done.exit_code, done.stderr) == (1, printed)


def test_run_whose_sink_failed_is_exit_code_1(run: Run) -> None:
    """What came of the others stands beside it; a person's own end stays one."""
    lost = ("jsonl failed: objects.jsonl: No space left on device (612 results lost)",)
    done = run("--source", "clip.mp4", "--model", "m", "--out", "out", failures=lost)
    assert (done.exit_code, "sink jsonl failed: objects.jsonl: No space" in done.stdout) == (1, True)
    summary = json.loads(run("--source", "clip.mp4", "--model", "m", "--json", failures=lost).stdout.splitlines()[-1])
    assert (summary["exit_code"], summary["sink_failures"]) == (1, list(lost))
    assert exit_code((), 15, has_lost=True) == 143


def test_run_without_a_sink_says_that_nothing_is_written(run: Run) -> None:
    """Hours of inference for nothing are worth a line."""
    assert (
        "; nothing is written: give --out FOLDER"
        in run("--source", "clip.mp4", "--model", "m", "--events", "off").stderr
    )
    assert "; only events are stored, in " in run("--source", "clip.mp4", "--model", "m").stderr
    assert "nothing is written" not in run("--source", "clip.mp4", "--model", "m", "--out", "out").stderr


def test_summary_tells_many_files_of_a_folder_in_a_line() -> None:
    """Segments of HLS would push everything else off the screen."""
    files = [(Path("out/objects.jsonl"), 2000), *((Path(f"out/hls/segment-{n}.ts"), 1000) for n in range(9))]
    assert file_lines(files) == ["out/objects.jsonl  2.0 kB", "out/hls/  9 files, 9.0 kB"]


def test_run_with_wrong_settings_tells_all_faults_and_starts_nothing(run: Run, tmp_path: Path) -> None:
    """Exit code 2."""
    (tmp_path / "cameras.yaml").write_text("source: [{uri: rstp://a}]\nstrammux: {}\n")
    kept: list[FakeProgram] = []
    done = run("cameras.yaml", "--interval", "2", kept=kept)
    lines = done.stderr.splitlines()
    assert (done.exit_code, len(lines), kept) == (2, 4, [])
    assert lines[-1] == "penstock: 3 faults in the settings"
    as_json = json.loads(run("cameras.yaml", "--json").stdout)
    assert (as_json["is_valid"], len(as_json["faults"])) == (False, 3)


def test_run_shows_no_control_character_of_others(run: Run, tmp_path: Path) -> None:
    """What a camera answers could clear the screen, or draw a lie on it."""
    states = {"cam-2": (SourceState.FAILED, "gone\x1b[2J\x07")}
    done = run("--source", "clip.mp4", "--source", "rtsp://cam/2", "--model", "m", states=states)
    assert "\x1b" not in done.output
    assert "gone\\x1b[2J\\x07" in done.stdout
    (tmp_path / "\x1b[31mred.mp4").touch()
    for name in ("\x1b[31mred.mp4", "\x1b[31mno.mp4", "rtsp://\x1b[31m/1", "\x1b[31m://a"):
        wrong = run("--source", name, "--model", "m")
        assert (wrong.exit_code, "\x1b" in wrong.output) == (2, False)


def test_run_of_a_file_again_moves_the_earlier_lines_aside(run: Run, tmp_path: Path) -> None:
    """Two runs in one file could not be distinguished; for cameras, lines are appended."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "objects.jsonl").write_text("{}\n")
    for name in ("annotated.mp4", "annotated-2.mp4", "mine.mp4"):
        (out / name).write_bytes(b"film")
    done = run("--source", "clip.mp4", "--model", "m", "--out", "out", "--sink", "jsonl")
    assert "out/objects.jsonl of an earlier run is now objects.previous.jsonl" in done.stderr
    assert {path.name for path in out.glob("*-2*")} == {"annotated-2.previous.mp4"}
    assert (out / "mine.mp4").read_bytes() == (out / "annotated.previous.mp4").read_bytes() == b"film"
    assert (
        "of an earlier run, renamed: out/annotated-2.previous.mp4, out/annotated.previous.mp4, out/obj" in done.stdout
    )
    assert not any("previous" in line for line in done.stdout.splitlines() if " B" in line), "not written by this run"
    (out / "objects.jsonl").write_text("{}\n")
    run("--source", "rtsp://cam", "--model", "m", "--out", "out", "--sink", "jsonl")
    assert (out / "objects.jsonl").read_text() == "{}\n"


def test_run_counts_events_by_rule_whether_or_not_they_are_written(run: Run) -> None:
    """Classes where there are several; a rule that was replaced meanwhile keeps its events, so that sums agree."""
    counts = {"roi-filtering/Lawn": 1, "roi-filtering/Lawn/dog": 1, "objects/dog": 3}
    events = {
        "roi-filtering/Lawn": 13, "roi-filtering/Lawn/dog": 11, "roi-filtering/Lawn/cat": 2,
        "line-crossing/Old": 53, "line-crossing/Old/dog": 53,
    }  # fmt: skip
    words = ("--source", "clip.mp4", "--model", "m")
    (source,) = json.loads(run(*words, "--json", counts=counts, events=events).stdout.splitlines()[-1])["sources"]
    assert (source["events"], source["events_by_rule"]) == (66, events)
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in run(*words, counts=counts, events=events).stdout.splitlines()
        if "roi-" in line or "line-" in line
    ]
    assert rows == [
        ["clip", "line-crossing/Old", "53", "–"],
        ["clip", "roi-filtering/Lawn", "13", "1"],
        ["clip", "roi-filtering/Lawn/cat", "2", "0"],
        ["clip", "roi-filtering/Lawn/dog", "11", "1"],
    ]


def test_summary_has_sources_that_were_removed_meanwhile(run: Run) -> None:
    """In the table and in the sums; what failed before a person removed it is no failure of the run."""
    gone = (
        SourceStatistics("gate", "", "", SourceState.ENDED, TAKEN_OUT, frames=971, inferred=970, active_s=97.0,
                         events={"dwell/Bench": 2}),
        SourceStatistics("yard", "", "", SourceState.FAILED, "404 Not Found"),
    )  # fmt: skip
    words = ("--source", "clip.mp4", "--model", "m")
    done = run(*words, gone=gone)
    assert (done.exit_code, "yard failed" in done.stdout) == (0, False)
    assert "1071 frames in" in done.stdout
    (row,) = [line.split() for line in done.stdout.splitlines() if "gate" in line and "971" in line]
    assert [cell for cell in row if cell != "│"] == ["gate", "removed", "971", "970", "0", "2", "0", "10.0"]
    clip, gate, _ = json.loads(run(*words, "--json", gone=gone).stdout.splitlines()[-1])["sources"]
    assert (gate["state"], gate["fps"], "reason" in gate) == ("removed", 10.0, False)
    assert (clip["fps"], clip["frames"]) == (24.75, 100)  # of its own four seconds


def test_summary_says_who_decodes_where_a_card_does(run: Run) -> None:
    """There is no decoder column if the CPU decodes every source; the JSON always has the decoder."""
    words = ("--source", "clip.mp4", "--model", "m")
    yard = SourceStatistics("yard", "", "", SourceState.ENDED, TAKEN_OUT, frames=9, inferred=9, decoder="cpu")
    assert "decoder" not in run(*words, gone=(yard,)).stdout
    gate = replace(yard, source_id="gate", decoder="nvdec")
    shown = run(*words, gone=(yard, gate)).stdout
    assert "decoder" in shown
    (row,) = [line.split() for line in shown.splitlines() if "gate" in line]
    assert [cell for cell in row if cell != "│"][:4] == ["gate", "removed", "nvdec", "9"]
    sources = json.loads(run(*words, "--json", gone=(yard, gate)).stdout.splitlines()[-1])["sources"]
    assert [source.get("decoder") for source in sources] == [None, "cpu", "nvdec"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_summary_keeps_its_numbers_whole_in_a_narrow_terminal(width: int) -> None:
    """Ids are cut in the middle, why frames were lost stands below."""
    name = "parking-lot-north-entrance-camera-number-1"
    source = SourceStatistics(
        name, "", "", SourceState.RECONNECTING, frames=12345, inferred=12344, drops={"ring_full": 4321, "too_old": 3},
        restarts=3, active_s=100.0, events={"line-crossing/Entry": 6789},
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=width)
    say_summary(Summary((source,) * 2, (), 200.0, 0), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = lines[1].split()
    assert words[0].startswith("parki")
    assert words[0].endswith("1")
    assert set(words[1:]) >= {"reconnecting", "12345", "4324", "6789", "123.4"}
    assert ("12344" in words) == (width >= 80)
    assert "dropped 4321 ring_full, 3 too_old" in " ".join(" ".join(lines[3:7]).split())


@pytest.mark.parametrize(
    ("number", "source", "code"),
    [
        (signal.SIGINT, "clip.mp4", 130),
        (signal.SIGINT, "rtsp://cam", 130),
        (signal.SIGTERM, "clip.mp4", 143),
        (signal.SIGTERM, "rtsp://cam", 0),
    ],
)
def test_run_that_is_stopped_drains_and_sums_up(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int, source: str, code: int
) -> None:
    """The first Ctrl-C or SIGTERM; for cameras SIGTERM is the ordinary end."""
    wait = FakeProgram.wait

    def interrupted(program: FakeProgram, timeout_s: float) -> bool:
        if program.looked == 5:
            os.kill(os.getpid(), number)
        return wait(program, timeout_s)

    monkeypatch.setattr(FakeProgram, "wait", interrupted)
    kept: list[FakeProgram] = []
    done = run("--source", source, "--model", "m", "--out", "out", "--sink", "jsonl", kept=kept, looks=1000)
    assert done.exit_code == code
    assert "stopping: what was decoded is finished" in done.stderr
    assert "out/annotated.mp4" in done.stdout
    assert kept[0].stopped[0] > 1
    assert kept[0].looked < 10


@pytest.mark.parametrize("source", ["clip.mp4", "rtsp://cam"])
def test_run_of_a_duration_drains_and_sums_up(run: Run, source: str) -> None:
    """After that time the run ends as at the last file's end, with exit code 0."""
    kept: list[FakeProgram] = []
    words = ("--source", source, "--model", "m", "--out", "out", "--sink", "jsonl", "--duration", 0.05)
    done = run(*words, kept=kept, looks=10**9)
    assert done.exit_code == 0, done.output
    assert "out/annotated.mp4" in done.stdout
    assert kept[0].stopped[0] > 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_run_of_no_duration_is_refused(run: Run, text: str) -> None:
    """The sentence states the value."""
    done = run("--source", "clip.mp4", "--model", "m", f"--duration={text}")
    assert (done.exit_code, done.stderr) == (2, f"penstock: --duration is {text}: give seconds above 0\n")


def test_run_that_is_stopped_twice_ends_at_once(tmp_path: Path) -> None:
    """Though the program hangs in its end; a sentence, no traceback."""
    words = ["run", "--source", str(tmp_path / "clip.mp4"), "--model", "m", "--api-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.video_program", *words],
        cwd=CHECKOUT, env=os.environ | {"HANGS": "1", "LOOKS": "10000"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("1 source")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("stopping")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err == "penstock: stopped at once: files that were being written may be cut short\n"
