"""Keys over gRPC: checked before the message, never forwarded, and the role that each method needs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import grpc
import pytest
import pytest_asyncio
import structlog
import uvloop
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from penstock.gateway.grpc.interceptors import role_needed
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, ONCE, STRANGER, door
from tests.grpc.harness import SERVICE, Front, infer_message, serving

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str | bytes], ...]
READS = frozenset(
    (
        *("ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
        *("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "TraceSetting", "LogSettings"),
    )
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Front]:
    async with serving(door=door()) as running:
        yield running


def bearer(secret: str) -> Metadata:
    return (("authorization", f"Bearer {secret}"),)


def api_key(secret: str) -> Metadata:
    return (("x-api-key", secret),)


async def refusal(front: Front, metadata: Metadata, method: str = "ModelInfer") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.call(method, infer_message(), metadata=metadata)
    return refused.value


@pytest.mark.parametrize("metadata", [bearer(KEYS[Role.INFER]), api_key(KEYS[Role.INFER])])
async def test_key_lets_its_call_through_and_stays_behind(front: Front, metadata: Metadata) -> None:
    """Either key of metadata; the engine gets neither, and all the rest."""
    await front.call("ModelInfer", infer_message(), metadata=(*metadata, ("traceparent", "00-1-2-01")))
    (_, _, call, _) = front.plane.relayed[0]
    assert ("traceparent", "00-1-2-01") in call.metadata
    assert not {"authorization", "x-api-key"} & {key for key, _ in call.metadata}


@pytest.mark.parametrize(
    ("metadata", "code", "text"),
    [
        ((), Code.UNAUTHENTICATED, "this needs an API key with the role infer"),
        (api_key(STRANGER), Code.UNAUTHENTICATED, "the API key is unknown"),
        ((("authorization", "Basic cGstc2VjcmV0"),), Code.UNAUTHENTICATED, "`authorization` is not `Bearer …`"),
        ((*bearer(KEYS[Role.INFER]), *api_key(STRANGER)), Code.UNAUTHENTICATED, "two different keys are sent"),
        (api_key(KEYS[Role.READ]), Code.PERMISSION_DENIED, "'read' lacks the role infer"),
    ],
)
async def test_call_that_may_not_is_refused_counted_and_logged_without_a_key(
    front: Front, metadata: Metadata, code: grpc.StatusCode, text: str
) -> None:
    """The status of the one table; nothing of a key in it or in the log."""
    with structlog.testing.capture_logs() as logged:
        refused = await refusal(front, metadata)
    assert refused.code() is code
    assert text in str(refused.details())
    assert front.plane.relayed == []
    assert front.recorder.reasons == ["unauthenticated" if code is Code.UNAUTHENTICATED else "permission_denied"]
    assert "pk-secret" not in str(refused.details()) + str(logged)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_call_without_a_key_is_refused_before_its_message(front: Front, method: str) -> None:
    """The status comes to a client that has sent its metadata and no message, and never will."""

    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    call = front.channel.stream_stream(SERVICE + method, None, None)(silence(), timeout=20.0)
    assert await call.code() is Code.UNAUTHENTICATED


async def test_who_may_infer_may_ask_whether_a_model_is_ready(front: Front) -> None:
    """As clients do before they infer; of its metadata a key needs the role read."""
    message = service_pb2.ModelReadyRequest(name="ident").SerializeToString()
    await front.call("ModelReady", message, metadata=api_key(KEYS[Role.INFER]))
    assert (await refusal(front, api_key(KEYS[Role.INFER]), "ModelMetadata")).code() is Code.PERMISSION_DENIED
    assert (await refusal(front, api_key(KEYS[Role.ADMIN]), "ModelReady")).code() is Code.PERMISSION_DENIED


async def test_every_method_needs_its_role(front: Front) -> None:
    """Infer, read, or admin for unlisted methods; health checks need none."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        needed = role_needed(f"/{service.full_name}/{method.name}")
        if method.name in ("ServerLive", "ServerReady"):
            assert needed is None
        elif method.name.endswith("Infer"):
            assert needed is Role.INFER
        else:
            assert needed is (Role.READ if method.name in READS else Role.ADMIN), method.name
        if needed is not None:
            assert (await refusal(front, (), method.name)).code() is Code.UNAUTHENTICATED
    assert role_needed("/some.Service/Method") is Role.ADMIN
    assert role_needed("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo") is Role.READ


async def test_health_is_open(front: Front) -> None:
    """ServerLive, ServerReady, and gRPC's own health protocol."""
    for method in ("ServerLive", "ServerReady"):
        await front.call(method)
    check = front.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    assert (await check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_one_call_is_not_another(front: Front) -> None:
    """Concurrent calls on one connection, each with its own key, are authorised independently."""
    metadata = [(), api_key(KEYS[Role.INFER]), api_key(KEYS[Role.READ]), api_key(STRANGER)] * 25
    answers = await asyncio.gather(
        *(front.call("ModelInfer", infer_message(), metadata=one) for one in metadata), return_exceptions=True
    )
    assert [isinstance(answer, bytes) for answer in answers] == [False, True, False, False] * 25


async def test_used_up_rate_is_resource_exhausted_and_says_when(front: Front) -> None:
    """As `retry-after`, in seconds."""
    ours = door()
    ours.quotas.take(await ours.admit([ONCE], Role.INFER), ours.now())
    async with serving(door=ours) as limited:
        refused = await refusal(limited, api_key(ONCE))
    assert refused.code() is Code.RESOURCE_EXHAUSTED
    trailing = dict(refused.trailing_metadata() or ())
    assert 3590 < float(trailing["retry-after"]) <= 3600
