"""Commands of other programs are found by entry points."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import build_app, commands

PROGRAM = """
from penstock.cli import Command

GREET = Command("penstock_greet.command", "greet", "Say hello.", extra="greet", needs={needs!r})
"""
COMMAND = "def greet() -> None:\n    print('hello')\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with the metadata of a distribution that adds `penstock greet`."""
    metadata = tmp_path / "penstock_greet-1.0.dist-info"
    metadata.mkdir()
    entry = "[console_scripts]\nx = y:z\n\n[penstock.commands]\ngreet = penstock_greet:GREET\n\n[other]\na = b:c\n"
    (metadata / "entry_points.txt").write_text(entry)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in ("penstock_greet", "penstock_greet.command"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def write_program(folder: Path, needs: tuple[str, ...] = ()) -> None:
    """The package that the entry point names."""
    (folder / "penstock_greet").mkdir()
    (folder / "penstock_greet" / "__init__.py").write_text(PROGRAM.format(needs=needs))
    (folder / "penstock_greet" / "command.py").write_text(COMMAND)


def test_entry_point_adds_a_command(install: Path) -> None:
    """A distribution named penstock… adds its command; it is listed with its line of help, and runs."""
    write_program(install)
    assert "Say hello." in CliRunner().invoke(build_app([]), ["--help"]).stdout
    assert CliRunner().invoke(build_app(["greet"]), ["greet"]).stdout == "hello\n"


def test_entry_point_of_an_absent_package_is_left_out(install: Path) -> None:
    """An image without the video program has no `penstock video`."""
    assert "greet" not in commands()


def test_command_without_its_extra_says_what_to_install(install: Path) -> None:
    """One sentence names the packages and the extra, before anything is imported."""
    write_program(install, needs=("json", "no_such_package"))
    with pytest.raises(SystemExit, match=r"not installed here \(no_such_package\).*pip install 'penstock\[greet\]'"):
        build_app(["greet"])


def test_programs_come_by_entry_points() -> None:
    """This environment has the commands of both programs."""
    assert {"video", "load"} <= set(commands())
