"""What the replay needs of a policy: the contract of the gateway's own queue, which rivals keep too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.batching.entry import Batch, Entry
from server.core.errors import InferenceError


class GivenUp(Protocol):
    """A waiting entry that will not be served, and what its caller is told."""

    @property
    def entry(self) -> Entry:
        """The one that waited."""
        ...

    @property
    def error(self) -> InferenceError:
        """Overloaded for one refused, DeadlineExceeded for one whose time passed."""
        ...


@dataclass(frozen=True, slots=True)
class Lost:
    """What a rival gives up."""

    entry: Entry
    error: InferenceError


class Policy(Protocol):
    """One model's queue. Every member takes now, monotonic seconds that never go back."""

    def push(self, entry: Entry, now: float) -> Sequence[GivenUp]:
        """Take the entry or raise an InferenceError for it; what waited and is displaced comes back."""
        ...

    def pop(self, now: float) -> Batch | None:
        """A batch to run now; called until None."""
        ...

    def expire(self, now: float) -> Sequence[GivenUp]:
        """Waiting entries that are given up now."""
        ...

    def done(self, batch: Batch, now: float) -> None:
        """The engine answered the batch."""
        ...

    def next_wakeup(self, now: float) -> float | None:
        """When to ask again if nothing else happens."""
        ...
