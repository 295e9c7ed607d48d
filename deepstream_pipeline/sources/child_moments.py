"""Where the frames that were told of lie on the recorder's clock, so that a recording is cut around its event's."""

from collections import deque
from collections.abc import Collection

_MOST_KEPT = 1024  # frames, the last ones: a result is never told of so late


class Moments:
    """Of one run's frames. Times in seconds of the recorder's clock."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, float]] = deque(maxlen=_MOST_KEPT)
        self._slots: dict[int, float] = {}

    def note(self, frame_num: int, slot: int, moment_s: float) -> None:
        """That frame is in that slot now."""
        self._frames.append((frame_num, moment_s))
        self._slots[slot] = moment_s

    def of(self, frame_num: int) -> float | None:
        """Of that frame, or of the nearest that is known; None where none is, or the number is negative."""
        if frame_num < 0 or not self._frames:
            return None
        return min(self._frames, key=lambda frame: abs(frame[0] - frame_num))[1]

    def oldest(self, outside: Collection[int]) -> float | None:
        """Of the frames that the parent has, in those slots, and of the last one told of; None before the first."""
        if not self._frames:
            return None
        return min([self._slots[slot] for slot in outside if slot in self._slots], default=self._frames[-1][1])
