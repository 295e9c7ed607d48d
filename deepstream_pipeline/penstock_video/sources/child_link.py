"""A decode process's end: its messages with the parent, the ring's slots, and the rows and pictures written to them."""

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

import av
import cv2
import msgspec
import numpy as np

from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import NUMPY_OF, Allocate, geometry_of, prepare
from penstock.vision.spec import ColorFormat, PrepareSpec
from penstock_video.decode.codec import Painter, Pixels, thumbnail_of
from penstock_video.errors import DecodeError
from penstock_video.sources.protocol import (
    DOWN,
    MESSAGE_BYTES,
    UP,
    Beat,
    Cut,
    Hold,
    Release,
    Start,
    Want,
    decode_down,
    encode,
)
from penstock_video.sources.ring import Ring, RingSize, image_offset
from penstock_video.types import DevicePicture, RowArray

BEAT_S = 1.0
_MOST_CUTS = 16  # queued requests for recordings


class ParentGone(Exception):
    """The parent closed its end, so the run must end."""


class ParentLink:
    """Messages from and to the parent. The decoding thread reads them and sends a beat a second, but not while it waits
    for its stream. wants_images: whether the parent draws pictures, one each
    image_interval_s."""

    def __init__(self, link: socket.socket, start: Start) -> None:
        self.wants_images, self.image_interval_s = start.wants_images, start.image_interval_s
        self._socket = link
        self._slots = start.ring_frames
        self._free = list(range(start.ring_frames))
        self._rows: set[int] = set()
        self._is_held = False
        self._cuts: list[Cut] = []
        self._is_closed = self._is_waiting = False
        self._beat: Callable[[], Beat] = lambda: Beat(0, 0, 0.0, 0.0)
        self._beat_at = time.monotonic() + BEAT_S
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def begin(self, beat: Callable[[], Beat]) -> None:
        """Sets the function that makes each beat."""
        self._beat = beat

    def end(self) -> None:
        """Ends the link. Reads unread messages first, since closing would otherwise reset the socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        self._look()

    def send(self, record: UP) -> None:
        """Sends, and waits while the parent does not read. Raises ParentGone."""
        try:
            self._socket.sendall(encode(record))
        except OSError:
            raise ParentGone from None

    def cuts(self) -> list[Cut]:
        """Recordings requested since the last call. Raises ParentGone."""
        self._look()
        self._require_parent()
        cuts, self._cuts = self._cuts, []
        return cuts

    def take_slot(self, most: int, most_rows: int | None = None) -> int | None:
        """A free slot, or None if there is none or the parent has `most`. most_rows: limit of slots with only a row."""
        if not self._may_take(most, most_rows):
            self._look()
        if not self._may_take(most, most_rows):
            return None
        slot = self._free.pop()
        if most_rows is not None:
            self._rows.add(slot)
        return slot

    def wait_for_slot(self, most: int, timeout_s: float) -> int | None:
        """As take_slot, with a timeout. Raises ParentGone."""
        self._wait_until(lambda: self._may_take(most, None), timeout_s)
        return self._free.pop() if self._may_take(most, None) else None

    def outside(self) -> set[int]:
        """The slots that the parent owns."""
        return set(range(self._slots)).difference(self._free)

    def wait_for_all_slots(self, timeout_s: float) -> bool:
        """Whether the parent freed every slot within the timeout. Raises ParentGone."""
        self._wait_until(lambda: len(self._free) == self._slots, timeout_s)
        return len(self._free) == self._slots

    def wait_while_paused(self, timeout_s: float) -> bool:
        """Whether it is still paused after the timeout. Raises ParentGone."""
        if self._is_held and not self._cuts:
            self._wait_until(lambda: not self._is_held or bool(self._cuts), timeout_s)
        return self._is_held

    def attend(self) -> None:
        """Reads and sends messages while the thread waits for its turn at the GPU. Raises ParentGone."""
        self._is_waiting = True
        try:
            self._look()
        finally:
            self._is_waiting = False
        self._require_parent()

    def _may_take(self, most: int, most_rows: int | None) -> bool:
        has_room = bool(self._free) and self._slots - len(self._free) < most
        return has_room and (most_rows is None or len(self._rows) < most_rows)

    def _require_parent(self) -> None:
        if self._is_closed:
            raise ParentGone

    def _look(self) -> None:
        """Reads the waiting messages, and sends a beat if it is due."""
        with suppress(BlockingIOError):
            while not self._is_closed and self._poller.poll(0):  # cheaper than an exception for each frame
                self._is_closed = not self._receive()
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_S
            beat = self._beat()
            beat = msgspec.structs.replace(beat, is_waiting=True) if self._is_waiting else beat
            with suppress(OSError):  # a parent that does not read needs no beats
                self._socket.send(encode(beat), socket.MSG_DONTWAIT)

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Waits for the condition or the timeout. Raises ParentGone."""
        until = time.monotonic() + timeout_s
        self._look()
        while not self._is_closed and not is_so() and (left_s := until - time.monotonic()) > 0:
            self._poller.poll(min(left_s, BEAT_S) * 1000)
            self._look()
        self._require_parent()

    def _receive(self) -> bool:
        """Reads one message; returns whether the parent is connected. Raises BlockingIOError."""
        try:
            message = self._socket.recv(MESSAGE_BYTES + 1, socket.MSG_DONTWAIT)
            record = decode_down(message) if message else None
        except BlockingIOError:
            raise
        except (OSError, msgspec.MsgspecError):
            return False
        if record is not None:
            self._apply(record)
        return record is not None

    def _apply(self, record: DOWN) -> None:
        if isinstance(record, Release):
            self._free += [slot for slot in record.slots if 0 <= slot < self._slots and slot not in self._free]
            self._rows.difference_update(record.slots)
        elif isinstance(record, Want):
            self.wants_images, self.image_interval_s = record.images, record.interval_s
        elif isinstance(record, Hold):
            self._is_held = record.is_held
        elif isinstance(record, Cut) and len(self._cuts) < _MOST_CUTS:
            self._cuts.append(record)


AnyFrame: TypeAlias = av.VideoFrame | DevicePicture

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

    def write(self, slot: int, frame: AnyFrame, *, has_row: bool, has_image: bool) -> Written:
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

    def write(self, slot: int, frame: AnyFrame, *, has_row: bool, has_image: bool) -> Written:
        """See Slots."""
        if isinstance(frame, DevicePicture):
            raise DecodeError("a picture in a GPU's memory is written by no painter")
        thumbnail = thumbnail_of(self._painter.luma(frame))
        spec = self._spec if has_row else None
        if spec is None and not has_image:
            return Written((), thumbnail)
        is_bgr = not has_image and spec is not None and spec.color is ColorFormat.BGR
        pixels = self._painter.bgr(frame) if is_bgr else self._painter.rgb(frame)
        row_bytes, shape = 0, ()
        if spec is not None:
            row = prepare_row(pixels, spec, lambda shape, dtype: self._ring.array(slot, 0, shape, dtype), is_bgr=is_bgr)
            row_bytes, shape = row.nbytes, row.shape
        if has_image:
            np.copyto(self._ring.array(slot, image_offset(row_bytes), pixels.shape, np.uint8), pixels)
        return Written(shape, thumbnail)

    def close(self) -> None:
        """Does nothing: the ring belongs to its owner."""


def most_slots(size: RingSize, ring_bytes: int, needed: int, what: str) -> int:
    """Maximum slots in use, at `needed` bytes each. Raises DecodeError if even one does not fit."""
    if needed > size.slot_bytes:
        raise DecodeError(f"{what} needs {needed} bytes, and has room for {size.slot_bytes}")
    return max(min(size.frames, ring_bytes // needed), _LEAST_SLOTS)


def prepare_row(pixels: Pixels, spec: PrepareSpec, allocate: Allocate = np.empty, *, is_bgr: bool = False) -> RowArray:
    """The network's input for a picture (H, W, 3) of RGB or BGR, bit-equal to that of the gateway's image endpoint.
    Without a batch axis. allocate(shape, dtype) gives the array that is written and returned."""
    height, width = pixels.shape[:2]
    if spec.color is ColorFormat.GRAY:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY if is_bgr else cv2.COLOR_RGB2GRAY)
    elif (spec.color is ColorFormat.BGR) is not is_bgr:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)  # its own inverse
    row: RowArray
    row, _ = prepare(DecodedImage(pixels, width, height), spec, allocate)
    return row


@lru_cache(maxsize=1024)
def row_bytes_of(width: int, height: int, spec: PrepareSpec) -> int:
    """Size of the row of a picture of this size."""
    geometry = geometry_of(width, height, spec)
    values = geometry.network_width * geometry.network_height * spec.color.channels
    return values * np.dtype(NUMPY_OF[spec.datatype]).itemsize
