"""A Triton of our own, where nobody but us decides who may load."""

import asyncio

from tritonclient.grpc import service_pb2

from server.backends.disk_loads import DiskLoads
from server.backends.patience import Patience
from server.backends.quiet_loads import as_http, quiet_load
from server.backends.retry_budget import RetryBudget
from server.backends.triton import TritonBackend
from server.core.relay import GrpcCall, HttpAnswer, HttpCall


class OwnTriton(TritonBackend):
    """The Triton that the stack started. Loads over HTTP and gRPC take the same path.

    That is not possible for a Triton given by URL, whose two ports may have different access rules. A plain load serves
    the files on disk. disk: our repositories; None to pass every load to Triton unchanged.
    """

    def __init__(  # noqa: PLR0913 - TritonBackend's, and the disk
        self,
        *,
        http_url: str,
        grpc_address: str,
        max_connections: int,
        metrics_url: str | None = None,
        patience: Patience | None = None,
        budget: RetryBudget | None = None,
        disk: DiskLoads | None = None,
    ) -> None:
        super().__init__(
            http_url=http_url,
            grpc_address=grpc_address,
            max_connections=max_connections,
            metrics_url=metrics_url,
            patience=patience,
            budget=budget,
        )
        self._disk = disk
        self._overridden: set[str] = set()

    async def http(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        if (load := quiet_load(call)) is not None:
            return as_http(await self.grpc(load, deadline=deadline))
        return await super().http(call, deadline=deadline)

    async def _load_call(self, call: GrpcCall) -> GrpcCall:
        question = service_pb2.RepositoryModelLoadRequest.FromString(call.message)
        if "config" in question.parameters:
            self._overridden.add(question.model_name)
        if question.parameters:
            return call
        question = await self._load_question(question.model_name)
        return GrpcCall(call.method, question.SerializeToString(), call.metadata)

    async def _load_question(self, model_name: str) -> "service_pb2.RepositoryModelLoadRequest":
        question = await super()._load_question(model_name)
        if self._disk is None:
            return question
        is_overridden = model_name in self._overridden
        if config := await asyncio.to_thread(self._disk.config_for, model_name, is_overridden=is_overridden):
            question.parameters["config"].string_param = config
        return question
