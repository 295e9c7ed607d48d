"""HTTP/2's frames and header fields as bytes, as far as a client of one gRPC server needs them. Sans-IO.

The peer is told to keep no table of header fields, so each header block means the same whenever it comes.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 64 << 10  # what we take; the peer's own limit is in its settings
MAX_BLOCK_BYTES = 256 << 10
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535  # of every connection and stream, until somebody says otherwise
_HEAD_BYTES = 9
_CACHED_BLOCKS, _CACHED_BLOCK_BYTES = 256, 512

Fields = tuple[tuple[bytes, bytes], ...]


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntEnum):
    """Flags of frames; ACK is of SETTINGS and PING."""

    ACK = 0x1
    END_STREAM = 0x1
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    """Names of settings."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class MalformedFrame(Exception):
    """The peer does not speak HTTP/2 as it must: nothing more on its connection can be believed."""


class Frame(NamedTuple):
    """One frame. kind: a Kind, or a number of one that means nothing here."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def frames(self, arrived: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises MalformedFrame for one that is too large."""
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
    """Header blocks of a peer that keeps no table. The few that come again and again are decoded once."""

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


def frame(kind: Kind, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame as it goes over the wire."""
    return b"".join(
        (len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream_id.to_bytes(4, "big"), payload),
    )


def field(name: bytes, value: bytes) -> bytes:
    """A header field in words, for a table that nobody keeps. name: in lower case."""
    return b"".join((b"\x00", _length(len(name)), name, _length(len(value)), value))


def opening() -> bytes:
    """What a client says first: no tables, no pushes, and room for as much as may come on a stream."""
    settings = {
        Setting.HEADER_TABLE_SIZE: 0,
        Setting.ENABLE_PUSH: 0,
        Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW,
        Setting.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
    }
    told = b"".join(struct.pack(">HI", name, value) for name, value in settings.items())
    return PREFACE + frame(Kind.SETTINGS, 0, 0, told) + window_update(0, MAX_WINDOW - FIRST_WINDOW)


def window_update(stream_id: int, size_bytes: int) -> bytes:
    """Room for so many more bytes."""
    return frame(Kind.WINDOW_UPDATE, 0, stream_id, size_bytes.to_bytes(4, "big"))


def settings_of(payload: bytes) -> Iterator[tuple[int, int]]:
    """Names and values of a SETTINGS frame. Raises MalformedFrame."""
    if len(payload) % 6:
        raise MalformedFrame(f"settings of {len(payload)} bytes")
    yield from struct.iter_unpack(">HI", payload)


def number_of(payload: bytes) -> int:
    """The 31-bit number that the payload begins with. Raises MalformedFrame."""
    if len(payload) < 4:
        raise MalformedFrame(f"a number of {len(payload)} bytes")
    return int.from_bytes(payload[:4], "big") & MAX_WINDOW


def content_of(frame: Frame) -> bytes:
    """What a DATA or HEADERS frame carries, without padding and priority. Raises MalformedFrame."""
    payload, start, end = frame.payload, 0, len(frame.payload)
    if frame.flags & Flag.PADDED:
        if not payload:
            raise MalformedFrame("padding without a length")
        start, end = 1, end - payload[0]
    if frame.kind == Kind.HEADERS and frame.flags & Flag.PRIORITY:
        start += 5
    if start > end:
        raise MalformedFrame("more padding than frame")
    return payload[start:end] if end - start < len(payload) else payload


def _length(size: int) -> bytes:
    """HPACK's number with a prefix of seven bits."""
    if size < 127:
        return bytes((size,))
    encoded, left = bytearray((127,)), size - 127
    while left >= 128:
        encoded.append(left & 127 | 128)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)
