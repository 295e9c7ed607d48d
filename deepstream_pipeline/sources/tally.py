"""What is counted of a source over all of its processes, and whether one of them talks too much."""

import math
from collections import Counter

from deepstream_pipeline.sources.line import BrokenPromise
from deepstream_pipeline.sources.messages import Beat, Lost
from deepstream_pipeline.types import DropReason

MAX_TALK = 1_000  # messages in one second that are no frames, which have their slots; a dozen are usual
_MAX_LOST = 1_000_000
_NONE = Beat(0, 0, 0.0, 0.0)


class Tally:
    """beat: sums since the source was added. drops: by types.DropReason."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()
        self.beat = self._before = _NONE
        self._second, self._in_second = 0, 0

    def begin(self) -> None:
        """Another process counts from 0."""
        self._before = self.beat

    def talk(self, now: float) -> None:
        """A message came that is no frame. Raises BrokenPromise where there are too many."""
        if int(now) != self._second:
            self._second, self._in_second = int(now), 0
        self._in_second += 1
        if self._in_second > MAX_TALK:
            raise BrokenPromise(f"its process sent {MAX_TALK} messages in a second")

    def lost(self, lost: Lost) -> DropReason:
        """Raises BrokenPromise where it cannot be."""
        if not 0 < lost.count <= _MAX_LOST:
            raise BrokenPromise(f"its process lost {lost.count} frames at once")
        try:
            reason = DropReason(lost.reason)
        except ValueError:
            raise BrokenPromise(f"its process lost frames for a reason that nobody knows: {lost.reason!r}") from None
        self.drops[reason.value] += lost.count
        return reason

    def beats(self, beat: Beat) -> Beat:
        """The sums of all processes. Raises BrokenPromise where they are no sums."""
        sums = (beat.decoded, beat.bad_packets, beat.decode_s, beat.prepare_s)
        if not all(math.isfinite(number) and number >= 0 for number in sums):
            raise BrokenPromise("its process counted below nothing")
        before = self._before
        self.beat = Beat(
            before.decoded + beat.decoded,
            before.bad_packets + beat.bad_packets,
            before.decode_s + beat.decode_s,
            before.prepare_s + beat.prepare_s,
        )
        return self.beat
