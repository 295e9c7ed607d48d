"""Traces: what the engine receives, what reaches a collector, and what happens without one."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from penstock.gateway.otel import MAX_SPANS, OtelTracer, traces_url
from penstock.gateway.tracing import Trace, TracedRelay, current_trace
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall
from penstock.protocol.errors import EngineUnavailable
from penstock.testing import FakeEngine, FakeMode
from tests.support.ports import free_port
from tests.tracing.collector import Collector, Got, collecting

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"), ("tracestate", "rojo=00f067aa0ba902b7"))
HTTP_CALL = HttpCall(
    "POST", b"/v2/models/m/infer", ((b"x", b"1"), *((name.encode(), value.encode()) for name, value in PARENT)), b"{}"
)
GRPC_CALL = GrpcCall("/inference.GRPCInferenceService/ModelReady", b"", (("x", "1"), *PARENT))


class Reports(list[str]):
    """What was said of the collector."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def tracer(collector: Collector) -> Iterator[OtelTracer]:
    running = OtelTracer(collector.url, Reports().append, interval_s=0.02)
    yield running
    running.stop(5.0)


def begun(tracer: OtelTracer, protocol: str = "http", parent: tuple[tuple[str, str], ...] = PARENT) -> Trace:
    trace = tracer.begin(parent, protocol)
    current_trace.set(trace)
    return trace


def by_name(spans: list[Got]) -> dict[str, Got]:
    return {span.name: span for span in spans}


async def test_http_request_is_gateway_over_queue_and_engine(tracer: OtelTracer, collector: Collector) -> None:
    """Under the caller's own span; the engine gets the span of its call, and every other header unchanged."""
    engine = FakeEngine(())
    engine.http_answer = HttpAnswer(200, (), b"{}")
    trace = begun(tracer)
    trace.arrived("street")
    await TracedRelay(engine).send(HTTP_CALL, deadline=None)
    trace.end("POST /infer", code=200, is_error=False)
    spans = by_name(collector.of_trace(TRACE_ID, 3))
    gateway, queue, call = spans["POST /infer"], spans["queue"], spans["engine"]
    assert gateway.parent_id == CALLER_ID
    assert {queue.parent_id, call.parent_id} == {gateway.span_id}
    assert gateway.started_ns <= queue.started_ns <= queue.ended_ns <= call.started_ns <= call.ended_ns
    assert call.ended_ns <= gateway.ended_ns
    assert gateway.attributes == {"http.response.status_code": 200, "penstock.model": "street"}
    assert gateway.service == "penstock"
    headers = engine.http_calls[-1].headers
    assert dict(headers) == {
        b"x": b"1",
        b"traceparent": f"00-{TRACE_ID}-{call.span_id}-01".encode(),
        b"tracestate": b"rojo=00f067aa0ba902b7",
    }
    assert len(headers) == 3


async def test_grpc_request_tells_the_engine_its_span_in_the_metadata(tracer: OtelTracer, collector: Collector) -> None:
    """The same over gRPC; the status is gRPC's."""
    engine = FakeEngine(())
    trace = begun(tracer, "grpc")
    await TracedRelay(engine).send(GRPC_CALL, deadline=None)
    trace.end("ModelReady", code=0, is_error=False)
    spans = by_name(collector.of_trace(TRACE_ID, 2))
    metadata = dict(engine.grpc_calls[-1].metadata)
    assert metadata["traceparent"] == f"00-{TRACE_ID}-{spans['engine'].span_id}-01"
    assert metadata["x"] == "1"


async def test_stages_lie_end_to_end_and_end_now(tracer: OtelTracer, collector: Collector) -> None:
    """What was measured becomes spans of that length, in their order."""
    trace = begun(tracer)
    trace.stages((("queue", 0.5), ("decode", 0.25)))
    trace.end("image", code=200, is_error=False)
    spans = by_name(collector.of_trace(TRACE_ID, 3))
    assert (spans["queue"].ended_ns - spans["queue"].started_ns) / 1e9 == pytest.approx(0.5, abs=1e-6)
    assert spans["queue"].ended_ns == spans["decode"].started_ns
    assert spans["decode"].ended_ns <= spans["image"].ended_ns


async def test_engine_that_fails_marks_its_span(tracer: OtelTracer, collector: Collector) -> None:
    """An error of the engine, and no answer at all, are errors of the span; the exception passes."""
    engine = FakeEngine(())
    engine.http_answer = HttpAnswer(500, (), b"{}")
    trace = begun(tracer)
    await TracedRelay(engine).send(HTTP_CALL, deadline=None)
    engine.mode = FakeMode.UNAVAILABLE
    with pytest.raises(EngineUnavailable):
        await TracedRelay(engine).send(GRPC_CALL, deadline=None)
    trace.end("POST /infer", code=503, is_error=True)
    assert [span.is_error for span in collector.of_trace(TRACE_ID, 3)] == [True, True, True]


async def test_caller_that_does_not_sample_is_obeyed(tracer: OtelTracer, collector: Collector) -> None:
    """Nothing is sent, and the engine gets the same: flags 00 under the same trace."""
    engine = FakeEngine(())
    trace = begun(tracer, "grpc", (("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-00"),))
    await TracedRelay(engine).send(GRPC_CALL, deadline=None)
    trace.end("ModelReady", code=0, is_error=False)
    received = str(dict(engine.grpc_calls[-1].metadata)["traceparent"])
    assert received.startswith(f"00-{TRACE_ID}-")
    assert received.endswith("-00")
    other = begun(tracer)
    other.end("other", code=200, is_error=False)
    assert [span.name for span in collector.of_trace(TRACE_ID, 1)] == ["other"]


@pytest.mark.parametrize("traceparent", ["", "rubbish", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff-" + "1" * 99])
async def test_broken_traceparent_begins_a_trace_of_its_own(
    tracer: OtelTracer, collector: Collector, traceparent: str
) -> None:
    """A caller's mistake costs neither the request nor the trace."""
    trace = begun(tracer, "http", (("traceparent", traceparent),))
    trace.end("alone", code=200, is_error=False)
    await asyncio.to_thread(tracer.stop, 20.0)
    assert [(span.name, span.parent_id) for span in collector.spans] == [("alone", "")]


async def test_call_outside_a_traced_request_passes_untouched(tracer: OtelTracer) -> None:
    """The watch's own calls belong to no trace."""
    current_trace.set(None)
    engine = FakeEngine(())
    assert isinstance(await TracedRelay(engine).send(GRPC_CALL, deadline=None), GrpcAnswer)
    assert engine.grpc_calls == [GRPC_CALL]


def test_lost_collector_is_reported_once_and_its_spans_are_counted() -> None:
    """A closed port: every span is dropped and counted, with one log line; the stop does not wait for it."""
    received = Reports()
    tracer = OtelTracer(f"http://127.0.0.1:{free_port()}", received.append, interval_s=0.02)
    for _ in range(3):
        tracer.begin((), "http").end("x", code=200, is_error=False)
    until = time.monotonic() + 20
    while tracer.dropped_spans < 3 and time.monotonic() < until:
        time.sleep(0.02)
    assert tracer.dropped_spans == 3
    assert len(received) == 1
    tracer.stop(1.0)


def test_collector_that_hangs_costs_requests_nothing_and_bounds_the_queue() -> None:
    """More spans than the queue holds: each is ended at once, what does not fit is dropped and counted."""
    with collecting(holds=True) as collector:
        tracer = OtelTracer(collector.url, Reports().append, interval_s=0.02)
        tracer.begin((), "http").end("first", code=200, is_error=False)
        until = time.monotonic() + 20
        while collector.requests == 0 and time.monotonic() < until:  # the thread is now inside the hanging call
            time.sleep(0.01)
        longest_s = 0.0
        for _ in range(MAX_SPANS + 500):
            started = time.perf_counter()
            tracer.begin((), "http").end("x", code=200, is_error=False)
            longest_s = max(longest_s, time.perf_counter() - started)
        dropped = tracer.dropped_spans
        started = time.monotonic()
        tracer.stop(0.2)
        assert dropped >= 500
        assert longest_s < 1.0
        assert time.monotonic() - started < 2.0


def test_collector_that_comes_back_gets_what_comes_then() -> None:
    """The loss and the return are reported; spans of the time between are dropped, later ones arrive."""
    received = Reports()
    with collecting(status=400) as collector:
        tracer = OtelTracer(collector.url, received.append, interval_s=0.02)
        tracer.begin(PARENT, "http").end("lost", code=200, is_error=False)
        until = time.monotonic() + 20
        while not received and time.monotonic() < until:
            time.sleep(0.02)
        collector.status = 200
        tracer.begin(PARENT, "http").end("kept", code=200, is_error=False)
        assert [span.name for span in collector.of_trace(TRACE_ID, 1)] == ["kept"]
        tracer.stop(5.0)
    assert [bool(why) for why in received] == [True, False]
    assert tracer.dropped_spans == 1


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_collectors_address_gets_otlps_own_path_where_it_has_none(endpoint: str, url: str) -> None:
    """As OTEL_EXPORTER_OTLP_ENDPOINT is read elsewhere; a path that is given is kept."""
    assert traces_url(endpoint) == url
