"""A sequence belongs to the key that began it: another key with the same ID has another sequence."""

import gzip
import queue
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.contract.clients.models import CORRELATION, MODEL, SUMS
from tests.support.http import call
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_model

ALICE, BOB = "alice-secret-of-32-characters-aaaa", "bob-secret-of-32-characters-bbbbbb"
CONFIG = f"""backend: "python"
max_batch_size: 8
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
input [ {{ name: "x" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_INT32 dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 120000000
  control_input [ {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }} ]
  {CORRELATION}
}}
"""
LENIENT = SUMS.replace("else self.totals[key]", "else self.totals.get(key, 0)")  # Triton fills empty slots with calls
Step = Callable[..., int]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack with two keys and models that sum the values of a sequence."""
    folder = tmp_path_factory.mktemp("sequences")
    write_model(folder / "models", "sums", MODEL.format(promise="Adds up.", methods=LENIENT), CONFIG)
    stack = start_stack(
        folder / "home",
        *("--model-repository", str(folder / "models"), "--models", "sums"),
        environ={"PENSTOCK_API_KEYS": f"alice:infer:{ALICE},bob:infer:{BOB}"},
    )
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def over_http(stack: RunningStack, key: str, value: int, headers: dict[str, str] | None = None, **step: object) -> int:
    """One step as JSON with a binary tensor after it."""
    given = tritonclient.http.InferInput("x", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[value]], np.int32))
    with closing(tritonclient.http.InferenceServerClient(stack.http_url.removeprefix("http://"))) as client:
        answer = client.infer("sums", [given], headers={"x-api-key": key} | (headers or {}), **step)
        return int(answer.as_numpy("y")[0, 0])


def compressed(stack: RunningStack, key: str, value: int, **step: object) -> int:
    """One step as compressed JSON, with an escape sequence in a name."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [value]}
    text = msgspec.json.encode({"parameters": step, "inputs": [tensor]}).replace(
        b'"sequence_id"', rb'"sequence\u005fid"'
    )
    headers = {"x-api-key": key, "content-encoding": "gzip", "content-type": "application/json"}
    answer = call("POST", f"{stack.http_url}/v2/models/sums/infer", gzip.compress(text), headers)
    if answer.status != 200:
        raise InferenceServerException(answer.body.decode())
    return int(answer.json["outputs"][0]["data"][0])


def over_grpc(stack: RunningStack, key: str, value: int, **step: object) -> int:
    """One step as a gRPC call."""
    given = tritonclient.grpc.InferInput("x", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[value]], np.int32))
    with closing(tritonclient.grpc.InferenceServerClient(stack.grpc_address)) as client:
        return int(client.infer("sums", [given], headers={"x-api-key": key}, **step).as_numpy("y")[0, 0])


def over_stream(stack: RunningStack, key: str, value: int, **step: object) -> int:
    """One step as a message of a gRPC stream."""
    answers: queue.Queue[tuple[tritonclient.grpc.InferResult, InferenceServerException | None]] = queue.Queue()
    given = tritonclient.grpc.InferInput("x", [1, 1], "INT32")
    given.set_data_from_numpy(np.array([[value]], np.int32))
    with closing(tritonclient.grpc.InferenceServerClient(stack.grpc_address)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers={"x-api-key": key})
        client.async_stream_infer("sums", [given], **step)
        result, error = answers.get(timeout=20)
        client.stop_stream()
    if error is not None:
        raise error
    return int(result.as_numpy("y")[0, 0])


WAYS: dict[str, Step] = {"http": over_http, "gzip": compressed, "grpc": over_grpc, "stream": over_stream}


@pytest.mark.parametrize("way", WAYS)
def test_key_does_not_reach_the_sequence_of_another(keyed: RunningStack, way: str) -> None:
    """With the same ID, bob cannot read, continue, restart or end alice's sequence; she can use any protocol."""
    number = 42 + list(WAYS).index(way)
    alice, bob = partial(WAYS[way], keyed, ALICE), partial(WAYS[way], keyed, BOB)
    step = {"sequence_id": number, "sequence_start": False, "sequence_end": False}
    begin, end = step | {"sequence_start": True}, step | {"sequence_end": True}
    assert alice(100, **begin) == 100
    for theirs in (step, end):
        with pytest.raises(InferenceServerException, match="START flag"):
            bob(1, **theirs)
    assert alice(1, **step) == 101
    assert bob(1000, **begin) == 1000
    assert alice(1, **step) == 102
    assert bob(1, **end) == 1001
    assert over_http(keyed, ALICE, 1, **step) == 103
    assert over_grpc(keyed, ALICE, 1, **end) == 104


def test_id_of_another_kind_is_refused(keyed: RunningStack) -> None:
    """A sequence_id that is neither a number nor a string is a client error, over HTTP and gRPC."""
    for way in (over_http, over_grpc):
        with pytest.raises(InferenceServerException, match=r"sequence_id|sequence ID"):
            way(keyed, ALICE, 1, parameters={"sequence_id": True})
