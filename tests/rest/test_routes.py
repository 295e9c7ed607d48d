"""What is where, and what is nowhere."""

import json
from pathlib import Path

import pytest

from penstock.protocol.call import HttpAnswer, HttpCall, InferHead
from penstock.protocol.identity import Verb
from tests.rest.harness import VALID_INFER, Client, Front, request_bytes

GOLDEN = Path(__file__).parent.parent / "golden" / "rest"
RELAYED = [
    ("GET", "/v2", Verb.READ, InferHead("")),
    ("GET", "/v2/models/stats", Verb.READ, InferHead("")),
    ("GET", "/v2/models/ident", Verb.READ, InferHead("ident")),
    ("GET", "/v2/models/ident/versions/3", Verb.READ, InferHead("ident", "3")),
    ("GET", "/v2/models/ident/ready", Verb.READY, InferHead("ident")),
    ("GET", "/v2/models/ident/versions/3/ready", Verb.READY, InferHead("ident", "3")),
    ("GET", "/v2/models/ident/config", Verb.CONFIG, InferHead("ident")),
    ("GET", "/v2/models/ident/versions/3/stats", Verb.READ, InferHead("ident", "3")),
    ("GET", "/v2/models/stats/ready", Verb.READY, InferHead("stats")),
    ("POST", "/v2/repository/index", Verb.INDEX, InferHead("")),
    ("POST", "/v2/repository/models/ident/load", Verb.LOAD, InferHead("ident")),
    ("POST", "/v2/repository/models/ident/unload", Verb.UNLOAD, InferHead("ident")),
    ("POST", "/v2/repository/other/models/ident/load", Verb.LOAD, InferHead("ident")),
    ("POST", "/v2/models/ident/infer", Verb.INFER, InferHead("ident", is_raw=True)),
    ("POST", "/v2/models/ident/versions/3/infer", Verb.INFER, InferHead("ident", "3", is_raw=True)),
    ("GET", "/v2/models/ident/ready?x=%20&y", Verb.READY, InferHead("ident")),
    ("GET", "/v2/models/a%2Fb%20c", Verb.READ, InferHead("a/b c")),
    ("GET", "/v2/models/a;b=c/config", Verb.CONFIG, InferHead("a;b=c")),
]


@pytest.mark.parametrize(("method", "target", "verb", "head"), RELAYED)
async def test_route_of_a_relayed_call_passes_the_path_untouched(
    front: Front, method: str, target: str, verb: Verb, head: InferHead
) -> None:
    """Path and query reach the relay as they stood on the wire; the answer comes back as it is."""
    content_type = (b"Content-Type", b"text/odd")
    front.plane.answer = HttpAnswer(418, (content_type, (b"x-engine", b"1")), b"\x00bytes")
    reply = await front.ask(method, target)
    assert (reply.status, reply.body) == (418, b"\x00bytes")
    assert reply.headers == {"content-type": "text/odd", "x-engine": "1", "content-length": "6"}
    assert front.plane.relayed == [(verb, head, HttpCall(method, target.encode(), (), b""), None)]


UNKNOWN = [
    "/nothing",
    "//v2",
    "/v2/",
    "/V2",
    "/v2//models/ident",
    "/v2/models",
    "/v2/models/",
    "/v2/models/ident/",
    "/v2/models/ident/ready/",
    "/v2/models/ident/nothing",
    "/v2/models/ident/versions",
    "/v2/models/ident/versions/x",
    "/v2/models/ident/versions//ready",
    "/v2/health/live/",
    "/v2/health/odd",
    "/v2/%68ealth/live",
    "/v2/../v2",
    "/redoc",
    "/metrics",
]


@pytest.mark.parametrize("target", UNKNOWN)
async def test_route_of_an_unknown_path_is_not_found_without_redirect(front: Front, target: str) -> None:
    """In Triton's words, never FastAPI's."""
    reply = await front.ask("GET", target)
    assert (reply.status, reply.body) == (404, b'{"error":"Not Found"}')
    assert reply.headers["content-type"] == "application/json"
    assert front.recorder.done == []


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("POST", "/v2", "GET"),
        ("HEAD", "/v2", "GET"),
        ("OPTIONS", "/v2/models/ident", "GET"),
        ("DELETE", "/v2/models/ident", "GET"),
        ("POST", "/v2/models/stats", "GET"),
        ("POST", "/v2/health/live", "GET"),
        ("GET", "/v2/models/ident/infer", "POST"),
        ("PUT", "/v2/models/ident/infer", "POST"),
        ("GET", "/v2/models/ident/image", "POST"),
        ("GET", "/v2/repository/index", "POST"),
        ("GET", "/v2/repository/models/ident/load", "POST"),
        ("DELETE", "/v2/logging", "GET, POST"),
    ],
)
async def test_route_with_a_wrong_method_says_which_is_right(
    front: Front, method: str, target: str, allow: str
) -> None:
    """405 with Allow, as with Triton for HEAD and OPTIONS too."""
    reply = await front.ask(method, target)
    assert (reply.status, reply.body) == (405, b'{"error":"Method Not Allowed"}')
    assert reply.headers["allow"] == allow


@pytest.mark.parametrize(
    ("method", "target", "said"),
    [
        ("GET", "/v2/systemsharedmemory/status", "start the gateway with --allow-client-shm"),
        ("POST", "/v2/systemsharedmemory/region/r/register", "start the gateway with --allow-client-shm"),
        ("POST", "/v2/cudasharedmemory/unregister", "start the gateway with --allow-client-shm"),
    ],
)
async def test_route_of_what_is_not_served_says_so(front: Front, method: str, target: str, said: str) -> None:
    """501 with a sentence that names what to do instead; nothing reaches the engine."""
    reply = await front.ask(method, target)
    assert reply.status == 501
    assert json.loads(reply.body)["error"].startswith("shared memory is off")
    assert json.loads(reply.body)["error"].endswith(said)
    assert front.plane.relayed == []
    assert front.recorder.reasons == ["not_supported"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a%0d%0aX-Evil:%201", "control characters"),
        ("a%00", "control characters"),
        ("a%C2%85", "control characters"),
        ("%FF", "not UTF-8"),
        ("..", "names a folder"),
        ("%2e%2E", "names a folder"),
    ],
)
@pytest.mark.parametrize("suffix", ["", "/infer", "/image"])
async def test_route_with_an_impossible_model_name_is_refused(front: Front, name: str, said: str, suffix: str) -> None:
    """Nothing that could forge a header, a log line or a path."""
    reply = await front.ask("POST" if suffix else "GET", f"/v2/models/{name}{suffix}", VALID_INFER)
    assert reply.status == 400
    assert said in json.loads(reply.body)["error"]
    assert front.plane.relayed == []


async def test_route_of_a_load_of_the_folder_above_is_refused(front: Front) -> None:
    """Triton 2.51 looks for a model in the repository's parent."""
    assert (await front.ask("POST", "/v2/repository/models/../load")).status == 400
    assert front.plane.relayed == []


async def test_route_relays_end_to_end_headers_only() -> None:
    """What belongs to the connection stays there, in both directions; over a real socket."""
    front = Front()
    front.plane.answer = HttpAnswer(
        200,
        (
            (b"Content-Type", b"application/octet-stream"),
            (b"Inference-Header-Content-Length", b"3"),
            (b"Content-Encoding", b"gzip"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Connection", b"keep-alive"),
            (b"Content-Length", b"999"),
        ),
        b"abcdef",
    )
    sent = (
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
        (b"TE", b"trailers"),
        (b"Proxy-Authorization", b"secret"),
        (b"Accept-Encoding", b"gzip"),
        (b"TraceParent", b"00-ab"),
        (b"Content-Type", b"application/json"),
    )
    async with front.served() as port, Client.connected(port) as client:
        await client.send(request_bytes("POST", "/v2/models/ident/infer", VALID_INFER, sent))
        reply = await client.reply()
    assert reply.body == b"abcdef"
    assert reply.headers == {
        "content-type": "application/octet-stream",
        "inference-header-content-length": "3",
        "content-encoding": "gzip",
        "content-length": "6",
    }
    assert front.plane.relayed[0][2].headers == (
        (b"accept-encoding", b"gzip"),
        (b"traceparent", b"00-ab"),
        (b"content-type", b"application/json"),
    )


async def test_server_metadata_does_not_advertise_what_is_not_served(front: Front) -> None:
    """Triton 2.51's own answer, without shared memory; otherwise byte for byte."""
    triton = (GOLDEN / "triton_2_51_server_metadata.json").read_bytes()
    front.plane.answer = HttpAnswer(200, ((b"content-type", b"application/json"),), triton)
    reply = await front.ask("GET", "/v2")
    assert reply.body == (GOLDEN / "gateway_server_metadata.json").read_bytes()
    assert reply.headers["content-length"] == str(len(reply.body))


async def test_repository_call_relays_its_body(front: Front) -> None:
    """A valid one goes on as it came."""
    body = b' {"parameters": {"unload_dependents": true}} '
    assert (await front.ask("POST", "/v2/repository/models/ident/unload", body)).status == 200
    assert front.plane.relayed[0][2].body == body
