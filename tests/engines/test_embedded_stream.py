"""The embedded engine's streams: in order, each request its own answer, and how they end."""

import asyncio
import time

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.grpc_stream import MAX_WAITING, OrderedStream
from penstock.engines.embedded.relay import STREAM_INFER
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.errors import DeadlineExceeded, NotSupported
from tests.contract.wire_case import F123, infer_request

WAIT_S = 30.0


def message(request_id: str, **fields: object) -> bytes:
    request: bytes = infer_request(id=request_id, **fields).SerializeToString()  # type: ignore[arg-type]
    return request


async def received(stream: object) -> list[service_pb2.ModelStreamInferResponse]:
    """All answers until there are no more."""
    assert isinstance(stream, OrderedStream)
    answers = []
    while (answer := await stream.receive()) is not None:
        answers.append(service_pb2.ModelStreamInferResponse.FromString(answer))
    return answers


async def test_answers_keep_the_requests_order_and_say_that_they_are_the_last(plain_engine: EmbeddedEngine) -> None:
    """A wrong one's error comes in order, in Triton's form; then the stream ends with OK."""
    stream = await plain_engine.open_stream(STREAM_INFER, (), deadline=None)
    async with asyncio.timeout(WAIT_S):
        for one in (message("a"), message("short", x=F123[:4]), message("b")):
            await stream.send(one)
        await stream.half_close()
        first, wrong, last = await received(stream)
        assert await stream.end() == GrpcAnswer(0)

    assert [answer.infer_response.id for answer in (first, wrong, last)] == ["a", "short", "b"]
    assert wrong.error_message.endswith("Expected 12, got 4")
    for answer in (first, last):
        assert list(answer.infer_response.raw_output_contents) == [F123]
        assert answer.infer_response.parameters["triton_final_response"].bool_param is True


async def test_bytes_that_are_no_request_are_reported_in_order(plain_engine: EmbeddedEngine) -> None:
    """Without an id, which is unreadable."""
    stream = await plain_engine.open_stream(STREAM_INFER, (), deadline=None)
    async with asyncio.timeout(WAIT_S):
        await stream.send(b"\xff")
        await stream.half_close()
        (answer,) = await received(stream)
    assert (answer.error_message, answer.infer_response.id) == ("Unable to parse request", "")


async def test_other_methods_have_no_stream(plain_engine: EmbeddedEngine) -> None:
    """NotSupported, naming it."""
    with pytest.raises(NotSupported, match="no Other that streams"):
        await plain_engine.open_stream("/inference.GRPCInferenceService/Other", (), deadline=None)


async def test_runs_side_by_side_answer_in_order_and_are_bounded() -> None:
    """The first is the slowest; a sender waits for room; cancelling ends what runs."""
    release, ran = asyncio.Event(), 0

    async def infer(_: bytes) -> bytes:
        nonlocal ran
        ran += 1
        if ran == 1:
            await release.wait()
        return service_pb2.ModelInferResponse(id=str(ran)).SerializeToString()

    stream = OrderedStream(infer, deadline=None)
    async with asyncio.timeout(WAIT_S):
        for _ in range(MAX_WAITING):
            await stream.send(b"")
        extra = asyncio.create_task(stream.send(b""))
        await asyncio.sleep(0)
        assert not extra.done()
        first = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        assert not first.done()
        release.set()
        assert await first is not None
        await extra
        stream.cancel()


async def test_deadline_ends_the_stream_and_its_runs() -> None:
    """DeadlineExceeded at the end, as any GrpcStream's; the run is cancelled."""
    is_cancelled = asyncio.Event()

    async def infer(_: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        return b""

    stream = OrderedStream(infer, deadline=time.monotonic() + 0.1)
    async with asyncio.timeout(WAIT_S):
        await stream.send(b"")
        assert await stream.receive() is None
        with pytest.raises(DeadlineExceeded):
            await stream.end()
        await is_cancelled.wait()
