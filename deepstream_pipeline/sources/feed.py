"""The frames of one decode process: what it says of a slot becomes a PreparedFrame, if it can be true."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from deepstream_pipeline.sources.line import BrokenPromise
from deepstream_pipeline.sources.messages import FrameReady
from deepstream_pipeline.sources.options import DeviceRing, SourceNeeds
from deepstream_pipeline.sources.ring import Ring, image_offset
from deepstream_pipeline.sources.timeline import Timeline
from deepstream_pipeline.types import ByteArray, DeviceRow, Frame, PreparedFrame, RowArray

_LONGEST_SIDE = 2**31 - 1  # of a sample aspect ratio: FFmpeg stores 32-bit integers
_CLOCKS_S = 1.0  # processes of one machine share the clock


class _Slot:
    """Hands a slot back once, from whatever thread, however often it is called."""

    def __init__(self, number: int, give_back: Callable[[int], None]) -> None:
        self._number = [number]
        self._give_back = give_back

    def __call__(self) -> None:
        try:
            number = self._number.pop()
        except IndexError:
            return
        self._give_back(number)


class Feed:
    """Of one process; the timeline is its source's. give_back: called with a slot, from any thread. device_ring: for
    rows in a card's memory, None where they lie in the ring.

    outside: the slots that somebody reads.
    """

    def __init__(
        self,
        source_id: str,
        ring: Ring,
        needs: SourceNeeds,
        give_back: Callable[[int], None],
        device_ring: DeviceRing | None = None,
    ) -> None:
        self.outside: set[int] = set()
        self.device_ring = device_ring
        self._rows: dict[int, RowArray | DeviceRow] = {}  # of each slot the last: they keep their shape
        self._row_dtype = np.dtype(needs.row_dtype)
        self._source_id = source_id
        self._ring = ring
        self._needs = needs
        self._give_back = give_back

    def prepared(
        self, ready: FrameReady, timeline: Timeline, now: float, *, max_pixels: int, is_live: bool
    ) -> PreparedFrame:
        """The frame, its slot taken. Raises BrokenPromise."""
        try:
            if not 0 <= ready.slot < self._ring.size.frames or ready.slot in self.outside:
                raise ValueError(f"slot {ready.slot}, which is not the process'")
            if ready.width < 1 or ready.height < 1 or ready.width * ready.height > max_pixels:
                raise ValueError(f"a picture of {ready.width}x{ready.height}")
            if not all(0 < side <= _LONGEST_SIDE for side in ready.sample_aspect):
                raise ValueError(f"a sample aspect ratio of {ready.sample_aspect}")
            if ready.captured_at > now + _CLOCKS_S:
                raise ValueError("a frame of the future")
            row = self._row(ready)
            image = self._image(ready, row)
            pts_s = timeline.place(ready, is_live=is_live)
        except ValueError as error:
            raise BrokenPromise(f"its process sent a frame that cannot be: {error}") from error
        self.outside.add(ready.slot)
        frame = Frame(
            self._source_id,
            ready.frame_num,
            pts_s,
            min(ready.captured_at, now),
            ready.width,
            ready.height,
            image,
            ready.captured_unix_s,
            ready.segment,
            ready.is_corrupt,
            ready.digest,
            Fraction(*ready.sample_aspect),
        )
        return PreparedFrame(frame, row, _Slot(ready.slot, self._give_back))

    def _row(self, ready: FrameReady) -> RowArray | DeviceRow | None:
        if not ready.row_shape:
            return None
        row = self._rows.get(ready.slot)
        if row is None or row.shape != ready.row_shape or isinstance(row, DeviceRow) is not ready.is_on_device:
            row = self._rows[ready.slot] = self._new_row(ready)
        return row

    def _new_row(self, ready: FrameReady) -> RowArray | DeviceRow:
        size_bytes = math.prod(ready.row_shape) * self._row_dtype.itemsize
        if min(ready.row_shape) < 1 or size_bytes > self._needs.row_bytes:
            raise ValueError(f"a row of {size_bytes} bytes, where {self._needs.row_bytes} are the most")
        if ready.is_on_device:
            if self.device_ring is None:
                raise ValueError("a row on a card, where it was told of none")
            return self.device_ring.row(ready.slot, ready.row_shape, self._row_dtype)
        row = self._ring.array(ready.slot, 0, ready.row_shape, self._row_dtype)
        row.flags.writeable = False
        return row  # type: ignore[return-value]  # its dtype is the network's

    def _image(self, ready: FrameReady, row: RowArray | DeviceRow | None) -> ByteArray | None:
        if not ready.has_image:
            return None
        row_bytes = 0 if row is None or isinstance(row, DeviceRow) else row.nbytes
        shape = (ready.height, ready.width, 3)
        image = self._ring.array(ready.slot, image_offset(row_bytes), shape, np.uint8)
        image.flags.writeable = False
        return image  # type: ignore[return-value]  # uint8 was asked for
