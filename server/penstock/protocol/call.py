"""Calls that are relayed as bytes, with the parsed head of an inference, and the headers that are relayed with them."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

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
class HttpStream:
    """An answer that comes in pieces. Its headers are as an HttpAnswer's.

    chunks: the body's bytes as they arrive, once; aclose() it where it is not read to its end.
    """

    status: int
    headers: HttpHeaders
    chunks: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class RegionUse:
    """A tensor of a request that stands in shared memory.

    offset, size_bytes: of the tensor within the region, as the request says; they may be any number, negative too.
    size_bytes is None if the request gives no number, for which the engine has its own error.
    """

    name: str
    offset: int = 0
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class InferHead:
    """What a shallow scan of a v2 inference request tells.

    timeout_us: the v2 parameter `timeout`, None if absent.
    regions: which parts of shared memory its inputs and outputs stand in.
    bytes_inputs: names of the inputs that are sent as BYTES, which for an image model may be encoded images.
    rowless_input: the name of an input whose first dimension is 0; empty if there is none.
    sequence: the request's sequence ID, 0 or "" for no sequence; None if the parameter is absent.
    json_bytes: size of the JSON that the engine must parse, decompressed; 0 over gRPC.
    """

    model_name: str
    model_version: str = ""
    request_id: str = ""
    timeout_us: int | None = None
    regions: tuple[RegionUse, ...] = ()
    bytes_inputs: tuple[str, ...] = ()
    rowless_input: str = ""
    sequence: int | str | None = None
    json_bytes: int = field(default=0, compare=False)


HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Of a request that is sent on whole: the next connection says these for itself.
CONNECTION_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


def end_to_end(headers: HttpHeaders, dropped: frozenset[bytes]) -> HttpHeaders:
    """The headers, names in lower case, without the dropped ones and those that `connection` names."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = [token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")]
    gone = dropped.union(named) if named else dropped
    return tuple([header for header in lowered if header[0] not in gone])
