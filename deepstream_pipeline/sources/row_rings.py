"""A source's memory on the card: a ring of rows for each run, kept until nobody reads it, and used again then."""

from collections.abc import Callable

from deepstream_pipeline.sources.feed import Feed
from deepstream_pipeline.sources.options import DeviceRing


class RowRings:
    """Of one source. new: as GpuSources.new_device_ring, for its slots and rows."""

    def __init__(self, new: Callable[[], DeviceRing]) -> None:
        self._new = new
        self._spare: DeviceRing | None = None
        self._read: dict[object, Feed] = {}  # of runs that are over
        self._is_over = False

    def take(self) -> DeviceRing:
        """For a run that begins. Raises what `new` does."""
        ring, self._spare = self._spare, None
        return ring if ring is not None else self._new()

    def leave(self, run: object, feed: Feed) -> None:
        """That run is over: nobody writes its ring any more, but its last rows may still be read."""
        self._read[run] = feed
        self.released(run, [])

    def released(self, run: object, slots: list[int]) -> None:
        """Slots of a run that is over were given back."""
        feed = self._read.get(run)
        if feed is None:
            return
        feed.outside.difference_update(slots)
        if not feed.outside:
            del self._read[run]
            if feed.device_ring is not None:
                self.put_back(feed.device_ring)

    def close(self) -> None:
        """No run begins any more. What is read still goes with its last row."""
        self._is_over = True
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def put_back(self, ring: DeviceRing) -> None:
        """Nobody uses it."""
        if self._is_over or self._spare is not None:
            ring.close()
        else:
            self._spare = ring
