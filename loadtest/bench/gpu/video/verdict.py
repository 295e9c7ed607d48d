"""Whether a number of streams was held in a window, and what is tried next. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.measure.buckets import Buckets

MOST_DROPPED = 0.001  # of the frames that were due
PLAYED_OFF = 0.005  # of the frames that were due, of all streams together
EDGE_FRAMES = 3  # of a stream: the window cuts through a frame at each end, and an answer may come in the next window
IN_TIME = 0.99
WITHIN = 0.02  # of the number held: a search ends there
FIRST_BACK = 0.04  # below what was answered of a number that was missed; twice as much each time


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
    """The highest number held: first what is named, then down to one that is held, then by halves.

    most: more than that many cannot be. It ends when held and missed are within 2 % of each other, or after `tries`.
    """

    def __init__(self, firsts: Sequence[int], most: int, tries: int = 7) -> None:
        self.held, self.missed = 0, max(most, 1) + 1
        self._firsts = [count for count in dict.fromkeys(min(one, self.missed - 1) for one in firsts) if count > 0]
        self._left, self._back, self._guess = tries, FIRST_BACK, int(self.missed * (1 - FIRST_BACK))

    def next_count(self) -> int | None:
        """What to try; None where it is over."""
        if self._left <= 0:
            return None
        while self._firsts:
            count = self._firsts.pop(0)
            if self.held < count < self.missed:
                return count
        if self.missed - self.held <= max(1, round(WITHIN * self.held)):
            return None
        if not self.held:
            return min(max(self._guess, 1), self.missed - 1)
        return (self.held + self.missed) // 2

    def record(self, count: int, *, is_held: bool, played: float = 1.0, full_at: int = 0) -> None:
        """What came of a try. played: of what was due, where it was missed; full_at: the streams that the card had
        decoders for, where it had none for the others, else 0."""
        self._left -= 1
        if is_held:
            self.held = max(self.held, count)
        elif full_at:
            self.missed = min(self.missed, full_at + 1)
            self._guess = below(full_at)
            self._firsts = [self._guess, *(one for one in self._firsts if one < self._guess)]
        else:
            self.missed = min(self.missed, count)
            could_be = count * min(played, 1.0)
            self._guess = int(could_be * (1 - self._back))
            self._firsts = [one for one in self._firsts if one <= could_be * (1 + FIRST_BACK)]
            self._back *= 2


def below(full_at: int) -> int:
    """Streams that a card which was full at so many surely has decoders for: a multiple of 5, where there is one."""
    return (full_at - 1) // 5 * 5 or max(full_at - 1, 1)


def shares(count: int, programs: int) -> tuple[int, ...]:
    """So many streams over so many programs, as evenly as can be; a program without one is none."""
    each, more = divmod(count, programs)
    return tuple(each + (number < more) for number in range(programs) if each + (number < more))
