"""The gRPC relay: messages, metadata and statuses pass as they are; a broken connection is no answer."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton import grpc_client as triton_grpc
from penstock.engines.triton.grpc_client import MAX_HTTP2_MESSAGE_BYTES, TritonGrpcClient
from penstock.protocol.call import GrpcAnswer, GrpcCall
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, Overloaded
from tests.engines.fake_triton import FakeTriton, Mode, child_triton

METHOD = "/inference.GRPCInferenceService/ModelInfer"


def infer_message() -> bytes:
    request = service_pb2.ModelInferRequest(model_name="double", id="7")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(b"\x00\x00\x80\x3f")
    message: bytes = request.SerializeToString()
    return message


INFER = GrpcCall(METHOD, infer_message())


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    async with FakeTriton().running() as triton:
        yield triton


@asynccontextmanager
async def connected(address: str, timeouts: CallTimeouts | None = None) -> AsyncIterator[TritonGrpcClient]:
    client = TritonGrpcClient(address, is_tls=False, timeouts=timeouts or CallTimeouts())
    try:
        yield client
    finally:
        await client.aclose()


async def test_relay_message_and_metadata_pass_both_ways(fake: FakeTriton) -> None:
    """The caller's metadata arrives but for what belongs to its own connection; the engine's trailing one returns."""
    metadata = (
        ("traceparent", "00-abc-def-01"),
        ("blob-bin", b"\x00\xff"),
        ("user-agent", "caller/1"),
        ("grpc-previous-rpc-attempts", "3"),
    )
    async with connected(fake.grpc_address) as client:
        answer = await client.relay(GrpcCall(METHOD, infer_message(), metadata), deadline=None)

    response = service_pb2.ModelInferResponse.FromString(answer.message)
    assert (answer.code, response.id, response.raw_output_contents[0]) == (0, "7", b"\x00\x00\x00\x40")
    assert answer.trailing_metadata == (("engine-key", "engine-value"),)
    arrived = dict(fake.grpc_metadata)
    assert (arrived["traceparent"], arrived["blob-bin"]) == ("00-abc-def-01", b"\x00\xff")
    assert not arrived["user-agent"].startswith("caller/1")  # type: ignore[arg-type]
    assert "grpc-previous-rpc-attempts" not in arrived


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        (Mode.ERROR, 13, "ValueError: boom\n\nAt:\n"),
        (Mode.QUEUE_FULL, 14, "Exceeds maximum queue size"),
        (Mode.GAVE_UP, 1, "the engine gave up"),
    ],
)
async def test_relay_engine_error_is_an_answer(fake: FakeTriton, mode: Mode, code: int, words: str) -> None:
    """Code, details and trailing metadata are the engine's own, UNAVAILABLE and CANCELLED too."""
    fake.mode = mode
    async with connected(fake.grpc_address) as client:
        answer = await client.relay(INFER, deadline=None)

    assert (answer.code, answer.message) == (code, b"")
    assert words in answer.details
    assert answer.trailing_metadata == (("engine-key", "engine-value"),)


async def test_relay_unknown_method_is_the_engines_answer(fake: FakeTriton) -> None:
    """What the engine has not is UNIMPLEMENTED in its own words."""
    async with connected(fake.grpc_address) as client:
        answer = await client.relay(GrpcCall("/inference.GRPCInferenceService/Other", b""), deadline=None)

    assert answer.code == 12


async def test_relay_messages_over_4_megabytes_pass(fake: FakeTriton) -> None:
    """gRPC's default limit is not ours, on neither way."""
    request = service_pb2.ModelInferRequest.FromString(infer_message())
    request.inputs[0].shape[:] = [1, 2 << 20]
    request.raw_input_contents[0] = bytes(8 << 20)
    async with connected(fake.grpc_address) as client:
        answer = await client.relay(GrpcCall(METHOD, request.SerializeToString()), deadline=None)

    assert answer.code == 0
    assert len(answer.message) > 8 << 20


def large_call() -> GrpcCall:
    """A call that goes over grpc.aio's connection, for its size."""
    request = service_pb2.ModelInferRequest.FromString(infer_message())
    request.inputs[0].shape[:] = [1, MAX_HTTP2_MESSAGE_BYTES]
    request.raw_input_contents[0] = bytes(4 * MAX_HTTP2_MESSAGE_BYTES)
    return GrpcCall(METHOD, request.SerializeToString())


async def test_relay_large_call_that_is_given_up_is_cancelled_a_moment_later(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too many are given up at once, the engine sees no more of them until it is rid of those."""
    monkeypatch.setattr(triton_grpc, "MAX_LARGE_GIVEN_UP", 1)
    fake.mode = Mode.SLOW
    async with connected(fake.grpc_address) as client:
        running = asyncio.create_task(client.relay(large_call(), deadline=None))
        await fake.grpc_begun.wait()
        fake.grpc_begun.clear()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(Overloaded, match="1 large abandoned calls"):
            await client.relay(large_call(), deadline=None)
        async with asyncio.timeout(60):
            await fake.grpc_cancelled.wait()
        assert not fake.grpc_begun.is_set()


async def test_relay_slow_engine_ends_at_the_deadline_and_is_cancelled(fake: FakeTriton) -> None:
    """DeadlineExceeded within 50 ms, and the engine's call is over."""
    fake.mode = Mode.SLOW
    async with connected(fake.grpc_address) as client:
        deadline = time.monotonic() + 0.3
        with pytest.raises(DeadlineExceeded):
            await client.relay(INFER, deadline=deadline)
        assert abs(time.monotonic() - deadline) < 0.05
        async with asyncio.timeout(2):
            await fake.grpc_cancelled.wait()


async def test_relay_without_a_deadline_ends_at_the_timeout(fake: FakeTriton) -> None:
    """No inference waits for ever."""
    fake.mode = Mode.SLOW
    async with connected(fake.grpc_address, CallTimeouts(call_s=0.1)) as client, asyncio.timeout(5):
        with pytest.raises(DeadlineExceeded):
            await client.relay(INFER, deadline=None)


async def test_relay_cancelled_caller_cancels_the_engine(fake: FakeTriton) -> None:
    """Cancelling the awaiting task reaches the engine's own call."""
    fake.mode = Mode.SLOW
    async with connected(fake.grpc_address) as client:
        running = asyncio.create_task(client.relay(INFER, deadline=None))
        await fake.grpc_begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(2):
            await fake.grpc_cancelled.wait()


async def test_relay_without_deadline_ends_at_the_timeout(fake: FakeTriton) -> None:
    """An inference waits `call_s`."""
    fake.mode = Mode.SLOW
    async with connected(fake.grpc_address, CallTimeouts(call_s=0.2)) as client:
        with pytest.raises(DeadlineExceeded):
            await client.relay(INFER, deadline=None)


async def test_relay_engine_killed_in_flight_is_unavailable_within_a_second() -> None:
    """Every call that the dead engine held fails at once, none hangs; later ones are refused."""
    async with child_triton(Mode.SLOW) as (process, _, address), connected(address) as client:
        running = [asyncio.create_task(client.relay(INFER, deadline=None)) for _ in range(8)]
        index = GrpcCall("/inference.GRPCInferenceService/RepositoryIndex", b"")
        assert (await client.relay(index, deadline=None)).code == 0
        process.kill()
        killed = time.monotonic()
        outcomes = await asyncio.gather(*running, return_exceptions=True)

        assert time.monotonic() - killed < 5  # some milliseconds on an idle machine
        assert {type(outcome) for outcome in outcomes} == {EngineUnavailable}
        with pytest.raises(EngineUnavailable):
            await client.relay(INFER, deadline=None)


async def test_relay_engine_back_on_its_port_is_found_again() -> None:
    """The connection comes back by itself, within the second that its back-off grows to."""
    async with child_triton(Mode.NORMAL) as (first, _, address), connected(address) as client:
        assert (await client.relay(INFER, deadline=None)).code == 0
        first.kill()
        await first.wait()
        with pytest.raises(EngineUnavailable):
            await client.relay(INFER, deadline=None)
        async with FakeTriton(grpc_port=int(address.rpartition(":")[2])).running():
            started = time.monotonic()
            answer = await _until_answered(client)

    assert answer.code == 0
    assert time.monotonic() - started < 2


async def _until_answered(client: TritonGrpcClient) -> GrpcAnswer:
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.relay(INFER, deadline=None)
            except EngineUnavailable:
                await asyncio.sleep(0.02)


async def test_relay_stopped_engine_ends_at_the_deadline_and_serves_again() -> None:
    """A hung process costs each call its deadline and no more; when it goes on, so do we."""
    async with child_triton(Mode.NORMAL) as (process, _, address), connected(address) as client:
        assert (await client.relay(INFER, deadline=None)).code == 0
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 0.3
        with pytest.raises(DeadlineExceeded):
            await client.relay(INFER, deadline=deadline)
        assert abs(time.monotonic() - deadline) < 0.05
        process.send_signal(signal.SIGCONT)

        assert (await client.relay(INFER, deadline=time.monotonic() + 5)).code == 0


async def test_relay_stopped_engine_is_noticed_by_keepalive() -> None:
    """Without a deadline, an engine that answers no ping is gone after keepalive plus its timeout."""
    timeouts = CallTimeouts(keepalive_s=0.3, keepalive_timeout_s=0.3)
    async with child_triton(Mode.SLOW) as (process, _, address), connected(address, timeouts) as client:
        running = asyncio.create_task(client.relay(INFER, deadline=None))
        index = GrpcCall("/inference.GRPCInferenceService/RepositoryIndex", b"")
        assert (await client.relay(index, deadline=None)).code == 0
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(EngineUnavailable):
            async with asyncio.timeout(30):
                await running

        assert time.monotonic() - started < 3
