"""What tritonclient's clients ask besides inference, of the gateway and of the bare Triton."""

import pytest

from tests.contract.clients.conftest import Sides
from tests.contract.clients.control_calls import CALLS
from tests.contract.clients.differences import agrees, promised

pytestmark = pytest.mark.xdist_group("client-stack")


@pytest.mark.parametrize("call", CALLS)
def test_control_call_through_every_client_is_reported_as_triton_does(sides: Sides, call: str) -> None:
    """Health, metadata, configuration, index, statistics, loads, trace and log settings."""
    through, bare = sides.ask(CALLS[call])
    promise = promised(sides.kind, call, bare)
    assert agrees(through, promise), (through, promise)
