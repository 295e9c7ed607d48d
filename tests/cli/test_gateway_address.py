"""The gateway that a command without --url uses: a running stack of this user, else the default address."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.cli import doctor
from penstock.cli.gateway_client import local_url
from penstock.engines.run_directory import RunDirectory, claim_run_directory
from penstock.gateway.settings_sources import read_settings
from penstock.gateway.workers import running_stacks
from penstock.gateway.workers.running_stacks import UP_CHILD, publish_stack
from tests.cli.conftest import Call, StandIn
from tests.models.add.test_add import write_yolox

ROW = {"name": "ppe", "version": "1", "state": "READY", "reason": ""}
Publish = Callable[..., RunDirectory]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Publishes a running stack of this address and home, newer than the ones before."""
    base = running_stacks.run_folders()
    base.chmod(0o700)
    with ExitStack() as directories:

        def start(http_url: str, home: str = "", checkout: str = "") -> RunDirectory:
            directory = directories.enter_context(claim_run_directory(base)[0])
            publish_stack(directory.path, http_url, "127.0.0.1:1", home=Path(home) if home else None)
            if checkout:
                file = directory.path / "running.json"
                file.write_text(file.read_text().replace(running_stacks.PROGRAM, checkout))
            number = len(list(base.glob("run-*")))
            os.utime(directory.path / "running.json", ns=(number, number))
            return directory

        yield start


def test_commands_without_url_use_the_stack_that_runs_here(penstock: Call, stand_in: StandIn, publish: Publish) -> None:
    """A stack on another port than 8000 is found by its run directory; standard error is empty."""
    stand_in.index = [ROW]
    publish(stand_in.url)
    answer = penstock("models", "list")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert "ppe" in answer.stdout
    assert stand_in.asked


def test_of_several_stacks_the_newest_is_used_and_named(penstock: Call, stand_in: StandIn, publish: Publish) -> None:
    """One line on standard error names it, the others with their homes, and how to use another."""
    stand_in.index = [ROW]
    publish("http://127.0.0.1:9", "/srv/theirs")
    publish(stand_in.url)
    answer = penstock("models", "unload", "ppe")
    used, other = f"{stand_in.url} is used", "others are http://127.0.0.1:9 (home /srv/theirs)"
    named = f"penstock: 2 stacks run here: {used}; {other}. --url or PENSTOCK_HTTP_PORT selects one\n"
    assert (answer.exit_code, answer.stderr) == (0, named)
    assert stand_in.asked[-1].path == "/v2/repository/models/ppe/unload"


def test_stack_of_this_home_is_used_before_newer_ones(penstock: Call, stand_in: StandIn, publish: Publish) -> None:
    """No other stack is asked or named, though another is newer; of one home, the one of this checkout is used."""
    stand_in.index = [ROW]
    here = os.environ["PENSTOCK_HOME"]
    publish(stand_in.url, here)
    publish("http://127.0.0.1:9", "/srv/theirs")
    publish("http://127.0.0.1:9", here, checkout="/srv/checkout")
    answer = penstock("models", "list", "--json")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert stand_in.asked


def test_only_stack_of_another_home_is_named(penstock: Call, stand_in: StandIn, publish: Publish) -> None:
    """It may be another person's, so a line on standard error names its home and this command's."""
    stand_in.index = [ROW]
    publish(stand_in.url, "/srv/theirs")
    answer = penstock("models", "list")
    assert answer.exit_code == 0
    homes = f"{stand_in.url} (home /srv/theirs) is used; no stack of this command's home runs here"
    assert answer.stderr.startswith(f"penstock: {homes} ({os.environ['PENSTOCK_HOME']}).")


def test_address_that_is_given_wins(penstock: Call, stand_in: StandIn, publish: Publish) -> None:
    """With --url the stacks of this machine are not read."""
    stand_in.index = [ROW]
    publish("http://127.0.0.1:9")
    publish("http://127.0.0.1:9")
    answer = penstock("models", "unload", "ppe", "--url", stand_in.url)
    assert (answer.exit_code, answer.stderr) == (0, "")


def test_add_without_loading_reads_no_stacks(penstock: Call, publish: Publish, tmp_path: Path) -> None:
    """The gateway adds models with --no-load, in a process whose standard error goes to the client."""
    for _ in range(2):
        publish("http://127.0.0.1:9")
    answer = penstock("models", "add", write_yolox(tmp_path / "m.onnx"), "--no-load", "--layout", "yolox")
    assert "stacks run here" not in answer.stderr


def test_port_in_the_settings_chooses_the_stack(publish: Publish) -> None:
    """PENSTOCK_HTTP_PORT chooses among the running stacks, with the scheme of the one on that port."""
    publish("https://127.0.0.1:9000")
    publish("http://127.0.0.1:9100")

    def url(**environ: str) -> str:
        return local_url(read_settings({}, environ=environ))

    assert url(PENSTOCK_HTTP_PORT="9000") == "https://127.0.0.1:9000"
    assert url(PENSTOCK_HTTP_PORT="9200") == "http://127.0.0.1:9200"
    assert url(PENSTOCK_HTTP_PORT="0") == "http://127.0.0.1:9100"


def test_without_a_stack_the_default_address_is_used(publish: Publish) -> None:
    """A stack that has ended is not used."""
    publish("http://127.0.0.1:9100").release()
    assert local_url(read_settings({}, environ={})) == "http://127.0.0.1:8000"


def test_own_stack_of_a_video_program_is_not_used(publish: Publish) -> None:
    """It ends with that program, so other commands must not depend on it."""
    waiting = [sys.executable, "-c", "print(flush=True); input()", UP_CHILD]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as video:
        assert video.stdout is not None
        video.stdout.readline()  # its command line can be read now
        file = publish("http://127.0.0.1:9100").path / "running.json"
        file.write_text(file.read_text().replace(f'"process_id":{os.getpid()}', f'"process_id":{video.pid}'))
        assert local_url(read_settings({}, environ={})) == "http://127.0.0.1:8000"
        video.kill()


def test_doctor_lists_the_models_of_the_stack_that_runs_here(
    stand_in: StandIn, publish: Publish, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The finding names the address."""
    stand_in.index = [ROW]
    publish(stand_in.url)
    monkeypatch.setattr(doctor, "examine", lambda plan: [])
    doctor.doctor(config=None, as_json=False)
    assert f"1 served by the gateway at {stand_in.url}" in capsys.readouterr().out
