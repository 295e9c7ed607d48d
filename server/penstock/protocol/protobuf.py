"""Reads protobuf's wire format without decoding messages: which field, and where its bytes are."""

from collections.abc import Iterator
from mmap import mmap

from penstock.protocol.errors import InvalidRequest

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_FIELDS = 50_000
_MAX_TAG = 2**32 - 1
_UINT64 = 2**64 - 1

WireField = tuple[int, int, int, int]
"""(field number, wire type, then value and 0 of a VARINT, else start and end of the field's bytes)."""


class WireReader:
    """Reads at most max_fields fields of a message and its nested ones: many would block the event loop."""

    def __init__(self, message: bytes | mmap, *, max_fields: int = MAX_FIELDS) -> None:
        self._message = message
        self._max_fields = self._fields_left = max_fields

    def fields(self, start: int = 0, end: int | None = None) -> Iterator[WireField]:
        """The fields of the message in [start, end), in order. Raises InvalidRequest if malformed, also for groups."""
        message = self._message
        position, stop = start, len(message) if end is None else end
        while position < stop:
            self._count_one()
            tag, position = read_varint(message, position, stop)
            number, wire_type = tag >> 3, tag & 7
            if number == 0 or tag > _MAX_TAG:
                raise malformed(position)
            if wire_type == VARINT:
                value, position = read_varint(message, position, stop)
                yield number, VARINT, value, 0
                continue
            size, position = self._size(wire_type, position, stop)
            if position + size > stop:
                raise malformed(position)
            yield number, wire_type, position, position + size
            position += size

    def text(self, start: int, end: int) -> str:
        """A string field. Raises InvalidRequest if it is not UTF-8."""
        try:
            return self._message[start:end].decode()
        except UnicodeDecodeError:
            raise malformed(start) from None

    def packed(self, start: int, end: int) -> Iterator[int]:
        """The numbers of a packed int64 field."""
        position = start
        while position < end:
            self._count_one()
            value, position = read_varint(self._message, position, end)
            yield as_int64(value)

    def _size(self, wire_type: int, position: int, end: int) -> tuple[int, int]:
        """Size and start of the field's bytes."""
        if wire_type == LENGTH:
            return read_varint(self._message, position, end)
        if wire_type == FIXED64:
            return 8, position
        if wire_type == FIXED32:
            return 4, position
        raise malformed(position)

    def _count_one(self) -> None:
        self._fields_left -= 1
        if self._fields_left < 0:
            raise InvalidRequest(
                f"the message has more than {self._max_fields} fields (tensors, parameters, dimensions, nodes)"
            )


def read_varint(message: bytes | mmap, position: int, end: int) -> tuple[int, int]:
    """An unsigned 64-bit number and the position after it. Raises InvalidRequest."""
    value = shift = 0
    while position < end and shift < 70:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, position
        shift += 7
    raise malformed(position)


def as_int64(value: int) -> int:
    """A varint as the signed number of an int64 field."""
    return value - 2**64 if value >> 63 else value


def malformed(position: int) -> InvalidRequest:
    """The error for bytes that are not a message of the expected type."""
    return InvalidRequest(f"not a valid protobuf message of this kind (at byte {position})")
