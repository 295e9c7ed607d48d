"""Pictures and tensors over HTTP: what goes out, and what becomes of it."""

import asyncio
import contextlib
import email
import json
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from penstock_load.clients import http as http_port
from penstock_load.clients.client import Answer, Client, Endpoint, TargetError
from penstock_load.clients.connect import connect
from penstock_load.clients.http import PENSTOCKS_PATH
from penstock_load.clients.payloads import make_pictures
from penstock_load.results import Stages, Status
from penstock_load.scenario import Kind, RequestSpec
from tests.loadtest.v2_server import V2Server, for_ever, running_v2_server

IMAGE = RequestSpec(kind=Kind.IMAGE, model="m", picture_px=(32, 24))
REST = RequestSpec(kind=Kind.REST, model="m", sizes=(3,))
TIMINGS = {"decode": 1.0, "preprocess": 2.0, "queue": 3.0, "infer": 4.0, "postprocess": 5.0, "total": 15.0}
RESULT = {"results": [{"detections": []}]}


@pytest.fixture
async def server() -> AsyncIterator[V2Server]:
    """A server that a test can set."""
    async with running_v2_server() as running:
        yield running


async def client_of(ask: RequestSpec, endpoint: Endpoint, *, images: str = "", timeout_s: float = 20.0) -> Client:
    return await connect(ask, endpoint, seed=1, images=images, timeout_s=timeout_s)


async def answer_to(ask: RequestSpec, endpoint: Endpoint, number: int = 0, *, timeout_s: float = 20.0) -> Answer:
    """To one request of a client of its own."""
    client = await client_of(ask, endpoint, timeout_s=timeout_s)
    try:
        return await client.send(number)
    finally:
        await client.aclose()


def always(status: int, content: object) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def post(_: web.Request) -> web.Response:
        if isinstance(content, str):
            return web.Response(status=status, text=content)
        return web.json_response(content, status=status)

    return post


async def test_answer_of_penstock_says_its_stages_and_its_batch(server: V2Server) -> None:
    """The server's own timings and batch size come with the answer, and the bytes of both ways."""
    server.post = always(200, RESULT | {"timings_ms": TIMINGS, "batch_size": 4})
    answer = await answer_to(IMAGE, server.endpoint)
    assert (answer.status, answer.code, answer.batch_size, answer.error) == (Status.OK, "200", 4, "")
    assert answer.stages == Stages(1.0, 2.0, 3.0, 4.0, 5.0, 15.0)
    assert answer.sent_bytes == len(server.posted[0][1])
    assert answer.received_bytes > 100


@pytest.mark.parametrize(
    ("status", "content", "kind", "error"),
    [
        (200, RESULT, Status.OK, ""),
        (200, {"answer": 42}, Status.FAILED, '0 results for 1 pictures in {"answer": 42}'),
        (200, {"results": []}, Status.FAILED, '0 results for 1 pictures in {"results": []}'),
        (200, "fine", Status.FAILED, "0 results for 1 pictures in fine"),
        (429, {"error": "slow  down"}, Status.REFUSED, "slow down"),
        (503, {"error": "512 in flight"}, Status.REFUSED, "512 in flight"),
        (504, "gateway\ntimeout", Status.REFUSED, "gateway timeout"),
        (400, {"detail": "no image"}, Status.FAILED, "no image"),
        (404, {"detail": [1, 2]}, Status.FAILED, '{"detail": [1, 2]}'),
        (500, "x" * 500, Status.FAILED, "x" * 199 + "…"),
        (302, "", Status.FAILED, ""),
    ],
)
async def test_statuses_become_what_they_mean(
    server: V2Server, status: int, content: object, kind: Status, error: str
) -> None:
    """Refused, failed or fine, with the server's sentence in at most 200 characters."""
    server.post = always(status, content)
    answer = await answer_to(IMAGE, server.endpoint)
    assert (answer.status, answer.code, answer.error) == (kind, str(status), error)


@pytest.mark.parametrize("content", ["fine", {"timings_ms": 7, "batch_size": "many"}, {"predictions": [1]}])
async def test_any_2xx_of_a_foreign_endpoint_is_good(server: V2Server, content: object) -> None:
    """Behind a path that is not Penstock's the answer's content is unknown, so its status is enough."""
    server.post = always(201, content)
    foreign = Endpoint(http_url=server.http_url, grpc_address="", image_path="/predict/{model}?top=5")
    answer = await answer_to(IMAGE, foreign)
    assert (answer.status, answer.code, answer.stages) == (Status.OK, "201", None)
    assert server.posted[0][0].path_qs == "/predict/m?top=5"
    assert Endpoint(http_url="", grpc_address="").image_path == PENSTOCKS_PATH


async def test_own_deadline_is_a_timeout(server: V2Server) -> None:
    """A request without an answer in time has timed out, and the answer says after how long."""

    async def never(_: web.Request) -> web.Response:
        await for_ever()
        raise AssertionError

    server.post = never
    answer = await answer_to(IMAGE, server.endpoint, timeout_s=0.2)
    assert (answer.status, answer.code, answer.error) == (Status.TIMEOUT, "", "no answer within 0.2 s")


async def test_redirect_says_where_it_points(server: V2Server) -> None:
    """It is not followed, since what it costs would be in the latency."""

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("https://there/")

    server.post = elsewhere
    answer = await answer_to(IMAGE, server.endpoint)
    assert (answer.status, answer.code) == (Status.FAILED, "302")
    assert answer.error == "redirects to https://there/, which is not followed"


async def test_answer_without_end_is_not_kept(server: V2Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit it is a failure, however long it would have gone on."""
    monkeypatch.setattr(http_port, "MOST_BYTES", 1 << 20)

    async def endless(request: web.Request) -> web.Response:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(bytes(1 << 16))
        raise AssertionError("the connection was closed")

    server.post = endless
    answer = await answer_to(IMAGE, server.endpoint)
    assert (answer.status, answer.error) == (
        Status.FAILED,
        "the answer is larger than 1,048,576 bytes, and the rest was not read",
    )


async def test_connection_that_breaks_is_a_failure(server: V2Server) -> None:
    """A connection that is cut, or never was, fails without a code, and nothing is raised."""

    async def cut(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.post = cut
    broken = await answer_to(IMAGE, server.endpoint)
    unanswered = await answer_to(IMAGE, Endpoint(http_url="http://127.0.0.1:1", grpc_address=""))
    for answer in (broken, unanswered):
        assert (answer.status, answer.code) == (Status.FAILED, "")
        assert answer.error
    client = await client_of(IMAGE, server.endpoint)
    await client.aclose()
    assert (await client.send(0)).status is Status.FAILED


async def test_generator_out_of_descriptors_has_not_sent(server: V2Server) -> None:
    """What the generator lacks is not held against the server."""
    client = await client_of(IMAGE, server.endpoint)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        answer = await client.send(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await client.aclose()
    assert (answer.status, answer.sent_bytes) == (Status.NOT_SENT, 0)
    assert "Too many open files" in answer.error


@pytest.mark.parametrize("kind", [Kind.IMAGE, Kind.REST, Kind.GRPC, Kind.GRPC_STREAM])
async def test_cancelled_send_is_cancelled(server: V2Server, kind: Kind) -> None:
    """A cancelled send raises its cancellation, of every kind."""
    arrived = asyncio.Event()

    async def never(*_: object) -> None:
        arrived.set()
        await for_ever()

    async def no_stream(*_: object) -> AsyncIterator[None]:
        await never()
        yield

    server.post, server.infer, server.stream = never, never, no_stream  # type: ignore[assignment]
    client = await client_of(RequestSpec(kind=kind, model="m", sizes=(1,)), server.endpoint)
    task = asyncio.create_task(client.send(0))
    async with asyncio.timeout(60):
        await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.aclose()


async def test_headers_go_with_every_request_and_connections_are_kept(server: V2Server) -> None:
    """The endpoint's headers are sent, no compression is asked for, and one connection serves one caller."""
    endpoint = Endpoint(http_url=server.http_url, grpc_address="", headers=(("Authorization", "Bearer 1"),))
    client = await client_of(IMAGE, endpoint)
    for number in range(3):
        await client.send(number)
    await client.aclose()
    requests = [request for request, _ in server.posted]
    assert {request.headers["Authorization"] for request in requests} == {"Bearer 1"}
    assert {request.headers["Accept-Encoding"] for request in requests} == {"identity"}
    assert len({id(request.protocol) for request in requests}) == 1


async def test_pictures_of_a_folder_go_in_turn_with_their_types(server: V2Server, tmp_path: Path) -> None:
    """The number chooses the picture, counted round; a PNG is sent as one."""
    first, second = (picture.content for picture in make_pictures(2, seed=1, size=(16, 16)))
    (tmp_path / "a.jpg").write_bytes(first)
    (tmp_path / "b.png").write_bytes(second)
    client = await client_of(IMAGE, server.endpoint, images=str(tmp_path))
    for number in (0, 1, 2):
        await client.send(number)
    await client.aclose()
    sent = [(request.headers["Content-Type"], body) for request, body in server.posted]
    assert sent == [("image/jpeg", first), ("image/png", second), ("image/jpeg", first)]
    with pytest.raises(TargetError, match="no picture"):
        await client_of(IMAGE, server.endpoint, images=str(tmp_path / "nowhere"))


async def test_batch_of_pictures_is_one_form(server: V2Server) -> None:
    """A batch of pictures is multipart/form-data with that many files, and so many results are wanted."""
    server.post = always(200, {"results": [{}, {}, {}]})
    answer = await answer_to(RequestSpec(kind=Kind.IMAGE, model="m", batch=3, picture_px=(16, 16)), server.endpoint)
    assert (answer.status, answer.error) == (Status.OK, "")
    request, body = server.posted[0]
    form = email.message_from_bytes(f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode() + body)
    parts = [part for part in form.walk() if not part.is_multipart()]
    assert [part.get_payload(decode=True) for part in parts] == [
        picture.content for picture in make_pictures(8, seed=1, size=(16, 16))[:3]
    ]
    assert {part.get_content_type() for part in parts} == {"image/jpeg"}
    server.post = always(200, RESULT)
    answer = await answer_to(RequestSpec(kind=Kind.IMAGE, model="m", batch=3, picture_px=(16, 16)), server.endpoint)
    assert answer.status is Status.FAILED


async def test_tensors_are_binary_where_the_server_takes_them(server: V2Server) -> None:
    """With the extension advertised, bytes follow the JSON, in the ask's batch and sizes, seeded."""
    ask = RequestSpec(
        kind=Kind.REST, model="m", batch=2, sizes=(150_000,)
    )  # above the size at which aiohttp would warn
    assert (await answer_to(ask, server.endpoint)).status is Status.OK
    request, body = server.posted[0]
    length = int(request.headers["Inference-Header-Content-Length"])
    head = json.loads(body[:length])
    (tensor,) = head["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("x", "FP32", [2, 150_000])
    assert tensor["parameters"] == {"binary_data_size": 1_200_000}
    assert head["parameters"] == {"binary_data_output": True}
    assert len(body) - length == 1_200_000
    assert 0 <= np.frombuffer(body[length:], np.float32).max() < 1


async def test_tensors_are_json_where_the_server_takes_nothing_else(server: V2Server) -> None:
    """Without the extension the same numbers go as JSON."""
    assert (await answer_to(REST, server.endpoint)).status is Status.OK
    server.extensions = []
    assert (await answer_to(REST, server.endpoint)).status is Status.OK
    (binary_request, binary), (json_request, body) = server.posted
    length = int(binary_request.headers["Inference-Header-Content-Length"])
    assert json_request.headers["Content-Type"] == "application/json"
    assert "Inference-Header-Content-Length" not in json_request.headers
    values = json.loads(body)["inputs"][0]["data"]
    np.testing.assert_array_equal(np.array(values, np.float32), np.frombuffer(binary[length:], np.float32))


async def test_tensors_without_a_json_form_are_refused(server: V2Server) -> None:
    """Pictures in BYTES cannot go as JSON, and a batch needs a dimension; both are refused before the load."""
    server.extensions, server.datatype = [], "BYTES"
    with pytest.raises(TargetError, match=r"input x is of type BYTES, .* ask the model over gRPC"):
        await client_of(REST, server.endpoint)


async def test_answer_without_outputs_is_a_failure(server: V2Server) -> None:
    """A 200 that holds no outputs is no answer."""
    server.post = always(200, {"model_name": "m"})
    answer = await answer_to(REST, server.endpoint)
    assert (answer.status, answer.code, answer.error) == (Status.FAILED, "200", 'no outputs in {"model_name": "m"}')
