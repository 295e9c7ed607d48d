"""The model's calls that the engine has, and when it is through with them. Sans-IO."""

from dataclasses import dataclass

from server.batching.entry import Batch


@dataclass(slots=True)
class Call:
    """One call. began: when an instance was free for it, None while it waits at the engine's door.

    expected_s: from then on. lead_s: how long before that it was sent.
    """

    batch: Batch
    expected_s: float
    began: float | None
    lead_s: float = 0.0


class Running:
    """Calls in the order in which they were sent; instances of them run, the rest wait.

    What is asked far more often than calls come and go is a number that `start` and `finish` keep. calls, rows: of all.
    is_free: whether an instance has nothing to do. due_at: when the first call should end by what was expected of it;
    None while an instance has nothing to do.
    """

    __slots__ = ("_at_the_door", "_calls", "_ends", "_instances", "calls", "due_at", "is_free", "rows")

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._calls: dict[int, Call] = {}
        self._ends: list[float] = []  # of those that run, as expected
        self._at_the_door: list[float] = []  # what the others are expected to take
        self.calls = 0
        self.rows = 0
        self.is_free = instances > 0
        self.due_at: float | None = None

    def start(self, batch: Batch, now: float, expected_s: float) -> None:
        """The batch is sent."""
        self._calls[batch.number] = Call(batch, expected_s, now if self.is_free else None)
        self._count()

    def finish(self, batch: Batch, now: float) -> Call | None:
        """The call's end; the next one at the door begins. None for a batch that did not run."""
        call = self._calls.pop(batch.number, None)
        has_run = call is not None and call.began is not None
        if has_run:
            self._begin_next(now)
        self._count()
        return call if has_run else None

    def _begin_next(self, now: float) -> None:
        for waiting in self._calls.values():
            if waiting.began is None:
                waiting.began = now
                waiting.lead_s = now - waiting.batch.formed_at
                return

    def _count(self) -> None:
        calls = self._calls.values()
        self.calls = len(calls)
        self.rows = sum([call.batch.rows for call in calls])
        self.is_free = self.calls < self._instances
        self._ends = [call.began + call.expected_s for call in calls if call.began is not None]
        self._at_the_door = [call.expected_s for call in calls if call.began is None]
        self.due_at = None if self.is_free else min(self._ends)

    def free_at(self, now: float) -> float:
        """When an instance takes one more call: now, or the expected end of those that run.

        A call that should have ended is taken to last as long again as it is late already.
        """
        if self.is_free:
            return now
        ends = [end if end >= now else now + (now - end) for end in self._ends]
        for expected_s in self._at_the_door:
            first = min(range(len(ends)), key=ends.__getitem__)
            ends[first] += expected_s
        return min(ends)

    def second_free_at(self, now: float) -> float:
        """When an instance takes one more call beside the one that begins next; never for a single instance."""
        free = self._instances - self.calls
        if free >= 2:
            return now
        ends = sorted(self._ends)
        after = 0 if free == 1 else 1
        return ends[after] if after < len(ends) else float("inf")
