"""Which event loops the tests of this room run on."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

ON_BOTH_LOOPS = ("test_triton_http.py",)
ON_UVLOOP = ("test_triton_backend.py", "test_triton_grpc.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The engine's client on the loop that the gateway runs on; its own sockets on both, whose transports differ."""
    if item.path.name in ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"uvloop": uvloop.new_event_loop} if item.path.name in ON_UVLOOP else {"asyncio": asyncio.new_event_loop}
