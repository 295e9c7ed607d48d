"""The front runs on the loop that the gateway runs on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from tests.grpc.harness import Front, serving


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Front]:
    """The front over a fake engine, with a client connected."""
    async with serving() as running:
        yield running
