"""The server itself: it starts, stops and bounds its clients."""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.tls import Certificates, TlsFiles
from penstock_video.api.options import ApiOptions, ApiRefused, check_address
from penstock_video.api.server import ApiServer
from penstock_video.metrics import VideoMetrics
from tests.auth.authorities import Authority
from tests.deepstream_pipeline.api.asking import ask, connect, read_all, send_on
from tests.deepstream_pipeline.api.pipeline import FakePipeline, serving

HOST = b"host: localhost\r\n"


@pytest.fixture
def impatient(pipeline: FakePipeline) -> Iterator[ApiServer]:
    """An API that gives clients half a second, and has room for eight."""
    with serving(pipeline, ApiOptions(port=0, client_timeout_s=0.5, max_connections=8)) as server:
        yield server


def test_port_that_is_taken_is_reported_with_the_fix(api: ApiServer) -> None:
    """No trace, no half-started server."""
    port = int(api.url.rpartition(":")[2])
    second = ApiServer(FakePipeline(), FakePipeline(), VideoMetrics(), ApiOptions(port=port))
    with pytest.raises(ApiRefused, match=f"port {port} .*choose another"):
        second.start()
    second.stop(1.0)
    with pytest.raises(ApiRefused, match=f"port {port} .*choose another"):  # and before anything else is begun
        check_address(ApiOptions(port=port))


def test_url_before_the_start_is_a_fault() -> None:
    """It is not known yet."""
    server = ApiServer(FakePipeline(), FakePipeline(), VideoMetrics(), ApiOptions(port=0))
    with pytest.raises(RuntimeError):
        _ = server.url


def test_api_on_ipv6_answers() -> None:
    """Its URL has brackets."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with serving(FakePipeline(), ApiOptions(host="::1", port=0)) as api:
            assert api.url.startswith("http://[::1]:")
            assert ask(api.url, "GET", "/health/live").status == 200
    except ApiRefused:
        pytest.skip("no IPv6 here")


def test_api_over_tls_demands_a_client_certificate_and_takes_a_replaced_one(tmp_path: Path) -> None:
    """Only HTTPS clients of the CA are answered; a replaced certificate is used for the next connection."""
    ours, theirs = Authority("ours"), Authority("theirs")
    files = ours.sign(tmp_path, "api")
    certificates = Certificates(TlsFiles(*files, ours.file(tmp_path)))

    def live(client: tuple[Path, Path] | None, url: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(ours.file(tmp_path, "trusted.pem")))
        if client is not None:
            context.load_cert_chain(*client)
        connection = http.client.HTTPSConnection(url.removeprefix("https://"), timeout=20, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/health/live")
            return connection.getresponse().status, connection.sock.getpeercert(binary_form=True) or b""

    with serving(FakePipeline(), ApiOptions(port=0, tls=certificates.context)) as api:
        assert api.url.startswith("https://")
        client = ours.sign(tmp_path, "client")
        status, before = live(client, api.url)
        assert status == 200
        for refused in (None, theirs.sign(tmp_path, "stranger")):
            with pytest.raises(OSError):  # noqa: PT011  # its text is the client library's
                live(refused, api.url)
        for path, fresh in zip(files, ours.sign(tmp_path, "fresh"), strict=True):
            fresh.replace(path)
        certificates.reload_if_changed()
        assert live(client, api.url)[1] not in (before, b"")


def test_client_that_never_completes_its_tls_handshake_is_hung_up_on(tmp_path: Path) -> None:
    """It is disconnected after its time limit, or at once if half of the connections are such."""
    tls = Certificates(TlsFiles(*Authority("ours").sign(tmp_path, "api"))).context
    with serving(FakePipeline(), ApiOptions(port=0, tls=tls, max_connections=4, client_timeout_s=60.0)) as api:
        held = [connect(api.url) for _ in range(2)]
        with connect(api.url) as third, held[0], held[1]:
            assert read_all(third) == b""
    with serving(FakePipeline(), ApiOptions(port=0, tls=tls, client_timeout_s=0.5)) as api, connect(api.url) as slow:
        assert read_all(slow) == b""


def test_stop_frees_the_port_and_leaves_no_thread() -> None:
    """The same port can be taken at once, again and again; stopping twice is no fault."""
    before, port = set(threading.enumerate()), 0
    for _ in range(3):
        with serving(FakePipeline(), ApiOptions(port=port)) as api:
            port = int(api.url.rpartition(":")[2])
            assert ask(api.url, "GET", "/health/live").status == 200
            api.stop(1.0)
    assert set(threading.enumerate()) - before == set()


def test_stop_does_not_wait_for_a_call_that_hangs(pipeline: FakePipeline) -> None:
    """Waiting clients are answered that the program ends."""
    free = threading.Event()
    entered = threading.Event()

    def hang(name: str) -> None:
        entered.set()
        assert free.wait(60.0)

    pipeline.before = hang
    answers: list[int] = []
    with serving(pipeline) as api:
        url = api.url
        asker = threading.Thread(target=lambda: answers.append(ask(url, "GET", "/v1/streams").status))
        asker.start()
        assert entered.wait(10.0)
        began = time.monotonic()
        api.stop(10.0)
        asker.join(10.0)
    assert answers == [503]
    assert time.monotonic() - began < 8.0
    free.set()


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        (b"", b""),
        (b"GET / HT", b""),
        (b"GET /health/live HTTP/1.1\r\nhost: loc", b""),
        (
            b"POST /v1/streams HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{",
            b"408",
        ),
        (b"\r\n", b""),
    ],
)
def test_client_that_dribbles_is_hung_up_on(impatient: ApiServer, begin: bytes, status: bytes) -> None:
    """Whether it stops in its head, in its body or before either; the time is for the whole of it."""
    with connect(impatient.url) as connection:
        connection.sendall(begin)
        answer = read_all(connection)
    assert answer[9:12] == status


def test_clients_that_dribble_on_a_kept_connection_are_hung_up_on(impatient: ApiServer) -> None:
    """Bytes that come one by one do not buy time."""
    with connect(impatient.url) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_on(connection, b"x", times=400, pause_s=0.05)


def test_head_without_an_end_is_refused(impatient: ApiServer) -> None:
    """431 after 64 KiB, and the connection ends."""
    with connect(impatient.url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


def test_bytes_that_are_no_http_are_refused(impatient: ApiServer) -> None:
    """400 with our form of error."""
    with connect(impatient.url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error": "the request is not valid HTTP/1.1"}' in answer


def test_body_of_tiny_chunks_is_refused(impatient: ApiServer) -> None:
    """It gets 400 after some thousands of chunks, because each chunk is a callback."""
    with connect(impatient.url) as connection:
        head = b"POST /v1/streams HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"1\r\n \r\n" * 9_000)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b""


def test_connections_are_bounded_and_free_again(impatient: ApiServer) -> None:
    """The ninth is refused with 503; when the eight are gone others are served."""
    held = [connect(impatient.url) for _ in range(8)]
    deadline = time.monotonic() + 10.0
    with connect(impatient.url) as ninth:
        answer = read_all(ninth)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"8 connections are open" in answer
    for each in held:
        each.close()
    while True:
        try:
            if ask(impatient.url, "GET", "/health/live").status == 200:
                return
        except OSError:
            assert time.monotonic() < deadline
