"""The model's calls that the engine has, and when it is through with them. Sans-IO."""

from dataclasses import dataclass

from server.batching.entry import Batch


@dataclass(slots=True)
class Call:
    """One call. began: when an instance took it, None while it waits at the engine's door."""

    batch: Batch
    began: float | None
    waited: bool


class Running:
    """Calls in the order in which they were sent; instances of them run, the rest wait."""

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._calls: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, batch: Batch) -> bool:
        return batch.number in self._calls

    def start(self, batch: Batch, now: float) -> None:
        """The batch is sent."""
        has_room = len(self._calls) < self._instances
        self._calls[batch.number] = Call(batch, now if has_room else None, not has_room)

    def finish(self, batch: Batch, now: float) -> Call | None:
        """The call's end; the next one at the door begins. None for a batch that does not run."""
        call = self._calls.pop(batch.number, None)
        if call is None or call.began is None:
            return None
        for waiting in self._calls.values():
            if waiting.began is None:
                waiting.began = now
                break
        return call

    def free_at(self, now: float) -> float:
        """When an instance takes one more call: now, or the expected end of those that run.

        A call that should have ended is taken to last as long again as it is late already.
        """
        if len(self._calls) < self._instances:
            return now
        ends, waiting = [], []
        for call in self._calls.values():
            expected_s = call.batch.expected_s or 0.0
            if call.began is None:
                waiting.append(expected_s)
            else:
                end = call.began + expected_s
                ends.append(end if end >= now else now + (now - end))
        for expected_s in waiting:
            ends.sort()
            ends[0] += expected_s
        return min(ends)

    def due_at(self) -> float:
        """The same by the calls' first expectation: it stands still while time goes on."""
        if len(self._calls) < self._instances:
            return 0.0
        return min(
            call.began + (call.batch.expected_s or 0.0) for call in self._calls.values() if call.began is not None
        )
