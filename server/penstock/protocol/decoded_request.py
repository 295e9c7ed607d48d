"""A decoded inference request, the same for HTTP and gRPC. Error messages are Triton's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.protocol.call import RegionUse
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Parameter, Tensor

RESERVED_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output. classes: 0 for the tensor. is_binary: as raw bytes. region: shared memory for it."""

    name: str
    classes: int = 0
    is_binary: bool = False
    region: RegionUse | None = None


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A decoded request. outputs: empty for all. is_binary: default form of outputs (REST).

    shared: shared memory of the inputs by name; their tensors are empty. raw: body of a raw binary request.
    """

    id: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...]
    is_binary: bool = False
    raw: memoryview | None = None
    shared: Mapping[str, RegionUse] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def output(self, name: str) -> RequestedOutput:
        """How this output is requested."""
        return next((ask for ask in self.outputs if ask.name == name), RequestedOutput(name, is_binary=self.is_binary))


def parse_error(name: str, reason: str) -> InvalidRequest:
    """The error for a member of the wrong type, with Triton's message."""
    return InvalidRequest(f"Unable to parse '{name}': {reason}")


REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def http_region(parameters: Mapping[str, Parameter]) -> RegionUse | None:
    """The shared memory in a tensor's JSON parameters. Raises InvalidRequest with Triton's message."""
    name = parameters.get(REGION)
    if name is None:
        return None
    if not isinstance(name, str):
        raise parse_error(REGION, "attempt to access JSON non-string as string")
    return RegionUse(name, _unsigned(parameters, OFFSET), _unsigned(parameters, SIZE))


def grpc_region(tensor_name: str, parameters: Mapping[str, Parameter]) -> RegionUse | None:
    """The shared memory in a tensor's gRPC parameters. Raises InvalidRequest with Triton's message."""
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
        raise parse_error(key, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
