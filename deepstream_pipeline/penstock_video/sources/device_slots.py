"""Contents of a ring slot when the GPU decodes: the row on the GPU or in the ring, and the picture in the ring."""

import numpy as np

from penstock.vision.spec import PrepareSpec
from penstock_video.errors import DecodeError, NeedsCpu
from penstock_video.gpu.device import Device, Pinned
from penstock_video.gpu.memory import DeviceSlots
from penstock_video.preprocess.device_rows import DevicePreparer, RowTarget, why_not
from penstock_video.sources.child_link import AnyFrame, Written, most_slots, row_bytes_of
from penstock_video.sources.protocol import Start
from penstock_video.sources.ring import ALIGNMENT, Ring, image_offset
from penstock_video.types import DevicePicture


class DeviceSlotWriter:
    """Writes one camera's slots from pictures in GPU memory. For one thread, which the device is bound to."""

    def __init__(self, device: Device, ring: Ring, start: Start) -> None:
        """Raises NeedsCpu if the GPU cannot make the network's rows, GpuUnavailable, GpuFailed."""
        self._spec = PrepareSpec.unpack(start.spec) if start.spec else None
        reason = why_not(self._spec) if self._spec else ""
        if reason:
            raise NeedsCpu(f"the network's rows are made by the CPU: {reason}")
        self._device, self._ring, self._start = device, ring, start
        self._pinned: dict[int, Pinned] = {}
        self._rows: DeviceSlots | None = None
        self._preparer = DevicePreparer(device, self._spec)
        try:
            if start.device_ring:
                self._rows = DeviceSlots(device, start.device_ring, start.ring_frames, start.row_bytes)
        except BaseException:
            self._preparer.close()
            raise
        self.is_on_device = self._rows is not None

    def most(self, width: int, height: int, has_image: bool) -> int:
        """See Slots."""
        what, row_bytes = f"a picture of {width}x{height}", self._row_bytes(width, height)
        if row_bytes > self._start.row_bytes:
            raise DecodeError(f"{what} makes a row of {row_bytes} bytes, and has room for {self._start.row_bytes}")
        needed = image_offset(0 if self.is_on_device else row_bytes) + width * height * 3 * has_image
        return most_slots(self._ring.size, self._start.ring_bytes, max(needed, 1), what)

    def write(self, slot: int, frame: AnyFrame, *, has_row: bool, has_image: bool) -> Written:
        """See Slots. Raises GpuFailed."""
        if not isinstance(frame, DevicePicture):
            raise DecodeError("a picture in the host's memory is not made ready by a GPU")
        width, height = frame.upright_size
        has_row = has_row and self._spec is not None
        row, row_bytes = self._row_target(slot, width, height) if has_row else (None, 0)
        offset, shape = image_offset(row_bytes), (height, width, 3)
        image = self._ring.array(slot, offset, shape, np.uint8).view(np.uint8) if has_image else None
        made = self._preparer.prepare(frame, row=row, image=image)
        return Written(made.row_shape if has_row else (), made.thumbnail)

    def close(self) -> None:
        """Frees resources; call it after the last write."""
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()
        if self._rows is not None:
            self._rows.close()
        self._preparer.close()

    def _row_bytes(self, width: int, height: int) -> int:
        return row_bytes_of(width, height, self._spec) if self._spec else 0

    def _row_target(self, slot: int, width: int, height: int) -> tuple[RowTarget, int]:
        """Address of the row, and its bytes in the ring's slot."""
        if self._rows is not None:
            return self._rows.address(slot), 0
        size_bytes = self._row_bytes(width, height)
        pinned = self._pinned.get(slot)
        if pinned is None or pinned.size_bytes < size_bytes:
            self._pin(slot, size_bytes)
        return self._ring.array(slot, 0, (size_bytes,), np.uint8), size_bytes

    def _pin(self, slot: int, size_bytes: int) -> None:
        """Pins the slot's pages for its row, once, since rows keep their size."""
        former = self._pinned.pop(slot, None)
        if former is not None:
            former.close()
        pages = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        self._pinned[slot] = self._device.pin(self._ring.array(slot, 0, (pages,), np.uint8))
