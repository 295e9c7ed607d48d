"""Clients that mean harm, or are broken, against a real stack: the others are served, and nothing of it remains."""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.living import family
from tests.integration.test_bad_input import INFER, ONE, grpc_infer, grpc_request
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("http-attacks")
MIB = 1 << 20
HEAD_TIMEOUT_S, BODY_TIMEOUT_S, WRITE_TIMEOUT_S = 1.0, 2.0, 1.5
MAX_CONNECTIONS = 300
TIGHT = {
    "PENSTOCK_HEAD_TIMEOUT_S": str(HEAD_TIMEOUT_S),
    "PENSTOCK_BODY_TIMEOUT_S": str(BODY_TIMEOUT_S),
    "PENSTOCK_WRITE_TIMEOUT_S": str(WRITE_TIMEOUT_S),
    "PENSTOCK_MAX_CONNECTIONS": str(MAX_CONNECTIONS),
    "PENSTOCK_TRUSTED_PROXY": "127.0.0.1",  # all clients of these tests have the same address
    "PENSTOCK_MAX_BODY_BYTES": str(16 * MIB),
    "PENSTOCK_MAX_INFLIGHT_BYTES": str(48 * MIB),
    "PENSTOCK_DECODERS": "1",
}
POST = b"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nhost: localhost\r\n"
GOOD = {"inputs": [ONE]}
FORGED = "forged-line level=error"
LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (debug|info|warning|error) |[EIW]\d{4} ")


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack with short times and low limits, which logs every refusal."""
    arguments = ("--models", "identity_fp32,street", "--log-level", "debug")
    running = start_stack(tmp_path_factory.mktemp("home"), *arguments, environ=TIGHT)
    with ThreadPoolExecutor(8) as crowd:  # what it keeps open towards the engine is open before anything is counted
        list(crowd.map(assert_others_are_served, [running] * 32))
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture
def stack(tight: RunningStack) -> Iterator[RunningStack]:
    """The same stack, and after the test: alive, ready, nothing in flight, no connection left, no error logged."""
    gateway, logged = gateway_of(tight), len(tight.log)
    descriptors = gateway.num_fds()
    yield tight
    wait_for(lambda: number(tight, "http_connections") == 0, 10, "all connections are gone")
    for name in ("inflight_requests", "inflight_bytes", "receiving_bytes", "engine_restarts_total"):
        assert number(tight, name) == 0, name
    assert call("GET", f"{tight.http_url}/v2/health/ready").status == 200
    assert gateway.num_fds() <= descriptors + 8
    said = [line for line in tight.log[logged:] if "Z debug " not in line]
    assert [line for line in said if "error" in line or "Traceback" in line] == []


def gateway_of(stack: RunningStack) -> psutil.Process:
    """The gateway's own process."""
    children = psutil.Process(stack.process.pid).children()
    return next(child for child in children if "penstock.gateway" in child.cmdline()[1:4])


def metrics(stack: RunningStack) -> str:
    """The gateway's text."""
    return call("GET", f"{stack.metrics_url}/penstock").body.decode()


def number(stack: RunningStack, name: str) -> float:
    """One metric; 0 where it has not been counted yet."""
    found = re.search(rf"^penstock_{re.escape(name)} (\S+)$", metrics(stack), re.MULTILINE)
    return float(found[1]) if found else 0.0


@contextmanager
def connected(stack: RunningStack, count: int, *, receive_bytes: int = 0) -> Iterator[list[socket.socket]]:
    """Raw connections to the REST port. receive_bytes: of their receive buffers, 0 for the system's own."""
    parts = urlsplit(stack.http_url)
    with ExitStack() as opened:
        sockets = []
        for _ in range(count):
            one = opened.enter_context(socket.socket())
            if receive_bytes:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            one.settimeout(15)
            one.connect((parts.hostname, parts.port))
            sockets.append(one)
        yield sockets


def read_to_end(one: socket.socket) -> bytes:
    """All that the gateway says before it closes."""
    said = b""
    try:
        while piece := one.recv(65536):
            said += piece
    except ConnectionError:
        pass
    return said


def dribble(sockets: list[socket.socket], piece: bytes, until: Callable[[], bool]) -> None:
    """A piece to each of them, again and again."""
    while not until():
        for one in sockets:
            try:
                one.send(piece)
            except OSError:
                continue
        time.sleep(0.1)


def assert_others_are_served(stack: RunningStack) -> None:
    """A healthy client's request, on a connection of its own."""
    assert post_json(f"{stack.http_url}/v2/models/identity_fp32/infer", GOOD).status == 200


def test_slow_loris_heads_are_ended_at_the_limit(stack: RunningStack) -> None:
    """200 connections that dribble headers: 408 for each in about a second, and the others are served meanwhile."""
    refused = number(stack, 'rejected_total{reason="head_too_slow"}')
    with connected(stack, 200) as sockets:
        started = time.monotonic()
        for one in sockets:
            one.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n")
        dribble(sockets, b"x: y\r\n", lambda: time.monotonic() - started > HEAD_TIMEOUT_S + 1)
        assert_others_are_served(stack)
        wait_for(
            lambda: number(stack, 'rejected_total{reason="head_too_slow"}') == refused + 200, 10, "all are refused"
        )
        assert all(read_to_end(one).startswith(b"HTTP/1.1 408 ") for one in sockets[:20])


def test_slow_bodies_are_ended_at_the_limit(stack: RunningStack) -> None:
    """50 bodies that dribble in: 408 for each, and the others are served meanwhile."""
    with connected(stack, 50) as sockets:
        started = time.monotonic()
        for one in sockets:
            one.sendall(POST + b"content-length: 100000\r\n\r\n")
        dribble(sockets, b"x" * 10, lambda: time.monotonic() - started > BODY_TIMEOUT_S / 2)
        assert_others_are_served(stack)
        dribble(sockets, b"x" * 10, lambda: time.monotonic() - started > BODY_TIMEOUT_S + 0.5)
        assert all(read_to_end(one).startswith(b"HTTP/1.1 408 ") for one in sockets)


def test_many_big_uploads_at_once_stay_within_the_bound(stack: RunningStack) -> None:
    """Twelve of 15 MB that never end: those over 48 MiB together get 503; memory is bounded; small requests come in."""
    gateway = gateway_of(stack)
    before = gateway.memory_info().rss
    with connected(stack, 12) as sockets:
        for one in sockets:
            try:
                one.sendall(POST + b"content-length: %d\r\n\r\n" % (16 * MIB) + bytes(15 * MIB))
            except OSError:
                continue  # its 503 came first
        assert_others_are_served(stack)
        assert gateway.memory_info().rss - before < (2 * 48 + 16) * MIB  # a body takes up to twice its bytes
        answers = [read_to_end(one)[:12] for one in sockets]
    assert answers.count(b"HTTP/1.1 408") == 3
    assert answers.count(b"HTTP/1.1 503") == 9


def test_million_tiny_chunks_cost_their_bytes_and_no_more(stack: RunningStack) -> None:
    """Six megabytes on the wire for one of body: refused for what it says, with little memory."""
    gateway = gateway_of(stack)
    before = gateway.memory_info().rss
    with connected(stack, 1) as (one,):
        one.sendall(POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        for _ in range(100):
            one.sendall(b"1\r\na\r\n" * 10_000)
        one.sendall(b"0\r\n\r\n")
        assert read_to_end(one).startswith(b"HTTP/1.1 400 ")
    assert gateway.memory_info().rss - before < 16 * MIB


def test_readers_that_stop_are_cut_and_cost_the_others_nothing(stack: RunningStack) -> None:
    """Five clients leave 8 MB answers unread: held against admission, cut after the time, all of it given back."""
    count = 2 * MIB
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "shape": [1, count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    cut = number(stack, 'rejected_total{reason="slow_reader"}')
    with connected(stack, 5, receive_bytes=4096) as sockets:
        lengths = b"inference-header-content-length: %d\r\ncontent-length: %d\r\n\r\n" % (
            len(head),
            len(head) + 4 * count,
        )
        for one in sockets:
            one.sendall(POST + lengths + head + bytes(4 * count))
        wait_for(lambda: number(stack, "inflight_bytes") > 4 * MIB, 10, "answers wait")
        assert_others_are_served(stack)
        wait_for(lambda: number(stack, 'rejected_total{reason="slow_reader"}') == cut + 5, 20, "all are cut")
        wait_for(lambda: number(stack, "inflight_bytes") == 0, 5, "their bytes are given back")


def test_connections_over_the_limit_are_refused_and_ready_stays_true(stack: RunningStack) -> None:
    """Those that were there first are served on; those that are too many get 503; when they go, others come in."""
    with connected(stack, MAX_CONNECTIONS) as sockets:
        wait_for(lambda: number(stack, "http_connections") == MAX_CONNECTIONS, 5, "all are in")
        with connected(stack, 30) as more:
            assert all(read_to_end(one).startswith(b"HTTP/1.1 503 ") for one in more)
        sockets[0].sendall(b"GET /v2/health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert sockets[0].recv(4096).startswith(b"HTTP/1.1 200 ")
        assert number(stack, "ready") == 1
    wait_for(lambda: number(stack, "http_connections") == 0, 10, "they are gone")
    assert_others_are_served(stack)


def test_images_whose_clients_left_the_queue_are_never_decoded(stack: RunningStack) -> None:
    """One decoder, twelve big pictures, eleven clients that leave: what waited is not decoded."""
    noise = np.random.default_rng(7).integers(0, 256, (500, 700, 3), np.uint8)
    picture = cv2.imencode(".jpg", cv2.resize(noise, (7000, 5000)), [cv2.IMWRITE_JPEG_QUALITY, 20])[1].tobytes()
    assert 12 * len(picture) < 48 * MIB
    head = b"POST /v2/models/street/image HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/jpeg\r\n"
    head += b"content-length: %d\r\n\r\n"
    decoded = number(stack, 'decode_seconds_count{model="street"}')
    left = number(stack, 'cancelled_total{protocol="http"}')
    with connected(stack, 1) as (stays,):
        stays.sendall(head % len(picture) + picture)
        with connected(stack, 11) as sockets:
            for one in sockets:
                one.sendall(head % len(picture) + picture)
            wait_for(lambda: number(stack, 'queue_depth{queue="decode"}') > 4, 10, "most wait")
        assert stays.recv(4096).startswith(b"HTTP/1.1 200 ")
    wait_for(lambda: number(stack, 'cancelled_total{protocol="http"}') == left + 11, 10, "all eleven are missed")
    wait_for(lambda: number(stack, "inflight_requests") == 0, 10, "nothing is left")
    assert number(stack, 'queue_depth{queue="decode"}') == 0
    assert number(stack, 'decode_seconds_count{model="street"}') <= decoded + 3


def test_words_of_a_client_forge_no_header_and_no_log_line(stack: RunningStack) -> None:
    """Line ends in paths, headers, names and ids come back escaped or not at all; each log line is one of ours."""
    broken = f"\r\n2026-01-01T00:00:00.000Z error   gateway: {FORGED}"
    escaped = "%0d%0a" + FORGED.replace(" ", "%20")
    for path in (f"/v2/models/a{escaped}/ready", f"/v2/{escaped}", f"/v2/repository/models/a{escaped}/load"):
        answer = call("POST" if path.endswith("load") else "GET", stack.http_url + path)
        assert answer.status in (400, 404), (path, answer)
        assert not any("forged" in f"{name}{value}" for name, value in answer.headers.items())
    odd = {"id": broken, "inputs": [{**ONE, "name": broken, "datatype": broken}], "outputs": [{"name": broken}]}
    assert post_json(stack.http_url + INFER, odd).status == 400
    assert post_json(stack.http_url + INFER, {"id": broken, "inputs": [{**ONE, "name": broken}]}).status == 400
    for head in (f"x-request-id: a\r{FORGED}", f"x-request-timeout-ms: 5\n {FORGED}", f"bad{broken}: 1"):
        with connected(stack, 1) as (one,):
            one.sendall(f"GET /v2 HTTP/1.1\r\nHost: localhost\r\n{head}\r\nConnection: close\r\n\r\n".encode())
            assert FORGED.encode() not in read_to_end(one).partition(b"\r\n\r\n")[0]
    for fields in ({"name": broken}, {"datatype": broken}):
        assert grpc_infer(stack, grpc_request(**fields))[0] is grpc.StatusCode.INVALID_ARGUMENT
    named = service_pb2.ModelInferRequest(model_name="a" + broken)
    assert grpc_infer(stack, named)[0] is grpc.StatusCode.INVALID_ARGUMENT
    stack.wait_for_log("request refused")
    assert [line for line in stack.log if not LINE.match(line)] == []
    assert not [line for line in stack.log if re.match(r"\S+ error +gateway: forged", line)]


def test_engine_without_keys_listens_on_no_port_by_default(stack: RunningStack) -> None:
    """A web page or another user cannot reach Triton: of the stack's processes only the gateway listens on TCP."""
    ports = {
        one.laddr.port
        for process in family(stack)
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    urls = (stack.http_url, stack.grpc_address, stack.metrics_url.removesuffix("/metrics"))
    assert ports == {int(url.rpartition(":")[2]) for url in urls}
    assert_others_are_served(stack)
