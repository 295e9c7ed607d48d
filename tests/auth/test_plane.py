"""Every way through the data plane asks for the caller's role and takes of its quota, and gives its share back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.gateway.dataplane import DataPlane, PlaneParts
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.metrics import Metrics
from penstock.protocol.call import GrpcCall, HttpCall, InferHead
from penstock.protocol.errors import InferenceError, Overloaded, PermissionDenied, QuotaExceeded
from penstock.protocol.identity import ROLE_OF, Identity, Quota, Role, Verb
from penstock.testing import FakeEngine, FakeMode
from penstock.vision.decode_pool import DecodePool
from tests.grpc.harness import MODELS, double, infer_message

HEAD = InferHead("double")
HTTP = HttpCall("POST", b"/v2/models/double/infer", (), b"{}")
GRPC = GrpcCall("/inference.GRPCInferenceService/ModelInfer", infer_message())
CAMERA = Identity("camera", roles=frozenset((Role.INFER,)), quota=Quota(share=0.25))


@dataclass
class Rig:
    plane: DataPlane
    backend: FakeEngine
    quotas: RateLimiter
    admission: InFlightLimiter


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Four places; a quarter of them is one."""
    backend = FakeEngine(MODELS, answer=double)
    watch = EngineWatch(backend, WatchOptions(probe_interval_s=60, down_interval_s=0.01, canary_interval_s=60))
    admission, quotas, metrics = (
        InFlightLimiter(InFlightLimits(4)),
        RateLimiter(max_requests=4, max_bytes=1 << 20),
        Metrics(),
    )
    slots = EngineSlots(backend, watch)
    images = ImageFlow(backend=backend, watch=watch, pool=DecodePool(workers=1), metrics=metrics, slots=slots)
    control = AdmissionControl(watch=watch, admission=admission, metrics=metrics, quotas=quotas)
    plane = DataPlane(
        PlaneParts(relay=backend, watch=watch, images=images, admission=control, metrics=metrics, slots=slots)
    )
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await watch.first_ready.wait()
    yield Rig(plane, backend, quotas, admission)
    assert quotas.in_flight() == {}
    assert admission.statistics().requests == 0
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def by_http(plane: DataPlane, caller: Identity) -> None:
    await plane.relay(Verb.INFER, HEAD, HTTP, caller=caller)


async def by_grpc(plane: DataPlane, caller: Identity) -> None:
    await plane.relay(Verb.INFER, HEAD, GRPC, caller=caller)


async def by_http_stream(plane: DataPlane, caller: Identity) -> None:
    async with plane.stream(HEAD, HTTP, caller=caller):
        await asyncio.sleep(0)


async def on_a_stream(plane: DataPlane, caller: Identity) -> None:
    async with plane.open_stream(GRPC.method, (), caller=caller):
        with plane.stream_slot(HEAD, caller, 10):
            await asyncio.sleep(0)


WAYS = (by_http, by_grpc, by_http_stream, on_a_stream)
Way = Callable[[DataPlane, Identity], Awaitable[None]]


@pytest.mark.parametrize("way", WAYS)
async def test_inference_needs_its_role(rig: Rig, way: Way) -> None:
    """Also where a transport forgot to ask."""
    with pytest.raises(PermissionDenied, match="this needs the role infer"):
        await way(rig.plane, Identity("viewer", roles=frozenset((Role.READ, Role.ADMIN))))


@pytest.mark.parametrize("verb", set(Verb) - {Verb.INFER})
async def test_every_verb_needs_its_role(rig: Rig, verb: Verb) -> None:
    """Over both protocols; reading is not changing."""
    others = frozenset(Role) - {ROLE_OF[verb]}
    for way in (
        rig.plane.relay(verb, HEAD, HTTP, caller=Identity("a", roles=others)),
        rig.plane.relay(verb, HEAD, GRPC, caller=Identity("a", roles=others)),
    ):
        with pytest.raises(PermissionDenied, match=f"this needs the role {ROLE_OF[verb]}"):
            await way


@pytest.mark.parametrize("way", WAYS)
async def test_caller_whose_share_is_taken_is_refused_and_another_is_not(rig: Rig, way: Way) -> None:
    """One of its requests runs; its next is refused at once, whichever way it comes."""
    rig.backend.mode = FakeMode.SLOW
    running = asyncio.create_task(by_http(rig.plane, CAMERA))
    while not rig.quotas.in_flight():
        await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded, match="'camera' has 1 requests in flight"):
        await way(rig.plane, CAMERA)
    other = asyncio.create_task(by_http(rig.plane, Identity("other", quota=Quota(share=0.25))))
    while len(rig.quotas.in_flight()) < 2:
        await asyncio.sleep(0)
    rig.backend.release.set()
    await asyncio.gather(running, other)


@pytest.mark.parametrize("way", WAYS)
async def test_share_is_given_back_however_a_request_ends(rig: Rig, way: Way) -> None:
    """Well, or refused by the engine's side; the fixture looks."""
    for _ in range(3):
        await way(rig.plane, CAMERA)
    rig.backend.mode = FakeMode.UNAVAILABLE
    with suppress(InferenceError):
        await way(rig.plane, CAMERA)


async def test_share_is_given_back_where_the_gateway_is_full_and_by_who_leaves(rig: Rig) -> None:
    """A place of all is missing, or the client cancels."""
    for _ in range(4):
        rig.admission.enter(1)
    with pytest.raises(Overloaded):
        await by_http(rig.plane, CAMERA)
    assert rig.quotas.in_flight() == {}
    for _ in range(4):
        rig.admission.leave(1)
    rig.backend.mode = FakeMode.SLOW
    leaving = asyncio.create_task(by_http(rig.plane, CAMERA))
    while not rig.quotas.in_flight():
        await asyncio.sleep(0)
    leaving.cancel()
    with suppress(asyncio.CancelledError):
        await leaving


@pytest.mark.parametrize("way", WAYS)
async def test_every_request_is_one_of_the_rate(rig: Rig, way: Way) -> None:
    """On a stream too, each by itself."""
    caller = Identity("camera", quota=Quota(rate=3, period_s=3600.0))
    for _ in range(3):
        await way(rig.plane, caller)
    with pytest.raises(QuotaExceeded, match="has sent its 3 requests"):
        await way(rig.plane, caller)
