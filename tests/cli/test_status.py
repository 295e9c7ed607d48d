"""`penstock status`, `penstock logs`, `penstock config show`, and `penstock` without arguments."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli import logs, status
from penstock.cli.main import build_app
from penstock.cli.start_page import Situation, model_to_try, start_page
from penstock.log_file import LogLine
from penstock.protocol.engine import ModelState
from penstock.protocol.system_reports import (
    EngineSummary,
    GpuProcess,
    GpuSummary,
    ModelQueue,
    ModelSummary,
    MpsSummary,
    ProcessUsage,
    ReplicaSummary,
    SystemReport,
)
from tests.cli.conftest import StandIn

LINE = LogLine("error", "2026-11-29T03:00:00.123456Z", "gateway", 7, "engine", "model\x1b[2J failed", {"why": "a b"})
GIB = 1 << 30


def report(**changes: Any) -> SystemReport:
    values: dict[str, Any] = {
        "version": "1.2.3",
        "uptime_s": 7260.0,
        "is_ready": True,
        "reason": "",
        "workers": 2,
        "in_flight": 3,
        "engine": EngineSummary("triton", "triton 2.51.0", True, "", 1, [ReplicaSummary("http://a", "up", 2, 0)]),
        "models": [ModelSummary("street", "ready"), ModelSummary("broken", "unavailable", "its file is empty")],
        "queues": [ModelQueue("street", 4, 4, 1, 0.012, {}), ModelQueue("idle", 0, 0, 0, None, {})],
        "processes": [ProcessUsage(1, "up", 80 << 20, 1.0, 10.0), ProcessUsage(2, "decoder", 2 * GIB, 5.0, 10.0)],
        "gpus": [],
        "mps": None,
        "errors": [LINE],
    }
    return SystemReport(**values | changes)


def answers(stand_in: StandIn, path: str, body: object, code: int = 200) -> None:
    stand_in.refusals[path] = (code, msgspec.json.encode(body).decode(), {})


def run(*words: str) -> Result:
    return CliRunner().invoke(build_app(words), list(words))


def shown(**changes: Any) -> str:
    console = Console(width=160, record=True, file=None, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(status.screen(report(**changes), "http://here"))
    return captured.get()


def test_status_shows_a_stack_on_one_screen() -> None:
    """Engine, models with a problem first, waiting queues, memory and CPU by role, and the last errors."""
    text = shown()
    assert "penstock 1.2.3 at http://here: ready, up 2 h 1 min, 3 in flight" in text
    assert "triton 2.51.0, up, 1 restart\n" in text.replace("  ", "").replace(" \n", "\n")
    assert text.index("broken unavailable  its file is empty") < text.index("street ready")
    assert "street: 4 waiting, 1 in flight, queue delay 12 ms" in text
    assert "idle" not in text
    assert "up (pid 1): 80 MiB, 1.0 s of CPU" in text
    assert "decoder (pid 2): 2.0 GiB" in text
    assert "\x1b" not in text, "what a client sent does not control the terminal"
    assert "model\\x1b[2J failed why=a b" in text


def test_status_of_many_models_stays_one_screen() -> None:
    """The rest is counted, with the command that lists it."""
    text = shown(models=[ModelSummary(f"m{number}", "ready") for number in range(100)], errors=[LINE] * 10)
    assert "100 ready" in text
    assert "and 88 more: penstock models list" in text
    assert text.count("\n") < 40


def test_status_shows_gpus_and_mps() -> None:
    """SM activity, memory, processes; a lost card with its reason."""
    process = GpuProcess(5, "street_0", 1, 0.5, is_mps_client=True)
    card = GpuSummary(0, "H100", "", 0.25, 0.9, 8 * GIB, 80 * GIB, [process])
    lost = GpuSummary(1, "H100", "Xid 79", None, None, None, None, [])
    text = shown(gpus=[card, lost], mps=MpsSummary(1, 0, 0, 0.0, 0, ""))
    assert "0 H100: SM activity 25%, memory 8.0 of 80.0 GiB, 1 process, 1 MPS client" in text
    assert "1 H100 lost: Xid 79" in text
    assert "1 client, 0 processes outside MPS" in text


def test_status_shows_lost_cards_and_where_models_are() -> None:
    """With an engine for each of several cards: the state of each, and each model's cards with the reason."""
    replicas = [ReplicaSummary("GPU 0", "up", 2, 0), ReplicaSummary("GPU 1", "lost", 0, 0)]
    engine = EngineSummary("triton", "triton", True, "", 0, replicas, {"street": "GPU 0, GPU 1: it fits"})
    text = shown(engine=engine)
    assert "GPU 0 up, 2 in flight" in text
    assert "GPU 1 lost, 0 in flight" in text
    assert "ready  GPU 0, GPU 1: it fits" in text


def test_status_shows_why_the_video_program_cannot_run() -> None:
    """The sentence that names the file and the key."""
    assert "video      video.yaml:1:2: primary-gie.x: there is no key" in shown(
        video_fault="video.yaml:1:2: primary-gie.x: there is no key"
    )


def test_status_shows_the_load_between_two_readings() -> None:
    """As `--watch` does: cores in use, by role."""
    before = {2: ProcessUsage(2, "decoder", 1, 4.0, 8.0)}
    console = Console(width=160, highlight=False)
    with console.capture() as captured:
        console.print(status.screen(report(), "http://here", None, before))
    assert "decoder (pid 2): 2.0 GiB, CPU 50%" in captured.get()


def test_status_command_asks_gateway_and_video_program(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variables for all commands; exit code 1 if the gateway is not ready."""
    monkeypatch.setenv("PENSTOCK_GATEWAY_URL", stand_in.url)
    monkeypatch.setenv("PENSTOCK_VIDEO_URL", stand_in.url)
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    stand_in.key = "secret"
    answers(stand_in, "/v1/system", report())
    stream = {"source_id": "door", "state": "reconnecting", "reason": "timeout", "fps": 0.0, "drops": {"late": 2}}
    refused = {"source_id": "gate", "state": "running", "fps": 25.0, "decoder_reason": "the video decoders are full"}
    answers(stand_in, "/v1/streams", {"streams": [stream, refused]})
    result = run("status")
    assert result.exit_code == 0
    assert "gate running  25.0 fps  decoded by the CPU: the video decoders are full" in result.stdout
    assert "door reconnecting  0.0 fps, 2 dropped  timeout" in result.stdout
    answers(stand_in, "/v1/system", report(is_ready=False, reason="draining"))
    result = run("status", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["reason"], answer["streams"][0]["source_id"]) == ("draining", "door")


def test_status_without_a_stack_says_how_to_start_one() -> None:
    """One sentence and exit code 1."""
    result = run("status", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9: start it with `penstock up`" in result.stderr


def test_status_watch_goes_on_until_ctrl_c(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the gateway refuses; exit code 130."""
    pauses = iter(range(2))

    def sleep(_: float) -> None:
        answers(stand_in, "/v1/system", {"error": "restarting"}, 503)
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    answers(stand_in, "/v1/system", report())
    result = run("status", "--watch", "--json", "--url", stand_in.url, "--video-url", "http://127.0.0.1:9")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["streams"] is None
    assert result.stderr.count("restarting") == 2


def log_page(*lines: LogLine, at: str = "1-50") -> dict[str, object]:
    return {"lines": [msgspec.to_builtins(line) for line in lines], "next": at}


def test_logs_shows_lines_and_passes_the_filter_on(stand_in: StandIn) -> None:
    """The gateway filters; control characters of a line are shown, not obeyed."""
    answers(stand_in, "/v1/logs", log_page(LINE))
    result = run("logs", "fail & co", "--level", "error", "--since", "10m", "--limit", "5", "--url", stand_in.url)
    assert result.stdout == ("2026-11-29T03:00:00.123Z error   gateway engine: model\\x1b[2J failed why='a b'\n")
    assert stand_in.asked[-1].query == "level=error&text=fail+%26+co&limit=5&since=10m"
    result = run("logs", "--json", "--url", stand_in.url)
    assert msgspec.json.decode(result.stdout, type=LogLine) == LINE


def test_logs_follow_asks_for_what_comes_after(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line once; while the gateway is away, one message."""
    later = msgspec.structs.replace(LINE, event="later", fields={})
    steps: Iterator[Callable[[], None]] = iter(
        [
            lambda: answers(stand_in, "/v1/logs", {"error": "restarting"}, 503),
            lambda: None,
            lambda: answers(stand_in, "/v1/logs", log_page(later, at="2-9")),
            lambda: answers(stand_in, "/v1/logs", log_page(at="2-9")),
        ]
    )

    def sleep(_: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(logs.time, "sleep", sleep)
    answers(stand_in, "/v1/logs", log_page(LINE))
    result = run("logs", "--follow", "--url", stand_in.url)
    assert result.exit_code == 130
    assert [line.split(": ", 1)[1] for line in result.stdout.splitlines()] == [
        "model\\x1b[2J failed why='a b'",
        "later",
    ]
    assert result.stderr.count("restarting") == 1
    assert stand_in.asked[-1].query == "level=debug&after=2-9&limit=1000"


def test_config_show_of_a_running_stack_is_what_is_in_force(stand_in: StandIn) -> None:
    """With origins; a name that is no setting is refused."""
    rows = [
        {"name": "http_port", "value": 9000, "default": 8000, "origin": "flag", "source": "--http-port"},
        {"name": "models", "value": ["a", "b"], "default": None, "origin": "file", "source": "a.toml:3"},
        {"name": "grace_s", "value": 30.0, "default": 30.0, "origin": "default"},
    ]
    answers(stand_in, "/v1/system/config", {"settings": rows})
    lines = run("config", "show", "--url", stand_in.url).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["setting", "value", "origin"],
        ["http_port", "9000", "flag", "--http-port"],
        ["models", "a,", "b", "file", "a.toml:3"],
        ["grace_s", "30.0", "default"],
    ]
    changed = run("config", "show", "--changed", "--json", "--url", stand_in.url)
    assert [row["name"] for row in json.loads(changed.stdout)] == ["http_port", "models"]
    result = run("config", "show", "http_prt", "--url", stand_in.url)
    assert result.exit_code == 2
    assert "no setting is named 'http_prt'" in result.stderr


def test_config_show_without_a_stack_is_what_up_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so; a file and variables count with their place."""
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "9")
    result = run("config", "show", "http_port")
    assert "showing the settings that `penstock up` would use" in result.stderr
    assert result.stdout.splitlines()[1].split() == ["http_port", "9", "variable", "PENSTOCK_HTTP_PORT"]
    file = tmp_path / "a.toml"
    file.write_text("\ngrace_s = 5\n")
    result = run("config", "show", "grace_s", "--config", str(file))
    assert result.stderr == ""
    assert result.stdout.splitlines()[1].split() == ["grace_s", "5.0", "file", f"{file}:2"]
    result = run("config", "show", "--config", str(tmp_path / "absent.toml"))
    assert (result.exit_code, "cannot be read" in result.stderr) == (2, True)


def test_penstock_alone_shows_commands_for_what_runs(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing; a stack with shipped models only; one with a model; one that wants a key; invalid settings."""
    monkeypatch.setenv("PENSTOCK_GATEWAY_URL", "http://127.0.0.1:9")
    assert "No stack is running.\n\n    penstock serve best.onnx " in run().stdout
    monkeypatch.setenv("PENSTOCK_GATEWAY_URL", stand_in.url)
    stand_in.index = [{"name": "street", "version": "1", "state": "READY"}]
    assert "serves the example models only.\n\n    penstock models add best.onnx" in run().stdout
    stand_in.index.append({"name": "ppe", "version": "1", "state": "READY"})
    assert f"A stack is running at {stand_in.url}.\n\n    penstock infer ppe photo.jpg --draw out.jpg  " in run().stdout
    stand_in.key = "secret"
    assert "export PENSTOCK_API_KEY=KEY" in run().stdout
    monkeypatch.delenv("PENSTOCK_GATEWAY_URL")
    monkeypatch.setenv("PENSTOCK_HTTP_PRT", "5")
    result = run()
    assert "did you mean PENSTOCK_HTTP_PORT?\n" in result.stdout
    assert result.exit_code == 0


@pytest.mark.parametrize("situation", Situation)
def test_start_page_names_commands_that_exist(situation: Situation) -> None:
    """Each is a command of ours or sets a variable of ours; names from a server are one line."""
    words = {"url": "http://here", "model": "a\x1b{b}", "reason": "no\nkey"}
    page = start_page(situation, words)
    assert "\x1b" not in page
    commands = [line.split() for line in page.splitlines() if line.startswith("    ")]
    assert 2 <= len(commands) <= 4
    known = {command.name for command in build_app([]).registered_commands}
    assert all(command[0] == "export" or command[1] in known for command in commands)


def test_model_to_try_is_one_of_the_users() -> None:
    """Not one that ships, nor one that does not serve."""
    rows = (ModelState("street", "1", "READY"), ModelState("mine", "1", "UNAVAILABLE"), ModelState("ppe", "1", "READY"))
    assert model_to_try(rows) == "ppe"
    assert model_to_try(rows[:2]) == ""
