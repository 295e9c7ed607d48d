"""What waits in the queue, and what leaves it."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from server.core.batching import CloseReason, Fit


class Stage(Enum):
    """Where an entry is. GONE: not in the queue: never pushed, answered, dropped or cancelled."""

    QUEUE = "queue"
    BATCH = "batch"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the queue; its identity is the object itself.

    key: requests with equal keys may share a batch; None for one that must go alone. rows: along axis 0. deadline:
    monotonic seconds, None for none. priority: 0 is served first. client: whom the queue is fair to. ahead: requests
    that waited when it came. The queue sets ahead, stage, rank (what it is served by inside its priority, monotonic
    seconds) and number (in the order of arrival).
    """

    key: Hashable
    rows: int
    size_bytes: int
    arrived_at: float
    deadline: float | None = None
    priority: int = 0
    client: str = ""
    ahead: int = 0
    stage: Stage = Stage.GONE
    rank: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Entries that go to the engine in one call, in the order in which they were chosen.

    busy: the model's calls that ran when it was formed, this one not among them. expected_s: by the fit, None without.
    """

    number: int
    entries: tuple[Entry, ...]
    rows: int
    close_reason: CloseReason
    formed_at: float
    busy: int
    fit: Fit | None = None
    expected_s: float | None = None
