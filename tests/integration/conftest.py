"""Fixtures of the tests that run a stack of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.client_processes import start_fronts
from tests.integration.guarded import Guarded, start_guarded
from tests.integration.ledger import Ledgers, parameter, write_ledger, write_shades
from tests.integration.living import write_quick_models
from tests.integration.two_workers import wait_until_both_serve
from tests.integration.video_runs import Place, new_place, put_model, put_small_models, start_stack_at
from tests.support.stack import RunningStack, start_stack, stop_stack


@pytest.fixture
def repository(tmp_path: Path, triton_environment: Path) -> Path:
    """One identity and one sleeper, quick to load."""
    return write_quick_models(tmp_path / "models")


@pytest.fixture(scope="session")
def ledgers(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[Ledgers]:
    """One stack over models that record their calls, and sleep as requested.

    naps; short, whose queue takes four, and which is asked so rarely that nothing is known of its times; replayed,
    10 ms a row and an SLO of 0.6 s; shades, of pictures.
    """
    folder = tmp_path_factory.mktemp("ledgers")
    write_ledger(folder, "naps")
    write_ledger(folder, "short", more=parameter("max_queue_size", 4))
    write_ledger(folder, "replayed", beta_ms=10, more=parameter("slo_p99_ms", 600))
    write_shades(folder)
    running = start_stack(folder / "home", "--model-repository", str(folder / "models"))
    yield Ledgers(running, folder)
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[Guarded]:
    """One stack with API keys."""
    ours = start_guarded(tmp_path_factory.mktemp("guarded"))
    yield ours
    assert stop_stack(ours.stack) == 0, "".join(ours.stack.log[-30:])


@pytest.fixture(scope="session")
def fronts_stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """Two fronts and their core, which local client processes join; see `start_fronts` for the models."""
    running = start_fronts(tmp_path_factory.mktemp("fronts"))
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture
def fronts(fronts_stack: RunningStack) -> RunningStack:
    """The stack once both fronts serve: the test before may have killed the core."""
    wait_until_both_serve(fronts_stack)
    return fronts_stack


@pytest.fixture(scope="session")
def video_place(
    tmp_path_factory: pytest.TempPathFactory, shared_dir: Path, triton_environment: Path
) -> Iterator[Place]:
    """Where a stack runs that runs of `penstock video` join: fastestdet, street, colour."""
    place = new_place(tmp_path_factory.mktemp("v"))
    put_model(place, shared_dir)
    put_small_models(place)
    running = start_stack_at(place, "--models", "fastestdet,street,colour")
    yield place
    assert stop_stack(running) == 0, "".join(running.log[-30:])
    assert not place.traces()
