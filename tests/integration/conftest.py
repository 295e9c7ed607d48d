"""Fixtures of the tests that run a stack of their own."""

from pathlib import Path

import pytest

from tests.integration.living import SLOW_CONFIG
from tests.tiny_models import CONFIG, IDENTITY, SLOW, write_model


@pytest.fixture
def repository(tmp_path: Path, triton_environment: Path) -> Path:
    """One identity and one sleeper, quick to load."""
    folder = tmp_path / "models"
    write_model(folder, "identity", IDENTITY, CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1))
    write_model(folder, "slow", SLOW, SLOW_CONFIG)
    return folder
