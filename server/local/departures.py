"""Callers who left what the core had of theirs: where they were, once the core says so."""

from dataclasses import dataclass

from server.core.leaving import LeftAt, ToldLater

PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Departure:
    """otherwise: what is said where the core does not. until: monotonic seconds."""

    later: ToldLater
    otherwise: LeftAt
    until: float


class Departures:
    """Sans-IO: `now` is monotonic seconds. Each is told once: by the core, or by `expire` or `lose` without it."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Departure] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, number: int, otherwise: LeftAt, now: float) -> ToldLater:
        """The core is asked about the question of that number."""
        later = ToldLater()
        self._waiting[number] = _Departure(later, otherwise, now + PATIENCE_S)
        return later

    def tell(self, number: int, where: LeftAt | None = None) -> None:
        """What the core said of it. where: None for an answer that crossed the question."""
        departure = self._waiting.pop(number, None)
        if departure is not None:
            departure.later.tell(where or departure.otherwise)

    def expire(self, now: float) -> None:
        """The core lets some wait too long."""
        for number in [number for number, departure in self._waiting.items() if now >= departure.until]:
            self.tell(number)

    def lose(self) -> None:
        """There is no core any more."""
        for number in list(self._waiting):
            self.tell(number)
