"""Fixtures of the tests that run a stack of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import start_stack, stop_stack
from tests.integration.ledger import Ledgers, parameter, write_ledger
from tests.integration.living import SLOW_CONFIG
from tests.tiny_models import CONFIG, IDENTITY, SLOW, write_model


@pytest.fixture
def repository(tmp_path: Path, triton_environment: Path) -> Path:
    """One identity and one sleeper, quick to load."""
    folder = tmp_path / "models"
    write_model(folder, "identity", IDENTITY, CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1))
    write_model(folder, "slow", SLOW, SLOW_CONFIG)
    return folder


@pytest.fixture(scope="session")
def ledgers(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[Ledgers]:
    """One stack over models that write down their calls, and sleep as told.

    naps; short, whose queue takes four, and which is asked so rarely that nothing is known of its times; replayed,
    10 ms a row and an SLO of 0.6 s.
    """
    folder = tmp_path_factory.mktemp("ledgers")
    write_ledger(folder, "naps")
    write_ledger(folder, "short", more=parameter("max_queue_size", 4))
    write_ledger(folder, "replayed", beta_ms=10, more=parameter("slo_p99_ms", 600))
    running = start_stack(folder / "home", "--model-repository", str(folder / "models"))
    yield Ledgers(running, folder)
    assert stop_stack(running) == 0, "".join(running.log[-30:])
