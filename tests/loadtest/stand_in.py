"""A gateway's stand-in for the load test's own tests: it answers the image endpoint and two gRPC calls."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass
class StandIn:
    """Where it listens, how it answers, and what came in."""

    http_url: str = ""
    grpc_address: str = ""
    image_status: int = 200
    image_delay_s: float = 0.0
    waiting: int = 0  # pictures that are not answered yet
    most_waiting: int = 0
    image_body: dict[str, object] = field(default_factory=lambda: {"results": [{"detections": []}]})
    images: list[tuple[str, str | None, bytes]] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)  # monotonic seconds of `images`
    tensors: list[service_pb2.ModelInferRequest] = field(default_factory=list)
    keys: set[tuple[str, str | None]] = field(default_factory=set)  # what was asked, and with which API key


@contextmanager
def running_stand_in() -> Iterator[StandIn]:
    """A stand-in on ephemeral ports, ended with the block."""
    stand_in = StandIn()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(stand_in))
    http.daemon_threads = True
    stand_in.http_url = f"http://127.0.0.1:{http.server_port}"
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(stand_in), server)
    stand_in.grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield stand_in
    finally:
        server.stop(None).wait()
        http.shutdown()
        thread.join()
        http.server_close()


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A model `m` with one FP32 input of [-1, 2, -1]."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def _note_key(self, call, context):
        self._stand_in.keys.add((call, dict(context.invocation_metadata()).get("x-api-key")))

    def ModelStreamInfer(self, requests, context):
        self._note_key("stream", context)
        for request in requests:
            answer = service_pb2.ModelInferResponse(model_name=request.model_name)
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)

    def ModelMetadata(self, request, context):
        self._note_key("metadata", context)
        answer = service_pb2.ModelMetadataResponse(name=request.name)
        answer.inputs.add(name="x", datatype="FP32", shape=[-1, 2, -1])
        return answer

    def ModelInfer(self, request, context):
        self._note_key("infer", context)
        self._stand_in.tensors.append(request)
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is down")
        return service_pb2.ModelInferResponse(model_name=request.model_name)


def _handler_of(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            stand_in.images.append((self.path, self.headers["content-type"], content))
            stand_in.arrived_at.append(time.monotonic())
            stand_in.keys.add((self.path.rpartition("/")[2], self.headers["x-api-key"]))
            stand_in.waiting += 1
            stand_in.most_waiting = max(stand_in.most_waiting, stand_in.waiting)
            time.sleep(stand_in.image_delay_s)
            stand_in.waiting -= 1
            self._answer(json.dumps(stand_in.image_body).encode())

        def do_GET(self) -> None:
            stand_in.keys.add(("model", self.headers["x-api-key"]))
            inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
            about = {"name": "stand-in", "extensions": ["binary_tensor_data"], "inputs": inputs, "outputs": []}
            self._answer(json.dumps(about).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(stand_in.image_status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the load would fill the test's output."""

    return Handler
