"""The GPU bench's `penstock up`: what it says of itself is believed, also that a model cannot be served."""

import time
from pathlib import Path

import pytest

from loadtest.bench.gpu.penstock_up import PenstockUp
from loadtest.bench.wire import BadAnswer

READY = "ready: REST http://127.0.0.1:8017  gRPC 127.0.0.1:8001  metrics http://127.0.0.1:8002/metrics\n"


@pytest.fixture
def up(tmp_path: Path) -> PenstockUp:
    """One that is not started: what it would say is written into its log."""
    return PenstockUp(tmp_path, ["resnet"], environment=tmp_path)


def test_stack_that_is_ready_says_its_port(up: PenstockUp, tmp_path: Path) -> None:
    """It is waited for until the line is there."""
    (tmp_path / "up.log").write_text(READY)
    up.wait(time.monotonic() + 1.0)
    assert up.port == 8017


def test_stack_that_is_ready_without_the_model_is_no_stack_to_measure(up: PenstockUp, tmp_path: Path) -> None:
    """Its own reason ends the part, instead of a 404 after twenty seconds of asking."""
    (tmp_path / "up.log").write_text("cannot serve resnet: it needs numpy 1.26\nengine: triton 2.51.0\n" + READY)
    with pytest.raises(BadAnswer, match=r"^penstock up cannot serve resnet: it needs numpy 1\.26$"):
        up.wait(time.monotonic() + 1.0)
