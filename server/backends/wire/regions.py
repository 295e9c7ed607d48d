"""What a tensor's parameters say of the shared memory that it stands in."""

from collections.abc import Mapping

from server.backends.wire.asks import unreadable
from server.core.errors import InvalidRequest
from server.core.infer import Parameter
from server.core.relay import RegionUse

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


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
