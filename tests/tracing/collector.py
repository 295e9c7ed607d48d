"""An OTLP/HTTP receiver of a few lines, and the spans that it got."""

import base64
import gzip
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_IDS = re.compile(rb'("(?:traceId|spanId|parentSpanId)"\s*:\s*")([0-9a-fA-F]+)"')


@dataclass(frozen=True)
class Got:
    """A span as the collector has it: ids in hex, times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int
    is_error: bool
    attributes: dict[str, int | str]
    service: str


@dataclass
class Collector:
    """status: what it answers; holds: it answers nothing until released."""

    url: str = ""
    status: int = 200
    spans: list[Got] = field(default_factory=list)
    requests: int = 0
    holds: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def of_trace(self, trace_id: str, count: int, timeout_s: float = 20.0) -> list[Got]:
        """That trace's spans in the order of their beginnings, waited for."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            found = [span for span in list(self.spans) if span.trace_id == trace_id]
            if len(found) >= count:
                return sorted(found, key=lambda span: (span.started_ns, -span.ended_ns))
            time.sleep(0.02)
        raise AssertionError(f"{[span.name for span in self.spans if span.trace_id == trace_id]} within {timeout_s} s")


@contextmanager
def collecting(*, holds: bool = False, status: int = 200) -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector(holds=holds, status=status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests += 1
            if collector.holds:
                collector.released.wait(30)
            elif collector.status == 200:
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                is_json = self.headers.get("content-type", "").startswith("application/json")
                message = _from_json(body) if is_json else ExportTraceServiceRequest.FromString(body)
                collector.spans += _spans(message)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the tests' output is for tests."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.released.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    """As Triton sends it. OTLP's JSON has ids in hex, where protobuf's own has base64."""
    message: ExportTraceServiceRequest = Parse(
        _IDS.sub(_as_base64, body), ExportTraceServiceRequest(), ignore_unknown_fields=True
    )
    return message


def _as_base64(found: re.Match[bytes]) -> bytes:
    return found[1] + base64.b64encode(bytes.fromhex(found[2].decode())) + b'"'


def _spans(message: ExportTraceServiceRequest) -> Iterator[Got]:
    for resource in message.resource_spans:
        service = next(item.value.string_value for item in resource.resource.attributes if item.key == "service.name")
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Got(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == 2,
                    {item.key: item.value.int_value or item.value.string_value for item in span.attributes},
                    service,
                )
