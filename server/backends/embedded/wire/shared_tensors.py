"""Tensors that stand in shared memory: brought to a request, and taken from an answer."""

from collections.abc import Mapping
from dataclasses import replace

from server.backends.embedded.shared_regions import SharedRegions
from server.backends.embedded.wire.asks import InferAsk, unreadable
from server.backends.embedded.wire.threads import in_thread
from server.core.errors import InvalidRequest
from server.core.infer import InferResponse, Parameter
from server.core.relay import RegionUse
from server.core.tensor import Tensor

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_NOTHING = memoryview(b"")


async def with_shared_inputs(regions: SharedRegions, ask: InferAsk) -> InferAsk:
    """The ask with the bytes of its shared inputs in place; its outputs' regions can take something.

    Raises RegionNotFound, InvalidRequest.
    """
    for output in ask.outputs:
        if output.region is not None:
            regions.check(output.region)
    if not ask.shared:
        return ask
    size_bytes = sum(use.size_bytes or 0 for use in ask.shared.values())
    return await in_thread(size_bytes, _filled, regions, ask)


async def to_shared_outputs(regions: SharedRegions, response: InferResponse, ask: InferAsk) -> InferResponse:
    """The response without the bytes of the outputs that were written to regions."""
    if all(output.region is None for output in ask.outputs):
        return response
    size_bytes = sum(tensor.data.nbytes for tensor in response.outputs)
    return await in_thread(size_bytes, _emptied, regions, response, ask)


def http_region(parameters: Mapping[str, Parameter]) -> RegionUse | None:
    """What a tensor's JSON parameters say of it. Raises InvalidRequest, in Triton's words."""
    name = parameters.get(REGION)
    if name is None:
        return None
    if not isinstance(name, str):
        raise unreadable(REGION, "attempt to access JSON non-string as string")
    return RegionUse(name, _unsigned(parameters, OFFSET), _unsigned(parameters, SIZE))


def grpc_region(tensor_name: str, parameters: Mapping[str, Parameter]) -> RegionUse | None:
    """What a tensor's parameters in a ModelInferRequest say of it. Raises InvalidRequest, in Triton's words."""
    if REGION in parameters and SIZE not in parameters:
        raise InvalidRequest(f"'{SIZE}' must be specified along with '{REGION}' parameter for tensor '{tensor_name}'")
    if REGION not in parameters:
        if SIZE in parameters:
            raise InvalidRequest(
                f"'{SIZE}' can not be specified without '{REGION}' parameter for tensor '{tensor_name}'"
            )
        return None
    for key, kind, word in ((REGION, str, "string_param"), (OFFSET, int, "int64_param"), (SIZE, int, "int64_param")):
        if key in parameters and type(parameters[key]) is not kind:
            raise InvalidRequest(
                f"invalid value type for '{key}' parameter for tensor '{tensor_name}', expected {word}."
            )
    return RegionUse(str(parameters[REGION]), int(parameters.get(OFFSET, 0)), int(parameters[SIZE]))


def _unsigned(parameters: Mapping[str, Parameter], key: str) -> int:
    value = parameters.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise unreadable(key, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def _filled(regions: SharedRegions, ask: InferAsk) -> InferAsk:
    inputs = (
        replace(tensor, data=regions.read(ask.shared[tensor.name])) if tensor.name in ask.shared else tensor
        for tensor in ask.inputs
    )
    return replace(ask, inputs=tuple(inputs))


def _emptied(regions: SharedRegions, response: InferResponse, ask: InferAsk) -> InferResponse:
    return replace(response, outputs=tuple(_sent(regions, tensor, ask) for tensor in response.outputs))


def _sent(regions: SharedRegions, tensor: Tensor, ask: InferAsk) -> Tensor:
    region = ask.output(tensor.name).region
    if region is None:
        return tensor
    regions.write(region, tensor.data, output_name=tensor.name)
    return replace(tensor, data=_NOTHING)
