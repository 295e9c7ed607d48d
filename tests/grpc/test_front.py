"""The front's own promises: statuses, deadlines, cancellation, limits, metrics."""

import asyncio
import logging
import time

import grpc
import pytest
import structlog
from grpc._cython import cygrpc
from tritonclient.grpc import service_pb2

from penstock.gateway.grpc.server import AddressTaken, GrpcEndpoint, GrpcLimits, serve
from penstock.gateway.grpc.status_codes import status_of
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.error_codes import ERROR_CODES
from penstock.protocol.errors import (
    AccessUnavailable,
    BodyTooSlow,
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    ModelRefused,
    ModelUnavailable,
    NotSupported,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
    UndecodableImage,
    UnsupportedMedia,
)
from penstock.protocol.identity import Verb
from penstock.testing import FakeMode
from tests.grpc.harness import Front, infer_message, infer_request, serving

Code = grpc.StatusCode


async def refusal(front: Front, method: str = "ModelInfer", message: bytes | None = None) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.call(method, infer_message() if message is None else message)
    return refused.value


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("bad"), Code.INVALID_ARGUMENT),
        (UndecodableImage("bad"), Code.INVALID_ARGUMENT),
        (UnsupportedMedia("bad"), Code.INVALID_ARGUMENT),
        (BodyTooSlow("bad"), Code.INVALID_ARGUMENT),
        (TooLarge("bad"), Code.RESOURCE_EXHAUSTED),
        (ModelNotFound("bad"), Code.NOT_FOUND),
        (ModelNotReady("bad"), Code.UNAVAILABLE),
        (ModelRefused("bad"), Code.NOT_FOUND),
        (ModelUnavailable("bad"), Code.UNAVAILABLE),
        (EngineUnavailable("bad"), Code.UNAVAILABLE),
        (Overloaded("bad"), Code.UNAVAILABLE),
        (DeadlineExceeded("bad"), Code.DEADLINE_EXCEEDED),
        (NotSupported("bad"), Code.UNIMPLEMENTED),
        (Unauthenticated("bad"), Code.UNAUTHENTICATED),
        (AccessUnavailable("bad"), Code.UNAVAILABLE),
        (PermissionDenied("bad"), Code.PERMISSION_DENIED),
        (QuotaExceeded("bad"), Code.RESOURCE_EXHAUSTED),
        (EngineFailed("bad"), Code.INTERNAL),
        (InferenceError("bad"), Code.INTERNAL),
    ],
)
async def test_error_of_the_plane_becomes_its_status(
    front: Front, error: InferenceError, code: grpc.StatusCode
) -> None:
    """The one table, with the error's own text, counted by reason and by code."""
    front.plane.error = error

    with structlog.testing.capture_logs() as logged:
        refused = await refusal(front)

    assert (refused.code(), refused.details()) == (code, "bad")
    assert [(line["event"], line["log_level"], line["reason"]) for line in logged] == [
        ("request refused", "debug", error.reason)
    ]
    assert front.recorder.reasons == [error.reason]
    assert front.recorder.done == [("double", "grpc", code.name)]


@pytest.mark.parametrize(
    ("details", "code"), [("Unable to parse request", Code.INVALID_ARGUMENT), ("out of memory", Code.INTERNAL)]
)
async def test_message_that_the_engine_cannot_read_is_the_callers_mistake(
    front: Front, details: str, code: grpc.StatusCode
) -> None:
    """INVALID_ARGUMENT with the engine's text, where gRPC there says INTERNAL; another INTERNAL stays one."""
    front.plane.answer = GrpcAnswer(13, details=details)
    refused = await refusal(front)
    assert (refused.code(), refused.details()) == (code, details)


def test_table_has_every_class_of_the_tree() -> None:
    """A new error class has a row, or a parent other than the root that has one."""
    for kind in InferenceError.__subclasses__():
        assert kind in ERROR_CODES


def test_status_where_waiting_helps_says_how_long() -> None:
    """Seconds, without a unit, as the HTTP header of that name has them; spread, so that no herd comes back as one."""
    cases = (
        (Overloaded("full", retry_after_s=0.2), 0.2),
        (EngineUnavailable("down"), 1.0),
        (ModelUnavailable("hangs"), 1.0),
    )
    for error, known in cases:
        reason, (name, seconds) = status_of(error).trailing_metadata
        assert (reason, name) == (("x-penstock-reason", error.reason), "retry-after")
        assert known <= float(seconds) <= 2 * known
    for error in (ModelNotFound("no"), ModelUnavailable("its trial failed", retry_after_s=None)):
        assert status_of(error).trailing_metadata == (("x-penstock-reason", error.reason),)


async def test_bug_of_ours_is_internal_and_keeps_its_secrets(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    """The client reads two words; the log has the rest, on one line's event."""
    front.plane.error = RuntimeError("secret")

    refused = await refusal(front)

    assert (refused.code(), refused.details()) == (Code.INTERNAL, "internal error")
    logged = capsys.readouterr()
    assert "a gRPC call failed unexpectedly" in logged.out + logged.err
    assert "secret" in logged.out + logged.err


async def test_too_little_memory_is_unavailable_with_retry_after(front: Front) -> None:
    """Unlike a bug, it is temporary: the client may retry."""
    front.plane.error = MemoryError()

    refused = await refusal(front)

    assert refused.code() is Code.UNAVAILABLE
    assert "too little memory" in (refused.details() or "")
    assert "retry-after" in dict(refused.trailing_metadata() or ())


async def test_engine_answer_passes_as_it_is(front: Front) -> None:
    """Message bytes and trailing metadata; or code, details and trailing metadata."""
    front.plane.answer = GrpcAnswer(0, b"any bytes", trailing_metadata=(("key", "value"),))
    running = front.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)(infer_message())
    assert await running == b"any bytes"  # type: ignore[comparison-overlap]
    assert ("key", "value") in tuple(await running.trailing_metadata())  # type: ignore[arg-type]

    front.plane.answer = GrpcAnswer(10, details="abörted\nby the engine", trailing_metadata=(("key", "value"),))
    refused = await refusal(front)
    assert (refused.code(), refused.details()) == (Code.ABORTED, "abörted\nby the engine")
    assert ("key", "value") in tuple(refused.trailing_metadata())
    assert front.recorder.reasons == []


async def test_engine_code_that_is_none_is_unknown(front: Front) -> None:
    """An engine's odd number does not break the front."""
    front.plane.answer = GrpcAnswer(99, details="odd")

    assert (await refusal(front)).code() is Code.UNKNOWN


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\xffm", b"\x0a\x02\xff\xff", b"\x00"])
async def test_infer_malformed_message_is_refused(front: Front, message: bytes) -> None:
    """Bytes that are no request never reach the engine."""
    refused = await refusal(front, message=message)

    assert refused.code() is Code.INVALID_ARGUMENT
    assert front.plane.relayed == []
    assert front.recorder.done == [("unknown", "grpc", "INVALID_ARGUMENT")]


async def test_infer_classification_of_bytes_is_refused(front: Front) -> None:
    """What kills Triton 2.51 is asked of the plane first; a numeric output passes."""
    request = infer_request("texts")
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    assert (await refusal(front, message=request.SerializeToString())).details() == "output 'y' is BYTES"
    assert front.plane.relayed == []

    request.model_name = "double"
    await front.call("ModelInfer", request.SerializeToString())
    assert len(front.plane.relayed) == 1


async def test_infer_unknown_models_share_a_label(front: Front) -> None:
    """Clients cannot grow the metrics."""
    for name in ("nope", "nope-2"):
        await refusal(front, message=infer_message(name))

    assert front.recorder.done == [("unknown", "grpc", "NOT_FOUND")] * 2


async def test_deadline_of_the_call_reaches_the_plane(front: Front) -> None:
    """Within the precision of its way over the wire."""
    await front.call("ModelInfer", infer_message(), timeout=5.0)

    deadline = front.plane.relayed[0][3]
    assert deadline is not None
    assert 4.0 < deadline - time.monotonic() < 5.1


@pytest.mark.parametrize("timeout_s", [None, 1e6])
async def test_deadline_none_or_absurd_is_none(front: Front, timeout_s: float | None) -> None:
    """More than a day counts as none."""
    await front.call("ModelInfer", infer_message(), timeout=timeout_s)

    assert front.plane.relayed[0][3] is None


@pytest.mark.parametrize(
    ("timeout_us", "timeout_s", "expected_s"),
    [(2_000_000, None, 2.0), (2_000_000, 9.0, 2.0), (60_000_000, 5.0, 5.0), (0, 5.0, 5.0)],
)
async def test_deadline_earlier_of_call_and_parameter_wins(
    front: Front, timeout_us: int, timeout_s: float | None, expected_s: float
) -> None:
    """The parameter `timeout` in microseconds, 0 for none. gRPC itself rounds a deadline up by a hundredth."""
    request = infer_request()
    request.parameters["timeout"].int64_param = timeout_us

    await front.call("ModelInfer", request.SerializeToString(), timeout=timeout_s)

    deadline = front.plane.relayed[0][3]
    assert deadline is not None
    assert expected_s - 1 < deadline - time.monotonic() < expected_s * 1.02


async def test_deadline_negative_never_reaches_the_engine(front: Front) -> None:
    """A request that was late before it came costs nothing."""
    request = infer_request()
    request.parameters["timeout"].int64_param = -1

    refused = await refusal(front, message=request.SerializeToString())

    assert refused.code() is Code.DEADLINE_EXCEEDED
    assert front.plane.relayed == []


async def test_deadline_passing_in_the_engine_is_deadline_exceeded(front: Front) -> None:
    """The v2 parameter alone, so that it is the front that answers."""
    front.engine.mode = FakeMode.SLOW
    request = infer_request()
    request.parameters["timeout"].int64_param = 150_000
    started = time.monotonic()

    refused = await refusal(front, message=request.SerializeToString())

    assert refused.code() is Code.DEADLINE_EXCEEDED
    assert 0.14 < time.monotonic() - started < 5  # the engine would never answer


async def test_deadline_passing_in_the_client_is_counted_as_such(front: Front) -> None:
    """DEADLINE_EXCEEDED on either side is not counted as a cancellation, and the engine's work ends."""
    front.engine.mode = FakeMode.SLOW

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.call("ModelInfer", infer_message(), timeout=0.15)

    assert refused.value.code() is Code.DEADLINE_EXCEEDED
    async with asyncio.timeout(2):
        while not front.recorder.done:
            await asyncio.sleep(0.01)
    assert front.recorder.done == [("double", "grpc", "DEADLINE_EXCEEDED")]
    assert not front.recorder.gone.is_set()


async def test_cancelled_client_cancels_the_engine(front: Front, capfd: pytest.CaptureFixture[str]) -> None:
    """The engine's work ends, the metric counts one, nothing is logged, the next request is fine."""
    front.engine.mode = FakeMode.SLOW
    running = asyncio.create_task(front.call("ModelInfer", infer_message()))
    await front.plane.entered.wait()

    running.cancel()

    async with asyncio.timeout(2):
        await front.recorder.gone.wait()
    assert front.engine.cancelled == 1
    assert front.recorder.done == []
    front.engine.mode = FakeMode.NORMAL
    assert await front.call("ModelInfer", infer_message())
    assert "Traceback" not in capfd.readouterr().err


async def test_message_over_the_limit_is_resource_exhausted() -> None:
    """The refusal names the limit; a message under it passes."""
    async with serving(GrpcLimits(max_message_bytes=1 << 20)) as front:
        refused = await refusal(front, message=infer_message(size=1 << 18))
        assert refused.code() is Code.RESOURCE_EXHAUSTED
        assert "1048576" in (refused.details() or "")
        assert await front.call("ModelInfer", infer_message(size=(1 << 18) - 100))


async def test_message_over_the_limit_once_decompressed_is_resource_exhausted() -> None:
    """A gzip bomb is measured as it unfolds."""
    async with serving(GrpcLimits(max_message_bytes=1 << 20)) as front:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await front.call("ModelInfer", infer_message(size=16 << 20), compression=grpc.Compression.Gzip)

        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        assert front.plane.relayed == []


async def test_message_limit_of_tritons_size_is_taken() -> None:
    """INT32_MAX, and more than gRPC's own four megabytes both ways."""
    async with serving(GrpcLimits(max_message_bytes=2**31 - 1)) as front:
        answer = await front.call("ModelInfer", infer_message(size=2 << 20))

    assert len(answer) > 8 << 20


async def test_metadata_up_to_64_kib_always_passes_and_more_never(front: Front) -> None:
    """gRPC by default refuses some of the calls with more than 8 KiB of metadata, a few long tokens, at random."""
    long = tuple((f"x-token-{number}", "t" * 5_000) for number in range(12))
    for _ in range(20):
        await front.call("ModelInfer", infer_message(), metadata=long)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.call("ModelInfer", infer_message(), metadata=(*long, ("x-more", "t" * 5_000)))
    assert refused.value.code() is Code.RESOURCE_EXHAUSTED


async def test_load_and_unload_are_distinguished(front: Front) -> None:
    """The data plane gets the model name and the verb."""
    load = service_pb2.RepositoryModelLoadRequest(model_name="texts").SerializeToString()
    unload = service_pb2.RepositoryModelUnloadRequest(model_name="texts").SerializeToString()

    await front.call("RepositoryModelUnload", unload)
    await front.call("RepositoryModelLoad", load)
    await front.call("RepositoryIndex")

    assert [(verb, head.model_name) for verb, head, _, _ in front.plane.relayed] == [
        (Verb.UNLOAD, "texts"),
        (Verb.LOAD, "texts"),
        (Verb.INDEX, ""),
    ]
    assert front.recorder.done == []


async def test_server_metadata_hides_what_is_blocked(front: Front) -> None:
    """The engine's shared memory is not the gateway's."""
    metadata = service_pb2.ServerMetadataResponse.FromString(await front.call("ServerMetadata"))

    assert "system_shared_memory" not in metadata.extensions
    assert "statistics" in metadata.extensions


async def test_server_live_and_ready_are_the_gateways_own(front: Front) -> None:
    """Live without an engine; ready as the plane says."""
    front.engine.mode = FakeMode.UNAVAILABLE
    front.plane.unready_reason = "the engine is down"

    assert service_pb2.ServerLiveResponse.FromString(await front.call("ServerLive")).live
    assert not service_pb2.ServerReadyResponse.FromString(await front.call("ServerReady")).ready
    assert (await refusal(front, "RepositoryIndex", b"")).code() is Code.UNAVAILABLE


@pytest.mark.parametrize("method", ["SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "NoSuchMethod"])
async def test_method_not_served_is_unimplemented(front: Front, method: str) -> None:
    """And never passed on."""
    assert (await refusal(front, method, b"")).code() is Code.UNIMPLEMENTED
    assert front.plane.relayed == []


@pytest.mark.parametrize("kind", ["System", "Cuda"])
@pytest.mark.parametrize("call", ["Status", "Register", "Unregister"])
async def test_shared_memory_that_is_off_is_refused_with_the_flag(front: Front, kind: str, call: str) -> None:
    """The sentence says why it is off and which flag of the gateway turns it on."""
    message = getattr(service_pb2, f"{kind}SharedMemory{call}Request")(name="r").SerializeToString()
    refused = await refusal(front, f"{kind}SharedMemory{call}", message)
    assert refused.code() is Code.UNIMPLEMENTED
    assert "start the gateway with --allow-client-shm" in (refused.details() or "")


async def test_serve_taken_port_is_an_error_that_names_it(front: Front) -> None:
    """Two gateways never share a port in silence."""
    with pytest.raises(AddressTaken, match=f"cannot listen on {front.address} for gRPC; .*--grpc-port"):
        await serve(front.plane, GrpcLimits(), GrpcEndpoint((front.address,)), front.recorder)  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "count"), [(cygrpc.ExecuteBatchError("client gone"), 0), (KeyError("a bug"), 1)])
async def test_log_answer_to_a_client_that_left_is_no_line(
    front: Front, caplog: pytest.LogCaptureFixture, error: Exception, count: int
) -> None:
    """gRPC's own log tells of bugs, and not of clients whose deadline came in the moment of the answer."""
    logging.getLogger("grpc._cython.cygrpc").error("raised in core by servicer method", exc_info=error)
    assert len(caplog.records) == count
