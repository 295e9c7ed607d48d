"""Bad input is refused by the one table with a sentence that says what is wrong; nothing else notices.

After every case the stack is live, nothing is in flight, memory and descriptors are where they were, and the next
request is served.
"""

import gzip
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.embedded_stack import own_metrics
from tests.integration.pictures import frames, jpeg
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("stack")
MIB = 1 << 20
ONE = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
INFER = "/v2/models/identity_fp32/infer"


@pytest.fixture(scope="module")
def picture(shared_dir: Path) -> bytes:
    return jpeg(frames(shared_dir / "media" / "vtest.avi")[0])


def gateway_processes(stack: RunningStack) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(stack.process.pid).children(recursive=True)
        if any(word.startswith("penstock") for word in _arguments(child)[1:4])
    ]


def _arguments(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def unharmed(stack: RunningStack, *, may_grow_bytes: int = 48 * MIB) -> Iterator[None]:
    """What every fault must leave as it was."""
    before = {process.pid: (process.memory_info().rss, process.num_fds()) for process in gateway_processes(stack)}
    yield
    assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
    assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    assert post_json(stack.http_url + INFER, {"inputs": [ONE]}).status == 200
    wait_for(lambda: "\npenstock_inflight_requests 0.0" in own_metrics(stack), what="nothing in flight")
    text = own_metrics(stack)
    assert "penstock_engine_restarts_total 0.0" in text
    for process in gateway_processes(stack):
        if process.pid in before:
            rss, descriptors = before[process.pid]
            assert process.memory_info().rss - rss < may_grow_bytes
            assert process.num_fds() - descriptors < 16


def rejections(stack: RunningStack) -> float:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("penstock_rejected_total{"))


def post_image(stack: RunningStack, body: bytes, content_type: str = "image/jpeg", model: str = "people") -> Answer:
    return call("POST", f"{stack.http_url}/v2/models/{model}/image", body, {"content-type": content_type})


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it is so large, in a few dozen bytes."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 64))]
    body = b"\x89PNG\r\n\x1a\n"
    for kind, content in [*chunks, (b"IEND", b"")]:
        body += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return body


IMAGES: dict[str, tuple[Callable[[bytes], bytes], str, int, str]] = {
    "truncated": (lambda jpg: jpg[: len(jpg) // 2], "image/jpeg", 400, "Premature end"),
    "corrupt": (lambda jpg: jpg[:400] + bytes(len(jpg) - 800) + jpg[-400:], "image/jpeg", 400, "JPEG"),
    "zero bytes": (lambda jpg: b"", "image/jpeg", 400, "empty"),
    "text called a jpeg": (lambda jpg: b"hello, I am no picture" * 9, "image/jpeg", 415, "JPEG"),
    "a gif": (lambda jpg: b"GIF89a" + bytes(60), "image/gif", 415, "GIF"),
    "a pdf": (lambda jpg: b"%PDF-1.7\n" + bytes(60), "image/png", 415, "PDF"),
    "json": (lambda jpg: b"{}", "application/json", 415, "application/json"),
    "900 megapixels": (lambda jpg: png_of_size(30_000, 30_000), "image/png", 413, "30000"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_bad_image_is_refused_with_its_reason(stack: RunningStack, picture: bytes, case: str) -> None:
    """By DESIGN's table: 400 undecodable, 413 too many pixels, 415 not an image that we take; and it is counted."""
    make, content_type, status, words = IMAGES[case]
    counted = rejections(stack)
    with unharmed(stack):
        answer = post_image(stack, make(picture), content_type)
        assert answer.status == status, answer.body
        assert any(word in answer.json["error"] for word in words.split("|")), answer.json
    assert rejections(stack) == counted + 1


def test_mislabelled_image_of_a_known_format_is_decoded_by_its_first_bytes(stack: RunningStack, picture: bytes) -> None:
    """A JPEG that calls itself PNG is still a JPEG."""
    with unharmed(stack):
        assert post_image(stack, picture, "image/png").status == 200


TENSORS: dict[str, tuple[dict[str, object], str]] = {
    "wrong name": ({"inputs": [{**ONE, "name": "missing"}]}, "missing"),
    "wrong type": ({"inputs": [{**ONE, "datatype": "INT8"}]}, "INT8"),
    "unknown type": ({"inputs": [{**ONE, "datatype": "FP33"}]}, "FP33"),
    "wrong rank": ({"inputs": [{**ONE, "shape": [2]}]}, "shape"),
    "wrong count": ({"inputs": [{**ONE, "shape": [1, 3]}]}, "x"),
    "negative size": ({"inputs": [{**ONE, "shape": [1, -2]}]}, "-2"),
    "overflow": ({"inputs": [{**ONE, "shape": [1 << 31, 1 << 31]}]}, "x"),
    "no inputs": ({"inputs": []}, "input"),
    "twice the same": ({"inputs": [ONE, ONE]}, "x"),
    "unknown output": ({"inputs": [ONE], "outputs": [{"name": "nothing"}]}, "nothing"),
    "10,000 outputs": ({"inputs": [ONE], "outputs": [{"name": f"o{n}"} for n in range(10_000)]}, "10000"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_bad_tensor_request_is_400_and_names_what_is_wrong(stack: RunningStack, case: str) -> None:
    """Names, types, shapes and counts, refused by the gateway or the engine."""
    payload, word = TENSORS[case]
    with unharmed(stack):
        answer = post_json(stack.http_url + INFER, payload)
        assert answer.status == 400, answer.body
        assert word in answer.json["error"]


BODIES: dict[str, tuple[bytes | Callable[[], bytes], dict[str, str], int]] = {
    "not json": (b"{nonsense", {}, 400),
    "cut json": (json.dumps({"inputs": [ONE]}).encode()[:-9], {}, 400),
    "10,000 deep": (b'{"inputs":' + b"[" * 10_000 + b"]" * 10_000 + b"}", {}, 400),
    "65 deep data": (
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":' + b"[" * 65 + b"1" + b"]" * 65 + b"}]}",
        {},
        400,
    ),
    "the same key twice": (b'{"inputs":[],"inputs":[]}', {}, 400),
    "a header longer than the body": (b"{}", {"inference-header-content-length": "99"}, 400),
    "a gzip bomb": (lambda: gzip.compress(bytes(80 * MIB), 1), {"content-encoding": "gzip"}, 413),
    "a deflate bomb": (lambda: zlib.compress(bytes(80 * MIB), 1), {"content-encoding": "deflate"}, 413),
    "gzip that is none": (b"not gzip", {"content-encoding": "gzip"}, 400),
}


@pytest.mark.parametrize("case", BODIES)
def test_bad_body_is_refused_by_the_table(stack: RunningStack, case: str) -> None:
    """Malformed JSON, depth, doubled keys, wrong header lengths and bombs."""
    made, headers, status = BODIES[case]
    body = made if isinstance(made, bytes) else made()
    with unharmed(stack, may_grow_bytes=80 * MIB):
        answer = call("POST", stack.http_url + INFER, body, headers)
        assert answer.status == status, answer.body
        assert answer.json["error"]


def test_binary_tensor_with_too_few_bytes_is_400(stack: RunningStack) -> None:
    """The header promises 32 bytes, 8 come."""
    head = json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": 32}}]}
    ).encode()
    with unharmed(stack):
        answer = call(
            "POST", stack.http_url + INFER, head + bytes(8), {"inference-header-content-length": str(len(head))}
        )
        assert answer.status == 400
        assert "x" in answer.json["error"]


def test_body_over_the_limit_is_413_without_being_read(stack: RunningStack) -> None:
    """Content-Length alone is enough: the answer comes before any of the body was sent."""
    parts = urlsplit(stack.http_url)
    with unharmed(stack), socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {10 << 30}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


def test_chunked_body_over_the_limit_is_413_at_the_limit(stack: RunningStack) -> None:
    """No Content-Length: the count stops it, and memory does not follow the sender."""
    parts = urlsplit(stack.http_url)
    with (
        unharmed(stack, may_grow_bytes=(2 * 64 + 16) * MIB),  # a body takes up to twice its bytes
        socket.create_connection((parts.hostname, parts.port), timeout=30) as connection,
    ):
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        chunk = b"100000\r\n" + bytes(MIB) + b"\r\n"
        for _ in range(66):
            connection.sendall(chunk)
        answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert str(64 * MIB).encode() in answer or b"64 MiB" in answer


def test_grpc_message_over_the_limit_names_the_limit(stack: RunningStack) -> None:
    """RESOURCE_EXHAUSTED, with the figure."""
    request = service_pb2.ModelInferRequest(model_name="identity_fp32")
    request.raw_input_contents.append(bytes(65 * MIB))
    with unharmed(stack, may_grow_bytes=100 * MIB):
        code, details = grpc_infer(stack, request)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(64 * MIB) in details


def grpc_infer(stack: RunningStack, request: service_pb2.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(stack.grpc_address, options=options) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", request_serializer=lambda message: message.SerializeToString()
        )
        with pytest.raises(grpc.RpcError) as refusal:
            method(request, timeout=20)
        return refusal.value.code(), refusal.value.details()


def grpc_request(**fields: object) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="identity_fp32")
    request.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 2], **fields})
    request.raw_input_contents.append(np.zeros(2, np.float32).tobytes())
    return request


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"name": "missing"}, "missing"),
        ({"datatype": "INT8"}, "INT8"),
        ({"shape": [1, 3]}, "x"),
        ({"shape": [1 << 31, 1 << 31]}, "x"),
        ({"shape": [1, -2]}, "x"),
    ],
)
def test_bad_grpc_tensor_is_invalid_argument(stack: RunningStack, fields: dict[str, object], word: str) -> None:
    """The same table over gRPC."""
    with unharmed(stack):
        code, details = grpc_infer(stack, grpc_request(**fields))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, details
        assert word in details


def test_classification_of_a_bytes_output_is_refused_before_it_kills_triton(stack: RunningStack) -> None:
    """What ends Triton 2.51 stops at the gateway, over both protocols."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    wanted = {"name": "y", "parameters": {"classification": 1}}
    request = service_pb2.ModelInferRequest(model_name="identity_bytes")
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(b"\x01\0\0\0a")
    request.outputs.add(name="y").parameters["classification"].int64_param = 1
    with unharmed(stack):
        answer = post_json(
            f"{stack.http_url}/v2/models/identity_bytes/infer", {"inputs": [tensor], "outputs": [wanted]}
        )
        assert answer.status == 400
        assert "BYTES" in answer.json["error"]
        code, details = grpc_infer(stack, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "BYTES" in details


def test_file_name_of_256_characters_in_a_load_is_refused_before_it_kills_triton(stack: RunningStack) -> None:
    """A model file override with an absurd name is 400."""
    payload = {"parameters": {"config": "{}", "file:" + "a" * 256: "eA=="}}
    with unharmed(stack):
        answer = post_json(f"{stack.http_url}/v2/repository/models/identity_fp32/load", payload)
        assert answer.status == 400
        assert "256" in answer.json["error"] or "255" in answer.json["error"]


@pytest.mark.parametrize("name", ["a b", "a;touch pwned", "$(id)", "a`id`", "a|b"])
def test_load_of_a_name_that_a_shell_would_read_is_refused(stack: RunningStack, name: str) -> None:
    """Triton's Python backend starts a model by a shell line with its name in it: such a name never gets there."""
    payload = {"parameters": {"config": "{}", "file:1/model.py": "eA=="}}
    request = service_pb2.RepositoryModelLoadRequest(model_name=name)
    with unharmed(stack), grpc.insecure_channel(stack.grpc_address) as channel:
        answer = post_json(f"{stack.http_url}/v2/repository/models/{quote(name)}/load", payload)
        assert answer.status == 400, answer.body
        assert "shell" in answer.json["error"]
        with pytest.raises(grpc.RpcError) as refusal:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryModelLoad(request, timeout=10)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/", 405),
        ("GET", "/v3", 404),
        ("GET", "//v2", 404),
        ("GET", "/v2/", 404),
        ("GET", INFER, 405),
        ("DELETE", "/v2/models/people", 405),
        ("GET", "/v2/models/a%0d%0ab/ready", 400),
    ],
)
def test_wrong_path_or_method_is_json_and_never_a_redirect(
    stack: RunningStack, method: str, path: str, status: int
) -> None:
    """Errors have one form."""
    answer = call(method, stack.http_url + path)
    assert answer.status == status, answer.body
    assert set(answer.json) == {"error"}


def test_deadline_that_is_no_number_or_already_over(stack: RunningStack) -> None:
    """400 for what cannot be read, 504 at once for what has passed."""
    payload = {"inputs": [ONE]}
    with unharmed(stack):
        assert post_json(stack.http_url + INFER, payload, **{"x-request-timeout-ms": "soon"}).status == 400
        assert post_json(stack.http_url + INFER, payload, **{"x-request-timeout-ms": "0"}).status == 504
        assert post_json(stack.http_url + INFER, payload, **{"x-request-timeout-ms": "-5"}).status == 504
