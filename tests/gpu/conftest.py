"""What the tests on a card share: torch from the environment of Triton's models, one reason to skip without a card."""

import importlib.util
import sys
from collections.abc import Iterable

import pytest

from penstock.gpu.nvml import read_cards
from tests.support.stack import TRITON_ENVIRONMENT


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Without a card every test that is marked gpu is skipped and says why; with one, torch is found, last of all."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    reading = read_cards()
    if not reading.cards:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reading.outcome}"))
    elif importlib.util.find_spec("torch") is None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        sys.path.append(str(TRITON_ENVIRONMENT / "lib" / version / "site-packages"))  # last: its numpy is 1.26
