"""`penstock doctor`: the object, the table, the exit code, and a machine with mistakes."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli import doctor as command
from penstock.cli.doctor import as_object, model_findings, show
from penstock.cli.gateway_client import GatewayClient
from penstock.cli.main import build_app
from penstock.doctor.finding import Finding, Severity
from tests.cli.conftest import StandIn

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SUBJECTS = {
    "settings", "host", "cpu", "memory", "gpu", "image", "tensorrt", "mps", "video", "engine", "shm", "limits", "ports",
    "disk",
}  # fmt: skip
FINDINGS = [
    Finding(
        "gpu.card0", Severity.OK, "NVIDIA H200, compute capability 9.0, 140.4 GiB (0 KiB used), mode DEFAULT, MIG off"
    ),
    Finding("image.tag", Severity.OK, "nvcr.io/nvidia/tritonserver:26.07-py3 or later: earlier ones are vulnerable"),
    Finding("shm.room", Severity.WARNING, "64 MiB free", "make it larger: docker run --shm-size=1g"),
    Finding("shm.leftovers", Severity.NOTE, "1 region\x1b[31m of a killed stack", "the next `penstock up` clears it"),
    Finding("ports.http", Severity.PROBLEM, "8000 is taken by nginx", "stop it, or penstock up --http-port N"),
]


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it, with nothing set but what is given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "doctor", *arguments],
        env=clean | environ, cwd=CHECKOUT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def shown(width: int, *, is_terminal: bool = False) -> str:
    """The table at that width."""
    stream = io.StringIO()
    color_system: Literal["standard"] | None = "standard" if is_terminal else None
    show(
        FINDINGS,
        Console(file=stream, width=width, force_terminal=is_terminal, color_system=color_system, highlight=False),
    )
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 120])
def test_show_fits_the_width_and_loses_nothing(width: int) -> None:
    """Every word of finding and advice is there, no line is wider than the terminal, and there is no escape in it."""
    text = shown(width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    joined = " ".join(text.split())
    for word in ("nvcr.io/nvidia/tritonserver:26.07-py3", "--shm-size=1g", "warning", "nginx", "`penstock up`"):
        assert word in joined
    assert joined.endswith("penstock up cannot serve here: 2 ok, 1 note, 1 warning, 1 problem")


def test_show_a_terminal_gets_colours() -> None:
    """Marks are coloured on a terminal; what was found cannot send it escapes of its own."""
    text = shown(80, is_terminal=True)
    assert "\x1b[1;31mproblem" in text
    assert "\\x1b[31m of" in text


def test_as_object_has_findings_and_a_summary() -> None:
    """One object, one row a finding, and whether it can serve."""
    read: dict[str, Any] = json.loads(as_object(FINDINGS))
    assert read["findings"][2] == {
        "id": "shm.room", "subject": "shm", "status": "warning", "found": "64 MiB free",
        "advice": "make it larger: docker run --shm-size=1g",
    }  # fmt: skip
    assert read["summary"] == {"ok": 2, "note": 1, "warning": 1, "problem": 1, "can_serve": False}


def test_doctor_here_answers_every_subject_on_standard_output_alone(tmp_path: Path) -> None:
    """One JSON object with every subject, nothing on standard error, and the code says whether there is a problem."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = doctor("--json", PENSTOCK_HOME=str(tmp_path), PENSTOCK_HTTP_PORT=str(port))
    read: dict[str, Any] = json.loads(said.stdout)
    by_id = {row["id"]: row for row in read["findings"]}
    assert {row["subject"] for row in read["findings"]} == SUBJECTS | {"models"}
    assert len(by_id) == len(read["findings"])
    assert by_id["settings.values"]["found"] == "given: PENSTOCK_HOME, PENSTOCK_HTTP_PORT"
    assert by_id["ports.http"]["status"] == "problem"
    assert "--http-port" in by_id["ports.http"]["advice"]
    assert (said.returncode, said.stderr) == (1, "")


@pytest.mark.parametrize(
    ("text", "found"),
    [("http_prot = 1\n", "unknown setting 'http_prot'"), ("a = \n", "not valid TOML"), (None, "cannot be read")],
)
def test_doctor_wrong_settings_are_a_finding(
    tmp_path: Path, text: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong settings are a problem with their fix, and the rest of the machine is looked at all the same."""
    monkeypatch.setattr(command, "examine", lambda plan: FINDINGS[:1])
    file = tmp_path / "penstock.toml"
    if text is not None:
        file.write_text(text)
    said = CliRunner().invoke(build_app(["doctor"]), ["doctor", "--config", str(file)])
    assert said.exit_code == 1
    assert found in " ".join(said.stdout.split())
    assert "NVIDIA H200" in said.stdout
    assert said.stderr == ""


def test_models_that_the_gateway_cannot_serve_are_findings(stand_in: StandIn) -> None:
    """Each has its reason and what to do; models that were unloaded or never loaded are no findings."""
    why = "its trial at load failed: a picture through /image: output 'y' has shape [3] for one image"
    stand_in.index = [
        {"name": "fine", "version": "1", "state": "READY", "reason": ""},
        {"name": "odd", "version": "1", "state": "UNAVAILABLE", "reason": why},
        {"name": "gone", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "new"},
    ]
    served, odd = model_findings(GatewayClient(stand_in.url))
    assert (served.id, served.status) == ("models.served", Severity.OK)
    assert served.found.startswith("1 served by the gateway at http://")
    assert (odd.id, odd.subject, odd.status) == ("models.odd", "models", Severity.WARNING)
    assert odd.found == f"odd: {why}"
    assert odd.advice.endswith("penstock models load odd")


def test_models_of_no_gateway_or_one_that_refuses(stand_in: StandIn) -> None:
    """Without a gateway there is no finding; with one that needs a key there is a note."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert model_findings(GatewayClient(f"http://127.0.0.1:{port}")) == []
    stand_in.key = "k"
    (note,) = model_findings(GatewayClient(stand_in.url))
    assert (note.status, "PENSTOCK_API_KEY" in note.found) == (Severity.NOTE, True)
