"""Bytes that are damaged on their way: the running stack answers or hangs up, and goes on."""

import pytest

from tests.integration.damaged_calls import damage_frames, damage_http, damage_messages
from tests.integration.test_bad_input import unharmed
from tests.support.damage import Run
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")


async def test_damaged_http_is_answered_without_a_server_error(stack: RunningStack) -> None:
    """Heads, framing, JSON, tensors: some of it is served still, most is refused, nothing breaks."""
    with unharmed(stack):
        outcomes = await damage_http(stack, Run("http", 500))
    assert outcomes["200"] > 0
    assert outcomes["400"] > 0


async def test_damaged_frames_of_grpc_end_their_connection_only(stack: RunningStack) -> None:
    """HTTP/2 as it should not be."""
    with unharmed(stack):
        outcomes = await damage_frames(stack, Run("frames", 500))
    assert outcomes["status 0"] > 0
    assert outcomes["closed"] > 0


async def test_damaged_grpc_messages_are_refused_or_served(stack: RunningStack) -> None:
    """Read by the gateway or the engine: never INTERNAL, never a dead engine."""
    with unharmed(stack):
        outcomes = await damage_messages(stack, Run("messages", 1000))
    assert outcomes["OK"] > 0
    assert outcomes["INVALID_ARGUMENT"] > 0
