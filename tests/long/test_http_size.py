"""The big and the many: a tensor of 512 MB, and ten thousand connections that wait."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import tritonclient.grpc

from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("http-size"), pytest.mark.timeout(600)]
MIB = 1 << 20
ELEMENTS = 128 * MIB  # of FP32: 512 MiB
TENSOR_MIB = 512
REST_MULTIPLE, GRPC_MULTIPLE = 2.2, 5.5  # of the tensor: what the gateway may hold at once
CONNECTIONS, CONNECTION_KIB = 10_000, 32
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and empty settings
GOOD = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack that takes a gigabyte at once."""
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("less than 8 GiB of memory are free")
    limits = {"PENSTOCK_MAX_BODY_BYTES": str(1 << 30), "PENSTOCK_BODY_TIMEOUT_S": "120"}
    running = start_stack(tmp_path_factory.mktemp("home"), "--models", "identity_fp32", environ=limits)
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def gateway_of(stack: RunningStack) -> psutil.Process:
    """The gateway's own process."""
    children = psutil.Process(stack.process.pid).children()
    return next(child for child in children if "penstock.gateway" in child.cmdline()[1:4])


def peak_growth_mib(process: psutil.Process, work: Callable[[], None]) -> float:
    """How much more memory the process held during the work than before it, at most."""
    before = peak = process.memory_info().rss
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        work()
    finally:
        is_done.set()
        watching.join()
    return (peak - before) / MIB


def test_tensor_of_512_mb_passes_over_rest_with_bounded_memory(roomy: RunningStack) -> None:
    """There and back: the request once and the answer once, and all of it is given back."""
    gateway, parts = gateway_of(roomy), urlsplit(roomy.http_url)
    tensor = np.arange(ELEMENTS, dtype=np.float32)
    described = {
        "name": "x",
        "shape": [1, ELEMENTS],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * ELEMENTS},
    }
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    before = gateway.memory_info().rss

    def infer() -> None:
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=240)
        connection.putrequest("POST", "/v2/models/identity_fp32/infer")
        connection.putheader("Inference-Header-Content-Length", str(len(head)))
        connection.putheader("Content-Length", str(len(head) + 4 * ELEMENTS))
        connection.endheaders()
        connection.send(head)
        connection.send(memoryview(tensor).cast("B"))
        answer = connection.getresponse()
        size = int(answer.getheader("inference-header-content-length") or 0)
        assert answer.status == 200
        assert json.loads(answer.read(size))["outputs"][0]["shape"] == [1, ELEMENTS]
        assert np.array_equal(np.frombuffer(answer.read(), np.float32), tensor)
        connection.close()

    growth = peak_growth_mib(gateway, infer)
    print(f"REST: {growth:.0f} MiB, {growth / TENSOR_MIB:.2f} times the tensor")  # noqa: T201
    assert growth < REST_MULTIPLE * TENSOR_MIB
    assert gateway.memory_info().rss - before < 64 * MIB


def test_tensor_of_512_mb_passes_over_grpc_with_bounded_memory(roomy: RunningStack) -> None:
    """There and back, within a stated multiple: gRPC's own copies are most of it."""
    client = tritonclient.grpc.InferenceServerClient(roomy.grpc_address)
    tensor = np.arange(ELEMENTS, dtype=np.float32).reshape(1, ELEMENTS)
    asked = tritonclient.grpc.InferInput("x", [1, ELEMENTS], "FP32")
    asked.set_data_from_numpy(tensor)

    def infer() -> None:
        assert np.array_equal(client.infer("identity_fp32", [asked], client_timeout=240).as_numpy("y"), tensor)

    growth = peak_growth_mib(gateway_of(roomy), infer)
    client.close()
    print(f"gRPC: {growth:.0f} MiB, {growth / TENSOR_MIB:.2f} times the tensor")  # noqa: T201
    assert growth < GRPC_MULTIPLE * TENSOR_MIB


@pytest.mark.parametrize(("port", "said"), [("http", b""), ("grpc", PREFACE)])
def test_ten_thousand_idle_connections_do_not_stop_the_others(roomy: RunningStack, port: str, said: bytes) -> None:
    """Each costs a few KiB; a hundred requests on new connections are all served, none slower than a second."""
    gateway = gateway_of(roomy)
    address = urlsplit(roomy.http_url).netloc if port == "http" else roomy.grpc_address
    host, _, number = address.rpartition(":")
    before = gateway.memory_info().rss
    with ExitStack() as opened:
        for _ in range(CONNECTIONS):
            opened.enter_context(socket.create_connection((host, int(number)), timeout=30)).sendall(said)
        slowest_s = 0.0
        for _ in range(100):
            started = time.monotonic()
            assert post_json(f"{roomy.http_url}/v2/models/identity_fp32/infer", GOOD).status == 200
            slowest_s = max(slowest_s, time.monotonic() - started)
        a_connection_kib = (gateway.memory_info().rss - before) / 1024 / CONNECTIONS
        print(f"{port}: {a_connection_kib:.1f} KiB a connection; the slowest request took {slowest_s * 1000:.0f} ms")  # noqa: T201
        assert a_connection_kib < CONNECTION_KIB
        assert slowest_s < 1
    assert call("GET", f"{roomy.http_url}/v2/health/ready").status == 200
