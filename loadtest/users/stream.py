"""v2 tensors over one long bidirectional gRPC stream a user (ModelStreamInfer), one request on its way at a time."""

import time
from collections.abc import Callable
from functools import partial

import gevent
import gevent.queue
import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.clients.client import Endpoint
from loadtest.clients.grpc_port import GrpcMetadata, metadata_of
from loadtest.clients.replies import short
from loadtest.scenario import Ask
from loadtest.users.grpc import failure_of, open_channel, request_for
from loadtest.users.http import without_figures
from loadtest.users.terms import Line, Outcome

END = "the server ended the stream"


class StreamAsker:
    """Opens the stream with the first request, and again with the first one after it broke."""

    def __init__(self, line: Line, *, request: service_pb2.ModelInferRequest) -> None:
        self._line = line
        self._request = request
        self._channel = open_channel(line.endpoint)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream: _Stream | None = None

    def send(self, name: str) -> None:
        """One request; complete with its first response."""
        began_s = time.perf_counter()
        if self._stream is None:
            self._stream = _Stream(self._stub, metadata_of(self._line.endpoint))
        failure, size_bytes = self._stream.ask(self._request, self._line.timeout_s)
        took_s = time.perf_counter() - began_s
        if failure:
            self._end_stream()
        is_latency = not failure or took_s >= self._line.timeout_s
        self._line.tell(Outcome("gRPC stream", name, took_s * 1000 if is_latency else None, size_bytes, failure))

    def close(self) -> None:
        """Ends the stream and closes the connection."""
        self._end_stream()
        self._channel.close()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Stream:
    """One call of ModelStreamInfer. A greenlet reads, so that a silent server can be given up on."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, headers: GrpcMetadata) -> None:
        self._outgoing: gevent.queue.Queue = gevent.queue.Queue(1)
        self._incoming: gevent.queue.Queue = gevent.queue.Queue(1)
        self._call = stub.ModelStreamInfer(iter(self._outgoing.get, None), metadata=headers)
        self._reader = gevent.spawn(self._read)

    def ask(self, request: service_pb2.ModelInferRequest, timeout_s: float) -> tuple[str, int]:
        """What went wrong, else empty, and the size of the answer in bytes."""
        try:
            with gevent.Timeout(timeout_s):
                self._outgoing.put(request)
                answer = self._incoming.get()
        except gevent.Timeout:
            return f"no answer within {timeout_s:g} s", 0
        if isinstance(answer, str):
            return answer, 0
        return without_figures(short(answer.error_message)), answer.ByteSize()

    def close(self) -> None:
        """Cancels the call."""
        self._call.cancel()
        self._reader.kill()
        if self._outgoing.empty():
            self._outgoing.put(None)  # gRPC's own reader of requests ends with it

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._incoming.put(answer)
            self._incoming.put(END)
        except grpc.RpcError as error:
            self._incoming.put(failure_of(error))


def prepare(ask: Ask, endpoint: Endpoint, timeout_s: float) -> Callable[[Line], StreamAsker]:
    """Askers for that model. Raises CannotAsk where it is unknown, or nothing here can fill its inputs."""
    return partial(StreamAsker, request=request_for(ask, endpoint, timeout_s))
