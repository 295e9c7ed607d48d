"""Frames of one decode process: validated descriptions of ring slots become PreparedFrames; a source's numbers."""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import numpy as np

from penstock_video.sources.options import DeviceRing, SourceNeeds
from penstock_video.sources.process import BrokenPromise
from penstock_video.sources.protocol import Beat, FrameReady, Lost
from penstock_video.sources.ring import Ring, image_offset
from penstock_video.types import ByteArray, DeviceRow, DropReason, Frame, PreparedFrame, RowArray

_LONGEST_SIDE = 2**31 - 1  # of a sample aspect ratio, which FFmpeg stores as 32-bit integers
_CLOCKS_S = 1.0  # processes of one machine share the clock


_STEP_S = 0.001  # minimum between the last frame of one process and the first of the next


class FrameNumbers:
    """frame_num: of the next frame. pts_s: of the last one."""

    def __init__(self) -> None:
        self.frame_num, self.segment = 0, 0
        self.pts_s: float | None = None
        self._captured_at = 0.0
        self._shift_s = 0.0
        self._is_first = True

    def begin(self, now: float, *, is_live: bool) -> tuple[int, float, int]:
        """First frame number, pts and segment of a process. A live source's pts includes the time in between."""
        self._is_first, self._shift_s = True, 0.0
        if self.pts_s is None:
            return 0, 0.0, 0
        self.segment += 1
        return (
            self.frame_num,
            self.pts_s + (max(now - self._captured_at, _STEP_S) if is_live else _STEP_S),
            self.segment,
        )

    def place(self, ready: FrameReady, *, is_live: bool) -> float:
        """The frame's pts across processes. Raises ValueError unless number, time and segment increase."""
        if not math.isfinite(ready.pts_s) or not math.isfinite(ready.captured_at):
            raise ValueError("a time that is no number")
        if ready.frame_num < self.frame_num or ready.segment < self.segment:
            raise ValueError(f"frame {ready.frame_num} of segment {ready.segment} after {self.frame_num - 1}")
        if self._is_first and self.pts_s is not None and is_live:  # opening took time, too
            self._shift_s = max(0.0, self.pts_s + ready.captured_at - self._captured_at - ready.pts_s)
        pts_s = ready.pts_s + self._shift_s
        if self.pts_s is not None and pts_s <= self.pts_s:
            raise ValueError(f"a pts of {pts_s:.6f} s after {self.pts_s:.6f} s")
        self._is_first = False
        self.pts_s, self._captured_at = pts_s, ready.captured_at
        self.frame_num, self.segment = ready.frame_num + 1, ready.segment
        return pts_s


class _Slot:
    """Returns a slot once. Thread-safe."""

    def __init__(self, number: int, give_back: Callable[[int], None]) -> None:
        self._number = [number]
        self._give_back = give_back

    def __call__(self) -> None:
        try:
            number = self._number.pop()
        except IndexError:
            return
        self._give_back(number)


_aspect_of = lru_cache(maxsize=64)(Fraction)  # constructing one takes 10 µs


class Feed:
    """Frames of one process. give_back: called with a slot, from any thread. outside: slots in use."""

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
        self._rows: dict[int, RowArray | DeviceRow] = {}  # the last one of each slot, since shapes rarely change
        self._row_dtype = np.dtype(needs.row_dtype)
        self._source_id = source_id
        self._ring = ring
        self._needs = needs
        self._give_back = give_back

    def prepared(
        self, ready: FrameReady, timeline: FrameNumbers, now: float, *, max_pixels: int, is_live: bool
    ) -> PreparedFrame:
        """The frame, with its slot in use. Raises BrokenPromise."""
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
            _aspect_of(*ready.sample_aspect),
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
                raise ValueError("a row in GPU memory, but there is no ring on a GPU")
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


class RowRings:
    """Device rings of one source. new: creates one."""

    def __init__(self, new: Callable[[], DeviceRing]) -> None:
        self._new = new
        self._spare: DeviceRing | None = None
        self._read: dict[object, Feed] = {}  # of ended runs
        self._is_over = False

    def take(self) -> DeviceRing:
        """A ring for a new run. Raises what `new` raises."""
        ring, self._spare = self._spare, None
        return ring if ring is not None else self._new()

    def leave(self, run: object, feed: Feed) -> None:
        """Ends a run: its ring is no longer written, but its last rows may still be read."""
        self._read[run] = feed
        self.released(run, [])

    def released(self, run: object, slots: list[int]) -> None:
        """Frees slots of an ended run."""
        feed = self._read.get(run)
        if feed is None:
            return
        feed.outside.difference_update(slots)
        if not feed.outside:
            del self._read[run]
            if feed.device_ring is not None:
                self.put_back(feed.device_ring)

    def close(self) -> None:
        """Ends the source. Rings in use are closed after their last row."""
        self._is_over = True
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def put_back(self, ring: DeviceRing) -> None:
        """Returns an unused ring."""
        if self._is_over or self._spare is not None:
            ring.close()
        else:
            self._spare = ring


MAX_TALK = 1_000  # messages per second without a frame; a dozen are usual
_MAX_LOST = 1_000_000
_NONE = Beat(0, 0, 0.0, 0.0)


class SourceCounts:
    """beat: sums since the source was added. drops: by types.DropReason."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()
        self.beat = self._before = _NONE
        self._second, self._in_second = 0, 0

    def begin(self) -> None:
        """Begins a new process, which counts from 0."""
        self._before = self.beat

    def talk(self, now: float) -> None:
        """Counts a message without a frame. Raises BrokenPromise if there are too many."""
        if int(now) != self._second:
            self._second, self._in_second = int(now), 0
        self._in_second += 1
        if self._in_second > MAX_TALK:
            raise BrokenPromise(f"its process sent {MAX_TALK} messages in a second")

    def lost(self, lost: Lost) -> DropReason:
        """Counts lost frames. Raises BrokenPromise for an unknown reason."""
        if not 0 < lost.count <= _MAX_LOST:
            raise BrokenPromise(f"its process lost {lost.count} frames at once")
        try:
            reason = DropReason(lost.reason)
        except ValueError:
            raise BrokenPromise(f"its process lost frames for an unknown reason: {lost.reason!r}") from None
        self.drops[reason.value] += lost.count
        return reason

    def beats(self, beat: Beat) -> Beat:
        """Sums over all processes. Raises BrokenPromise for a negative or non-finite sum."""
        sums = (beat.decoded, beat.bad_packets, beat.decode_s, beat.prepare_s)
        if not all(math.isfinite(number) and number >= 0 for number in sums):
            raise BrokenPromise("its process counted below nothing")
        before = self._before
        self.beat = Beat(
            before.decoded + beat.decoded,
            before.bad_packets + beat.bad_packets,
            before.decode_s + beat.decode_s,
            before.prepare_s + beat.prepare_s,
            sharing=beat.sharing,
        )
        return self.beat
