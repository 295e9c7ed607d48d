"""What tritonclient's clients ask besides inference, of the gateway and of the bare Triton."""

import pytest

from tests.contract.clients.asking import KINDS
from tests.contract.clients.conftest import Sides
from tests.contract.clients.control_calls import CALLS
from tests.contract.clients.differences import agrees, promised

pytestmark = pytest.mark.xdist_group("client-stack")
RELOADS = [call for call in CALLS if call.split()[0] in ("load", "unload") and not call.endswith("unknown model")]
ASKED = [
    pytest.param(kind, call, marks=[pytest.mark.long] if ".aio" in kind and call in RELOADS else [])
    for kind in KINDS
    for call in CALLS
]


@pytest.mark.parametrize(("sides", "call"), ASKED, indirect=["sides"])
def test_control_call_through_every_client_is_reported_as_triton_does(sides: Sides, call: str) -> None:
    """Health, metadata, configuration, index, statistics, loads, trace and log settings."""
    through, bare = sides.ask(CALLS[call])
    promise = promised(sides.kind, call, bare)
    assert agrees(through, promise), (through, promise)
