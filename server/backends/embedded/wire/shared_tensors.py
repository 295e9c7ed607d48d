"""Tensors that stand in shared memory: brought to a request, and taken from an answer."""

from dataclasses import replace

from server.backends.embedded.shared_regions import SharedRegions
from server.backends.wire.asks import InferAsk
from server.backends.wire.threads import in_thread
from server.core.infer import InferResponse
from server.core.tensor import Tensor

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
