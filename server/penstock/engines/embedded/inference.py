"""One inference in the embedded engine, for REST and gRPC, and the server metadata."""

from collections.abc import Mapping
from dataclasses import replace

from penstock.engines.concurrency import in_thread
from penstock.engines.embedded.models import ModelStore
from penstock.engines.embedded.shared_memory import to_shared_outputs, with_shared_inputs
from penstock.engines.model_io import classified
from penstock.protocol.decoded_request import DecodedRequest
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
NO_TRACE_SETTINGS = "the embedded engine writes no traces, so it has no trace settings; start with --engine triton"
NO_LOG_SETTINGS = "the embedded engine logs with the gateway, whose --log-level holds; start with --engine triton"


CONFIG_PARAMETER, FILE_PREFIX = "config", "file:"


async def infer(
    engine: ModelStore, ask: DecodedRequest, *, model: str, version: str, deadline: float | None
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
            f"the embedded engine loads models from its repository only, not {name!r} that came with the load; "
            "put the file there, or start with --engine triton"
        )
    if name != CONFIG_PARAMETER:
        raise InvalidRequest(f"unrecognized load parameter '{name}'.")


def refuse_repository(name: str) -> None:
    """Raises NotSupported for a repository name, as Triton does."""
    if name:
        raise NotSupported("'repository_name' specification is not supported")
