"""How `penstock video run` begins, or does not: its words, its exit code, and the files that it leaves alone."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from penstock_video.cli import commands as video
from penstock_video.cli.access import warn_of_short_key
from penstock_video.cli.engine import EngineUnavailable, ModelUnknown
from penstock_video.errors import InferFailed, ModelUnusable, TooManySources
from penstock_video.infer.options import EngineAddress
from penstock_video.settings.document import InvalidSettings, SettingsFault
from penstock_video.settings.models import ApiSettings, VideoSettings
from tests.cli.video_program import PLACE, FakeProgram

Run = Callable[..., Result]
CLIP = ("--source", "clip.mp4", "--model", "m")
LABEL = SettingsFault("two.yaml:1:56", "analytics.line-crossing[0].class-id: 'persn': the model has no such class")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clip, and results of an earlier run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "objects.jsonl").write_text("{}\n")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`penstock video run WORDS…` with a FakeProgram of these options. no_engine: raised when the engine starts."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(video.app, name="video")

    def call(
        *words: object,
        no_engine: Exception | None = None,
        place: EngineAddress = PLACE,
        programs: list[FakeProgram] | None = None,
        **options: Any,
    ) -> Result:
        @contextmanager
        def engine(*_: object, **__: object) -> Iterator[EngineAddress]:
            if no_engine is not None:
                raise no_engine
            yield place

        monkeypatch.setattr(video, "engine_for", engine)

        def program_of(settings: VideoSettings, place: object, api: object) -> FakeProgram:
            program = FakeProgram(settings, **options)
            if programs is not None:
                programs.append(program)
            return program

        monkeypatch.setattr(video, "program_of", program_of)
        port = () if programs is not None else ("--api-port", 0)
        return CliRunner().invoke(app, ["video", "run", *map(str, (*words, *port))])

    return call


def test_default_port_of_the_api_that_is_in_use_is_replaced_by_a_free_one(run: Run) -> None:
    """Beside a stack's video program; the line names the taken port. A port in the settings file is not replaced."""
    programs: list[FakeProgram] = []
    with ExitStack() as held:
        with suppress(OSError):  # in use already
            held.enter_context(socket.create_server(("127.0.0.1", 8010)))
        done = run(*CLIP, programs=programs)
        Path("all.yaml").write_text("api: {port: 8010}\n")
        refused = run("all.yaml", *CLIP, programs=programs)
    assert (done.exit_code, [program.settings.api.port for program in programs]) == (0, [0])
    assert done.stderr.startswith("port 8010 is in use, so the control API gets a free one; --api-port chooses one\n")
    assert (refused.exit_code, "port 8010 (Address already in use)" in refused.stderr) == (1, True)


FAULTS = {
    "a class": (InvalidSettings([LABEL]), 2, f"penstock: {LABEL}\n"),
    "a model": (ModelUnusable("'m' is no image model"), 2, "penstock: 'm' is no image model\n"),
    "sources": (TooManySources("201 sources are given"), 2, "penstock: 201 sources are given\n"),
    "the engine": (InferFailed("no engine at http://a"), 1, "penstock: no engine at http://a\n"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_fault_that_is_found_before_the_first_frame_leaves_earlier_results(run: Run, what: str) -> None:
    """A label that is none, at last found with the model's: nothing is moved; wrong settings are exit code 2."""
    fault, code, printed = FAULTS[what]
    done = run(*CLIP, "--out", "out", fault=fault)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", printed)
    assert (Path("out/objects.jsonl").read_text(), Path("out/objects.previous.jsonl").exists()) == ("{}\n", False)
    as_json = json.loads(run(*CLIP, "--out", "out", "--json", fault=fault).stdout)
    assert as_json["exit_code"] == code


NO_ENGINE = {2: ModelUnknown("there is no model 'm' at http://a"), 1: EngineUnavailable("m is not loaded at http://a")}


@pytest.mark.parametrize("code", NO_ENGINE)
def test_model_that_is_nowhere_is_wrong_settings_as_a_missing_file_is(run: Run, code: int) -> None:
    """One that is there and not loaded is the engine's failure. Earlier results stay where they are."""
    done = run(*CLIP, "--out", "out", no_engine=NO_ENGINE[code])
    assert (done.exit_code, done.stderr) == (code, f"penstock: {NO_ENGINE[code]}\n")
    assert run("--source", "nowhere.mp4", "--model", "m").exit_code == 2
    assert json.loads(run(*CLIP, "--json", no_engine=NO_ENGINE[code]).stdout)["exit_code"] == code
    assert [path.name for path in Path("out").iterdir()] == ["objects.jsonl"]


def other_shard() -> str:
    """The one of two that the clip does not belong to."""
    from penstock_video.source_ids import shard_of

    return "2/2" if shard_of("1/2").has("clip") else "1/2"


def test_shard_without_a_source_ends_at_once_where_nothing_can_be_added(run: Run) -> None:
    """Without an engine, too; exit code 0. As JSON, a summary alone."""
    words = (*CLIP, "--shard", other_shard(), "--no-api", "--out", "out")
    done = run(*words, no_engine=EngineUnavailable("none"))
    nothing = "nothing to do, and without the control API nothing comes"
    printed = f"0 sources (1 more on other shards than {other_shard()}): {nothing}\n"
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", printed)
    as_json = run(*words, "--json", no_engine=EngineUnavailable("none"))
    (record,) = map(json.loads, as_json.stdout.splitlines())
    assert (record["kind"], record["exit_code"], record["sources"], as_json.stderr) == ("summary", 0, [], "")


def test_shard_without_a_source_waits_for_the_control_api(run: Run) -> None:
    """A StatefulSet's replica stays: cameras are added later."""
    done = run(*CLIP, "--shard", other_shard(), looks=3)
    printed = f"0 sources (1 more on other shards than {other_shard()}), model m, engine: the gateway at "
    assert done.stderr.startswith(printed)
    assert "; waits for sources over the control API http://127.0.0.1:8010" in done.stderr


STACK = EngineAddress(Path("/run/x"), "http://127.0.0.1:8000", "127.0.0.1:8001")
TITLES = {
    "the stack at http://127.0.0.1:8000": STACK,
    "its own": EngineAddress(Path("/x"), "http://a", "a", is_own=True),
}


@pytest.mark.parametrize("title", TITLES)
def test_start_line_names_the_engine(run: Run, title: str) -> None:
    """Of two stacks that run, which one infers."""
    done = run(*CLIP, "--out", "out", place=TITLES[title])
    assert f"1 source, model m, engine: {title}; control API" in done.stderr


@pytest.mark.parametrize("is_json", [True, False])
def test_run_without_progress_says_none_in_either_form(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_json: bool
) -> None:
    """Only start, summary and warnings are printed."""
    monkeypatch.setattr("penstock_video.cli.progress.LINE_EVERY_S", 0.0)
    levels: list[str] = []
    monkeypatch.setattr(video, "configure_logs", lambda form, level, stream: levels.append(level))
    done = run(*CLIP, "--no-progress", *(["--json"] if is_json else []))
    if is_json:
        assert [json.loads(line)["kind"] for line in done.stdout.splitlines()] == ["start", "summary"]
        assert done.stderr == ""
    else:
        assert done.stderr.splitlines()[1:] == []
        assert done.stderr.startswith("1 source, ")
    assert levels == ["warning"]


def test_run_tells_of_sources_that_come_and_go_where_it_shows_progress(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal as in a pipe; for programs only what is wrong; a level that is asked for holds."""
    levels: list[str] = []
    monkeypatch.setattr(video, "configure_logs", lambda form, level, stream: levels.append(level))
    for words in ((), ("--json",), ("--json", "--log-level", "debug")):
        run(*CLIP, *words)
    assert levels == ["info", "warning", "debug"]


KEYS = {"short": 1, "long enough, 20 signs"[:20].replace(" ", "-"): 0}


@pytest.mark.parametrize("key", KEYS)
def test_short_key_of_an_api_that_others_reach_is_warned_of(key: str) -> None:
    """As short as the gateway's own keys may not be. The key itself is not said."""
    with capture_logs() as lines:
        warn_of_short_key(ApiSettings("0.0.0.0", 0), {"PENSTOCK_VIDEO_API_KEY": key})
        warn_of_short_key(ApiSettings("127.0.0.1", 0), {"PENSTOCK_VIDEO_API_KEY": "short"})
        warn_of_short_key(ApiSettings("0.0.0.0", 0), {})
    assert [line["log_level"] for line in lines] == ["warning"] * KEYS[key]
    assert not [line for line in lines if key in str(line["event"]).split()]


def test_api_that_others_reach_without_a_key_is_wrong_settings(run: Run) -> None:
    """Exit code 2, before an engine starts."""
    Path("all.yaml").write_text("api: {host: 0.0.0.0}\n")
    done = run("all.yaml", *CLIP, no_engine=EngineUnavailable("none"))
    assert (done.exit_code, "api: the control API on 0.0.0.0" in done.stderr) == (2, True)


def test_audit_log_that_cannot_be_opened_fails_before_anything_starts(run: Run) -> None:
    """The command ends with exit code 2 and one sentence."""
    done = run(*CLIP, "--audit-log", "nowhere/audit.jsonl")
    assert done.exit_code == 2
    assert "audit_log nowhere/audit.jsonl: cannot be opened (No such file or directory)" in done.stderr


@pytest.mark.parametrize("flag", ["--url", "--gateway"])
def test_gateways_address_has_one_name_and_its_former_one(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    """`--url` as in all commands; `--gateway` still works, and is not in the help."""
    seen: list[str] = []
    monkeypatch.setattr(video, "_run", lambda config, flags, *_: seen.append(flags.gateway) or 0)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(video.app, name="video")
    assert CliRunner().invoke(app, ["video", "run", *CLIP, flag, "http://gpu:8000"]).exit_code == 0
    assert seen == ["http://gpu:8000"]
    assert "--gateway" not in CliRunner().invoke(app, ["video", "run", "--help"]).stdout
