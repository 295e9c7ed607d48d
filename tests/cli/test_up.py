"""`penstock up` before it starts anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import up
from penstock.cli.main import build_app
from penstock.cli.up import announce
from penstock.gateway.stack.stack import Announcement
from penstock.gateway.stack.startup import CannotStart
from tests.support.stack import CHECKOUT

RAISES = """
import resource, sys
from penstock.cli.up import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int) -> list[str]:
    """The limits of open files of a process that began with these and allowed itself more."""
    done = subprocess.run(
        [sys.executable, "-c", RAISES, str(soft), str(hard)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_open_files_of_a_usual_shell_are_raised_to_the_hard_limit() -> None:
    """1,024 requests in flight hold more than the 1,024 files that most shells start with."""
    assert limits_after(1024, 4096) == ["4096", "4096"]


@pytest.mark.parametrize(("workers", "suffix"), [(1, ""), (2, "  (2 workers)")])
def test_ready_line_says_how_many_workers_serve_where_there_is_more_than_one(
    capsys: pytest.CaptureFixture[str], workers: int, suffix: str
) -> None:
    """The last line that a person reads, behind the addresses that a program reads."""
    announce(Announcement("Triton 2.58", "http://a:1", "a:2", "http://a:3/metrics", ("m",), {}, workers))
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"ready: REST http://a:1  gRPC a:2  metrics http://a:3/metrics{suffix}"
    )


@pytest.mark.parametrize(("models", "is_offered"), [((), True), (("people", "street"), True), (("mine",), False)])
def test_summary_offers_the_default_detector_while_only_shipped_models_serve(
    capsys: pytest.CaptureFixture[str], models: tuple[str, ...], is_offered: bool
) -> None:
    """One line with the command; no line for a user who serves a model of their own."""
    announce(Announcement("Triton", "http://a:1", "a:2", "http://a:3/metrics", models, {}))
    lines = capsys.readouterr().out.splitlines()
    assert ("for a detector of 80 classes: penstock models pull yolox-nano" in lines) is is_offered


def test_gateway_whose_required_models_do_not_serve_is_not_called_ready(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is on a separate line."""
    announce(Announcement("Triton", "http://a:1", "a:2", "http://a:3/metrics", ("m",), {}, not_ready="model 'n'"))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "health checks fail: model 'n'",
        "not ready: REST http://a:1  gRPC a:2  metrics http://a:3/metrics",
    ]


def test_keys_of_the_environment_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the gateway's nor the one with which commands beside it ask: Triton's Python models could read them."""

    def stop(*_: object) -> None:
        raise CannotStart("here")

    monkeypatch.setenv("PENSTOCK_API_KEYS", "ops:admin:" + "x" * 20)
    monkeypatch.setenv("PENSTOCK_API_KEY", "x" * 20)
    monkeypatch.setattr(up, "check_access", stop)
    monkeypatch.setattr(up, "configure_logs", lambda *_: None)
    with pytest.raises(CannotStart):
        up._serve(dict.fromkeys(("models", "required_models", "anonymous", "batching", "model_repository")), None)
    assert not [name for name in os.environ if name.startswith("PENSTOCK_API_KEY")]


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        (("--host", "0.0.0.0"), {}, "can be reached from other machines, and there are no API keys: make one with"),
        (("--host", "::"), {}, "or say what all may do with --anonymous infer,read"),
        (("--access-file", "/nowhere.toml"), {}, "/nowhere.toml: cannot be read (No such file or directory)"),
        (("--anonymous", "root"), {}, "--anonymous is 'root': it should be 'infer', 'read' or 'admin'"),
        (
            (),
            {"PENSTOCK_API_KEYS": "ops:infer:secret-of-ours"},
            "PENSTOCK_API_KEYS: key number 1 is not NAME:ROLE+ROLE",
        ),
        (("--audit-log", "/nowhere/log"), {}, "cannot be opened (No such file or directory); name a file to append to"),
    ],
)
def test_start_without_safe_access_or_its_audit_log_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], environ: dict[str, str], sentence: str
) -> None:
    """One line; nothing has started by then, and no secret is in it."""
    monkeypatch.setattr(up, "choose_engine", lambda _: pytest.fail("the start went on"))
    words = ["up", "--home", str(tmp_path), "--engine", "embedded", *arguments]
    answer = CliRunner().invoke(build_app(["up"]), words, env=environ)
    assert answer.exit_code == 2
    assert len(answer.output.splitlines()) == 1
    assert sentence in answer.output
    assert "secret-of-ours" not in answer.output
