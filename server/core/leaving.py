"""Where a request was when its caller left: told along with the cancellation, which passes through every room."""

from collections.abc import Callable
from enum import StrEnum

_NOTE = "left_at"


class LeftAt(StrEnum):
    """DECODE: its images were being prepared. QUEUE: it waited for a batch, and is in none. BATCH: its batch ran, or
    runs on for its mates. ENGINE: the engine had it alone. STREAM: it was on a stream.
    """

    DECODE = "decode"
    QUEUE = "queue"
    BATCH = "batch"
    ENGINE = "engine"
    STREAM = "stream"


class ToldLater:
    """Where it was, which another process knows and will say. Whoever makes one sees to it that it is told."""

    def __init__(self) -> None:
        self._where: LeftAt | None = None
        self._hear: Callable[[LeftAt], None] = lambda _: None

    def tell(self, where: LeftAt) -> None:
        """The first word counts."""
        if self._where is None:
            self._where = where
            self._hear(where)

    def when_told(self, hear: Callable[[LeftAt], None]) -> None:
        """Have it heard once: now, where it is known already."""
        if self._where is None:
            self._hear = hear
        else:
            hear(self._where)


def leaving(cancelled: BaseException, where: LeftAt | ToldLater) -> None:
    """Note it on the CancelledError; the first room to know is believed."""
    vars(cancelled).setdefault(_NOTE, where)


def left_at(cancelled: BaseException) -> LeftAt | ToldLater | None:
    """What was noted; None where nobody did."""
    where: LeftAt | ToldLater | None = vars(cancelled).get(_NOTE)
    return where


def when_known(cancelled: BaseException, otherwise: LeftAt, hear: Callable[[LeftAt], None]) -> None:
    """Have it heard once, now or later. otherwise: where nobody noted it."""
    where = left_at(cancelled) or otherwise
    if isinstance(where, ToldLater):
        where.when_told(hear)
    else:
        hear(where)
