"""How long to wait before a process that ended is started again."""

import random
from collections.abc import Callable


class RestartBackoff:
    """0.2 s before the first restart, then twice as long each time, up to 30 s; anew after 60 s of running.

    Sans-IO: every time is `now`, monotonic seconds. Each delay is shortened by a random part of up to a fifth, so that
    what died together does not come back together. uniform: random numbers in [0, 1).
    """

    def __init__(
        self,
        *,
        first_s: float = 0.2,
        cap_s: float = 30.0,
        stable_s: float = 60.0,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._stable_s = stable_s
        self._uniform = uniform
        self._restarts = 0
        self._live_since: float | None = None

    def live(self, now: float) -> None:
        """The process began to work."""
        self._live_since = now

    def next_delay_s(self, now: float) -> float:
        """The process ended: seconds to wait before its next start."""
        if self._live_since is not None and now - self._live_since >= self._stable_s:
            self._restarts = 0
        self._live_since = None
        delay_s = min(self._cap_s, self._first_s * 2.0 ** min(self._restarts, 60))
        self._restarts += 1
        return delay_s * (1.0 - 0.2 * self._uniform())
