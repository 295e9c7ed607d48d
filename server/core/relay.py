"""Calls that pass through as bytes."""

from dataclasses import dataclass

HttpHeaders = tuple[tuple[bytes, bytes], ...]
GrpcMetadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """target: path and query as they stood on the wire, neither decoded nor merged. Header names in lower case."""

    method: str
    target: bytes
    headers: HttpHeaders
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Hop-by-hop headers are gone, names in lower case; everything else is as the engine sent it."""

    status: int
    headers: HttpHeaders
    body: bytes


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """method: "/inference.GRPCInferenceService/ModelInfer". message: the request, serialised."""

    method: str
    message: bytes
    metadata: GrpcMetadata = ()


@dataclass(frozen=True, slots=True)
class GrpcAnswer:
    """code: grpc's status number, 0 for OK, where message is the response, serialised; else details says why."""

    code: int
    message: bytes = b""
    details: str = ""
    trailing_metadata: GrpcMetadata = ()


@dataclass(frozen=True, slots=True)
class InferHead:
    """What a shallow scan of a v2 inference request tells.

    timeout_us: the v2 parameter `timeout`, None where it is not given.
    """

    model_name: str
    model_version: str = ""
    request_id: str = ""
    timeout_us: int | None = None
