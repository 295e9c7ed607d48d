"""Calls relayed as bytes, the parsed head of an inference, and the headers that are relayed."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar

HttpHeaders = tuple[tuple[bytes, bytes], ...]
GrpcMetadata = tuple[tuple[str, str | bytes], ...]


# Whether a model succeeded, by the response's status. gRPC: OK; UNKNOWN, INTERNAL.
_HTTP_SUCCESS, _GRPC_SUCCESS = {200: True, 500: False}, {0: True, 2: False, 13: False}
# UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS.
GRPC_FAULTS = frozenset((2, 4, 12, 13, 14, 15))
MIN_HTTP_FAULT, _HTTP_NOT_FOUND, _GRPC_NOT_FOUND = 500, 404, 5


class Answer(ABC):
    """The engine's response as bytes."""

    __slots__ = ()

    @property
    @abstractmethod
    def status_code(self) -> int:
        """The HTTP status, or the number of the gRPC status code."""

    @property
    @abstractmethod
    def succeeded(self) -> bool | None:
        """Whether the model succeeded; None if the engine rejected the call, which says nothing about the model."""

    @property
    @abstractmethod
    def is_fault(self) -> bool:
        """Whether the status is an error of the server, not of the client."""

    @property
    @abstractmethod
    def not_found_text(self) -> str:
        """The engine's message if something was not found; empty otherwise."""

    @abstractmethod
    def with_header(self, name: str, value: str) -> Self:
        """The response with one more header (gRPC: trailing metadata); unchanged if it has one, or is an error."""


A = TypeVar("A", bound=Answer)


class Call(ABC, Generic[A]):
    """A request as bytes. A: the type of its response."""

    __slots__ = ()

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the body or message."""

    @abstractmethod
    def header(self, name: str) -> str | None:
        """The first header (gRPC: metadata) of this lower-case name."""

    @abstractmethod
    def with_headers(self, added: tuple[tuple[str, str], ...], *, dropped: tuple[str, ...]) -> Self:
        """The call with more headers (gRPC: metadata), and without the dropped ones."""


@dataclass(frozen=True, slots=True)
class HttpAnswer(Answer):
    """Has lower-case header names and no hop-by-hop headers; otherwise as the engine sent it."""

    status: int
    headers: HttpHeaders
    body: bytes

    @property
    def status_code(self) -> int:
        return self.status

    @property
    def succeeded(self) -> bool | None:
        return _HTTP_SUCCESS.get(self.status)

    @property
    def is_fault(self) -> bool:
        return self.status >= MIN_HTTP_FAULT

    @property
    def not_found_text(self) -> str:
        return self.body.decode("utf-8", "replace") if self.status == _HTTP_NOT_FOUND else ""

    def with_header(self, name: str, value: str) -> "HttpAnswer":
        if self.status != 200 or any(known == name.encode() for known, _ in self.headers):
            return self
        return HttpAnswer(self.status, (*self.headers, (name.encode(), value.encode())), self.body)


@dataclass(frozen=True, slots=True)
class HttpCall(Call[HttpAnswer]):
    """target: path and query as on the wire, not decoded. Header names are lower case."""

    method: str
    target: bytes
    headers: HttpHeaders
    body: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.body)

    def header(self, name: str) -> str | None:
        wanted = name.encode()
        for known, value in self.headers:
            if known == wanted:
                return value.decode("latin-1")
        return None

    def with_headers(self, added: tuple[tuple[str, str], ...], *, dropped: tuple[str, ...]) -> "HttpCall":
        gone = [name.encode() for name in dropped]
        kept = tuple([header for header in self.headers if header[0] not in gone])
        return replace(self, headers=kept + tuple([(name.encode(), value.encode()) for name, value in added]))


@dataclass(frozen=True, slots=True)
class GrpcAnswer(Answer):
    """code: the gRPC status number, 0 for OK. message: serialised response if OK; details: why not."""

    code: int
    message: bytes = b""
    details: str = ""
    trailing_metadata: GrpcMetadata = ()

    @property
    def status_code(self) -> int:
        return self.code

    @property
    def succeeded(self) -> bool | None:
        return _GRPC_SUCCESS.get(self.code)

    @property
    def is_fault(self) -> bool:
        return self.code in GRPC_FAULTS

    @property
    def not_found_text(self) -> str:
        return self.details if self.code == _GRPC_NOT_FOUND else ""

    def with_header(self, name: str, value: str) -> "GrpcAnswer":
        if self.code or any(known == name for known, _ in self.trailing_metadata):
            return self
        return GrpcAnswer(0, self.message, self.details, (*self.trailing_metadata, (name, value)))


@dataclass(frozen=True, slots=True)
class GrpcCall(Call[GrpcAnswer]):
    """method: such as "/inference.GRPCInferenceService/ModelInfer". message: the serialised request."""

    method: str
    message: bytes
    metadata: GrpcMetadata = ()

    @property
    def size_bytes(self) -> int:
        return len(self.message)

    def header(self, name: str) -> str | None:
        for known, value in self.metadata:
            if known == name:
                return value if isinstance(value, str) else value.decode("latin-1")
        return None

    def with_headers(self, added: tuple[tuple[str, str], ...], *, dropped: tuple[str, ...]) -> "GrpcCall":
        kept = tuple([pair for pair in self.metadata if pair[0] not in dropped])
        return replace(self, metadata=kept + added)


@dataclass(frozen=True, slots=True)
class HttpStream:
    """A streamed response, with headers like HttpAnswer. chunks: the body, once; aclose() it if not read to its end."""

    status: int
    headers: HttpHeaders
    chunks: AsyncGenerator[bytes, None]

    @property
    def succeeded(self) -> bool | None:
        return _HTTP_SUCCESS.get(self.status)


@dataclass(frozen=True, slots=True)
class RegionUse:
    """A request's tensor in shared memory. offset, size_bytes: as sent, possibly negative; None for no number."""

    name: str
    offset: int = 0
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class InferHead:
    """Content of a v2 inference request, from a shallow scan.

    timeout_us: the v2 parameter `timeout`. regions: shared memory of inputs and outputs. bytes_inputs: names of BYTES
    inputs, which may be encoded images. rowless_input: name of an input whose first dimension is 0, or "". sequence:
    the sequence ID, 0 or "" for no sequence, None if absent. json_bytes: decompressed JSON that the engine must parse.
    classification_outputs: names of outputs requested as classes. is_raw: the body is one raw tensor.
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
    classification_outputs: tuple[str, ...] = ()
    is_raw: bool = False


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
# Not relayed with a request: the next connection sets its own.
CONNECTION_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


def end_to_end(headers: HttpHeaders, dropped: frozenset[bytes]) -> HttpHeaders:
    """The headers, names in lower case, without the dropped ones and those that `connection` names."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = [token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")]
    gone = dropped.union(named) if named else dropped
    return tuple([header for header in lowered if header[0] not in gone])
