"""`penstock up --otlp-endpoint …`: traces of the real stack in an OTLP receiver, and a stack that has lost its own."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http

from penstock.engines.triton.endpoints import pick_free_ports
from tests.integration.embedded_stack import NO_TRITON, own_metrics
from tests.integration.living import triton_of
from tests.support.http import call
from tests.support.stack import CHECKOUT, ENGINE_PORTS, RunningStack, start_stack, stop_stack
from tests.tracing.collector import Collector, Got, collecting

GOLDEN = (CHECKOUT / "model_repository" / "street" / "golden.jpg").read_bytes()
PORT_FLAGS = ("--http-port", "--grpc-port", "--metrics-port")
CALLER_ID = "b7ad6b7169203331"

pytestmark = pytest.mark.xdist_group("tracing")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    tmp_path_factory: pytest.TempPathFactory, triton_environment: Path, collector: Collector
) -> Iterator[RunningStack]:
    """Two shipped models in Triton, and a collector."""
    running = start_stack(
        tmp_path_factory.mktemp("home"),
        "--otlp-endpoint",
        collector.url,
        "--models",
        "identity_fp32,street",
        *ENGINE_PORTS,
    )
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def parent_of(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER_ID}-01"}


def assert_tree(spans: list[Got], root: str, children: set[str]) -> None:
    """One root under the caller, everything else under the root and within its time."""
    (gateway,) = [span for span in spans if span.parent_id == CALLER_ID]
    assert gateway.name == root
    below = [span for span in spans if span is not gateway]
    assert {span.name for span in below} == children
    assert {span.parent_id for span in below} == {gateway.span_id}
    slack_ns = 2_000_000  # stages that were measured by another clock
    assert all(gateway.started_ns - slack_ns <= span.started_ns <= span.ended_ns for span in below)
    assert all(span.ended_ns <= gateway.ended_ns + slack_ns for span in below)


def ask_identity(module: object, address: str, headers: dict[str, str]) -> None:
    array = np.ones((1, 4), np.float32)
    with module.InferenceServerClient(address) as client:  # type: ignore[attr-defined]
        tensor = module.InferInput("x", [1, 4], "FP32")  # type: ignore[attr-defined]
        tensor.set_data_from_numpy(array)
        client.infer("identity_fp32", [tensor], headers=headers)


def test_tensors_over_http_are_gateway_queue_engine(traced: RunningStack, collector: Collector) -> None:
    """The caller's trace goes on through the unmodified client."""
    trace_id = "1" * 32
    ask_identity(tritonclient.http, traced.http_url.removeprefix("http://"), parent_of(trace_id))
    spans = collector.of_trace(trace_id, 3)
    assert_tree(spans, "POST /v2/models/{model}/infer", {"queue", "engine"})
    assert spans[0].attributes == {"http.response.status_code": 200, "penstock.model": "identity_fp32"}


def test_tensors_over_grpc_are_gateway_queue_engine(traced: RunningStack, collector: Collector) -> None:
    """The same over gRPC's metadata."""
    trace_id = "2" * 32
    ask_identity(tritonclient.grpc, traced.grpc_address, parent_of(trace_id))
    assert_tree(collector.of_trace(trace_id, 3), "ModelInfer", {"queue", "engine"})


def test_image_shows_its_stages(traced: RunningStack, collector: Collector) -> None:
    """Waiting for a decoder, decoding, preparing, the engine, parsing."""
    trace_id = "3" * 32
    answer = call("POST", f"{traced.http_url}/v2/models/street/image", GOLDEN, parent_of(trace_id))
    assert answer.status == 200
    spans = collector.of_trace(trace_id, 6)
    stages = {"queue", "decode", "preprocess", "engine", "postprocess"}
    assert_tree(spans, "POST /v2/models/{model}/image", stages)


def test_encoded_image_on_infer_shows_its_stages(traced: RunningStack, collector: Collector) -> None:
    """As a tensor's, with what was done to the picture before."""
    trace_id = "4" * 32
    headers = parent_of(trace_id) | {"inference-header-content-length": "0"}
    assert call("POST", f"{traced.http_url}/v2/models/street/infer", GOLDEN, headers).status == 200
    names = {"queue", "decode", "preprocess", "engine"}
    assert_tree(collector.of_trace(trace_id, 5), "POST /v2/models/{model}/infer", names)


def test_refused_request_is_a_trace_without_an_engine(traced: RunningStack, collector: Collector) -> None:
    """400, no error of ours, and no call to the engine."""
    trace_id = "5" * 32
    assert call("POST", f"{traced.http_url}/v2/models/street/infer", b"{", parent_of(trace_id)).status == 400
    (span,) = collector.of_trace(trace_id, 1)
    assert (span.attributes["http.response.status_code"], span.is_error) == (400, False)


def test_health_and_the_gateways_own_calls_make_no_traces(traced: RunningStack, collector: Collector) -> None:
    """Probes, canaries and the watch's questions would bury what people look for."""
    for _ in range(3):
        assert call("GET", f"{traced.http_url}/v2/health/ready", None, parent_of("6" * 32)).status == 200
    ask_identity(tritonclient.http, traced.http_url.removeprefix("http://"), parent_of("7" * 32))
    collector.of_trace("7" * 32, 3)
    ours = [span for span in collector.spans if span.service == "penstock"]
    assert not [span for span in ours if "health" in span.name or span.trace_id == "6" * 32]
    assert all(span.trace_id == span.trace_id[0] * 32 for span in ours)


@contextmanager
def tracing_triton(like: psutil.Process, collector: Collector) -> Iterator[tuple[str, str]]:
    """A second Triton, by the command line of a running one, that sends spans of its own; its two addresses."""
    words = like.cmdline()
    ports = dict(zip(PORT_FLAGS, pick_free_ports("127.0.0.1", len(PORT_FLAGS)), strict=True))
    for flag, port in ports.items():
        words[words.index(flag) + 1] = str(port)
    words += ["--trace-config", "mode=opentelemetry", "--trace-config", "rate=1"]
    words += ["--trace-config", "level=TIMESTAMPS", "--trace-config", "opentelemetry,bsp_schedule_delay=100"]
    words += ["--trace-config", f"opentelemetry,url={collector.url}/v1/traces"]
    process = subprocess.Popen(
        words, env=like.environ(), cwd=like.cwd(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{ports['--http-port']}", f"127.0.0.1:{ports['--grpc-port']}"
    finally:
        process.terminate()
        process.wait(30)


def assert_child_of_ours(collector: Collector, trace_id: str, ask: Callable[[dict[str, str]], object]) -> None:
    """Triton's request is a child of our call. Asked again where none comes: Triton may drop spans."""
    for _ in range(4):
        ask(parent_of(trace_id))
        until = time.monotonic() + 5
        while time.monotonic() < until:
            spans = [span for span in list(collector.spans) if span.trace_id == trace_id]
            ours = {span.span_id for span in spans if span.name == "engine"}
            theirs = [span for span in spans if span.name == "InferRequest"]
            if theirs and ours >= {span.parent_id for span in theirs}:
                return
            time.sleep(0.02)
    raise AssertionError([(span.service, span.name, span.parent_id) for span in spans])


def test_triton_hangs_its_own_spans_under_ours(traced: RunningStack, collector: Collector, tmp_path: Path) -> None:
    """A real Triton in its OpenTelemetry mode: HTTP, gRPC and pictures, its request is a child of our call."""
    with tracing_triton(triton_of(traced), collector) as (http_url, grpc_address):
        external = ("--engine", http_url, "--engine-grpc", grpc_address, "--models", "identity_fp32,street")
        stack = start_stack(tmp_path, *external, "--otlp-endpoint", collector.url)
        try:
            http, address = stack.http_url, stack.grpc_address
            assert_child_of_ours(
                collector, "a" * 32, partial(ask_identity, tritonclient.http, http.removeprefix("http://"))
            )
            assert_child_of_ours(collector, "b" * 32, partial(ask_identity, tritonclient.grpc, address))
            assert_child_of_ours(collector, "c" * 32, partial(call, "POST", f"{http}/v2/models/street/image", GOLDEN))
        finally:
            assert stop_stack(stack) == 0


@pytest.mark.long
def test_collector_that_is_away_costs_no_request_and_its_spans_are_counted(tmp_path: Path) -> None:
    """Requests are answered as ever, spans are dropped and counted, and the stop is quick and clean."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stack = start_stack(tmp_path, "--engine", "embedded", "--otlp-endpoint", away, environ=NO_TRITON)
    try:
        for _ in range(5):
            started = time.monotonic()
            assert call("POST", f"{stack.http_url}/v2/models/street/image", GOLDEN).status == 200
            assert time.monotonic() - started < 5.0
        stack.wait_for_log("the collector of traces is lost")
        until = time.monotonic() + 30
        while "penstock_spans_dropped_total 30.0" not in own_metrics(stack) and time.monotonic() < until:
            time.sleep(0.1)
        assert "penstock_spans_dropped_total 30.0" in own_metrics(stack)  # six of each picture
        assert len(stack.logged("the collector of traces is lost")) == 1
    finally:
        started = time.monotonic()
        assert stop_stack(stack) == 0
    assert time.monotonic() - started < 15.0
