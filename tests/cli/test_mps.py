"""`penstock mps`: a daemon in the background, who its clients are, its end; and one line where there is no GPU."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli import mps
from penstock.cli.main import build_app
from penstock.gpu.mps.control import PIPE_DIRECTORY
from penstock.gpu.mps.daemon import PLAN_FILE
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading
from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad, ProcessLoad
from tests.gpu.mps_programs import programs

H200 = NvmlReading(NvmlOutcome.ANSWERED, cuda=(13, 0), cards=(GpuDevice(0, "H200", (9, 0), 1 << 37, 0),))
P4 = NvmlReading(NvmlOutcome.ANSWERED, cuda=(12, 4), cards=(GpuDevice(0, "P4", (6, 1), 1 << 33, 0),))
Ask = Callable[..., Result]
Patch = pytest.MonkeyPatch


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name, for the sockets in it."""
    return tmp_path_factory.mktemp("mps")


@pytest.fixture
def ask(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """`penstock mps …` on a machine with an H200 and NVIDIA's programs; no daemon is left."""
    monkeypatch.setenv("PATH", f"{programs(place / 'bin')}:{os.defpath}")
    monkeypatch.delenv(PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps, "run_folders", lambda: place / "runs")
    monkeypatch.setattr(mps, "read_cards", lambda: H200)

    def run(*words: str) -> Result:
        return CliRunner().invoke(build_app(["mps"]), ["mps", *words])

    yield run
    run("stop", "--grace-s", "0")


def test_started_daemon_is_shown_with_its_clients_and_stop_ends_it(ask: Ask, place: Path) -> None:
    """The last line of start is what its clients set; status names each of them; a second start is refused."""
    began = ask("start", "--active-thread-percentage", "50", "--pinned-memory", "4G")
    pipes = place / "runs" / "mps"
    assert (began.exit_code, began.stdout.splitlines()[-1]) == (0, f"export {PIPE_DIRECTORY}={pipes}")
    again = ask("start")
    assert (again.exit_code, "runs in" in again.stderr) == (1, True)
    (pipes / "clients").write_text(f"{os.getpid()}\n")
    (pipes / PLAN_FILE).write_text("net: 1 process, all threads: no limit is set\n")
    shown = ask("status")
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (
        0, f"{pipes}: up, 1 clients, at most 48 a GPU, 50 % of the threads for a client by default",
    )  # fmt: skip
    assert shown.stdout.splitlines()[1] == "  model net: 1 process, all threads: no limit is set"
    daemon = json.loads(ask("status", "--json").stdout)["daemons"][0]
    assert daemon["models"] == ["net: 1 process, all threads: no limit is set"]
    assert (daemon["is_up"], daemon["client_limit"], daemon["active_thread_percentage"]) == (True, 48, 50.0)
    assert [client["pid"] for client in daemon["servers"][0]["clients"]] == [os.getpid()]
    assert daemon["servers"][0]["state"] == "active"
    assert ask("stop", "--grace-s", "0").exit_code == 0
    assert not (pipes / "control").exists()
    assert ask("stop").exit_code == 1
    assert ask("status").exit_code == 1


def test_without_a_gpu_each_command_says_so_in_one_line(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1; stop has nothing to stop."""
    monkeypatch.setattr(mps, "read_cards", lambda: NvmlReading(NvmlOutcome.NO_LIBRARY))
    for words in (["start"], ["status"], ["status", "--json"]):
        answer = ask(*words)
        assert (answer.exit_code, answer.stdout) == (1, "")
        assert answer.stderr == f"penstock: {mps.NO_GPU}\n"


def test_wrong_limit_is_refused_before_anything_starts(ask: Ask, place: Path) -> None:
    """With what it takes."""
    answer = ask("start", "--pinned-memory", "lots")
    assert (answer.exit_code, "--pinned-memory has 'lots'; use 4G" in answer.stderr) == (2, True)
    assert not (place / "runs").exists()


def test_limits_on_a_card_before_volta_are_refused(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS would take them there and not keep them."""
    monkeypatch.setattr(mps, "read_cards", lambda: P4)
    answer = ask("start", "--active-thread-percentage", "50")
    assert (answer.exit_code, "older than Volta" in answer.stderr) == (2, True)


def test_daemon_that_refuses_its_limits_does_not_stay(ask: Ask) -> None:
    """The stand-in has no card 7."""
    answer = ask("start", "--pinned-memory", "7=1G")
    assert (answer.exit_code, "no such device" in answer.stderr) == (1, True)
    assert ask("status").exit_code == 1


def test_daemon_of_a_running_stack_is_shown_and_not_ended(ask: Ask, place: Path) -> None:
    """Its folder is a run directory, with its owner in it."""
    pipes = place / "runs" / "run-0123456789ab"
    assert ask("start", "--directory", str(pipes)).exit_code == 0
    (pipes / "owner").touch()
    assert str(pipes) in ask("status").stdout
    refused = ask("stop", "--directory", str(pipes))
    assert (refused.exit_code, "penstock up" in refused.stderr) == (1, True)
    (pipes / "owner").unlink()
    ended = ask("stop", "--directory", str(pipes), "--grace-s", "0", "--json")
    assert (ended.exit_code, json.loads(ended.stdout)) == (0, {"directory": str(pipes)})


def test_status_tells_how_busy_the_card_is_and_what_each_client_has(ask: Ask, place: Path, monkeypatch: Patch) -> None:
    """SM activity beside util; memory and time of a client where NVML tells them, nothing of one it does not show."""
    held = ProcessLoad(os.getpid(), "resnet50_0_0", 3 << 29, 0.4, is_mps_client=True)
    card = CardLoad(0, kernel_running=1.0, source=ActivitySource.GPM, activity=Activity(sm=0.54), processes=(held,))
    monkeypatch.setattr(mps, "sample", lambda seconds: (card,))
    assert ask("start").exit_code == 0
    (place / "runs" / "mps" / "clients").write_text(f"{os.getpid()}\n1\n")
    lines = ask("status").stdout.splitlines()
    assert lines[1] == "  GPU 0: SM activity 54.0% by gpm, util 100%"
    shows_memory = [line.endswith(", 1.50 GiB, a kernel ran 40% of the time") for line in lines if "  client " in line]
    assert shows_memory == [False, True]
    clients = json.loads(ask("status", "--json").stdout)["daemons"][0]["servers"][0]["clients"]
    assert [(one["memory_bytes"], one["time_share"]) for one in clients] == [(None, None), (3 << 29, 0.4)]
