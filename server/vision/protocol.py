"""What the decode pool and a decoder process say to each other: two fixed records over a socket, bulk in a memory file.

The parent writes the encoded image at the start of the memory file and sends a JOB; the worker puts the array behind
it, or into the slab where the job has room there and the array fits, and answers a REPLY. One job at a time, so one
side owns the file, and the room in the slab, at any moment. A job that is the first of another slab brings its
descriptor.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from server.core.errors import InferenceError, TooLarge, UndecodableImage, UnsupportedMedia
from server.vision.preprocess import Geometry
from server.vision.spec import PrepareSpec

READY = b"R"
_JOB = struct.Struct(f"<QQQQ{PrepareSpec.WIRE_SIZE}s")
_REPLY = struct.Struct("<B??IIIQIIIIddiidd400s")
_TEXT_BYTES = 400


class Status(IntEnum):
    """How a job ended, and as which error the caller sees it."""

    OK = 0
    UNDECODABLE = 1
    TOO_LARGE = 2
    UNSUPPORTED = 3
    BROKEN_WORKER = 4


_ERRORS: dict[Status, type[InferenceError]] = {
    Status.UNDECODABLE: UndecodableImage,
    Status.TOO_LARGE: TooLarge,
    Status.UNSUPPORTED: UnsupportedMedia,
    Status.BROKEN_WORKER: InferenceError,
}


@dataclass(frozen=True, slots=True)
class Job:
    """Decode and prepare the first size_bytes of the memory file.

    slab_bytes: the room in the slab, from slab_offset on; 0 for none.
    """

    size_bytes: int
    max_pixels: int
    spec: PrepareSpec
    slab_offset: int = 0
    slab_bytes: int = 0

    WIRE_SIZE = _JOB.size

    def pack(self) -> bytes:
        return _JOB.pack(self.size_bytes, self.max_pixels, self.slab_offset, self.slab_bytes, self.spec.pack())

    @classmethod
    def unpack(cls, wire: bytes) -> "Job":
        size_bytes, max_pixels, slab_offset, slab_bytes, spec = _JOB.unpack(wire)
        return cls(size_bytes, max_pixels, PrepareSpec.unpack(spec), slab_offset, slab_bytes)


_NOWHERE = Geometry(0, 0, 0, 0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Reply:
    """The array's shape and place in the memory file, or why there is none. Times in seconds.

    is_in_slab: it is in the job's room in the slab, not in the memory file. is_worn: the process uses too much memory
    and must be replaced.
    """

    status: Status
    shape: tuple[int, int, int] = (0, 0, 0)
    offset: int = 0
    geometry: Geometry = _NOWHERE
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    text: str = ""
    is_in_slab: bool = False
    is_worn: bool = False

    WIRE_SIZE: ClassVar[int] = _REPLY.size

    def pack(self) -> bytes:
        place = self.geometry
        return _REPLY.pack(
            self.status,
            self.is_in_slab,
            self.is_worn,
            *self.shape,
            self.offset,
            place.source_width,
            place.source_height,
            place.network_width,
            place.network_height,
            place.scale_x,
            place.scale_y,
            place.pad_x,
            place.pad_y,
            self.decode_s,
            self.preprocess_s,
            self.text.encode()[:_TEXT_BYTES],
        )

    @classmethod
    def unpack(cls, wire: bytes) -> "Reply":
        status, is_in_slab, is_worn, depth, rows, columns, offset, *place, decode_s, pre_s, text = _REPLY.unpack(wire)
        return cls(
            Status(status),
            (depth, rows, columns),
            offset,
            Geometry(*place),
            decode_s,
            pre_s,
            text.rstrip(b"\0").decode(errors="ignore"),
            is_in_slab,
            is_worn,
        )

    def error(self) -> InferenceError:
        """The error to raise for a job that failed."""
        return _ERRORS[self.status](self.text)


def reply_to(error: InferenceError) -> Reply:
    """The refusal that error() turns back into the same class with the same text."""
    status = next((status for status, kind in _ERRORS.items() if type(error) is kind), Status.BROKEN_WORKER)
    return Reply(status, text=error.message)
