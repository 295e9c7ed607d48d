"""HTTP/2 frames, header fields, keepalive, and gRPC over them, for a client of one gRPC server. No I/O."""

import base64
import binascii
import struct
from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import hpack

from penstock.protocol.call import GrpcMetadata

MAX_PINGS = 2


class KeepaliveAction(Enum):
    """What to do with a connection."""

    NOTHING = "nothing"
    PING = "send a ping"
    GIVE_UP = "close the connection"


class Keepalive:
    """A ping is due after silence_s without received data; the peer is dead after timeout_s more.

    At most MAX_PINGS between two calls, because a gRPC server may treat more as an attack. now: monotonic seconds.
    """

    def __init__(self, silence_s: float, timeout_s: float) -> None:
        self.interval_s = min(silence_s, timeout_s) / 2
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._last_received_at = 0.0
        self._asked_at: float | None = None
        self._pings = 0

    def received(self, now: float) -> None:
        self._last_received_at = now
        self._asked_at = None

    def sent(self, now: float, *, is_first: bool) -> None:
        """A call begins. is_first: no other is in flight, so earlier silence does not count."""
        self._pings = 0
        if is_first:
            self._last_received_at = now
            self._asked_at = None

    def due(self, now: float) -> KeepaliveAction:
        """What to do now. Call it only while calls are in flight."""
        if self._asked_at is not None:
            return KeepaliveAction.GIVE_UP if now - self._asked_at >= self._timeout_s else KeepaliveAction.NOTHING
        if now - self._last_received_at < self._silence_s or self._pings >= MAX_PINGS:
            return KeepaliveAction.NOTHING
        self._asked_at = now
        self._pings += 1
        return KeepaliveAction.PING


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 64 << 10  # our limit; the peer's is in its settings
MAX_BLOCK_BYTES = 256 << 10
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535  # initial, of every connection and stream
_HEAD_BYTES = 9
_CACHED_BLOCKS, _CACHED_BLOCK_BYTES = 256, 512

Fields = tuple[tuple[bytes, bytes], ...]


class FrameKind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class FrameFlag(IntEnum):
    """Flags of frames; ACK is for SETTINGS and PING."""

    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Http2Setting(IntEnum):
    """Names of settings."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class MalformedFrame(Exception):
    """The peer violates HTTP/2; its connection is unusable."""


class Frame(NamedTuple):
    """One frame. kind: a FrameKind, or another number, which is ignored."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def frames(self, arrived: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises MalformedFrame if one is too large."""
        if self._rest:
            arrived = self._rest + arrived
        position, size = 0, len(arrived)
        while size - position >= _HEAD_BYTES:
            length = int.from_bytes(arrived[position : position + 3], "big")
            if length > MAX_FRAME_BYTES:
                raise MalformedFrame(f"a frame of {length} bytes (limit {MAX_FRAME_BYTES})")
            start = position + _HEAD_BYTES
            if start + length > size:
                break
            stream_id = int.from_bytes(arrived[position + 5 : start], "big") & MAX_WINDOW
            yield Frame(arrived[position + 3], arrived[position + 4], stream_id, arrived[start : start + length])
            position = start + length
        self._rest = arrived[position:]


class HeaderDecoder:
    """Decodes header blocks of a peer without a dynamic table; caches small ones."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(MAX_BLOCK_BYTES)
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._known: dict[bytes, Fields] = {}

    def fields(self, block: bytes) -> Fields:
        """Names and values in their order. Raises MalformedFrame."""
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            fields: Fields = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            raise MalformedFrame(f"a header block cannot be read: {error}") from error
        if len(block) <= _CACHED_BLOCK_BYTES and len(self._known) < _CACHED_BLOCKS:
            self._known[block] = fields
        return fields


def frame(kind: FrameKind, flags: int, stream_id: int, payload: bytes) -> bytes:
    """An encoded frame."""
    return b"".join((len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream_id.to_bytes(4, "big"), payload))


def field(name: bytes, value: bytes) -> bytes:
    """A literal header field, not added to the dynamic table. name: in lower case."""
    return b"".join((b"\x00", _length(len(name)), name, _length(len(value)), value))


def opening() -> bytes:
    """A client's preface and settings: no dynamic table, no push, the largest windows."""
    settings = {
        Http2Setting.HEADER_TABLE_SIZE: 0,
        Http2Setting.ENABLE_PUSH: 0,
        Http2Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW,
        Http2Setting.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
    }
    payload = b"".join(struct.pack(">HI", name, value) for name, value in settings.items())
    return PREFACE + frame(FrameKind.SETTINGS, 0, 0, payload) + window_update(0, MAX_WINDOW - FIRST_WINDOW)


def window_update(stream_id: int, size_bytes: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(FrameKind.WINDOW_UPDATE, 0, stream_id, size_bytes.to_bytes(4, "big"))


def settings_of(payload: bytes) -> Iterator[tuple[int, int]]:
    """Names and values of a SETTINGS frame. Raises MalformedFrame."""
    if len(payload) % 6:
        raise MalformedFrame(f"settings of {len(payload)} bytes")
    yield from struct.iter_unpack(">HI", payload)


def number_of(payload: bytes) -> int:
    """The 31-bit number at the payload's start. Raises MalformedFrame."""
    if len(payload) < 4:
        raise MalformedFrame(f"a number of {len(payload)} bytes")
    return int.from_bytes(payload[:4], "big") & MAX_WINDOW


def content_of(frame: Frame) -> bytes:
    """Payload of a DATA or HEADERS frame without padding and priority. Raises MalformedFrame."""
    payload, start, end = frame.payload, 0, len(frame.payload)
    if frame.flags & FrameFlag.PADDED:
        if not payload:
            raise MalformedFrame("padding without a length")
        start, end = 1, end - payload[0]
    if frame.kind == FrameKind.HEADERS and frame.flags & FrameFlag.PRIORITY:
        start += 5
    if start > end:
        raise MalformedFrame("more padding than frame")
    return payload[start:end] if end - start < len(payload) else payload


def _length(size: int) -> bytes:
    if size < 127:
        return bytes((size,))
    encoded, left = bytearray((127,)), size - 127
    while left >= 128:
        encoded.append(left & 127 | 128)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)


INTERNAL, UNKNOWN = 13, 2
PREFIX_BYTES = 5
_MAX_STATUS_DIGITS = 9
_NOT_METADATA = frozenset(
    (b"content-type", b"grpc-status", b"grpc-message", b"grpc-encoding", b"grpc-accept-encoding", b"accept-encoding")
)


class GrpcReply(NamedTuple):
    """The end of a call. code: gRPC's number. message: the serialised answer if code is 0, else empty."""

    code: int
    message: bytes
    details: str
    trailing_metadata: GrpcMetadata


def encode_head(method: bytes, authority: bytes) -> bytes:
    """The start of a method's header block; `metadata_fields` may be appended."""
    fields = (
        *((b":path", method), (b":authority", authority), (b"te", b"trailers")),
        *((b"content-type", b"application/grpc"), (b"user-agent", b"penstock")),
    )
    return b"\x83\x86" + b"".join(field(*one) for one in fields)  # :method POST, :scheme http


def metadata_fields(metadata: GrpcMetadata) -> bytes:
    """Metadata as header fields; values of keys that end in -bin are base64."""
    return b"".join(field(key.encode(), _encoded(key, value)) for key, value in metadata)


def _encoded(key: str, value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return base64.b64encode(raw).rstrip(b"=") if key.endswith("-bin") else raw


def is_informational(fields: Fields) -> bool:
    """Whether it is the header of an informational response, such as 103."""
    return any(name == b":status" and value.startswith(b"1") for name, value in fields)


def decode_reply(headers: Fields, parts: list[bytes], trailers: Fields) -> GrpcReply:
    """UNKNOWN without a grpc-status: no gRPC server answered. Raises MalformedFrame."""
    status = _first(b"grpc-status", trailers)
    trailing = _metadata(trailers)
    if not status.isdigit():
        http = _first(b":status", (*headers, *trailers)) or b"none"
        return GrpcReply(UNKNOWN, b"", f"the answer is not gRPC's (HTTP status {http.decode('latin-1')})", trailing)
    if len(status) > _MAX_STATUS_DIGITS:
        raise MalformedFrame(f"a grpc-status of {len(status)} digits")
    if status != b"0":
        text = unquote_to_bytes(_first(b"grpc-message", trailers)).decode(errors="replace")
        return GrpcReply(int(status), b"", text, trailing)
    if parts and len(parts[0]) >= PREFIX_BYTES:
        prefix, body = parts[0][:PREFIX_BYTES], b"".join((memoryview(parts[0])[PREFIX_BYTES:], *parts[1:]))  # one copy
    else:
        whole = b"".join(parts)
        prefix, body = whole[:PREFIX_BYTES], whole[PREFIX_BYTES:]
    if len(prefix) < PREFIX_BYTES or prefix[0] or int.from_bytes(prefix[1:], "big") != len(body):
        return GrpcReply(INTERNAL, b"", f"the answer is not one gRPC message ({len(prefix + body)} bytes)", trailing)
    return GrpcReply(0, body, "", trailing)


def _first(name: bytes, fields: Fields) -> bytes:
    for known, value in fields:
        if known == name:
            return value
    return b""


def _metadata(fields: Fields) -> GrpcMetadata:
    metadata = [one for one in fields if one[0] not in _NOT_METADATA and not one[0].startswith(b":")]
    return tuple([(name.decode("latin-1"), _decoded(name, value)) for name, value in metadata])


def _decoded(name: bytes, value: bytes) -> str | bytes:
    if not name.endswith(b"-bin"):
        return value.decode("latin-1")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return value
