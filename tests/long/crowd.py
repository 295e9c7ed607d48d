"""Workers that each do one thing again and again until they are stopped."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

Work = Callable[[], str]


class Crowd:
    """A thread for each work, for as long as the block lasts; outcomes by name: the work's, a blank, how it ended."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def _repeat(self, work: Work) -> None:
        while not self._stop.is_set():
            outcome = self.outcome_of(work)
            self.outcomes[f"{work.__name__} {outcome}"] += 1
            if not self.is_fine(outcome):
                self._stop.wait(0.05)

    def outcome_of(self, work: Work) -> str:
        """How it ended, in a word; whatever it raises is an outcome, and fails the test by its name."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001
            return repr(error)[:200]

    def is_fine(self, outcome: str) -> bool:
        """Whether the next one follows at once."""
        return True
