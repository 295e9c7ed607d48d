"""Tensors in shared memory: the embedded engine's answers, and what it writes there, are Triton's."""

import asyncio
import os
import time
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcAnswer, HttpAnswer
from penstock.protocol.engine import Relay
from tests.contract.wire_case import F123, Json, grpc_call, infer, infer_binary, infer_request, set_parameter
from tests.contract.wire_engines import Engines, comparable_grpc, comparable_http

pytestmark = [pytest.mark.xdist_group("wire"), pytest.mark.asyncio(loop_scope="module")]
SIZE_BYTES, WHERE = 4096, 64
UNREGISTERED_S = 10.0  # with the requests gone that held it


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """1, 2, 3 at its start, zeros behind."""
    shared = SharedMemory(f"test_{os.getpid()}_{uuid.uuid4().hex[:8]}", create=True, size=SIZE_BYTES)
    try:
        yield shared
    finally:
        shared.close()
        shared.unlink()


async def register(engines: Engines, memory: SharedMemory) -> None:
    message = service_pb2.SystemSharedMemoryRegisterRequest(name="r", key=f"/{memory.name}", byte_size=SIZE_BYTES)
    for relay in (engines.triton, engines.embedded):
        answer = await relay.send(grpc_call("SystemSharedMemoryRegister", message), deadline=None)
        assert answer.code == 0, answer.details


async def unregister(engines: Engines) -> None:
    """Nothing is registered afterwards. Triton keeps a region for as long as a request holds it, which may be a moment
    longer than its answer takes, and would refuse the next test's of the same name till then."""
    message = service_pb2.SystemSharedMemoryUnregisterRequest()
    for relay in (engines.triton, engines.embedded):
        began = time.monotonic()
        while True:
            answer = await relay.send(grpc_call("SystemSharedMemoryUnregister", message), deadline=None)
            if answer.code == 0 and not await regions(relay):
                break
            assert time.monotonic() - began < UNREGISTERED_S, answer.details or await regions(relay)
            await asyncio.sleep(0.01)


async def regions(relay: Relay) -> list[str]:
    """Their names."""
    call = grpc_call("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest())
    answer = await relay.send(call, deadline=None)
    assert answer.code == 0, answer.details
    return list(service_pb2.SystemSharedMemoryStatusResponse.FromString(answer.message).regions)


def part(size: object = 12, offset: object = None, region: object = "r") -> Json:
    """A tensor's parameters; None leaves one out."""
    found = {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}
    return {name: value for name, value in found.items() if value is not None}


def tensor(parameters: Json, **members: Any) -> Json:
    return {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": parameters} | members


def ask(given: Json | None, wanted: Json | None = None, **members: Any) -> Json:
    body: Json = {"inputs": [tensor(given or {}, **members)]}
    return body | ({"outputs": [{"name": "y", "parameters": wanted}]} if wanted is not None else {})


HTTP_CASES: dict[str, tuple[Json, bool]] = {
    "an input": (ask(part()), True),
    "an input at an offset": (ask(part(offset=4)), True),
    "an input of the wrong size": (ask(part(size=8)), True),
    "beyond the end": (ask(part(offset=SIZE_BYTES - 8)), True),
    "behind the end": (ask(part(offset=SIZE_BYTES)), True),
    "no size": (ask(part(size=None)), True),
    "no such region": (ask(part(region="none")), True),
    "a size that is no number": (ask(part(size="12")), False),
    "a negative offset": (ask(part(offset=-4)), False),
    "a region that is no name": (ask(part(region=7)), False),
    "an output": (ask(None, part(offset=WHERE), data=[1, 2, 3]), True),
    "an output with room to spare": (ask(None, part(size=100, offset=WHERE), data=[1, 2, 3]), True),
    "an output without room": (ask(None, part(size=8, offset=WHERE), data=[1, 2, 3]), True),
    "an output beyond the end": (ask(None, part(offset=SIZE_BYTES - 4), data=[1, 2, 3]), True),
    "an output as binary, too": (ask(None, part() | {"binary_data": True}, data=[1, 2, 3]), True),
    "an output as classes, too": (ask(None, part() | {"classification": 1}, data=[1, 2, 3]), True),
    "both": (ask(part(), part(offset=WHERE)), True),
}


@pytest.mark.parametrize("name", HTTP_CASES)
async def test_http_tensor_in_shared_memory_is_as_triton_has_it(
    engines: Engines, memory: SharedMemory, name: str
) -> None:
    """The same answer, and the same bytes in the segment; malformed JSON is 400 here and 500 there, in its words."""
    body, is_status = HTTP_CASES[name]
    answers = await _both(engines, memory, body)
    (theirs, there), (ours, here) = answers
    assert isinstance(theirs, HttpAnswer)
    assert isinstance(ours, HttpAnswer)
    answered, expected = comparable_http(ours), comparable_http(theirs)
    if not is_status:
        assert (expected.pop("status"), answered.pop("status")) == (500, 400)
    assert answered == expected
    assert here == there


GRPC_CASES: dict[str, tuple[Json, Json | None]] = {
    "an input": (part(), None),
    "an input at an offset": (part(offset=4), None),
    "an output": (part(), part(offset=WHERE)),
    "an output without room": (part(), part(size=8, offset=WHERE)),
    "an output as classes, too": (part(), part() | {"classification": 1}),
    "no size": (part(size=None), None),
    "no size of an output": (part(), part(size=None)),
    "a size without a region": (part(region=None), None),
    "a size that is no number": (part(size="12"), None),
    "an offset that is no number": (part(offset="0"), None),
    "a region that is no name": (part(region=7), None),
    "a negative offset": (part(offset=-1), None),
    "a negative size": (part(size=-1), None),
    "no such region": (part(region="none"), None),
}


@pytest.mark.parametrize("name", GRPC_CASES)
async def test_grpc_tensor_in_shared_memory_is_as_triton_has_it(
    engines: Engines, memory: SharedMemory, name: str
) -> None:
    """The same answer, and the same bytes in the segment."""
    given, wanted = GRPC_CASES[name]
    request = infer_request(x=None, outputs={"y": wanted} if wanted is not None else None)
    for key, value in given.items():
        set_parameter(request.inputs[0].parameters[key], value)
    (theirs, there), (ours, here) = await _both(engines, memory, request)
    assert isinstance(theirs, GrpcAnswer)
    assert isinstance(ours, GrpcAnswer)
    assert comparable_grpc("ModelInfer", ours) == comparable_grpc("ModelInfer", theirs)
    assert here == there


async def test_grpc_raw_contents_are_of_the_inputs_that_are_not_shared(engines: Engines, memory: SharedMemory) -> None:
    """The first input stands in the region, the second is the first raw content."""
    request = service_pb2.ModelInferRequest(model_name="pair")
    for name in ("a", "b"):
        request.inputs.add(name=name, datatype="FP32", shape=[1, 3])
    for key, value in part().items():
        set_parameter(request.inputs[0].parameters[key], value)
    request.raw_input_contents.append(np.array([10, 20, 30], np.float32).tobytes())
    (theirs, _), (ours, _) = await _both(engines, memory, request)
    assert isinstance(theirs, GrpcAnswer)
    assert isinstance(ours, GrpcAnswer)
    assert theirs.code == 0, theirs.details
    assert comparable_grpc("ModelInfer", ours) == comparable_grpc("ModelInfer", theirs)


async def test_http_binary_data_is_of_the_inputs_that_are_not_shared(engines: Engines, memory: SharedMemory) -> None:
    """The bytes behind the JSON belong to the second input."""
    inputs = [
        {"name": "a", "shape": [1, 3], "datatype": "FP32", "parameters": part()},
        {"name": "b", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": 12}},
    ]
    call = infer_binary("pair", {"inputs": inputs}, np.array([10, 20, 30], np.float32).tobytes())
    (theirs, _), (ours, _) = await _both(engines, memory, call)
    assert isinstance(theirs, HttpAnswer)
    assert isinstance(ours, HttpAnswer)
    assert theirs.status == 200, theirs.body
    assert comparable_http(ours) == comparable_http(theirs)


async def _both(engines: Engines, memory: SharedMemory, asked: Any) -> list[tuple[HttpAnswer | GrpcAnswer, bytes]]:
    """Triton's answer and the segment afterwards, then the embedded engine's."""
    found: list[tuple[HttpAnswer | GrpcAnswer, bytes]] = []
    try:
        await register(engines, memory)
        for relay in (engines.triton, engines.embedded):
            memory.buf[:] = F123.ljust(SIZE_BYTES, b"\0")
            answer: HttpAnswer | GrpcAnswer
            if isinstance(asked, service_pb2.ModelInferRequest):
                answer = await relay.send(grpc_call("ModelInfer", asked), deadline=None)
            else:
                call = infer("plain", asked) if isinstance(asked, dict) else asked
                answer = await relay.send(call, deadline=None)
            found.append((answer, bytes(memory.buf)))
    finally:
        await unregister(engines)
    return found
