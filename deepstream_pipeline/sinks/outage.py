"""When something outside is full or gone: told once, tried again later, what was lost is counted. Sans-IO."""


class Outage:
    """Whether it may be tried now. `lost` counts what was given up since the beginning; times are monotonic seconds.

    The pause between two tries doubles from first_s to longest_s with each that fails; jitter in [0, 1) shortens it by
    up to half, so that many do not come back together.
    """

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self.lost = 0
        self._first_s, self._longest_s = first_s, longest_s
        self._pause_s = first_s
        self._again_at: float | None = None
        self._lost_before = 0

    @property
    def is_open(self) -> bool:
        """Whether the last try failed."""
        return self._again_at is not None

    def may_try(self, now: float) -> bool:
        """False while it is too early for another try."""
        return self._again_at is None or now >= self._again_at

    def failed(self, now: float, *, jitter: float = 0.0) -> bool:
        """A try failed. True where that is news: it worked before."""
        is_news = self._again_at is None
        if is_news:
            self._lost_before, self._pause_s = self.lost, self._first_s
        self._again_at = now + self._pause_s * (1 - jitter / 2)
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        return is_news

    def worked(self) -> int | None:
        """A try worked. How much was lost, where it failed before, for who was told of that; else None."""
        if self._again_at is None:
            return None
        self._again_at = None
        return self.lost - self._lost_before
