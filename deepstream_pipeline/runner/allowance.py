"""How many frames may be at the engine at once: fewer as soon as they come back too late. Sans-IO.

A quick engine is kept busy by several batches. One that is slow would answer all of them when they are worth nothing
any more: with three batches of half a second and frames that are too old after a second, every answer is late and the
engine works for nobody. Batches become smaller, too, until an answer comes in time, or one frame alone is too late.
How long an answer takes also says how long a frame may wait before it is sent.
"""

LATE, SOON = 0.5, 0.25  # of the latency that is allowed; between them nothing changes
GROWTH = 1.25
ANSWERED = 0.75  # of the latency that is allowed: by then a frame is to be answered
FRESH = 0.05  # of it: so long any frame may wait
FORGET = 0.9  # of how long an answer took, with each that came sooner


class Allowance:
    """most: frames at the engine, where it is quick. max_latency_s: of a frame, from its packet's coming on."""

    def __init__(self, most: int, max_latency_s: float) -> None:
        self._most = most
        self._max_latency_s = max_latency_s
        self._frames = float(most)
        self._took_s: float | None = None

    def begin(self) -> None:
        """A frame that may be too late comes, while nothing is known of the engine: it is tried with one."""
        if self._took_s is None:
            self._frames, self._took_s = 1.0, self._max_latency_s / 2

    @property
    def frames(self) -> int:
        """At once."""
        return int(self._frames)

    @property
    def patience_s(self) -> float:
        """How old a frame may be when it is sent."""
        took_s = self._took_s if self._took_s is not None else self._max_latency_s / 2
        return max(ANSWERED * self._max_latency_s - took_s, FRESH * self._max_latency_s)

    def of_batch(self, at_engine: int) -> int:
        """Frames that the next batch may have, 0 for none now. at_engine: frames that are there already.

        Where they are fewer than usual, half of them at most, so that one batch waits while one is worked at.
        """
        at_most = self.frames if self.frames >= self._most else (self.frames + 1) // 2
        return max(min(self.frames - at_engine, at_most), 0)

    def answered(self, took_s: float, *, is_refused: bool) -> None:
        """A batch came back so long after it was sent. is_refused: the engine had no room or no time for it."""
        self._took_s = max(took_s, FORGET * (self._took_s or 0.0))
        if is_refused or took_s > LATE * self._max_latency_s:
            self._frames = max(self._frames / 2, 1.0)
        elif took_s < SOON * self._max_latency_s:
            self._frames = min(max(self._frames * GROWTH, self._frames + 1.0), float(self._most))
