"""Traces with OpenTelemetry's SDK, exported by a thread over OTLP/HTTP. Imported only with a collector."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.gateway.tracing import PARENT_HEADERS, EngineSpan, Trace, TraceHeaders

MAX_SPANS = 2048
BATCH_SPANS = 128  # small, because the event loop shares the GIL with the encoding of a batch
EXPORT_INTERVAL_S = 1.0


class SpanExportQueue(SpanProcessor):
    """Exports spans in batches, and drops them if the queue is full. tell: called with why it fails, and "" after."""

    def __init__(
        self, exporter: SpanExporter, tell: Callable[[str], None], *, interval_s: float = EXPORT_INTERVAL_S
    ) -> None:
        self._exporter = exporter
        self._tell = tell
        self._interval_s = interval_s
        self._spans: deque[ReadableSpan] = deque()
        self._is_due = threading.Event()
        self._is_stopping = False
        self._is_lost = False
        self._full = 0
        self._refused = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that were not delivered."""
        return self._full + self._refused

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._is_stopping or len(self._spans) >= MAX_SPANS:
            self._full += 1
            return
        self._spans.append(span)
        if len(self._spans) >= BATCH_SPANS:
            self._is_due.set()

    def stop(self, grace_s: float) -> None:
        """Sends queued spans, within grace_s."""
        self._is_stopping = True
        self._is_due.set()
        self._thread.join(grace_s)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_stopping:
            self._is_due.wait(self._interval_s)
            self._is_due.clear()
            self._send_all()
        self._send_all()  # spans that arrived between the last round and the stop

    def _send_all(self) -> None:
        while self._spans:
            self._send()

    def _send(self) -> None:
        batch: list[ReadableSpan] = []
        with suppress(IndexError):
            while len(batch) < BATCH_SPANS:
                batch.append(self._spans.popleft())
        try:
            result = self._exporter.export(batch)
            reason = "" if result is SpanExportResult.SUCCESS else "the collector took no spans"
        except Exception as error:  # noqa: BLE001 - the root of the thread
            reason = f"spans could not be sent: {error!r}"
        if reason:
            self._refused += len(batch)
        if bool(reason) != self._is_lost:
            self._is_lost = bool(reason)
            self._tell(reason)


EXPORT_TIMEOUT_S = 3.0
_TRACES_PATH = "/v1/traces"
_W3C = TraceContextTextMapPropagator()
_MODEL_ATTRIBUTE = "penstock.model"
_CODE_ATTRIBUTES = {"http": "http.response.status_code", "grpc": "rpc.grpc.status_code"}


class OtelTracer:
    """A Tracer. Reads OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS."""

    def __init__(self, endpoint: str, tell: Callable[[str], None], *, interval_s: float = EXPORT_INTERVAL_S) -> None:
        """tell: called from a thread with the reason when the collector is lost, and with "" when it is back."""
        logging.getLogger("opentelemetry.exporter").addFilter(lambda _: False)  # `tell` reports it once instead
        exporter = OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
        self._outbox = SpanExportQueue(exporter, tell, interval_s=interval_s)
        named = Resource({"service.name": "penstock"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(self._outbox)
        self._tracer = provider.get_tracer("penstock")

    @property
    def dropped_spans(self) -> int:
        return self._outbox.dropped

    def begin(self, headers: Iterable[tuple[str, str]], protocol: str) -> Trace:
        """See Tracer."""
        parent = _W3C.extract({name: value for name, value in headers if name in PARENT_HEADERS}, Context())
        span = self._tracer.start_span(protocol, parent, SpanKind.SERVER)
        return _OtelTrace(self._tracer, span, _CODE_ATTRIBUTES[protocol])

    def stop(self, grace_s: float) -> None:
        """Sends queued spans, within grace_s. Blocks: call it from a thread."""
        self._outbox.stop(grace_s)


def traces_url(endpoint: str) -> str:
    """The collector's URL; without a path, OTLP's default path is added."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path not in ("", "/") else urlunsplit(parts._replace(path=_TRACES_PATH))


class _OtelTrace:
    def __init__(self, tracer: SdkTracer, span: Span, code_attribute: str) -> None:
        self._tracer = tracer
        self._span = span
        self._code_attribute = code_attribute
        self._context = set_span_in_context(span, Context())
        self._waits_since_ns = 0

    def arrived(self, model: str) -> None:
        self._span.set_attribute(_MODEL_ATTRIBUTE, model)
        self._waits_since_ns = time.time_ns()

    def stages(self, stages: Iterable[tuple[str, float]]) -> None:
        timed = [(name, int(seconds * 1e9)) for name, seconds in stages]
        ended_ns = time.time_ns()
        at_ns = ended_ns - sum(length_ns for _, length_ns in timed)
        for name, length_ns in timed:
            self._past(name, at_ns, at_ns + length_ns)
            at_ns += length_ns
        self._waits_since_ns = 0

    def engine(self, name: str) -> EngineSpan:
        now_ns = time.time_ns()
        if self._waits_since_ns:
            self._past("queue", self._waits_since_ns, now_ns)
            self._waits_since_ns = 0
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, start_time=now_ns)
        return _OtelEngineSpan(span, self._code_attribute)

    def end(self, name: str, *, code: int, is_error: bool) -> None:
        self._span.update_name(name)
        _end(self._span, self._code_attribute, code, is_error=is_error)

    def _past(self, name: str, started_ns: int, ended_ns: int) -> None:
        self._tracer.start_span(name, self._context, start_time=started_ns).end(ended_ns)


class _OtelEngineSpan:
    def __init__(self, span: Span, code_attribute: str) -> None:
        self._span = span
        self._code_attribute = code_attribute

    @property
    def headers(self) -> TraceHeaders:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(self._span, Context()))
        return tuple(carrier.items())

    def end(self, *, code: int | None = None, is_error: bool = False) -> None:
        _end(self._span, self._code_attribute, code, is_error=is_error)


def _end(span: Span, code_attribute: str, code: int | None, *, is_error: bool) -> None:
    if code is not None:
        span.set_attribute(code_attribute, code)
    if is_error:
        span.set_status(StatusCode.ERROR)
    span.end()
