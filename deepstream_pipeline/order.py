"""The order of one source's frames: they are answered as the engine likes, and go on as they were seen. Sans-IO."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
END = 1 << 62  # behind every frame number


class Sequencer(Generic[T]):
    """Numbers are expected in rising order; what they came to is handed on in that order, each once."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, T | None] = OrderedDict()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        first = next(iter(self._open), None)
        return f"Sequencer({len(self._open)} open, first {first})"

    def expect(self, number: int) -> None:
        """That number's turn is behind all that are expected already."""
        self._open[number] = None

    def resolve(self, number: int, outcome: T) -> list[T]:
        """What may go on now, in order. A number that is not expected is not waited for, and lost."""
        if number in self._open:
            self._open[number] = outcome
        return self._ready()

    def forget(self, number: int) -> list[T]:
        """Nothing will come of that number; what may go on now without it."""
        if number in self._open:
            self._gone.add(number)
        return self._ready()

    def _ready(self) -> list[T]:
        ready: list[T] = []
        while self._open:
            number = next(iter(self._open))
            outcome = self._open[number]
            if number in self._gone:
                self._gone.discard(number)
            elif outcome is None:
                break
            else:
                ready.append(outcome)
            del self._open[number]
        return ready
