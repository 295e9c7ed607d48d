"""Whether a number of streams was held in a window, and what is tried next. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.measure.buckets import Buckets

MOST_DROPPED = 0.001  # of the frames that were due
PLAYED_OFF = 0.005  # of the frames that were due, of all streams together
EDGE_FRAMES = 3  # of a stream: the window cuts through a frame at each end, and an answer may come in the next window
IN_TIME = 0.99


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of all streams. answered: frames of each. fps: that each was due. dropped: by reason, of all.

    latency: from a frame's capture to its result.
    """

    seconds: float
    fps: float
    answered: tuple[int, ...]
    dropped: Mapping[str, int]
    latency: Buckets

    @property
    def due(self) -> float:
        """Frames of all streams."""
        return self.fps * self.seconds * len(self.answered)

    @property
    def rate(self) -> float:
        """Frames answered a second."""
        return sum(self.answered) / self.seconds

    @property
    def played(self) -> float:
        """Of what was due. Below 1: frames are lost, or come later and later. Above: what was late is made up for."""
        return sum(self.answered) / self.due if self.due else 0.0

    @property
    def dropped_share(self) -> float:
        """Of what was due."""
        return sum(self.dropped.values()) / self.due if self.due else 0.0

    def in_time(self, bound_ms: float) -> float:
        """The share of the answered frames that kept the bound: exact where the histogram has it as a bound."""
        return self.latency.within(bound_ms / 1000) / self.latency.count if self.latency.count else 0.0


def complaint(window: Window, bound_ms: float) -> str:
    """Why the streams were not held; empty where they were."""
    if not window.answered:
        return "there is no stream"
    least = window.fps * window.seconds * (1 - MOST_DROPPED) - EDGE_FRAMES
    off = PLAYED_OFF * window.due + 2 * len(window.answered) ** 0.5  # each stream's begin and end are chance
    behind = sum(frames < least for frames in window.answered)
    if window.dropped_share > MOST_DROPPED:
        return f"{window.dropped_share:.2%} of the frames dropped"
    if window.in_time(bound_ms) < IN_TIME:
        return f"p99 {window.latency.percentile_ms(0.99):.0f} ms"
    if sum(window.answered) < window.due - off:
        return f"{window.played:.2%} of the frames answered"
    if sum(window.answered) > window.due + off:
        return f"{window.played:.2%} of the frames answered: streams that were late still catch up"
    if behind:
        return f"{behind} streams had fewer than {least:.0f} frames, the least {min(window.answered)}"
    return ""


class HeldSearch:
    """The highest number held: first what is named, then by 0.85 down to one that is held, then by halves.

    most: more than that many cannot be. It ends when held and missed are within 1 % of each other, or after `tries`.
    """

    def __init__(self, firsts: Sequence[int], most: int, tries: int = 7) -> None:
        self.held, self.missed = 0, max(most, 1) + 1
        self._firsts = [count for count in dict.fromkeys(firsts) if count > 0]
        self._left = tries

    def next_count(self) -> int | None:
        """What to try; None where it is over."""
        if self._left <= 0 or self.missed - self.held <= max(1, round(0.01 * self.held)):
            return None
        while self._firsts:
            count = min(self._firsts.pop(0), self.missed - 1)
            if count > self.held:
                return count
        if not self.held:
            return min(max(int(self.missed * 0.85), 1), self.missed - 1)
        return (self.held + self.missed) // 2

    def record(self, count: int, *, is_held: bool) -> None:
        """What came of a try."""
        self._left -= 1
        if is_held:
            self.held = max(self.held, count)
        else:
            self.missed = min(self.missed, count)


def shares(count: int, programs: int) -> tuple[int, ...]:
    """So many streams over so many programs, as evenly as can be; a program without one is none."""
    each, more = divmod(count, programs)
    return tuple(each + (number < more) for number in range(programs) if each + (number < more))
