"""Tensors over gRPC, a call a request and over one stream: what goes out, and what becomes of it."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2 as pb

from penstock_load.clients import grpc as stream_client
from penstock_load.clients.client import Answer, Client, Endpoint, grpc_refusal
from penstock_load.clients.connect import connect
from penstock_load.results import Status
from penstock_load.scenario import Kind, RequestSpec
from tests.loadtest.v2_server import Context, V2Server, for_ever, response_to, running_v2_server

GRPC = RequestSpec(kind=Kind.GRPC, model="m", sizes=(3,))
STREAM = RequestSpec(kind=Kind.GRPC_STREAM, model="m", sizes=(3,))
Requests = AsyncIterator[pb.ModelInferRequest]
Responses = AsyncIterator[pb.ModelStreamInferResponse]


@pytest.fixture
async def server() -> AsyncIterator[V2Server]:
    """A server that a test can set."""
    async with running_v2_server() as running:
        yield running


async def client_of(ask: RequestSpec, endpoint: Endpoint, timeout_s: float = 20.0) -> Client:
    return await connect(ask, endpoint, seed=1, images="", timeout_s=timeout_s)


async def answers_to(ask: RequestSpec, server: V2Server, count: int, timeout_s: float = 20.0) -> list[Answer]:
    """To that many requests at once of one client."""
    client = await client_of(ask, server.endpoint, timeout_s)
    try:
        return await asyncio.gather(*(client.send(number) for number in range(count)))
    finally:
        await client.aclose()


@pytest.mark.parametrize("ask", [GRPC, STREAM], ids=["call", "stream"])
async def test_good_answers_are_ok(server: V2Server, ask: RequestSpec) -> None:
    """Many at once, each with its bytes of both ways."""
    answers = await answers_to(ask, server, 32)
    assert {(answer.status, answer.code, answer.error) for answer in answers} == {(Status.OK, "OK", "")}
    assert min(answer.sent_bytes for answer in answers) > 12
    assert min(answer.received_bytes for answer in answers) > 4


async def test_request_has_the_inputs_of_the_metadata(server: V2Server) -> None:
    """Batch and sizes stand in the shape, contents are raw, and the endpoint's headers are metadata."""
    seen: list[tuple[pb.ModelInferRequest, dict[str, str | bytes]]] = []
    infer = server.infer

    async def look(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        seen.append((request, dict(context.invocation_metadata() or ())))
        return await infer(request, context)

    server.infer = look
    endpoint = Endpoint(http_url="", grpc_address=server.grpc_address, headers=(("Authorization", "Bearer 1"),))
    client = await client_of(RequestSpec(kind=Kind.GRPC, model="m", batch=2, sizes=(5,)), endpoint)
    await client.send(0)
    await client.send(1)
    await client.aclose()
    (first, metadata), (second, _) = seen
    assert metadata["authorization"] == "Bearer 1"
    assert (first.model_name, first.inputs[0].name, list(first.inputs[0].shape)) == ("m", "x", [2, 5])
    assert len(first.raw_input_contents[0]) == 40
    assert first.raw_input_contents[0] != second.raw_input_contents[0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Status.REFUSED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Status.REFUSED),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Status.REFUSED),
        (grpc.StatusCode.INVALID_ARGUMENT, Status.FAILED),
        (grpc.StatusCode.INTERNAL, Status.FAILED),
        (grpc.StatusCode.CANCELLED, Status.FAILED),
    ],
    ids=lambda value: value.name,
)
@pytest.mark.parametrize("ask", [GRPC, STREAM], ids=["call", "stream"])
async def test_codes_become_what_they_mean(
    server: V2Server, ask: RequestSpec, code: grpc.StatusCode, kind: Status
) -> None:
    """Refused or failed by the server's word, in at most 200 characters of it."""

    async def infer(_: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        await context.abort(code, "no\n" + "x" * 300)

    async def stream(requests: Requests, context: Context) -> Responses:
        await anext(requests)
        await context.abort(code, "no\n" + "x" * 300)
        yield

    server.infer, server.stream = infer, stream
    (answer,) = await answers_to(ask, server, 1)
    assert (answer.status, answer.code, answer.error) == (kind, code.name, "no " + "x" * 196 + "…")


@pytest.mark.parametrize("ask", [GRPC, STREAM], ids=["call", "stream"])
async def test_own_deadline_is_a_timeout(server: V2Server, ask: RequestSpec) -> None:
    """A request without an answer in time has timed out."""

    async def infer(*_: object) -> pb.ModelInferResponse:
        await for_ever()
        raise AssertionError

    async def stream(requests: Requests, _: Context) -> Responses:
        async for _request in requests:
            pass
        yield

    server.infer, server.stream = infer, stream
    client = await client_of(ask, server.endpoint, timeout_s=20.0)
    answer = await within(client, 0.3)
    await client.aclose()
    assert answer.status is Status.TIMEOUT
    assert answer.sent_bytes > 0


async def within(client: Client, timeout_s: float) -> Answer:
    """The client's answer under another deadline: its first connection may take longer than a short one."""
    client._timeout_s = timeout_s  # type: ignore[attr-defined]
    return await client.send(0)


@pytest.mark.parametrize("ask", [GRPC, STREAM], ids=["call", "stream"])
async def test_answer_without_its_output_is_a_failure(server: V2Server, ask: RequestSpec) -> None:
    """An OK that lacks an output of the metadata is no answer."""

    async def infer(request: pb.ModelInferRequest, _: Context) -> pb.ModelInferResponse:
        return pb.ModelInferResponse(id=request.id)

    async def stream(requests: Requests, context: Context) -> Responses:
        async for request in requests:
            yield pb.ModelStreamInferResponse(infer_response=await infer(request, context))

    server.infer, server.stream = infer, stream
    (answer,) = await answers_to(ask, server, 1)
    assert (answer.status, answer.code, answer.error) == (Status.FAILED, "OK", "the answer has no output y")


@pytest.mark.parametrize("ask", [GRPC, STREAM], ids=["call", "stream"])
async def test_server_that_goes_is_a_failure_and_no_refusal(ask: RequestSpec) -> None:
    """UNAVAILABLE of a connection that broke or never was is gRPC's word, not the server's."""
    async with running_v2_server() as server:
        client = await client_of(ask, server.endpoint)
        assert (await client.send(0)).status is Status.OK
    answer = await client.send(1)
    await client.aclose()
    assert (answer.status, answer.code) == (Status.FAILED, "UNAVAILABLE")


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", Status.FAILED),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", Status.FAILED),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: UNKNOWN", Status.FAILED),
        (grpc.StatusCode.UNAVAILABLE, "512 requests in flight (limit 512)", Status.REFUSED),
        (grpc.StatusCode.UNAVAILABLE, "", Status.REFUSED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Socket closed", Status.REFUSED),
    ],
)
def test_end_of_a_connection_is_no_refusal_before_the_channel_knows(
    code: grpc.StatusCode, words: str, kind: Status
) -> None:
    """A call may hear of it first; between the two a busy machine lets many milliseconds pass."""
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), words)
    assert grpc_refusal(error, 10, is_connected=True, is_late=False).status is kind


@pytest.mark.parametrize("ask", [GRPC, STREAM], ids=["call", "stream"])
async def test_client_closed_under_a_request_fails_it(server: V2Server, ask: RequestSpec) -> None:
    """Closing leaves no call waiting, and raises nothing where requests are under way or come after."""
    arrived = asyncio.Event()

    async def infer(*_: object) -> pb.ModelInferResponse:
        arrived.set()
        await for_ever()
        raise AssertionError

    async def stream(requests: Requests, context: Context) -> Responses:
        await anext(requests)
        yield await infer()  # type: ignore[misc]

    server.infer, server.stream = infer, stream
    client = await client_of(ask, server.endpoint)
    task = asyncio.create_task(client.send(0))
    async with asyncio.timeout(60):
        await arrived.wait()
        await client.aclose()
        answers = (await task, await client.send(1))
    assert [(answer.status, answer.code) for answer in answers] == [(Status.FAILED, "")] * 2


async def test_stream_answers_out_of_order_find_their_requests(server: V2Server) -> None:
    """The id says whose an answer is; one that failed fails alone."""

    async def backwards(requests: Requests, _: Context) -> Responses:
        taken = [await anext(requests) for _ in range(4)]
        for request in reversed(taken):
            response = response_to(request)
            if request is taken[2]:
                response.error_message = "the third was bad"
            yield response
        await for_ever()

    server.stream = backwards
    answers = await answers_to(STREAM, server, 4)
    assert [answer.status for answer in answers] == [Status.OK, Status.OK, Status.FAILED, Status.OK]
    assert answers[2].error == "the third was bad"


async def test_stream_answers_without_ids_are_taken_in_order(server: V2Server) -> None:
    """A server that repeats no id answers in order."""

    async def nameless(requests: Requests, _: Context) -> Responses:
        async for request in requests:
            response = response_to(request)
            response.infer_response.id = ""
            yield response

    server.stream = nameless
    assert {answer.status for answer in await answers_to(STREAM, server, 5)} == {Status.OK}


async def test_stream_of_a_decoupled_model_counts_until_the_final_response(server: V2Server) -> None:
    """Three responses and an empty last one are one answer; without the last there is none."""
    is_asked: list[bool] = []

    async def several(requests: Requests, _: Context) -> Responses:
        async for request in requests:
            is_asked.append(request.parameters["triton_enable_empty_final_response"].bool_param)
            for _number in range(3):
                yield response_to(request, is_final=False)
            if len(is_asked) == 1:
                last = response_to(request)
                last.infer_response.ClearField("outputs")
                yield last

    server.stream, server.is_decoupled = several, True
    client = await client_of(STREAM, server.endpoint)
    whole = await client.send(0)
    unfinished = await within(client, 0.3)
    await client.aclose()
    one_response = response_to(pb.ModelInferRequest(model_name="m", id="1"), is_final=False).ByteSize()
    assert (whole.status, is_asked) == (Status.OK, [True, True])
    assert whole.received_bytes > 3 * one_response
    assert unfinished.status is Status.TIMEOUT


async def test_stream_that_breaks_fails_what_waits_and_is_opened_again(server: V2Server) -> None:
    """Everything on its way fails with the stream's code; the next request has a new stream."""
    streams: list[int] = []

    async def fragile(requests: Requests, context: Context) -> Responses:
        streams.append(1)
        if len(streams) == 1:
            for _number in range(3):
                await anext(requests)
            await context.abort(grpc.StatusCode.INTERNAL, "out of memory")
        async for request in requests:
            yield response_to(request)

    server.stream = fragile
    client = await client_of(STREAM, server.endpoint)
    broken = await asyncio.gather(*(client.send(number) for number in range(3)))
    assert {(one.status, one.code, one.error) for one in broken} == {(Status.FAILED, "INTERNAL", "out of memory")}
    healed = await asyncio.gather(*(client.send(number) for number in range(3)))
    await client.aclose()
    assert {one.status for one in healed} == {Status.OK}
    assert len(streams) == 2


async def test_stream_that_is_refused_unread_has_the_servers_code(server: V2Server) -> None:
    """A server that answers before it reads is quoted, however much was being written."""

    async def unread(_: Requests, context: Context) -> Responses:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no streams here")
        yield

    server.stream = unread
    for _ in range(10):
        answers = await answers_to(RequestSpec(kind=Kind.GRPC_STREAM, model="m", sizes=(150_528,)), server, 4)
        assert {(one.code, one.error) for one in answers} == {("UNIMPLEMENTED", "no streams here")}


async def test_stream_that_the_server_ends_fails_what_waits(server: V2Server) -> None:
    """A stream that ends well, but too early, is said to have ended."""

    async def curt(requests: Requests, _: Context) -> Responses:
        await anext(requests)
        return
        yield

    server.stream = curt
    (answer,) = await answers_to(STREAM, server, 1)
    assert (answer.status, answer.error) == (Status.FAILED, "the server ended the stream")


async def test_stream_answer_after_its_deadline_is_nobodys(server: V2Server) -> None:
    """A late answer is not taken for the next request's."""
    late = asyncio.Event()

    async def slow_first(requests: Requests, _: Context) -> Responses:
        first = await anext(requests)
        second = await anext(requests)
        yield response_to(first)
        late.set()
        await for_ever()
        yield response_to(second)

    server.stream = slow_first
    client = await client_of(STREAM, server.endpoint)
    answers = [await within(client, 0.3), await within(client, 0.3)]
    await client.aclose()
    assert late.is_set()
    assert [answer.status for answer in answers] == [Status.TIMEOUT, Status.TIMEOUT]


async def test_stream_bounds_what_waits(server: V2Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit a request is not sent, and the sentence says the limit."""
    monkeypatch.setattr(stream_client, "MOST_WAITING", 2)

    async def silent(requests: Requests, _: Context) -> Responses:
        async for _request in requests:
            pass
        yield

    server.stream = silent
    answers = await answers_to(STREAM, server, 3, timeout_s=0.5)
    assert [answer.status for answer in answers] == [Status.TIMEOUT, Status.TIMEOUT, Status.NOT_SENT]
    assert "limit 2" in answers[2].error
