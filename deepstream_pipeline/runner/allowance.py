"""How many frames may be at the engine at once: fewer as soon as they come back too late. Sans-IO.

A quick engine is kept busy by several batches. One that is slow would answer all of them when they are worth nothing
any more: with three batches of half a second and frames that are too old after a second, every answer is late and the
engine works for nobody. Batches become smaller, too, until an answer comes in time, or one frame alone is too late.
"""

LATE, SOON = 0.5, 0.25  # of the latency that is allowed; between them nothing changes
GROWTH = 1.25


class Allowance:
    """most: frames at the engine, where it is quick. max_latency_s: of a frame, from its decoding on."""

    def __init__(self, most: int, max_latency_s: float) -> None:
        self._most = most
        self._max_latency_s = max_latency_s
        self._frames = float(most)

    @property
    def frames(self) -> int:
        """At once."""
        return int(self._frames)

    def of_batch(self, at_engine: int) -> int:
        """Frames that the next batch may have, 0 for none now. at_engine: frames that are there already.

        Where they are fewer than usual, half of them at most, so that one batch waits while one is worked at.
        """
        at_most = self.frames if self.frames >= self._most else (self.frames + 1) // 2
        return max(min(self.frames - at_engine, at_most), 0)

    def answered(self, took_s: float, *, is_refused: bool) -> None:
        """A batch came back so long after it was sent. is_refused: the engine had no room or no time for it."""
        if is_refused or took_s > LATE * self._max_latency_s:
            self._frames = max(self._frames / 2, 1.0)
        elif took_s < SOON * self._max_latency_s:
            self._frames = min(max(self._frames * GROWTH, self._frames + 1.0), float(self._most))
