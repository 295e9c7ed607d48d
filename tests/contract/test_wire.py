"""The KServe v2 wire: the same calls to the real Triton and to the embedded engine, and the same answers."""

import asyncio

import pytest

from penstock.protocol.engine import Relay
from tests.contract import wire_generate_cases, wire_grpc_cases, wire_http_binary_cases, wire_http_cases, wire_loads
from tests.contract.wire_case import Difference, GrpcCase, HttpCase, post
from tests.contract.wire_engines import MODEL_IN_PATH, Engines, Json, comparable_grpc, comparable_http, without

pytestmark = [pytest.mark.xdist_group("wire"), pytest.mark.asyncio(loop_scope="module")]

HTTP_CASES = [
    *wire_http_cases.READS,
    *wire_http_cases.INFERS,
    *wire_http_cases.PARAMETERS,
    *wire_http_binary_cases.BINARY,
    *wire_http_binary_cases.RAW,
    *wire_http_binary_cases.COMPRESSED,
    *wire_http_binary_cases.CLASSES,
    *wire_generate_cases.GENERATE,
]
GRPC_CASES = [*wire_grpc_cases.READS, *wire_grpc_cases.INFERS]
BATCHED_HTTP_CASES = [
    case for case in HTTP_CASES if MODEL_IN_PATH.fullmatch(case.call.target) and case.call.method == "POST"
]
BATCHED_DIFFERENCES = {"FP16 out as JSON": Difference("ours names the output", is_text=True)}


@pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case.name)
async def test_rest_call_to_either_engine_gets_the_same_answer(engines: Engines, case: HttpCase) -> None:
    """Status, headers, JSON and tensor bytes are Triton's, but for what the table says and why."""
    theirs = comparable_http(await engines.triton.send(case.call, deadline=None))
    ours = comparable_http(await engines.embedded.send(case.call, deadline=None))
    compare(ours, theirs, case.but, code="status")


@pytest.mark.parametrize("case", GRPC_CASES, ids=lambda case: case.name)
async def test_grpc_call_to_either_engine_gets_the_same_answer(engines: Engines, case: GrpcCase) -> None:
    """Code, details and message are Triton's, but for what the table says and why."""
    theirs = comparable_grpc(case.method, await engines.triton.send(case.call, deadline=None))
    ours = comparable_grpc(case.method, await engines.embedded.send(case.call, deadline=None))
    compare(ours, theirs, case.but, code="code")


@pytest.mark.parametrize("case", BATCHED_HTTP_CASES, ids=lambda case: case.name)
async def test_rest_call_through_a_batch_of_ours_gets_tritons_answer(engines: Engines, case: HttpCase) -> None:
    """Status, headers, JSON and tensor bytes are Triton's, but for what the table says and why."""
    theirs = comparable_http(await engines.triton.send(case.call, deadline=None))
    ours = comparable_http(await engines.batched.http(case.call))
    compare(ours, theirs, BATCHED_DIFFERENCES.get(case.name), code="status")


@pytest.mark.parametrize("case", wire_grpc_cases.INFERS, ids=lambda case: case.name)
async def test_grpc_call_through_a_batch_of_ours_gets_tritons_answer(engines: Engines, case: GrpcCase) -> None:
    """Code, details and message are Triton's, but for what the table says and why."""
    theirs = comparable_grpc(case.method, await engines.triton.send(case.call, deadline=None))
    ours = comparable_grpc(case.method, await engines.batched.grpc(case.call))
    compare(ours, theirs, BATCHED_DIFFERENCES.get(case.name), code="code")


async def test_rest_loads_and_unloads_change_either_engine_alike(engines: Engines) -> None:
    """Each step, in its order, gets the same answer from both."""
    for step in wire_loads.HTTP_STEPS:
        if isinstance(step, wire_loads.Unloaded):
            await until_unloaded(engines.triton)
            continue
        theirs = comparable_http(await engines.triton.send(step.call, deadline=None))
        ours = comparable_http(await engines.embedded.send(step.call, deadline=None))
        compare(ours, theirs, step.but, code="status", name=step.name)


async def test_grpc_loads_and_unloads_change_either_engine_alike(engines: Engines) -> None:
    """Each step, in its order, gets the same answer from both."""
    for step in wire_loads.GRPC_STEPS:
        if isinstance(step, wire_loads.Unloaded):
            await until_unloaded(engines.triton)
            continue
        theirs = comparable_grpc(step.method, await engines.triton.send(step.call, deadline=None))
        ours = comparable_grpc(step.method, await engines.embedded.send(step.call, deadline=None))
        compare(ours, theirs, step.but, code="code", name=step.name)


async def until_unloaded(triton: Relay) -> None:
    """Triton unloads in its own time, and has no event for it."""
    async with asyncio.timeout(60):
        while b'"unloaded"' not in (await triton.send(post("/v2/repository/index"), deadline=None)).body:
            await asyncio.sleep(0.02)


def compare(ours: Json, theirs: Json, but: Difference | None, *, code: str, name: str = "") -> None:
    """Equal, but for the difference; and a difference in codes must be there."""
    if but is None:
        assert ours == theirs, name
        return
    if but.code is not None:
        assert ours[code] == but.code, name
        assert theirs[code] != but.code, name
        return
    if but.is_text:
        assert ours[code] == theirs[code], name
        assert ours != theirs, name
        return
    assert without(ours, but.aside) == without(theirs, but.aside), name
