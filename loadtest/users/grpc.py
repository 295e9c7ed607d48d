"""v2 tensors over gRPC, one ModelInfer a request, shaped by the model's own metadata."""

import time
from collections.abc import Callable
from functools import partial

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.clients.client import Endpoint, TargetError
from loadtest.clients.grpc_port import CHANNEL_OPTIONS, metadata_of
from loadtest.clients.replies import short
from loadtest.clients.tensors import make_grpc_request
from loadtest.scenario import Ask
from loadtest.users.http import without_figures
from loadtest.users.terms import CannotAsk, Line, Outcome

SEED = 1


class GrpcAsker:
    """Sends one seeded request again and again, over a connection of its own."""

    def __init__(self, line: Line, *, request: service_pb2.ModelInferRequest) -> None:
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
        self._line.tell(Outcome("gRPC", name, took_s * 1000 if is_latency else None, size_bytes, failure))

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


def prepare(ask: Ask, endpoint: Endpoint, timeout_s: float) -> Callable[[Line], GrpcAsker]:
    """Askers for that model. Raises CannotAsk as `request_for` does."""
    return partial(GrpcAsker, request=request_for(ask, endpoint, timeout_s))


def request_for(ask: Ask, endpoint: Endpoint, timeout_s: float) -> service_pb2.ModelInferRequest:
    """What the model takes. Raises CannotAsk where nobody knows it, or nothing here can fill its inputs."""
    with open_channel(endpoint) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            wanted = service_pb2.ModelMetadataRequest(name=ask.model)
            metadata = stub.ModelMetadata(wanted, timeout=timeout_s, metadata=metadata_of(endpoint))
            return make_grpc_request(metadata, batch=ask.batch, sizes=ask.sizes, seed=SEED)
        except grpc.RpcError as error:
            raise CannotAsk(f"{endpoint.grpc_address} says nothing of the model {ask.model}: {reason(error)}") from None
        except TargetError as error:
            raise CannotAsk(str(error)) from None
        except ValueError as error:
            raise CannotAsk(f"model {ask.model}: {error}") from None


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
