"""What a person reads before a load test of a target that cannot be asked, and what a target says of itself."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from penstock_load.clients.client import Endpoint, TargetError
from penstock_load.clients.connect import preflight, server_identity
from penstock_load.clients.payloads import InputSpec, concrete_shape, make_tensors
from penstock_load.results import Status
from penstock_load.scenario import Kind, RequestSpec
from tests.loadtest.v2_server import V2Server, running_v2_server

CLOSED = Endpoint(http_url="http://127.0.0.1:1", grpc_address="127.0.0.1:1")


@pytest.fixture
async def server() -> AsyncIterator[V2Server]:
    """A server that a test can set."""
    async with running_v2_server() as running:
        yield running


async def complaint(ask: RequestSpec, endpoint: Endpoint, *, images: str = "", timeout_s: float = 20.0) -> str:
    """What preflight says against the target."""
    with pytest.raises(TargetError) as raised:
        await preflight(ask, endpoint, images=images, timeout_s=timeout_s)
    return str(raised.value)


CALLS = [kind for kind in Kind if kind is not Kind.VIDEO]  # a video stream is not asked for picture by picture


def asking(kind: Kind, model: str = "m", batch: int = 1) -> RequestSpec:
    return RequestSpec(kind=kind, model=model, batch=batch, sizes=(4,), picture_px=(16, 16))


@pytest.mark.parametrize("kind", CALLS)
async def test_target_that_can_gives_its_answer(server: V2Server, kind: Kind) -> None:
    """One real request of each kind, answered."""
    assert (await preflight(asking(kind), server.endpoint, timeout_s=20)).status is Status.OK


@pytest.mark.parametrize("kind", CALLS)
async def test_no_server_listens(kind: Kind) -> None:
    """The sentence says where nothing answers and what to do."""
    sentence = await complaint(asking(kind), CLOSED)
    assert sentence.startswith(("nothing answers at http://127.0.0.1:1 (", "nothing answers at gRPC at 127.0.0.1:1 ("))
    assert sentence.endswith("start the server, or give the address of one that runs")


async def test_cut_connection_differs_from_a_closed_port(server: V2Server) -> None:
    """Something listens there, so that to start the server is no advice."""

    async def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    server.post = cut
    sentence = await complaint(asking(Kind.IMAGE), server.endpoint)
    assert sentence == f"{server.http_url} broke off the first image m (Server disconnected); does it take https?"


@pytest.mark.parametrize("header", [("x-key-bin", "secret"), ("x!key", "secret"), ("x-key", "a\tb")])
async def test_header_that_grpc_does_not_take_is_refused(server: V2Server, header: tuple[str, str]) -> None:
    """HTTP takes more than gRPC does; the sentence names the header and keeps its value to itself."""
    endpoint = msgspec.structs.replace(server.endpoint, headers=(header,))
    assert (await preflight(asking(Kind.REST), endpoint, timeout_s=20)).status is Status.OK
    sentence = await complaint(asking(Kind.GRPC), endpoint)
    assert sentence.startswith(f"the header '{header[0]}' cannot travel over gRPC")
    assert header[1] not in sentence


@pytest.mark.parametrize("kind", CALLS)
async def test_unknown_model_names_the_served_ones(server: V2Server, kind: Kind) -> None:
    """Who mistyped a model's name reads which models there are: the ready ones."""
    server.post = not_found
    sentence = await complaint(asking(kind, "n"), server.endpoint)
    assert sentence.endswith("does not serve n; it serves m")


async def not_found(_: web.Request) -> web.Response:
    return web.json_response({"error": "nothing here"}, status=404)


async def test_server_without_image_endpoint(server: V2Server) -> None:
    """A model without an image endpoint differs from a model that does not exist."""
    server.post = not_found
    sentence = await complaint(asking(Kind.IMAGE), server.endpoint)
    url = f"{server.http_url}/v2/models/m/image"
    assert sentence == f"there is no image endpoint at {url} (POST answered 404: nothing here)"


async def test_refused_or_failed_first_request_says_what_the_server_said(server: V2Server) -> None:
    """Whatever else goes wrong, the code and the server's own words are in the sentence."""

    async def not_supported(_: web.Request) -> web.Response:
        return web.json_response({"error": "m takes no images"}, status=501)

    server.post = not_supported
    assert (await complaint(asking(Kind.IMAGE), server.endpoint)).endswith(
        "/v2/models/m/image did not take the first picture (501: m takes no images)"
    )
    assert (await complaint(asking(Kind.REST), server.endpoint)).endswith(
        "did not do what rest m asks (501: m takes no images)"
    )


async def test_slow_server_is_named_as_slow(server: V2Server) -> None:
    """For a first request that takes too long the message has the timeout."""

    async def slow(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    server.post = slow
    sentence = await complaint(asking(Kind.IMAGE), server.endpoint, timeout_s=0.3)
    assert sentence == f"{server.http_url} took longer than 0.3 s over the first request of image m"


@pytest.mark.parametrize("kind", [Kind.GRPC, Kind.GRPC_STREAM])
async def test_grpc_on_an_http_port_is_reported(server: V2Server, kind: Kind) -> None:
    """Who gives the HTTP port for gRPC reads that nothing answers there."""
    swapped = Endpoint(http_url=server.http_url, grpc_address=server.http_url.removeprefix("http://"))
    assert (await complaint(asking(kind), swapped)).startswith(f"nothing answers at gRPC at {swapped.grpc_address} (")


async def test_https_on_a_plain_port_is_reported(server: V2Server) -> None:
    """Who asks a plain port over TLS reads where nothing answers."""
    wrong = Endpoint(http_url=server.http_url.replace("http:", "https:"), grpc_address=server.grpc_address)
    for kind in CALLS:
        assert (await complaint(asking(kind), wrong)).startswith("nothing answers at ")


async def test_web_server_that_is_no_v2_server(server: V2Server) -> None:
    """A web server of another sort is reported, and has no identity; a picture endpoint needs none."""
    elsewhere = Endpoint(http_url=f"{server.http_url}/other", grpc_address="", image_path="/predict")
    sentence = await complaint(asking(Kind.REST), elsewhere)
    assert sentence == f"{elsewhere.http_url} is no KServe v2 server: GET /v2/models/m answered 405"
    assert await server_identity(elsewhere, 20) == ("", "", ())
    assert (await preflight(asking(Kind.IMAGE), elsewhere, timeout_s=20)).status is Status.OK


async def test_identity_is_the_servers_word(server: V2Server) -> None:
    """Name, version and extensions of GET /v2; a closed port has none."""
    assert await server_identity(server.endpoint, 20) == ("small", "1.2", ("binary_tensor_data",))
    assert await server_identity(CLOSED, 20) == ("", "", ())


async def test_decoupled_model_wants_a_stream(server: V2Server) -> None:
    """A model that answers over streams only is not asked by calls."""
    server.is_decoupled = True
    assert "ask it with grpc-stream" in await complaint(asking(Kind.GRPC), server.endpoint)
    assert (await preflight(asking(Kind.GRPC_STREAM), server.endpoint, timeout_s=20)).status is Status.OK


def test_shapes_fill_what_is_free() -> None:
    """A free first dimension is the batch; the others take the sizes in turn, the last repeats, 256 without any."""
    spec = InputSpec("x", "FP32", (-1, 3, -1, -1))
    assert concrete_shape(spec, batch=4, sizes=()) == (4, 3, 256, 256)
    assert concrete_shape(spec, batch=1, sizes=(8,)) == (1, 3, 8, 8)
    assert concrete_shape(spec, batch=1, sizes=(8, 9, 7)) == (1, 3, 8, 9)
    assert concrete_shape(InputSpec("x", "FP32", (2, -1)), batch=1, sizes=(5,)) == (2, 5)
    with pytest.raises(ValueError, match=r"shape \[2, -1\], so a batch of 4 has no place"):
        concrete_shape(InputSpec("x", "FP32", (2, -1)), batch=4, sizes=())


@pytest.mark.parametrize(
    ("datatype", "size_bytes"), [("BOOL", 1), ("UINT8", 1), ("INT64", 8), ("FP16", 2), ("BF16", 2), ("FP64", 8)]
)
def test_tensors_have_the_bytes_of_their_type(datatype: str, size_bytes: int) -> None:
    """Every number type of the protocol can be filled; an unknown one is refused."""
    (tensor,) = make_tensors([InputSpec("x", datatype, (-1, 5))], batch=2, seed=1)
    assert len(tensor.content) == 10 * size_bytes
    with pytest.raises(ValueError, match="FP3"):
        make_tensors([InputSpec("x", "FP3", (1,))], seed=1)
