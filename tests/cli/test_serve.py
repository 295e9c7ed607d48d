"""`penstock serve`: which files become models of the stack, and how the others are reported."""

from pathlib import Path
from typing import Any

import pytest

from penstock.cli import serve as command
from penstock.cli.main import build_app
from tests.models.add.test_add import write_yolox

FLAGS = ("--layout", "yolox", "--color", "bgr")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each start of the stack, which does not start."""
    starts: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "up", lambda **given: starts.append(given))
    return starts


def serve(*words: object) -> int:
    """The exit code. The process that adds models writes to the same standard error."""
    return build_app(["serve"])(["serve", *map(str, words)], standalone_mode=False) or 0


def sentences(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Our lines on standard error; gRPC, if an earlier test used it, writes a line for each fork."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("penstock: ")]


def test_serve_of_a_folder_serves_what_can_be_added(
    tmp_path: Path, started: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """One file that cannot be added is reported by its name, and does not stop the others."""
    write_yolox(tmp_path / "a.onnx")
    (tmp_path / "b.onnx").write_bytes(b"no model")
    write_yolox(tmp_path / "c.onnx")
    assert serve(tmp_path, *FLAGS) == 0
    assert [one["models"] for one in started] == ["a,c"]
    first, last = sentences(capfd)
    assert first.startswith(f"penstock: {tmp_path / 'b.onnx'} was not added: ")
    assert last.startswith(f"penstock: a, c will be served, without {tmp_path / 'b.onnx'}; add it to the running stack")


def test_serve_of_files_that_cannot_be_added_starts_nothing(
    tmp_path: Path, started: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, after a line for each file."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.onnx").write_bytes(b"no model")
    assert (serve(tmp_path), started) == (1, [])
    lines = sentences(capfd)
    assert ["was not added: " in line for line in lines] == [True, True, False]
    assert "the stack is not started" in lines[-1]


def test_serve_with_wrong_settings_is_one_sentence(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No traceback of the process that adds the models."""
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "no port")
    (tmp_path / "a.onnx").write_bytes(b"no model")
    assert (serve(tmp_path), started) == (2, [])
    (line,) = sentences(capfd)
    assert "PENSTOCK_HTTP_PORT" in line
