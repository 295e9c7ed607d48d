"""Readings of the video program's metrics, and whether a number of streams was sustained."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock_load.measure.buckets import Buckets

Key = TypeVar("Key")
_SAMPLE = re.compile(r"^penstock_video_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Counters so far, of one program or several. latency: (source, upper bound in seconds) → its frames that took no
    longer. dropped: (source, reason) → frames.

    hand_over: rows by where they lay. processes: decode processes by decoder. prepare_s, decode_s: of CPU.
    """

    answered: Mapping[str, int] = field(default_factory=dict)
    decoded: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)
    latency: Mapping[tuple[str, float], int] = field(default_factory=dict)
    hand_over: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, int] = field(default_factory=dict)
    batches: int = 0
    batched: int = 0
    infer_s: float = 0.0
    decode_s: float = 0.0
    prepare_s: float = 0.0


def read_page(text: str) -> MetricsPage:
    """Of one program."""
    answered: dict[str, int] = {}
    decoded: dict[str, int] = {}
    restarts: dict[str, int] = {}
    by_source = {"inferred_total": answered, "frames_total": decoded, "restarts_total": restarts}
    dropped: dict[tuple[str, str], int] = {}
    latency: dict[tuple[str, float], int] = {}
    hand_over: dict[str, int] = {}
    processes: dict[str, int] = {}
    by_word = {"rows_total": (hand_over, "hand_over"), "decode_processes": (processes, "decoder")}
    sums = dict.fromkeys(
        ("batch_frames_count", "batch_frames_sum", "infer_seconds_sum", "decode_seconds_sum", "prepare_seconds_sum"),
        0.0,
    )
    for name, words, value in _SAMPLE.findall(text):
        if name in by_source:
            by_source[name][_label(words, "source")] = int(float(value))
        elif name in by_word:
            counts, label = by_word[name]
            word = _label(words, label)
            counts[word] = counts.get(word, 0) + int(float(value))
        elif name == "dropped_total":
            dropped[_label(words, "source"), _label(words, "reason")] = int(float(value))
        elif name == "glass_to_event_seconds_bucket":
            latency[_label(words, "source"), float(_label(words, "le"))] = int(float(value))
        elif name in sums:
            sums[name] += float(value)
    batches, batched, infer_s, decode_s, prepare_s = sums.values()
    return MetricsPage(
        answered, decoded, restarts, dropped, latency, hand_over, processes,
        int(batches), int(batched), infer_s, decode_s, prepare_s,
    )  # fmt: skip


def joined(pages: Iterable[MetricsPage]) -> MetricsPage:
    """Of several programs, whose sources have different ids."""
    pages = tuple(pages)
    return MetricsPage(
        answered=_added(page.answered for page in pages),
        decoded=_added(page.decoded for page in pages),
        restarts=_added(page.restarts for page in pages),
        dropped=_added(page.dropped for page in pages),
        latency=_added(page.latency for page in pages),
        hand_over=_added(page.hand_over for page in pages),
        processes=_added(page.processes for page in pages),
        batches=sum(page.batches for page in pages),
        batched=sum(page.batched for page in pages),
        infer_s=sum(page.infer_s for page in pages),
        decode_s=sum(page.decode_s for page in pages),
        prepare_s=sum(page.prepare_s for page in pages),
    )


def latency_between(before: MetricsPage, after: MetricsPage) -> Buckets:
    """Of the frames answered meanwhile, of the sources that are still there: one that goes takes its counts along."""
    return Buckets(tuple(sorted(_between(before.latency, after.latency).items())))


def dropped_between(before: MetricsPage, after: MetricsPage) -> dict[str, int]:
    """Frames by reason, of the sources that are still there."""
    return {why: n for why, n in _between(before.dropped, after.dropped).items() if n}


def _between(before: Mapping[tuple[str, Key], int], after: Mapping[tuple[str, Key], int]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for (source, key), n in after.items():
        found[key] = found.get(key, 0) + n - before.get((source, key), 0)
    return found


def _added(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for one in counts:
        for key, n in one.items():
            found[key] = found.get(key, 0) + n
    return found


def _label(words: str, name: str) -> str:
    return next((value for key, value in _LABEL.findall(words) if key == name), "")


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


class SustainedSearch:
    """The highest number held: first what is named, then down to one that is held, then by halves.

    most: more than that many cannot be. It ends when held and missed are within 2 % of each other, or after `tries`.
    """

    def __init__(self, firsts: Sequence[int], most: int, tries: int = 7) -> None:
        self.held, self.missed = 0, max(most, 1) + 1
        self._firsts = [count for count in dict.fromkeys(min(one, self.missed - 1) for one in firsts) if count > 0]
        self._left, self._back, self._guess = tries, FIRST_BACK, int(self.missed * (1 - FIRST_BACK))

    def next_count(self) -> int | None:
        """What to try; None at the end."""
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
