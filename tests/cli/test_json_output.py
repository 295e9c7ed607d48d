"""`--json`: every command whose output a program could want has it, and it prints JSON alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli.gateway_client import gateway_url
from penstock.cli.main import build_app, commands
from penstock_load.measure.run_folder import write_run
from tests.cli.conftest import Call, StandIn
from tests.loadtest.runs import make_run

UNUSED_URL = "http://127.0.0.1:9"
FOREGROUND = {"up", "serve", "console", "load locust"}  # they run until they are stopped, and log (--log-format json)


def all_commands() -> Iterator[tuple[str, TyperCommand]]:
    """(words, command) of every command for people and their programs."""
    for name in commands():
        root = get_command(build_app([name]))
        assert isinstance(root, TyperGroup)
        command = root.commands[name]
        parts = command.commands if isinstance(command, TyperGroup) else {"": command}
        for part, one in parts.items():
            if not one.hidden:
                yield f"{name} {part}".strip(), one


def test_every_command_has_json_output_unless_it_runs_until_it_is_stopped() -> None:
    """So that a program never has to read a table."""
    without = {words for words, command in all_commands() if not any("--json" in one.opts for one in command.params)}
    assert without == FOREGROUND


def test_load_and_unload_say_what_they_did_as_json(penstock: Call, stand_in: StandIn) -> None:
    """The model, its state and the gateway."""
    stand_in.index = [{"name": "m", "version": "1", "state": "READY"}]
    for action in ("load", "unload"):
        answer = penstock("models", action, "m", "--json", "--url", stand_in.url)
        assert json.loads(answer.stdout) == {"model": "m", "state": f"{action}ed", "url": stand_in.url}


def test_pull_says_where_the_model_is_as_json(penstock: Call, shared_dir: Path) -> None:
    """One object: folder, licence, whether anything was fetched, and what the gateway did."""
    words = ("models", "pull", "fastestdet", "--from", shared_dir / "models", "--url", UNUSED_URL, "--json")
    first, again = (json.loads(penstock(*words).stdout) for _ in range(2))
    assert (first["model"], first["licence"], first["preserved"]) == ("fastestdet", "BSD-3-Clause", [])
    assert (Path(first["folder"]) / "config.pbtxt").is_file()
    assert (first["changed"], again["changed"]) == (True, False)
    assert first["state"].startswith("no gateway runs")


def test_remove_names_the_folder_as_json(penstock: Call, stand_in: StandIn, shared_dir: Path) -> None:
    """null if only the gateway had the model."""
    words = ("models", "pull", "fastestdet", "--from", shared_dir / "models", "--url", UNUSED_URL, "--json")
    folder = json.loads(penstock(*words).stdout)["folder"]
    remove = ("models", "remove", "fastestdet", "--json", "--url", stand_in.url)
    assert json.loads(penstock(*remove).stdout) == {"model": "fastestdet", "folder": folder}
    stand_in.index = [{"name": "fastestdet", "version": "1", "state": "READY"}]
    assert json.loads(penstock(*remove).stdout) == {"model": "fastestdet", "folder": None}


def test_new_key_is_printed_with_its_roles_as_json(tmp_path: Path) -> None:
    """The note that it is shown only once stays on standard error."""
    file = tmp_path / "access.toml"
    words = ["keys", "new", "ops", "--file", str(file), "--role", "read,admin", "--json"]
    answer = CliRunner().invoke(build_app(words), words)
    made = json.loads(answer.stdout)
    assert (made["name"], made["roles"], made["file"]) == ("ops", ["read", "admin"], str(file))
    assert made["key"] not in file.read_text()
    assert "it cannot be shown again" in answer.stderr


def test_load_report_prints_its_path_as_json(penstock: Call, tmp_path: Path) -> None:
    """Of a run that is written again."""
    write_run(tmp_path / "run", make_run())
    shown = json.loads(penstock("load", "report", tmp_path / "run", "--json").stdout)
    assert Path(shown["report"]).is_file()


def test_variable_names_the_gateway_for_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """PENSTOCK_GATEWAY_URL counts where no address is given; an address of the command line counts more."""
    monkeypatch.setenv("PENSTOCK_GATEWAY_URL", "http://gateway:1")
    assert gateway_url(None) == "http://gateway:1"
    assert gateway_url("http://other:2") == "http://other:2"
    answer = CliRunner().invoke(build_app(["models"]), ["models", "unload", "m"])
    assert "http://gateway:1" in answer.stderr
