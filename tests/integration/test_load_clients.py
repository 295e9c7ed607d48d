"""The load test's clients against the real stack: every kind, both front and engine."""

import asyncio
import re
from collections.abc import Callable

import pytest

from penstock_load.clients.client import Answer, Client, Endpoint, TargetError
from penstock_load.clients.connect import connect, preflight, server_identity
from penstock_load.results import Status
from penstock_load.scenario import Kind, RequestSpec
from tests.engines.fake_triton import FakeTriton
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")

TIMEOUT_S = 30.0
LARGE = (150_528,)


def gateway(stack: RunningStack) -> Endpoint:
    return Endpoint(http_url=stack.http_url, grpc_address=stack.grpc_address)


def engine(stack: RunningStack) -> Endpoint:
    return Endpoint(http_url=stack.engine_http_url, grpc_address=stack.engine_grpc_address)


async def answers_to(ask: RequestSpec, endpoint: Endpoint, count: int = 12, images: str = "") -> list[Answer]:
    """To that many requests, four at once."""
    client = await connect(ask, endpoint, seed=1, images=images, timeout_s=TIMEOUT_S)
    try:
        turns = [range(first, count, 4) for first in range(4)]
        rows = await asyncio.gather(*(_in_turn(client, turn) for turn in turns))
    finally:
        await client.aclose()
    return [answer for row in rows for answer in row]


async def _in_turn(client: Client, numbers: range) -> list[Answer]:
    return [await client.send(number) for number in numbers]


def outcomes(answers: list[Answer]) -> set[tuple[Status, str]]:
    return {(answer.status, answer.error) for answer in answers}


@pytest.mark.parametrize(("model", "batch"), [("street", 1), ("street", 3), ("people", 1)])
async def test_pictures_are_answered_with_stages(stack: RunningStack, model: str, batch: int) -> None:
    """One picture or a form of three: good answers that say the server's own time."""
    answers = await answers_to(RequestSpec(kind=Kind.IMAGE, model=model, batch=batch), gateway(stack), count=4)
    assert outcomes(answers) == {(Status.OK, "")}
    for answer in answers:
        assert answer.stages is not None
        assert 0 < answer.stages.infer_ms <= answer.stages.total_ms
        assert answer.batch_size >= 1


@pytest.mark.parametrize("kind", [Kind.REST, Kind.GRPC])
@pytest.mark.parametrize(
    ("model", "batch", "sizes"),
    [("identity_fp32", 1, (16,)), ("identity_fp32", 8, LARGE), ("identity_bytes", 2, (3,)), ("people", 1, (96, 3))],
    ids=lambda value: str(value),
)
async def test_tensors_are_answered(
    stack: RunningStack, kind: Kind, model: str, batch: int, sizes: tuple[int, ...]
) -> None:
    """Small and large tensors, batches and BYTES, over REST and gRPC."""
    if model == "people":  # no batch dimension: its first free one is a height, which counts as the batch
        batch = 128
    answers = await answers_to(RequestSpec(kind=kind, model=model, batch=batch, sizes=sizes), gateway(stack))
    assert outcomes(answers) == {(Status.OK, "")}
    if model == "identity_fp32":
        assert min(answer.received_bytes for answer in answers) > 4 * batch * sizes[0]


@pytest.mark.parametrize("end", [gateway, engine])
async def test_streams_are_answered(stack: RunningStack, end: Callable[[RunningStack], Endpoint]) -> None:
    """Tensors over one stream, in any size."""
    for sizes in ((16,), LARGE):
        ask = RequestSpec(kind=Kind.GRPC_STREAM, model="identity_fp32", sizes=sizes)
        assert (await preflight(ask, end(stack), timeout_s=TIMEOUT_S)).status is Status.OK
        answers = await answers_to(ask, end(stack))
        assert outcomes(answers) == {(Status.OK, "")}
        assert min(answer.received_bytes for answer in answers) > 4 * sizes[0]


@pytest.mark.parametrize("end", [gateway, engine])
async def test_stream_error_fails_its_request_alone(
    stack: RunningStack, end: Callable[[RunningStack], Endpoint]
) -> None:
    """What Triton says of one request on a stream fails that one; the stream goes on."""
    ask = RequestSpec(kind=Kind.GRPC_STREAM, model="identity_fp32", batch=9, sizes=(2,))
    answers = await answers_to(ask, end(stack), count=4)
    assert {(answer.status, answer.code) for answer in answers} == {(Status.FAILED, "")}
    assert all("max" in answer.error or "batch" in answer.error for answer in answers)


async def test_server_without_streams_is_distinguished_from_one_that_fails() -> None:
    """A sentence where gRPC answers UNIMPLEMENTED."""
    async with FakeTriton().running() as fake:
        endpoint = Endpoint(http_url=f"http://127.0.0.1:{fake.http_port}", grpc_address=fake.grpc_address)
        with pytest.raises(TargetError, match="this server does not stream over gRPC"):
            await preflight(
                RequestSpec(kind=Kind.GRPC_STREAM, model="double", sizes=(1, 1)), endpoint, timeout_s=TIMEOUT_S
            )


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.VIDEO])
async def test_preflight_names_what_is_served(stack: RunningStack, kind: Kind) -> None:
    """The error for an unknown model lists the served models."""
    with pytest.raises(TargetError, match=r"does not serve nothing; it serves .*identity_fp32, .*street"):
        await preflight(RequestSpec(kind=kind, model="nothing"), gateway(stack), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (RequestSpec(kind=Kind.IMAGE, model="identity_fp32"), "send tensors to /infer instead"),
        (
            RequestSpec(kind=Kind.GRPC, model="identity_fp32", batch=9),
            "did not do what grpc identity_fp32 asks (INVALID_ARG",
        ),
        (RequestSpec(kind=Kind.REST, model="identity_fp32", batch=9), "did not do what rest identity_fp32 asks (400: "),
        (RequestSpec(kind=Kind.REST, model="street", batch=1000), "is 1687 MiB (limit 256); ask a smaller batch"),
    ],
    ids=["no images", "batch too large", "REST too", "huge"],
)
async def test_preflight_says_what_the_gateway_cannot(stack: RunningStack, ask: RequestSpec, sentence: str) -> None:
    """A sentence for what this gateway, or this model, does not do."""
    with pytest.raises(TargetError, match=re.escape(sentence)):
        await preflight(ask, gateway(stack), timeout_s=TIMEOUT_S)


async def test_engine_has_no_image_endpoint(stack: RunningStack) -> None:
    """Triton itself takes no pictures, and preflight says where it looked."""
    with pytest.raises(TargetError, match=r"there is no image endpoint at http://\S+/v2/models/street/image"):
        await preflight(RequestSpec(kind=Kind.IMAGE, model="street"), engine(stack), timeout_s=TIMEOUT_S)


async def test_identities_are_distinguished(stack: RunningStack) -> None:
    """Both say their name, version and that they take binary tensors."""
    for endpoint in (gateway(stack), engine(stack)):
        identity = await server_identity(endpoint, TIMEOUT_S)
        assert identity.name
        assert identity.version
        assert "binary_tensor_data" in identity.extensions
