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

_LEAST_SLOTS = 2  # one is written while the parent looks at another


class Written(NamedTuple):
    """row_shape: of the network's row, empty without one. thumbnail: for who compares pictures (decode.likeness), and
    borrowed until the next is written."""

    row_shape: tuple[int, ...]
    thumbnail: Pixels


class Slots(Protocol):
    """Who makes ready what was decoded. Of one thread. is_on_device: the rows lie on the card, not in the ring."""

    is_on_device: bool

    def most(self, width: int, height: int, has_image: bool) -> int:
        """How many slots may be in use at once for pictures of that size. Raises DecodeError where none is enough."""
        ...

    def write(self, slot: int, frame: Frame, *, has_row: bool, has_image: bool) -> Written:
        """Into a free slot, what is asked for of it; complete when it returns."""
        ...

    def close(self) -> None:
        """Nothing is written any more."""
        ...


class SlotWriter:
    """Converts frames in host memory straight into slots."""

    is_on_device = False

    def __init__(self, ring: Ring, start: Start) -> None:
        self._painter = Painter()
        self._ring = ring
        self._spec = PrepareSpec.unpack(start.spec) if start.spec else None
        self._ring_bytes = start.ring_bytes

    def most(self, width: int, height: int, has_image: bool) -> int:
        """How many slots may be in use at once for pictures of that size. Raises DecodeError where none is enough."""
        row_bytes = row_bytes_of(width, height, self._spec) if self._spec else 0
        needed = max(image_offset(row_bytes) + width * height * 3 * has_image, 1)
        return most_slots(self._ring.size, self._ring_bytes, needed, f"a picture of {width}x{height}")

    def write(self, slot: int, frame: Frame, *, has_row: bool, has_image: bool) -> Written:
        """Into a free slot, what is asked for of it."""
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
        """Nothing: the ring is its owner's."""

    def _write_row(self, slot: int, pixels: Pixels, spec: PrepareSpec, is_bgr: bool) -> tuple[int, tuple[int, ...]]:
        row = prepare_row(pixels, spec, lambda shape, dtype: self._ring.array(slot, 0, shape, dtype), is_bgr=is_bgr)
        return row.nbytes, row.shape


def most_slots(size: RingSize, ring_bytes: int, needed: int, what: str) -> int:
    """How many slots may be in use at once, where each takes so many bytes. Raises DecodeError where none is enough."""
    if needed > size.slot_bytes:
        raise DecodeError(f"{what} needs {needed} bytes, and has room for {size.slot_bytes}")
    return max(min(size.frames, ring_bytes // needed), _LEAST_SLOTS)


def _on_host(frame: Frame) -> av.VideoFrame:
    if isinstance(frame, DevicePicture):
        raise DecodeError("a picture in a GPU's memory is written by no painter")
    return frame
