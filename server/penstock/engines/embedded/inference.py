"""One inference in an engine in this process, for REST and gRPC, and the server metadata."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.concurrency import in_thread
from penstock.engines.embedded.shared_memory import SharedRegions, to_shared_outputs, with_shared_inputs
from penstock.engines.model_io import classified
from penstock.protocol.decoded_request import DecodedRequest
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.inference import InferRequest, InferResponse

NAME = "penstock-embedded"
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
NO_TRACE_SETTINGS = (
    "an engine in the gateway's process writes no traces, so it has no trace settings; start with --engine triton"
)
NO_LOG_SETTINGS = (
    "an engine in the gateway's process logs with the gateway, whose --log-level applies; start with --engine triton"
)


CONFIG_PARAMETER, FILE_PREFIX = "config", "file:"


_LEADING_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,40}", re.ASCII)
_VERSION_LIMIT = 2**63


class ServedModels(Protocol):
    """The models of an engine in this process. version: empty for the highest. Raises ModelNotFound, InvalidRequest."""

    regions: SharedRegions

    async def infer(self, request: InferRequest) -> InferResponse: ...

    async def ready(self, model_name: str = "", model_version: str = "") -> bool: ...

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata: ...

    async def repository_index(self) -> list[ModelState]: ...

    async def load(self, model_name: str, config_json: str | None = None) -> None: ...

    async def unload(self, model_name: str) -> None: ...

    def config_message(self, model_name: str, version: str = "") -> model_config_pb2.ModelConfig: ...

    def statistics(self, model_name: str = "", version: str = "") -> list[service_pb2.ModelStatistics]: ...

    def labels(self, model_name: str, version: str, output_name: str) -> tuple[str, ...]: ...


def version_number(version: str) -> int | None:
    """None for an empty text, else its leading number, as C++ parses it. Raises InvalidRequest with Triton's text."""
    if not version:
        return None
    wanted = "version should be an integral value > 0"
    leading = _LEADING_NUMBER.match(version)
    number = int(leading[0]) if leading is not None else _VERSION_LIMIT
    if abs(number) >= _VERSION_LIMIT:
        raise InvalidRequest(
            f"failed to get model version from specified version string '{version}' (details: stol), {wanted}"
        )
    if number < 0:
        raise InvalidRequest(f"invalid model version specified '{version}' , {wanted}")
    return number


async def infer(
    engine: ServedModels, ask: DecodedRequest, *, model: str, version: str, deadline: float | None
) -> InferResponse:
    """The engine's response, with classification of the requested outputs."""
    ask = await with_shared_inputs(engine.regions, ask)
    wanted = tuple(output.name for output in ask.outputs)
    request = InferRequest(model, ask.inputs, version, ask.id, wanted, deadline=deadline)
    if not any(output.classes for output in ask.outputs):
        return await to_shared_outputs(engine.regions, await engine.infer(request), ask)
    has_batch = engine.config_message(model, version).max_batch_size > 0  # it may be unloaded during the run
    labels = {output.name: engine.labels(model, version, output.name) for output in ask.outputs}
    response = await to_shared_outputs(engine.regions, await engine.infer(request), ask)
    return await in_thread(response_bytes(response), _with_classes, response, ask, labels, has_batch=has_batch)


def _with_classes(
    response: InferResponse, ask: DecodedRequest, labels: Mapping[str, tuple[str, ...]], *, has_batch: bool
) -> InferResponse:
    outputs = tuple(
        classified(tensor, classes=classes, labels=labels.get(tensor.name, ()), has_batch=has_batch)
        if (classes := ask.output(tensor.name).classes)
        else tensor
        for tensor in response.outputs
    )
    return replace(response, outputs=outputs)


def response_bytes(response: InferResponse) -> int:
    """Size of all output tensors."""
    return sum(tensor.data.nbytes for tensor in response.outputs)


def refuse_load_parameter(name: str) -> None:
    """Raises NotSupported for a file in a load request, InvalidRequest for other unknown parameters."""
    if name.startswith(FILE_PREFIX):
        raise NotSupported(
            f"an engine in the gateway's process loads no files from requests, such as {name!r}; put the file into a "
            "model repository, or start with --engine triton"
        )
    if name != CONFIG_PARAMETER:
        raise InvalidRequest(f"unrecognized load parameter '{name}'.")


def refuse_repository(name: str) -> None:
    """Raises NotSupported for a repository name, as Triton does."""
    if name:
        raise NotSupported("'repository_name' specification is not supported")
