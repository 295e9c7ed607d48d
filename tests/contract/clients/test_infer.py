"""The same inferences through each of tritonclient's clients, asked of the gateway and of the bare Triton."""

import threading
import time

import numpy as np
import pytest

from tests.contract.clients import control_calls, shared_memory_calls, stream_calls
from tests.contract.clients.asking import asking
from tests.contract.clients.conftest import Sides, sides_of
from tests.contract.clients.differences import DIFFERENCES, agrees, promised
from tests.contract.clients.infer_calls import CALLS
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("client-stack")
IN_JSON = "every datatype in JSON"
ANSWERED = {
    "every datatype", IN_JSON, "strings", "not numbers", "no elements", "an id", "a version",
    "an output", "classes", "more classes than there are", "parameters", "a priority", "time enough", "a sequence",
    "a sequence with a name", "gzip", "deflate",
}  # fmt: skip
OCCUPIED_MS, TURN_MS = 3000.0, 1.0


@pytest.mark.parametrize("call", [call for call in CALLS if call != IN_JSON])
def test_inference_through_every_client_is_reported_as_triton_does(sides: Sides, call: str) -> None:
    """Results, errors and the heads of the answers are Triton's, but for the listed differences."""
    compare(sides, call)


@pytest.mark.parametrize("sides", ["http", "http.aio"], indirect=True)
def test_inference_in_json_is_reported_as_triton_does(sides: Sides) -> None:
    """The same of tensors that stand in the JSON, which gRPC has not."""
    compare(sides, IN_JSON)


def compare(sides: Sides, call: str) -> None:
    """Ask both sides the same."""
    through, bare = sides.ask(CALLS[call])
    promise = promised(sides.kind, call, bare)
    assert agrees(through, promise), (through, promise)
    if call in ANSWERED:
        assert not isinstance(through.reply, dict), "an error where a result was meant"


@pytest.mark.parametrize("kind", ["http", "grpc"])
@pytest.mark.parametrize("side", ["gateway", "bare"])
def test_request_of_a_higher_priority_is_served_first(client_stack: RunningStack, kind: str, side: str) -> None:
    """Behind one that occupies the model, the later request of priority 1 overtakes that of priority 2."""
    address = getattr(sides_of(kind, client_stack), side)
    turns: dict[str, float] = {}

    def ask(name: str, sleep_ms: float, priority: int) -> None:
        with asking(kind, address) as asker:
            inputs = [asker.tensor(np.array([[sleep_ms]], np.float32), "FP32")]
            _, outputs = asker.infer("turns", inputs, priority=priority)
        turns[name] = np.frombuffer(outputs["y"][2], np.float32)[0]

    askers = [("occupies", OCCUPIED_MS, 2), ("low", TURN_MS, 2), ("high", TURN_MS, 1)]
    threads = [threading.Thread(target=ask, args=asked) for asked in askers]
    for thread in threads:
        thread.start()
        time.sleep(OCCUPIED_MS / 1000 / 4)
    for thread in threads:
        thread.join(20)
    assert sorted(turns, key=lambda name: turns[name]) == ["occupies", "high", "low"]


def test_every_listed_difference_names_calls_that_are_made() -> None:
    """No difference is listed for nothing."""
    made = {*CALLS, *control_calls.CALLS, *shared_memory_calls.CALLS, *stream_calls.CALLS}
    assert {call for difference in DIFFERENCES for call in difference.calls} <= made
