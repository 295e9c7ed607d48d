"""Prepared requests that a locust user sends: pictures, v2 REST, gRPC and gRPC streams."""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import gevent
import gevent.queue
import grpc
import msgspec
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock_load.clients.client import Endpoint, TargetError, is_good, reason_of, short
from penstock_load.clients.grpc import CHANNEL_OPTIONS, GrpcMetadata, metadata_of
from penstock_load.clients.http import HttpRequest, binary_request, image_requests
from penstock_load.clients.payloads import InputSpec, make_grpc_request, make_pictures, make_tensors, read_pictures
from penstock_load.scenario import RequestSpec
from penstock_load.users.figures import HttpAnswer, HttpSession, RequestOutcome, RequestsError, UserConnection

# A server that compresses spends more on it than on inference.
PLAIN = {"Accept-Encoding": "identity"}


class HttpSender:
    """Posts requests in turn; each user begins with another."""

    def __init__(
        self,
        line: UserConnection,
        *,
        requests: Sequence[HttpRequest],
        complaint: Callable[[bytes], str],
        turn: "itertools.count[int]",
    ) -> None:
        """complaint: what is wrong with the body of a good status, else empty. turn: counts the users."""
        first = next(turn) % len(requests)
        self._requests = itertools.cycle((*requests[first:], *requests[:first]))
        self._complaint = complaint
        self._line = line
        self._headers = {**PLAIN, **dict(line.endpoint.headers)}

    def send(self, name: str) -> None:
        """One POST, one answer."""
        request = next(self._requests)
        began_s = time.perf_counter()
        headers = {**request.headers, **self._headers}
        answer = self._line.session.post(str(request.url), data=request.body, headers=headers)
        took_s = time.perf_counter() - began_s
        try:
            body = answer.content or b""
            failure = self._failure_of(answer, body)
        except FAILURE_EXCEPTIONS as error:
            body, failure = b"", without_figures(short(f"the answer broke off: {error}"))
        is_latency = not failure or took_s >= self._line.timeout_s
        self._line.tell(RequestOutcome("POST", name, took_s * 1000 if is_latency else None, len(body), failure))

    def close(self) -> None:
        """Nothing to do: the session is the user's."""

    def _failure_of(self, answer: HttpAnswer, body: bytes) -> str:
        if not answer.status_code:
            return without_figures(short(f"no answer: {getattr(answer, 'error', 'the connection ended')}"))
        if not is_good(answer.status_code):
            return f"{answer.status_code}: {without_figures(reason_of(body))}"
        return self._complaint(body)


def without_figures(reason: str) -> str:
    """The text with # for every number, so that one reason is one row of locust's statistics."""
    return re.sub(r"\d+(\.\d+)?", "#", reason)


GENERATED_COUNT = 8
SEED = 1


class _ImageAnswer(msgspec.Struct):
    results: list[msgspec.Raw]


_IMAGE_ANSWER = msgspec.json.Decoder(_ImageAnswer)


def prepare_image(ask: RequestSpec, endpoint: Endpoint, folder: str) -> Callable[[UserConnection], HttpSender]:
    """Askers that post the folder's pictures, or generated ones. Raises CannotAsk for a folder without any."""
    try:
        pictures = (
            read_pictures(Path(folder)) if folder else make_pictures(GENERATED_COUNT, seed=SEED, size=ask.picture_px)
        )
    except (ValueError, OSError) as error:
        raise RequestsError(f"--images: {error}") from None
    requests = image_requests(endpoint, ask.model, pictures, batch=ask.batch)
    return partial(HttpSender, requests=requests, complaint=_without_results, turn=itertools.count())


def _without_results(body: bytes) -> str:
    try:
        _IMAGE_ANSWER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return short(f"no results in {body[:100].decode(errors='replace')}")
    return ""


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]


class _Metadata(msgspec.Struct):
    inputs: tuple[_Input, ...]


def prepare_rest(ask: RequestSpec, endpoint: Endpoint, session: HttpSession) -> Callable[[UserConnection], HttpSender]:
    """Askers that send one seeded tensor an input again and again.

    Raises CannotAsk where the server knows no such model, or nothing here can fill its inputs.
    """
    url = f"{endpoint.http_url}/v2/models/{quote(ask.model, safe='')}"
    answer = session.get(url, headers=dict(endpoint.headers))
    if not is_good(answer.status_code):
        why = f"{answer.status_code} {reason_of(answer.content or b'')}" if answer.status_code else "no answer"
        raise RequestsError(f"{endpoint.http_url} says nothing of the model {ask.model}: {why}")
    try:
        metadata = msgspec.json.decode(answer.content or b"", type=_Metadata)
        specs = [InputSpec(one.name, one.datatype, one.shape) for one in metadata.inputs]
        tensors = make_tensors(specs, batch=ask.batch, sizes=ask.sizes, seed=SEED)
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestsError(f"model {ask.model}: {error}") from None
    requests = [binary_request(endpoint.http_url, ask.model, tensors)]
    return partial(HttpSender, requests=requests, complaint=_without_outputs, turn=itertools.count())


def _without_outputs(body: bytes) -> str:
    return "" if b'"outputs"' in body else short(f"no outputs in {body[:100].decode(errors='replace')}")


class GrpcSender:
    """Sends one seeded request again and again, over a connection of its own."""

    def __init__(self, line: UserConnection, *, request: service_pb2.ModelInferRequest) -> None:
        self._line = line
        self._request = request
        self._channel = open_channel(line.endpoint)
        self._headers = metadata_of(line.endpoint)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def send(self, name: str) -> None:
        """One ModelInfer; a status other than OK is a failure."""
        began_s = time.perf_counter()
        size_bytes, error = 0, None
        try:
            answer = self._stub.ModelInfer(self._request, timeout=self._line.timeout_s, metadata=self._headers)
            size_bytes = answer.ByteSize()
        except grpc.RpcError as raised:
            error = raised
        took_s = time.perf_counter() - began_s
        is_latency = error is None or took_s >= self._line.timeout_s
        failure = failure_of(error) if error else ""
        self._line.tell(RequestOutcome("gRPC", name, took_s * 1000 if is_latency else None, size_bytes, failure))

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


def prepare_grpc(ask: RequestSpec, endpoint: Endpoint, timeout_s: float) -> Callable[[UserConnection], GrpcSender]:
    """Askers for that model. Raises CannotAsk as `request_for` does."""
    return partial(GrpcSender, request=request_for(ask, endpoint, timeout_s))


def request_for(ask: RequestSpec, endpoint: Endpoint, timeout_s: float) -> service_pb2.ModelInferRequest:
    """What the model takes. Raises CannotAsk if it is unknown, or nothing here can fill its inputs."""
    with open_channel(endpoint) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            wanted = service_pb2.ModelMetadataRequest(name=ask.model)
            metadata = stub.ModelMetadata(wanted, timeout=timeout_s, metadata=metadata_of(endpoint))
            return make_grpc_request(metadata, batch=ask.batch, sizes=ask.sizes, seed=SEED)
        except grpc.RpcError as error:
            raise RequestsError(
                f"{endpoint.grpc_address} says nothing of the model {ask.model}: {reason(error)}"
            ) from None
        except TargetError as error:
            raise RequestsError(str(error)) from None
        except ValueError as error:
            raise RequestsError(f"model {ask.model}: {error}") from None


def open_channel(endpoint: Endpoint) -> grpc.Channel:
    """A connection of its own, with TLS where the endpoint's http_url has it."""
    if endpoint.http_url.startswith("https://"):
        return grpc.secure_channel(endpoint.grpc_address, grpc.ssl_channel_credentials(), options=CHANNEL_OPTIONS)
    return grpc.insecure_channel(endpoint.grpc_address, options=CHANNEL_OPTIONS)


def reason(error: grpc.RpcError) -> str:
    """Status and text, in one line."""
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    return short(f"{code().name}: {details()}") if code and details else short(str(error))


def failure_of(error: grpc.RpcError) -> str:
    """The reason as a row of locust's statistics."""
    return without_figures(reason(error))


END = "the server ended the stream"


class StreamSender:
    """Opens the stream with the first request, and again with the first one after it broke."""

    def __init__(self, line: UserConnection, *, request: service_pb2.ModelInferRequest) -> None:
        self._line = line
        self._request = request
        self._channel = open_channel(line.endpoint)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream: _UserStream | None = None

    def send(self, name: str) -> None:
        """One request; complete with its first response."""
        began_s = time.perf_counter()
        if self._stream is None:
            self._stream = _UserStream(self._stub, metadata_of(self._line.endpoint))
        failure, size_bytes = self._stream.ask(self._request, self._line.timeout_s)
        took_s = time.perf_counter() - began_s
        if failure:
            self._end_stream()
        is_latency = not failure or took_s >= self._line.timeout_s
        self._line.tell(RequestOutcome("gRPC stream", name, took_s * 1000 if is_latency else None, size_bytes, failure))

    def close(self) -> None:
        """Ends the stream and closes the connection."""
        self._end_stream()
        self._channel.close()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _UserStream:
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


def prepare_stream(ask: RequestSpec, endpoint: Endpoint, timeout_s: float) -> Callable[[UserConnection], StreamSender]:
    """Askers for that model. Raises CannotAsk where it is unknown, or nothing here can fill its inputs."""
    return partial(StreamSender, request=request_for(ask, endpoint, timeout_s))
