"""Contents of a ring slot: the model input row and, where needed, the picture."""

from typing import NamedTuple, Protocol, TypeAlias

import av
import numpy as np

from penstock.vision.spec import PrepareSpec
from penstock_video.decode.codec import Painter, Pixels, thumbnail_of
from penstock_video.errors import DecodeError
from penstock_video.gpu.picture import DevicePicture
from penstock_video.preprocess.rows import prepare_row, row_bytes_of, wants_bgr
from penstock_video.sources.protocol import Ring, RingSize, Start, image_offset

Frame: TypeAlias = av.VideoFrame | DevicePicture

_LEAST_SLOTS = 2  # one is written while the parent reads another


class Written(NamedTuple):
    """row_shape: of the network's input, empty without a row. thumbnail: valid until the next write."""

    row_shape: tuple[int, ...]
    thumbnail: Pixels


class Slots(Protocol):
    """Writes decoded frames into slots. For one thread. is_on_device: rows are in GPU memory, not in the ring."""

    is_on_device: bool

    def most(self, width: int, height: int, has_image: bool) -> int:
        """Maximum slots in use for pictures of this size. Raises DecodeError if even one does not fit."""
        ...

    def write(self, slot: int, frame: Frame, *, has_row: bool, has_image: bool) -> Written:
        """Writes row and picture, as requested, into a free slot; complete on return."""
        ...

    def close(self) -> None:
        """Frees resources; call it after the last write."""
        ...


class SlotWriter:
    """Converts frames in host memory directly into slots."""

    is_on_device = False

    def __init__(self, ring: Ring, start: Start) -> None:
        self._painter = Painter()
        self._ring = ring
        self._spec = PrepareSpec.unpack(start.spec) if start.spec else None
        self._ring_bytes = start.ring_bytes

    def most(self, width: int, height: int, has_image: bool) -> int:
        """See Slots."""
        row_bytes = row_bytes_of(width, height, self._spec) if self._spec else 0
        needed = max(image_offset(row_bytes) + width * height * 3 * has_image, 1)
        return most_slots(self._ring.size, self._ring_bytes, needed, f"a picture of {width}x{height}")

    def write(self, slot: int, frame: Frame, *, has_row: bool, has_image: bool) -> Written:
        """See Slots."""
        host = _on_host(frame)
        thumbnail = thumbnail_of(self._painter.luma(host))
        spec = self._spec if has_row else None
        if spec is None and not has_image:
            return Written((), thumbnail)
        is_bgr = not has_image and spec is not None and wants_bgr(spec)
        pixels = self._painter.bgr(host) if is_bgr else self._painter.rgb(host)
        row_bytes, shape = (0, ()) if spec is None else self._write_row(slot, pixels, spec, is_bgr)
        if has_image:
            np.copyto(self._ring.array(slot, image_offset(row_bytes), pixels.shape, np.uint8), pixels)
        return Written(shape, thumbnail)

    def close(self) -> None:
        """Does nothing: the ring belongs to its owner."""

    def _write_row(self, slot: int, pixels: Pixels, spec: PrepareSpec, is_bgr: bool) -> tuple[int, tuple[int, ...]]:
        row = prepare_row(pixels, spec, lambda shape, dtype: self._ring.array(slot, 0, shape, dtype), is_bgr=is_bgr)
        return row.nbytes, row.shape


def most_slots(size: RingSize, ring_bytes: int, needed: int, what: str) -> int:
    """Maximum slots in use, at `needed` bytes each. Raises DecodeError if even one does not fit."""
    if needed > size.slot_bytes:
        raise DecodeError(f"{what} needs {needed} bytes, and has room for {size.slot_bytes}")
    return max(min(size.frames, ring_bytes // needed), _LEAST_SLOTS)


def _on_host(frame: Frame) -> av.VideoFrame:
    if isinstance(frame, DevicePicture):
        raise DecodeError("a picture in a GPU's memory is written by no painter")
    return frame
