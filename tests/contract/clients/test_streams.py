"""tritonclient's streams through the gateway and to the bare Triton."""

import pytest

from tests.contract.clients.conftest import sides_of
from tests.contract.clients.differences import agrees, promised
from tests.contract.clients.stream_calls import CALLS
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("client-stack")


@pytest.mark.parametrize("kind", ["grpc", "grpc.aio"])
@pytest.mark.parametrize("call", CALLS)
def test_stream_through_every_client_is_reported_as_triton_does(
    client_stack: RunningStack, kind: str, call: str
) -> None:
    """The answers in their order, errors where Triton has them, heads and the end of the call."""
    through, bare = sides_of(kind, client_stack).ask(CALLS[call])
    promise = promised(kind, call, bare)
    assert agrees(through, promise), (through, promise)
