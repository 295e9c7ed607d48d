"""System shared memory through tritonclient's clients, at the gateway and at the bare Triton."""

import contextlib

import pytest

from tests.contract.clients.asking import asking
from tests.contract.clients.conftest import Sides, sides_of
from tests.contract.clients.differences import agrees, promised
from tests.contract.clients.shared_memory_calls import CALLS, SIZE, segment
from tests.contract.clients.tap import tapped
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("client-stack")


@pytest.mark.parametrize("call", CALLS)
def test_shared_memory_through_every_client_is_reported_as_triton_does(sides: Sides, call: str) -> None:
    """Registered, used, listed, refused and unregistered; and what stands in the memory afterwards."""
    through, bare = sides.ask(CALLS[call])
    promise = promised(sides.kind, call, bare)
    assert agrees(through, promise), (through, promise)


def test_unregister_all_of_one_client_leaves_the_regions_of_another(client_stack: RunningStack) -> None:
    """Two gRPC connections of one address, without keys: both see both regions, each removes its own only."""
    address = sides_of("grpc", client_stack).gateway
    with contextlib.ExitStack() as ends:
        # A tap each: gRPC lets two clients of one process share a connection to one address.
        one, other = (ends.enter_context(asking("grpc", ends.enter_context(tapped(address)).address)) for _ in range(2))
        (_, key), (_, other_key) = ends.enter_context(segment(one)), ends.enter_context(segment(other))
        one.register_system_shared_memory("one's", key, SIZE)
        other.register_system_shared_memory("other's", other_key, SIZE)
        assert set(one.get_system_shared_memory_status().regions) == {"one's", "other's"}
        other.unregister_system_shared_memory()
        assert set(one.get_system_shared_memory_status().regions) == {"one's"}
        one.unregister_system_shared_memory()
        assert not one.get_system_shared_memory_status().regions
