"""Fixtures of the REST front."""

import tracemalloc
from collections.abc import Callable

import pytest

from tests.rest.harness import Front


@pytest.fixture
def front() -> Front:
    """The app over fakes, with the default limits."""
    return Front()


@pytest.fixture
def traced_peak() -> Callable[[Callable[[], object]], int]:
    """Runs something; gives the most bytes that it held at once."""

    def measure(work: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measure
