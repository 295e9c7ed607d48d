"""System shared memory of the embedded engine: registered regions, shared inputs and shared outputs."""

from dataclasses import dataclass, replace

from penstock.engines.concurrency import in_thread
from penstock.engines.segments import OpenedSegment, open_segment
from penstock.protocol.call import RegionUse
from penstock.protocol.decoded_request import DecodedRequest
from penstock.protocol.errors import EngineFailed, InvalidRequest, RegionNotFound, RegionTaken
from penstock.protocol.inference import InferResponse, Tensor


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """size_bytes of the segment `key`, from offset on."""

    name: str
    key: str
    offset: int
    size_bytes: int
    segment: OpenedSegment


class SharedRegions:
    """The registered regions by name, with Triton's error texts. Unregister a region only when no request uses it."""

    def __init__(self) -> None:
        self._regions: dict[str, SharedRegion] = {}

    def register(self, name: str, key: str, *, offset: int, size_bytes: int) -> None:
        """Raises RegionTaken, InvalidRequest; EngineFailed if the segment does not exist."""
        if name in self._regions:
            raise RegionTaken(f"shared memory region '{name}' already in manager")
        segment_name = key.lstrip("/")
        if not segment_name or "/" in segment_name:
            raise EngineFailed(f"Unable to open shared memory region: '{key}'")
        try:
            segment = open_segment(segment_name)
        except OSError as error:
            raise EngineFailed(f"Unable to open shared memory region: '{key}'") from error
        if size_bytes <= 0 or offset < 0 or offset + size_bytes > segment.size_bytes():
            segment.close()
            raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
        self._regions[name] = SharedRegion(name, key, offset, size_bytes, segment)

    def unregister(self, name: str = "") -> None:
        """Removes the region if it exists, or all without a name."""
        for known in [name] if name else list(self._regions):
            region = self._regions.pop(known, None)
            if region is not None:
                region.segment.close()

    def listed(self, name: str = "") -> list[SharedRegion]:
        """The region of that name, or all by name. Raises RegionNotFound."""
        if not name:
            return [self._regions[known] for known in sorted(self._regions)]
        if name not in self._regions:
            raise RegionNotFound(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name]]

    def check(self, use: RegionUse) -> None:
        """Raises RegionNotFound; InvalidRequest for a part outside of the region."""
        self._find(use)

    def read(self, use: RegionUse) -> memoryview:
        """A copy of that part. Raises as check(), and InvalidRequest if the segment was truncated."""
        region, size_bytes = self._find(use)
        found = region.segment.read(region.offset + use.offset, size_bytes)
        if len(found) < size_bytes:
            raise _truncated_segment(use.name, size_bytes, len(found))
        return memoryview(found)

    def write(self, use: RegionUse, content: memoryview, *, output_name: str) -> None:
        """Raises as check(), and EngineFailed if the part is too small or the segment was truncated."""
        region, size_bytes = self._find(use)
        if content.nbytes > size_bytes:
            raise EngineFailed(
                f"shared memory size specified with the request for output '{output_name}' ({size_bytes} bytes) "
                f"should be at least {content.nbytes} bytes to hold the results"
            )
        there = region.segment.size_bytes() - region.offset - use.offset
        if there < content.nbytes:
            raise _truncated_segment(use.name, content.nbytes, max(0, there))
        region.segment.write(region.offset + use.offset, content)

    def _find(self, use: RegionUse) -> tuple[SharedRegion, int]:
        region = self._regions.get(use.name)
        if region is None:
            raise RegionNotFound(f"Unable to find shared memory region: '{use.name}'")
        if not 0 <= use.offset < region.size_bytes:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{use.name}'")
        size_bytes = use.size_bytes or 0
        if not 0 < size_bytes <= region.size_bytes - use.offset:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{use.name}'")
        return region, size_bytes


def _truncated_segment(name: str, wanted: int, there: int) -> InvalidRequest:
    return InvalidRequest(
        f"{wanted} bytes of shared memory region '{name}' are meant, but its segment was cut and has {there} of them; "
        "unregister it, and register what there is"
    )


_NO_BYTES = memoryview(b"")


async def with_shared_inputs(regions: SharedRegions, ask: DecodedRequest) -> DecodedRequest:
    """The request with its shared inputs' bytes; also checks outputs. Raises RegionNotFound, InvalidRequest."""
    for output in ask.outputs:
        if output.region is not None:
            regions.check(output.region)
    if not ask.shared:
        return ask
    size_bytes = sum(use.size_bytes or 0 for use in ask.shared.values())
    return await in_thread(size_bytes, _with_inputs, regions, ask)


async def to_shared_outputs(regions: SharedRegions, response: InferResponse, ask: DecodedRequest) -> InferResponse:
    """The response without the outputs that were written to regions."""
    if all(output.region is None for output in ask.outputs):
        return response
    size_bytes = sum(tensor.data.nbytes for tensor in response.outputs)
    return await in_thread(size_bytes, _without_outputs, regions, response, ask)


def _with_inputs(regions: SharedRegions, ask: DecodedRequest) -> DecodedRequest:
    inputs = (
        replace(tensor, data=regions.read(ask.shared[tensor.name])) if tensor.name in ask.shared else tensor
        for tensor in ask.inputs
    )
    return replace(ask, inputs=tuple(inputs))


def _without_outputs(regions: SharedRegions, response: InferResponse, ask: DecodedRequest) -> InferResponse:
    return replace(response, outputs=tuple(_written(regions, tensor, ask) for tensor in response.outputs))


def _written(regions: SharedRegions, tensor: Tensor, ask: DecodedRequest) -> Tensor:
    region = ask.output(tensor.name).region
    if region is None:
        return tensor
    regions.write(region, tensor.data, output_name=tensor.name)
    return replace(tensor, data=_NO_BYTES)
