"""gRPC's words in HTTP/2's: what a call begins with, and what its answer came to. Sans-IO."""

import base64
import binascii
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from server.backends.http2_frames import Fields, MalformedFrame, field
from server.core.relay import GrpcMetadata

INTERNAL, UNKNOWN = 13, 2
PREFIX_BYTES = 5
_MAX_STATUS_DIGITS = 9
_NOT_METADATA = frozenset(
    (b"content-type", b"grpc-status", b"grpc-message", b"grpc-encoding", b"grpc-accept-encoding", b"accept-encoding")
)


class Reply(NamedTuple):
    """How the peer ended a call. code: grpc's number, 0 for OK, where message is the answer, serialised."""

    code: int
    message: bytes
    details: str
    initial_metadata: GrpcMetadata
    trailing_metadata: GrpcMetadata


def head_of(method: bytes, authority: bytes) -> bytes:
    """What the header blocks of all calls of a method begin with: block and metadata may be appended."""
    words = ((b":path", method), (b":authority", authority), (b"te", b"trailers"))
    told = (b"content-type", b"application/grpc"), (b"user-agent", b"penstock")
    return b"\x83\x86" + b"".join(field(*word) for word in (*words, *told))  # :method POST, :scheme http


def metadata_fields(metadata: GrpcMetadata) -> bytes:
    """Metadata as header fields; binary values, whose keys end in -bin, in base64."""
    return b"".join(field(key.encode(), _encoded(key, value)) for key, value in metadata)


def _encoded(key: str, value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return base64.b64encode(raw).rstrip(b"=") if key.endswith("-bin") else raw


def is_informational(fields: Fields) -> bool:
    """Whether the head is one before the real one, as 103 is."""
    return any(name == b":status" and value.startswith(b"1") for name, value in fields)


def reply_of(headers: Fields, parts: list[bytes], trailers: Fields) -> Reply:
    """The answer of these pieces. Without a grpc-status it was no gRPC server's. Raises MalformedFrame."""
    status = _first(b"grpc-status", trailers)
    initial = _metadata(headers)
    trailing = _metadata(trailers)
    if not status.isdigit():
        http = _first(b":status", (*headers, *trailers)) or b"none"
        return Reply(
            UNKNOWN, b"", f"the answer is not gRPC's (HTTP status {http.decode('latin-1')})", initial, trailing
        )
    if len(status) > _MAX_STATUS_DIGITS:
        raise MalformedFrame(f"a grpc-status of {len(status)} digits")
    if status != b"0":
        text = unquote_to_bytes(_first(b"grpc-message", trailers)).decode(errors="replace")
        return Reply(int(status), b"", text, initial, trailing)
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(body) < PREFIX_BYTES or body[0] or int.from_bytes(body[1:PREFIX_BYTES], "big") != len(body) - PREFIX_BYTES:
        return Reply(INTERNAL, b"", f"the answer is no single gRPC message ({len(body)} bytes)", initial, trailing)
    return Reply(0, body[PREFIX_BYTES:], "", initial, trailing)


def _first(name: bytes, fields: Fields) -> bytes:
    """The first value of that name; empty where there is none."""
    for known, value in fields:
        if known == name:
            return value
    return b""


def _metadata(fields: Fields) -> GrpcMetadata:
    told = [one for one in fields if one[0] not in _NOT_METADATA and not one[0].startswith(b":")]
    return tuple([(name.decode("latin-1"), _decoded(name, value)) for name, value in told])


def _decoded(name: bytes, value: bytes) -> str | bytes:
    if not name.endswith(b"-bin"):
        return value.decode("latin-1")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return value
