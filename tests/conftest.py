"""Fixtures for all tests: the real inputs beside the checkout, and one running stack for the integration tests."""

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.support.stack import CHECKOUT, ENGINE_PORTS, TRITON_ENVIRONMENT, RunningStack, start_stack, stop_stack

settings.register_profile("quick", max_examples=40, deadline=None)
settings.register_profile("thorough", max_examples=500, deadline=None)  # in make test-long
settings.load_profile("quick")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a command with `&`: programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while tests are collected: their objects are all kept


def pytest_collection_finish() -> None:
    """The garbage collector never scans the thousands of collected tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A test that configures the logs writes to a stream that ends with it; the next test has the defaults."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        logging.root.handlers[:], logging.root.level = handlers, level


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of real inputs (models, media) beside the checkout; tests that need it skip where it is absent."""
    folder = CHECKOUT.parent / "shared"
    if not (folder / "media" / "vtest.avi").is_file():
        pytest.skip(f"no real inputs: {folder} is absent")
    return folder


@pytest.fixture(scope="session")
def triton_environment() -> Path:
    """The environment that holds the real Triton."""
    if not (TRITON_ENVIRONMENT / ".ready").is_file():
        pytest.skip("no Triton here: `make .venv-triton/.ready` builds its environment on Linux x86-64")
    return TRITON_ENVIRONMENT


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """The real stack with the shipped models, two detectors where the real inputs are, and the tests' tiny models."""
    from tests.support.pulled_models import SOURCE, pull_model
    from tests.support.tiny_models import write_tiny_repository

    home = tmp_path_factory.mktemp("home")
    write_tiny_repository(home / "models")
    if SOURCE.is_dir():
        for name in ("fastestdet", "yolox-nano"):
            pull_model(home, name)
    running = start_stack(home, *ENGINE_PORTS)
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])
