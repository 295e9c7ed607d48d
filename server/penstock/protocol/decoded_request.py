"""A decoded inference request, the same for HTTP and gRPC: inputs, requested outputs, shared-memory references.

Error texts are Triton's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.protocol.call import RegionUse
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Parameter, Tensor

RESERVED_PREFIX = "triton_"


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A wanted output. classes: of the classification extension, 0 for the tensor itself. is_binary: as raw bytes.

    region: where it goes instead of into the answer.
    """

    name: str
    classes: int = 0
    is_binary: bool = False
    region: RegionUse | None = None


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """outputs: empty for all of the model's. is_binary: the form of outputs that are not requested by name (REST).

    shared: where the inputs of these names stand; they have no bytes until those are brought.
    raw: the body of a raw binary request, whose one input the model's config describes; inputs is empty then.
    parameters: of the request.
    """

    id: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...]
    is_binary: bool = False
    raw: memoryview | None = None
    shared: Mapping[str, RegionUse] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def output(self, name: str) -> RequestedOutput:
        """What is asked of that output."""
        return next((ask for ask in self.outputs if ask.name == name), RequestedOutput(name, is_binary=self.is_binary))


def parse_error(name: str, reason: str) -> InvalidRequest:
    """The error for a member of the wrong kind, in Triton's words."""
    return InvalidRequest(f"Unable to parse '{name}': {reason}")


REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


def http_region(parameters: Mapping[str, Parameter]) -> RegionUse | None:
    """What a tensor's JSON parameters say of it. Raises InvalidRequest, in Triton's words."""
    name = parameters.get(REGION)
    if name is None:
        return None
    if not isinstance(name, str):
        raise parse_error(REGION, "attempt to access JSON non-string as string")
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
        raise parse_error(key, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
