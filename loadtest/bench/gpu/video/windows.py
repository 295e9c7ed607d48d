"""Measurement windows of a fleet: its metrics, whether its streams were sustained, and the search for their number."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench.gpu.programs import PenstockUp
from loadtest.bench.gpu.video.clips import FPS
from loadtest.bench.gpu.video.fleet import Fleet, MetricsPage, NotAllThere, between
from loadtest.bench.gpu.video.machine import CardMeter, cores_by_kind, interrupted_between, usage_of
from loadtest.bench.wire import BadAnswer
from penstock_load.measure.buckets import Buckets

MOST_DROPPED = 0.001  # of the due frames
PLAYED_OFF = 0.005  # of the due frames, of all streams together
EDGE_FRAMES = 3  # of a stream: a window cuts through a frame at each end, and an answer may come in the next window
IN_TIME = 0.99
WITHIN = 0.02  # of the sustained number: a search ends there
FIRST_BACK = 0.04  # below what was answered of a number that was missed; twice as much each time
HOPELESS_IN_TIME, HOPELESS_DROPPED, HOPELESS_PLAYED = 0.8, 0.05, 0.9
WINDOWS = 2  # of a number before it counts as missed: one moment of the machine's must not decide


@dataclass(frozen=True, slots=True)
class Pacing:
    """bound_ms: of in_time's share of the answers. settle_s: before a window. start_s: until all streams must have
    answers. fps: answers of a stream that are due."""

    seconds: float
    bound_ms: float
    settle_s: float
    start_s: float
    in_time: float = IN_TIME
    fps: float = FPS


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of all streams. answered: frames of each. fps: due of each. dropped: frames by reason.

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
    def played(self) -> float:
        """Answered by due. Below 1: frames are lost, or later and later. Above: late frames are caught up."""
        return sum(self.answered) / self.due if self.due else 0.0

    @property
    def dropped_share(self) -> float:
        """Of the due frames."""
        return sum(self.dropped.values()) / self.due if self.due else 0.0

    def in_time(self, bound_ms: float) -> float:
        """Share of the answered frames within the bound: exact if the histogram has this bound."""
        return self.latency.within(bound_ms / 1000) / self.latency.count if self.latency.count else 0.0


def complaint(window: Window, bound_ms: float, in_time: float = IN_TIME) -> str:
    """Why the streams were not sustained; empty if they were."""
    if not window.answered:
        return "there is no stream"
    least = window.fps * window.seconds * (1 - MOST_DROPPED) - EDGE_FRAMES
    off = PLAYED_OFF * window.due + 2 * len(window.answered) ** 0.5  # each stream's begin and end are chance
    behind = sum(frames < least for frames in window.answered)
    if window.dropped_share > MOST_DROPPED:
        return f"{window.dropped_share:.2%} of the frames dropped"
    if window.in_time(bound_ms) < in_time:
        return f"p{in_time * 100:.0f} {window.latency.percentile_ms(in_time):.0f} ms"
    if sum(window.answered) < window.due - off:
        return f"{window.played:.2%} of the frames answered"
    if sum(window.answered) > window.due + off:
        return f"{window.played:.2%} of the frames answered: streams that were late still catch up"
    if behind:
        return f"{behind} streams had fewer than {least:.0f} frames, the least {min(window.answered)}"
    return ""


def measure(fleet: Fleet, up: PenstockUp, card: CardMeter, pacing: Pacing) -> dict[str, Any]:
    """One window's figures; `complaint` is empty if the streams were sustained. Raises BadAnswer."""
    stack, ids = up.process.pid, fleet.ids
    used, before = usage_of(fleet.pids, stack), fleet.look()
    load = card.during(pacing.seconds)
    after, spent = fleet.look(), usage_of(fleet.pids, stack)
    seconds, page = after.at_s - before.at_s, between(before.page, after.page)
    answered = page.by_source("inferred_total")
    window = Window(
        seconds=seconds,
        fps=pacing.fps,
        answered=tuple(int(answered.get(one, 0)) for one in ids),
        dropped={why: int(n) for why, n in page.by_word("dropped_total").items() if n},
        latency=latency_of(page),
    )
    batches = page.total("batch_frames_count")
    rate, cores = sum(window.answered) / seconds, cores_by_kind(used, spent)
    return {
        "streams": len(ids),
        "complaint": complaint(window, pacing.bound_ms, pacing.in_time),
        "seconds": seconds,
        "rate": rate,
        "played": window.played,
        "least_frames": min(window.answered, default=0),
        "dropped_share": window.dropped_share,
        "dropped": dict(window.dropped),
        "p50_ms": window.latency.percentile_ms(0.5),
        "p95_ms": window.latency.percentile_ms(0.95),
        "p99_ms": window.latency.percentile_ms(0.99),
        "in_time": window.in_time(pacing.bound_ms),
        "frames_a_batch": page.total("batch_frames_sum") / max(batches, 1),
        "infer_ms_a_batch": 1000 * page.total("infer_seconds_sum") / max(batches, 1),
        "rows": page.by_word("rows_total"),
        "decode_processes": after.page.by_word("decode_processes"),
        "restarts": page.total("restarts_total"),
        "cores": cores,
        "cpu_ms_a_frame": {kind: 1000 * one / max(rate, 1.0) for kind, one in cores.items()},
        "card": load,
        "interrupts": interrupted_between(used, spent),
    }


def latency_of(page: MetricsPage) -> Buckets:
    """Of all its sources."""
    bounds = page.by_word("glass_to_event_seconds_bucket")
    return Buckets(tuple(sorted((float(bound), int(n)) for bound, n in bounds.items())))


def try_count(fleet: Fleet, count: int, window: Callable[[], dict[str, Any]], pacing: Pacing) -> dict[str, Any]:
    """The fleet with that many streams: the first window that was sustained, else the last of two.

    waited_s: until all streams had answers. If some have none in time, that is the complaint; if the GPU makes no more
    decoders there is no window, and full_at is the number of streams that have one. Raises BadAnswer.
    """
    fleet.resize(count)
    try:
        waited_s = round(fleet.wait(pacing.start_s), 1)
    except NotAllThere as error:
        failure = {"streams": count, "complaint": str(error), "waited_s": round(error.waited_s, 1)}
        return failure | {"full_at": error.answered} if error.is_full else window() | failure
    time.sleep(pacing.settle_s)
    found: dict[str, Any] = {}
    for _ in range(WINDOWS):
        found = window()
        is_hopeless = found["in_time"] < HOPELESS_IN_TIME or found["dropped_share"] > HOPELESS_DROPPED
        if not found["complaint"] or is_hopeless or found["played"] < HOPELESS_PLAYED:
            break
    return found | {"waited_s": waited_s}


class SustainedSearch:
    """The highest sustained number: first the given ones, then down to one that is sustained, then by halves.

    most: the limit. It ends if sustained and missed are within 2 % of each other, or after `tries`.
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
        """The result of a try. played: answered by due, if it was missed. full_at: decoders of a full GPU, else 0."""
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
    """Streams that a GPU which was full at that many surely has decoders for: a multiple of 5, if there is one."""
    return (full_at - 1) // 5 * 5 or max(full_at - 1, 1)


def search(
    finding: SustainedSearch, attempt: Callable[[int], dict[str, Any]], budget_s: float = math.inf
) -> dict[str, Any]:
    """held, missed (0 if nothing was), full_at (decoders at which the GPU was full, else 0), and every try.

    budget_s: once a number is sustained, nothing is tried after that. cut: why the search ended early, else empty.
    Raises BadAnswer, OSError if the first try fails; after a later failure the earlier results stay.
    """
    tried, cut, began_s = list[dict[str, Any]](), "", time.monotonic()
    while (count := finding.next_count()) is not None:
        if finding.held and time.monotonic() - began_s > budget_s:
            cut = f"{count} streams: its {budget_s:g} s were over"
            break
        try:
            tried.append(attempt(count))
        except (BadAnswer, OSError) as error:
            if not tried:
                raise
            cut = f"{count} streams: {error}"
            break
        last = tried[-1]
        finding.record(
            count,
            is_held=not last["complaint"],
            played=float(last.get("played", 1.0)),
            full_at=int(last.get("full_at", 0)),
        )
    missed = [one["streams"] for one in tried if one["complaint"]]
    full_at = max((int(one.get("full_at", 0)) for one in tried), default=0)
    return {"held": finding.held, "missed": min(missed, default=0), "full_at": full_at, "tries": tried, "cut": cut}
