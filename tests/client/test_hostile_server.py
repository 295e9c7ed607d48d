"""Servers that are hostile or not a gateway cause a clear error within the deadline, in bounded memory."""

import json
import socket
import threading
import time

import pytest

from penstock.protocol.errors import ConnectionFailed, DeadlineExceeded, EngineFailed, InferenceError
from tests.client.conftest import PICTURE, Make, client_of, http_answer, raw_server, read_request

ANSWER = {"model_name": "m", "model_version": "1", "timings_ms": {}, "batch_size": 1}


@pytest.mark.parametrize(
    "body",
    [
        b"<html>not JSON</html>",
        b"",
        b"[" * 100_000,
        b'{"model_name": 1}',
        json.dumps(ANSWER | {"results": []}).encode(),
        json.dumps(ANSWER | {"results": [{}]}).encode(),
        json.dumps(
            ANSWER | {"results": [{"detections": [{"xyxy": [1], "class_id": 0, "label": "", "score": 1}]}]}
        ).encode(),
        json.dumps(ANSWER | {"results": [{"classes": [{"class_id": 1 << 70, "label": "", "score": 1}]}]}).encode(),
    ],
)
def test_unexpected_body_raises_that_it_is_not_a_gateway(make: Make, body: bytes) -> None:
    """The error is one short sentence with the URL."""
    wrong = pytest.raises(
        ConnectionFailed, match=r"the server at http://127\.0\.0\.1:\d+ is not a gateway .*check the address"
    )
    with client_of(make, http_answer(200, body)) as client, wrong as caught:
        client.infer("m", PICTURE)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP"),
        (http_answer(502, b"<html>"), r"is not a gateway \(HTTP 502 Status\)"),
        (http_answer(404, b'{"error": "no"}'), r"is not a gateway \(no\)"),
        (http_answer(204, b""), "is not a gateway"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "broke"),
        (b"", "closed the connection without a response"),
    ],
)
def test_malformed_response_raises_one_sentence(make: Make, answer: bytes, sentence: str) -> None:
    """The error says what was received and what to check."""
    with client_of(make, answer) as client, pytest.raises(ConnectionFailed, match=sentence):
        client.health()


@pytest.mark.parametrize("framing", ["Content-Length: 100000000000", "Transfer-Encoding: chunked"])
def test_huge_body_is_not_read_to_its_end(make: Make, framing: str) -> None:
    """The connection is closed once the body exceeds the limit."""
    sent = threading.Event()

    def flood(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode())
        chunk = b"10000\r\n" + bytes(65536) + b"\r\n" if "chunked" in framing else bytes(65536)
        try:
            while True:
                connection.sendall(chunk)
        finally:
            sent.set()

    with raw_server(flood) as url, make(url, retries=0, max_response_bytes=1 << 20) as client:
        with pytest.raises(ConnectionFailed, match="exceeds 1048576 bytes"):
            client.infer("m", PICTURE)
        assert sent.wait(10.0)


@pytest.mark.parametrize("kind", ["silent", "head by the byte", "body by the byte"])
def test_response_that_never_ends_raises_at_the_deadline(make: Make, kind: str) -> None:
    """A server that sends single bytes cannot extend the deadline."""
    is_left = threading.Event()

    def dribble(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" if kind != "silent" else b"")
        connection.sendall(b"\r\n" if kind == "body by the byte" else b"")
        while not is_left.wait(0.02):
            connection.sendall(b"x" if kind != "silent" else b"")

    with raw_server(dribble) as url, make(url, retries=0) as client:
        begin = time.monotonic()
        with client.deadline(0.3), pytest.raises(DeadlineExceeded, match=rf"{url} did not answer within 0\.\d+ s"):
            client.infer("m", PICTURE)
        assert time.monotonic() - begin < 2.0
        is_left.set()


def test_redirect_is_not_followed_and_the_key_is_not_sent(make: Make) -> None:
    """The other host gets no request; the error names it without its path."""
    asked: list[bytes] = []

    def other(connection: socket.socket) -> None:
        asked.append(read_request(connection))

    with raw_server(other) as elsewhere:
        redirect = http_answer(307, b"", f"Location: {elsewhere}/v2/models/m/image")
        redirected = pytest.raises(ConnectionFailed, match=r"redirects to http://127\.0\.0\.1 .*not followed")
        with client_of(make, redirect, api_key="secret") as client, redirected as caught:
            client.infer("m", PICTURE)
    assert (asked, "secret" in str(caught.value)) == ([], False)


def test_long_error_text_of_a_server_is_truncated(make: Make) -> None:
    """At most 2000 characters of the server's text are shown."""
    body = json.dumps({"error": "x" * 1_000_000}).encode()
    with client_of(make, http_answer(400, body)) as client, pytest.raises(InferenceError) as caught:
        client.infer("m", PICTURE)
    assert len(str(caught.value)) == 2000


def test_tensors_whose_sizes_do_not_match_the_data_are_rejected(make: Make) -> None:
    """Binary data that is too short, too long or without a size raises an error."""
    import numpy as np

    def answer(size: object, data: bytes) -> bytes:
        output = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": size}}
        head = json.dumps({"outputs": [output]}).encode()
        return http_answer(200, head + data, f"Inference-Header-Content-Length: {len(head)}")

    cases = {"is truncated": (8, bytes(4)), "after the last output": (4, bytes(8)), "no binary data": (-1, b"")}
    for sentence, (size, data) in cases.items():
        with client_of(make, answer(size, data)) as client, pytest.raises(EngineFailed, match=sentence):
            client.infer_tensors("m", {"x": np.ones(1, np.float32)})
