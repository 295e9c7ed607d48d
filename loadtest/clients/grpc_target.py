"""A target's word over gRPC: a model's metadata and configuration, the repository index."""

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from loadtest.clients.client import Endpoint, TargetError
from loadtest.clients.grpc_port import SERVICE, metadata_of
from loadtest.clients.replies import short
from loadtest.clients.target import IndexedModel, ModelFace, no_model, nothing_answers, ready_names
from loadtest.clients.tensors import InputSpec


class GrpcTarget:
    """Asks over a channel that others use, too."""

    def __init__(self, channel: grpc.aio.Channel, endpoint: Endpoint, timeout_s: float) -> None:
        self._channel = channel
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def model(self, name: str) -> ModelFace:
        """The model's inputs and outputs. Raises TargetError where nothing answers or it is not served."""
        message = service_pb2.ModelMetadataRequest(name=name).SerializeToString()
        try:
            told = service_pb2.ModelMetadataResponse.FromString(await self._ask("ModelMetadata", message))
        except grpc.aio.AioRpcError as error:
            raise TargetError(await self._why_no_model(name, error)) from error
        except DecodeError:
            where = f"gRPC at {self._endpoint.grpc_address}"
            raise TargetError(f"{where} is no KServe v2 server (ModelMetadata answered something else)") from None
        inputs = tuple(InputSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in told.inputs)
        return ModelFace(inputs, frozenset(tensor.name for tensor in told.outputs), await self._is_decoupled(name))

    async def models(self) -> tuple[str, ...]:
        """The ready models' names; none where the server has no repository index."""
        try:
            answer = await self._ask("RepositoryIndex", b"")
        except grpc.aio.AioRpcError:
            return ()
        index = service_pb2.RepositoryIndexResponse.FromString(answer)
        return ready_names(IndexedModel(model.name, model.state) for model in index.models)

    async def _is_decoupled(self, name: str) -> bool:
        try:
            answer = await self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=name).SerializeToString())
        except grpc.aio.AioRpcError:
            return False  # a server without the extension has no such models either
        return bool(service_pb2.ModelConfigResponse.FromString(answer).config.model_transaction_policy.decoupled)

    async def _ask(self, method: str, message: bytes) -> bytes:
        call = self._channel.unary_unary(f"{SERVICE}/{method}", None, None)
        answer: bytes = await call(message, timeout=self._timeout_s, metadata=metadata_of(self._endpoint))
        return answer

    async def _why_no_model(self, name: str, error: grpc.aio.AioRpcError) -> str:
        where = f"gRPC at {self._endpoint.grpc_address}"
        told = f"{error.code().name}: {short(error.details() or '')}"
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return nothing_answers(where, told)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return nothing_answers(where, f"it took longer than {self._timeout_s:g} s")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"{where} is no KServe v2 server (ModelMetadata answered {told})"
        return no_model(where, name, await self.models(), told)
