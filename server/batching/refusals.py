"""What callers are told whom the queue does not serve."""

from server.batching.entry import Entry
from server.batching.options import BatchOptions
from server.core.errors import DeadlineExceeded, Overloaded


def passed(model_name: str, entry: Entry, now: float) -> DeadlineExceeded:
    """Its time is over."""
    late_s = now - (entry.deadline or now)
    return DeadlineExceeded(
        f"the deadline passed {late_s * 1e3:.1f} ms ago, after {max(now - entry.arrived_at, 0.0) * 1e3:.1f} ms in "
        f"{model_name}'s queue; allow more time or send less"
    )


def cannot_meet(model_name: str, deadline: float | None, now: float, finish: float) -> Overloaded:
    """The time until the deadline is too short. finish: when it would be answered."""
    left_s = (deadline or now) - now
    return Overloaded(
        f"{model_name} would answer in {(finish - now) * 1e3:.1f} ms at the soonest and {left_s * 1e3:.1f} ms are "
        "left; allow more time or send less",
        reason="cannot_meet",
    )


def queue_full(model_name: str, options: BatchOptions, waiting: int) -> Overloaded:
    """So many requests wait, and nobody has more of them than the newcomer's client."""
    return Overloaded(
        f"{waiting} requests (limit {options.max_queue_size}) wait for {model_name}; send again later",
        reason="queue_full",
    )


def queue_bytes(model_name: str, options: BatchOptions, waiting_bytes: int) -> Overloaded:
    """So many bytes wait, and nobody has more rows among them than the newcomer's client."""
    return Overloaded(
        f"{waiting_bytes} bytes (limit {options.max_queue_bytes}) wait for {model_name}; send again later",
        reason="queue_bytes",
    )


def share(model_name: str, rows: int) -> Overloaded:
    """Its client has the most rows in a full queue, and another one needs the place."""
    return Overloaded(
        f"{model_name}'s queue is full and this caller has the most in it ({rows} rows); send less", reason="share"
    )


def draining(model_name: str) -> Overloaded:
    """The gateway stops."""
    return Overloaded(f"the gateway stops; {model_name} takes no more requests", reason="draining")
