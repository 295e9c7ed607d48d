"""Where a request was when its caller left: told along with the cancellation, which passes through every room."""

from enum import StrEnum


class LeftAt(StrEnum):
    """DECODE: its images were being prepared. QUEUE: it waited for a batch, and is in none. BATCH: its batch ran, or
    runs on for its mates. ENGINE: the engine had it alone. STREAM: it was on a stream.
    """

    DECODE = "decode"
    QUEUE = "queue"
    BATCH = "batch"
    ENGINE = "engine"
    STREAM = "stream"


def leaving(cancelled: BaseException, where: LeftAt) -> None:
    """Note it on the CancelledError; the first room to know is believed."""
    if left_at(cancelled) is None:
        cancelled.add_note(where)


def left_at(cancelled: BaseException) -> LeftAt | None:
    """What was noted; None where nobody did."""
    return next((note for note in getattr(cancelled, "__notes__", ()) if isinstance(note, LeftAt)), None)
