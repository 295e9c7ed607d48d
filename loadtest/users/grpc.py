"""Users of the tensor path: one ModelInfer a request over gRPC, shaped by the model's own metadata."""

import time
from urllib.parse import urlsplit

import grpc
import numpy as np
from locust import User, constant, task
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import triton_to_np_dtype

from loadtest.payloads import make_pictures, make_raw_tensor

SEED = 1
FREE_DIMENSION = 256
TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = (1 << 31) - 1
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection a user, as users on many machines would have
]


class GrpcUser(User):  # type: ignore[misc]  # locust is not type-checked here
    """Sends one seeded tensor again and again; the batch is 1 and a free dimension is 256."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Connects, and asks the model for its inputs."""
        options = self.environment.parsed_options
        address = options.grpc or default_address(self.host or "")
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        metadata = self.stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=options.model), timeout=TIMEOUT_S)
        self.request = make_request(metadata)

    def on_stop(self) -> None:
        """Closes the connection."""
        self.channel.close()

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """One tensor, one answer; a status other than OK counts as a failure."""
        started = time.perf_counter()
        failure: grpc.RpcError | None = None
        size_bytes = 0
        try:
            size_bytes = self.stub.ModelInfer(self.request, timeout=TIMEOUT_S).ByteSize()
        except grpc.RpcError as error:
            failure = error
        self.environment.events.request.fire(
            request_type="grpc",
            name=f"ModelInfer {self.request.model_name}",
            response_time=(time.perf_counter() - started) * 1000,
            response_length=size_bytes,
            exception=failure,
            context={},
        )


def default_address(host: str) -> str:
    """host:port of gRPC, which is one above that of --host."""
    url = urlsplit(host)
    return f"{url.hostname}:{(url.port or 80) + 1}"


def make_request(metadata: service_pb2.ModelMetadataResponse) -> service_pb2.ModelInferRequest:
    """A request with every input of the model, filled from the seed. A BYTES element is a small JPEG."""
    request = service_pb2.ModelInferRequest(model_name=metadata.name)
    for tensor in metadata.inputs:
        shape = [(1 if axis == 0 else FREE_DIMENSION) if size < 0 else size for axis, size in enumerate(tensor.shape)]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(_fill(tensor.datatype, shape))
    return request


def _fill(datatype: str, shape: list[int]) -> bytes:
    if datatype == "BYTES":
        jpeg = make_pictures(1, seed=SEED, size=(64, 48))[0].content
        return (len(jpeg).to_bytes(4, "little") + jpeg) * int(np.prod(shape))
    return make_raw_tensor(shape, triton_to_np_dtype(datatype), seed=SEED)
