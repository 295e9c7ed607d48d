"""Streams to the engine: messages as they are, how they end, and an engine that is slow, gone or killed."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from penstock.engines.triton import grpc_calls as triton_stream
from penstock.engines.triton.grpc_calls import TritonGrpcStream
from penstock.engines.triton.grpc_client import TritonGrpcClient
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable
from tests.engines.fake_triton import FakeTriton, Mode, child_triton
from tests.engines.test_triton_grpc import connected, infer_message

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
WAIT_S = 30.0


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    async with FakeTriton(has_streams=True).running() as triton:
        yield triton


@pytest_asyncio.fixture
async def client(fake: FakeTriton) -> AsyncIterator[TritonGrpcClient]:
    async with connected(fake.grpc_address) as connection:
        yield connection


async def begun_stream(fake: FakeTriton, client: TritonGrpcClient) -> TritonGrpcStream:
    """One request on it, on which the engine works until it is released."""
    fake.mode = Mode.SLOW
    stream = client.open_stream(METHOD, (), deadline=None)
    await stream.send(infer_message())
    await fake.grpc_begun.wait()
    return stream


async def test_stream_passes_messages_both_ways_and_ends_with_the_engines_status(
    fake: FakeTriton, client: TritonGrpcClient
) -> None:
    """In order; after half-close what is left is answered; trailing metadata is the engine's own."""
    async with asyncio.timeout(WAIT_S):
        stream = client.open_stream(METHOD, (("traceparent", "00-abc-def-01"),), deadline=None)
        for _ in range(3):
            await stream.send(infer_message())
        await stream.half_close()
        received = []
        while (message := await stream.receive()) is not None:
            received.append(service_pb2.ModelStreamInferResponse.FromString(message).infer_response.id)
        end = await stream.end()

    assert received == ["7"] * 3
    assert end == GrpcAnswer(0, trailing_metadata=(("engine-key", "engine-value"),))
    assert dict(fake.grpc_metadata)["traceparent"] == "00-abc-def-01"


async def test_stream_goes_without_the_metadata_that_ends_triton(fake: FakeTriton, client: TritonGrpcClient) -> None:
    """triton_grpc_error stays here: with it a decoupled model's error kills Triton 2.51."""
    async with asyncio.timeout(WAIT_S):
        stream = client.open_stream(METHOD, (("triton_grpc_error", "true"), ("other", "1")), deadline=None)
        await stream.send(infer_message())
        await stream.receive()
        stream.cancel()

    assert "triton_grpc_error" not in dict(fake.grpc_metadata)
    assert dict(fake.grpc_metadata)["other"] == "1"


@pytest.mark.parametrize(
    ("mode", "code"), [(Mode.ERROR, 13), (Mode.QUEUE_FULL, 14), (Mode.GAVE_UP, 1)], ids=["error", "full", "gave up"]
)
async def test_stream_that_the_engine_ends_says_how(
    fake: FakeTriton, client: TritonGrpcClient, mode: Mode, code: int
) -> None:
    """Code, details and trailing metadata as they are; messages that came too late are no error."""
    fake.mode = mode
    async with asyncio.timeout(WAIT_S):
        stream = client.open_stream(METHOD, (), deadline=None)
        await stream.send(infer_message())
        assert await stream.receive() is None
        await stream.send(infer_message())
        await stream.half_close()
        end = await stream.end()

    assert end.code == code
    assert end.details
    assert end.trailing_metadata == (("engine-key", "engine-value"),)


async def test_stream_keeps_its_deadline(fake: FakeTriton, client: TritonGrpcClient) -> None:
    """DeadlineExceeded then, and the engine's call is cancelled; one that has passed opens nothing."""
    fake.mode = Mode.SLOW
    async with asyncio.timeout(WAIT_S):
        stream = client.open_stream(METHOD, (), deadline=time.monotonic() + 0.2)
        await stream.send(infer_message())
        assert await stream.receive() is None
        with pytest.raises(DeadlineExceeded):
            await stream.end()
        await fake.grpc_cancelled.wait()
        assert fake.stream_time_s is None  # Triton 2.51 dies of streams that it ends itself
        with pytest.raises(DeadlineExceeded):
            client.open_stream(METHOD, (), deadline=time.monotonic() - 1)


async def test_cancelled_stream_cancels_the_engine(fake: FakeTriton, client: TritonGrpcClient) -> None:
    """And may be cancelled again."""
    async with asyncio.timeout(WAIT_S):
        stream = await begun_stream(fake, client)
        stream.cancel()
        stream.cancel()
        await fake.grpc_cancelled.wait()


@pytest.mark.parametrize("is_reader_gone", [True, False], ids=["its reader gone", "its reader waiting"])
async def test_stream_that_is_left_as_the_engine_answers_is_not_cancelled(
    fake: FakeTriton, client: TritonGrpcClient, is_reader_gone: bool
) -> None:
    """It is half-closed and answered to its end: Triton 2.51 dies of a cancel at that moment."""
    async with asyncio.timeout(WAIT_S):
        stream = await begun_stream(fake, client)
        reading = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        if is_reader_gone:
            reading.cancel()
        stream.cancel()
        fake.release.set()
        await fake.stream_ended.wait()
        await asyncio.wait((reading,))
    assert not fake.grpc_cancelled.is_set()


async def test_streams_that_are_left_are_read_up_to_a_number(
    fake: FakeTriton, client: TritonGrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ones are cancelled at once."""
    monkeypatch.setattr(triton_stream, "MAX_LEAVING", 0)
    monkeypatch.setattr(triton_stream, "GRACE_S", 10 * WAIT_S)
    async with asyncio.timeout(WAIT_S):
        stream = await begun_stream(fake, client)
        stream.cancel()
        await fake.grpc_cancelled.wait()


async def test_stream_of_a_killed_engine_is_unavailable_within_a_second() -> None:
    """BackendUnavailable, whether the stream was open or is opened after."""
    async with child_triton(Mode.SLOW) as (process, _, address), connected(address) as client:
        async with asyncio.timeout(WAIT_S):
            stream = client.open_stream(METHOD, (), deadline=None)
            await stream.send(infer_message())
            process.kill()
            killed = time.monotonic()
            assert await stream.receive() is None
            with pytest.raises(EngineUnavailable):
                await stream.end()
            assert time.monotonic() - killed < 5  # some milliseconds on an idle machine
            late = client.open_stream(METHOD, (), deadline=None)
            assert await late.receive() is None
            with pytest.raises(EngineUnavailable):
                await late.end()
