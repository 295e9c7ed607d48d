"""The GPU bench's `penstock up`: what the stack says of itself is understood, also that a model cannot be served."""

import time
from pathlib import Path

import pytest

from loadtest.bench.gpu.programs import PenstockUp
from loadtest.bench.wire import BadAnswer
from penstock.cli.up import announce
from penstock.gateway.stack.stack import Announcement

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def up(tmp_path: Path) -> PenstockUp:
    """One that is not started: what it would say is written into its log."""
    return PenstockUp(tmp_path, ["resnet"], environment=tmp_path)


def say(log: Path, capsys: Capsys, unavailable: dict[str, str]) -> None:
    """The stack's own words, behind a line of its log."""
    served = tuple({"resnet"} - unavailable.keys())
    announced = Announcement(
        "triton 2.51.0", "http://127.0.0.1:8017", "127.0.0.1:1", "http://a:2/metrics", served, unavailable
    )
    announce(announced)
    log.write_text("2026-11-23T09:32:05Z info    engine: engine is ready\n" + capsys.readouterr().out)


def test_stack_that_is_ready_says_its_port(up: PenstockUp, tmp_path: Path, capsys: Capsys) -> None:
    """It is waited for until the line is there."""
    say(tmp_path / "up.log", capsys, {})
    up.wait(time.monotonic() + 1.0)
    assert up.port == 8017


def test_stack_that_is_ready_without_the_model_is_no_stack_to_measure(
    up: PenstockUp, tmp_path: Path, capsys: Capsys
) -> None:
    """Its own reason ends the part, instead of a 404 after twenty seconds of asking."""
    say(tmp_path / "up.log", capsys, {"resnet": "model 'resnet' cannot be loaded: it needs numpy 1.26"})
    with pytest.raises(BadAnswer, match=r"^penstock up cannot serve resnet: it needs numpy 1\.26$"):
        up.wait(time.monotonic() + 1.0)
