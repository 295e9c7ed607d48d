"""Lines for who waits."""

import sys
import time


def tell(line: str) -> None:
    """One line on stdout, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Progress:
    """Tells how far a long work is, how fast it goes and how long it still takes, some twenty times in all."""

    def __init__(self, total: int, noun: str, *, reports: int = 20) -> None:
        self._total = total
        self._noun = noun
        self._every = max(total // reports, 1)
        self._started = time.perf_counter()

    def reached(self, done: int, remark: str = "") -> None:
        """done of the total are finished."""
        if done % self._every and done != self._total:
            return
        rate = done / max(time.perf_counter() - self._started, 1e-9)
        left_s = (self._total - done) / rate
        tell(f"{done}/{self._total} {self._noun}{remark}, {rate:.3g}/s, {left_s:.0f} s left")
