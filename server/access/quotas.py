"""How much each caller has asked for: a bucket of requests and a share of what is in flight. Sans-IO."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from server.core.caller import Caller, Quota
from server.core.errors import QuotaExceeded

SHARE_RETRY_AFTER_S = 0.2
MAX_BUCKETS = 10_000  # callers whose rate is remembered; beyond it, who has asked for nothing for longest is forgotten
_NO_QUOTA = Quota()


@dataclass(slots=True)
class Held:
    """What one caller has in flight."""

    requests: int = 0
    size_bytes: int = 0
    receiving_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.requests and not self.receiving_bytes


_NOTHING = Held()


class Board(Protocol):
    """Where processes that keep quotas together tell each other. Callers go by their names."""

    def others(self, name: str) -> Held:
        """What the caller has in flight in other processes."""
        ...

    def note(self, name: str, held: Held) -> None:
        """What it has in this one."""
        ...

    def full_again(self, name: str) -> float:
        """When its bucket has all its tokens again, monotonic seconds; 0 where nobody has taken any."""
        ...

    def set_full_again(self, name: str, at: float) -> None:
        """A token was taken."""
        ...

    def in_flight(self) -> Iterable[tuple[str, int]]:
        """Every caller that has requests in flight anywhere, and how many."""
        ...


class Quotas:
    """Keeps callers from each other's share. A caller is its key's name; all without a key are one."""

    def __init__(self, *, max_requests: int, max_bytes: int, board: Board | None = None) -> None:
        """max_requests, max_bytes: what may be in flight of all callers together.

        board: where other processes keep quotas with this one.
        """
        self._board = board
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._full_again: dict[str, float] = {}  # by caller: when its bucket has all its tokens again; oldest use first
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        """Callers whose rate is remembered."""
        return len(self._full_again)

    def look(self, caller: Caller, now: float) -> None:
        """Raises QuotaExceeded where the caller's bucket is empty; takes nothing. now: monotonic seconds."""
        quota = caller.quota
        if quota is None or not quota.rate:
            return
        wait_s = self._wait_s(caller.key_name, quota, now)
        if wait_s > 0:
            self._remember(caller.key_name, self._full_again.get(caller.key_name, now))  # it has asked, so it stays
            raise QuotaExceeded(
                f"{_subject(caller)} has sent its {quota.rate} requests per {quota.period_s:g} s; "
                f"retry after {wait_s:.2g} s",
                retry_after_s=wait_s,
            )

    def take(self, caller: Caller, now: float) -> None:
        """One request out of the caller's bucket. Raises QuotaExceeded where it is empty."""
        quota = caller.quota
        if quota is None or not quota.rate:
            return
        self.look(caller, now)
        name = caller.key_name
        full_again = max(self._full_again_of(name, now), now) + quota.period_s / quota.rate
        self._remember(name, full_again)
        if self._board is not None:
            self._board.set_full_again(name, full_again)

    def enter(self, caller: Caller, size_bytes: int) -> None:
        """A place in the caller's share; every enter that returned is owed one leave. Raises QuotaExceeded."""
        share = (caller.quota or _NO_QUOTA).share
        held = self._held.get(caller.key_name) or Held()
        others = self._others(caller)
        requests, held_bytes = held.requests + others.requests, held.size_bytes + others.size_bytes
        max_requests = max(1, int(self._max_requests * share))
        max_bytes = int(self._max_bytes * share)
        if requests >= max_requests:
            raise QuotaExceeded(
                f"{_subject(caller)} has {requests} requests in flight (its share is {max_requests}); "
                f"retry after {SHARE_RETRY_AFTER_S} s",
                retry_after_s=SHARE_RETRY_AFTER_S,
            )
        if requests and held_bytes + size_bytes > max_bytes:
            raise QuotaExceeded(
                f"{_subject(caller)} has {held_bytes} bytes in flight and asks for {size_bytes} more "
                f"(its share is {max_bytes}); retry after {SHARE_RETRY_AFTER_S} s",
                retry_after_s=SHARE_RETRY_AFTER_S,
            )
        held.requests += 1
        held.size_bytes += size_bytes
        self._keep(caller, held)

    def leave(self, caller: Caller, size_bytes: int) -> None:
        """Give the place of an enter with the same size back."""
        held = self._held[caller.key_name]
        held.requests -= 1
        held.size_bytes -= size_bytes
        self._keep(caller, held)

    def receive(self, caller: Caller, size_bytes: int, *, before: int) -> None:
        """So many bytes of a caller's body have come, more will follow; `received` gives them back.

        before: bytes of the same body that came earlier. Raises QuotaExceeded at its share, though not for a body that
        is its only one.
        """
        held = self._held.get(caller.key_name) or Held()
        receiving_bytes = held.receiving_bytes + self._others(caller).receiving_bytes
        max_bytes = int(self._max_bytes * (caller.quota or _NO_QUOTA).share)
        if receiving_bytes + size_bytes > max_bytes and receiving_bytes > before:
            raise QuotaExceeded(
                f"{_subject(caller)} has {receiving_bytes} bytes of bodies on their way "
                f"(its share is {max_bytes}); retry after {SHARE_RETRY_AFTER_S} s",
                retry_after_s=SHARE_RETRY_AFTER_S,
            )
        held.receiving_bytes += size_bytes
        self._keep(caller, held)

    def received(self, caller: Caller, size_bytes: int) -> None:
        """These bytes are of a body that is whole now, or gone."""
        held = self._held[caller.key_name]
        held.receiving_bytes -= size_bytes
        self._keep(caller, held)

    def receiving_bytes(self) -> int:
        """Bytes of bodies that are on their way now, of all callers."""
        return sum(held.receiving_bytes for held in self._held.values())

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by the caller's name, of those that have any; "" stands for all without a key."""
        if self._board is None:
            return {name: held.requests for name, held in self._held.items() if held.requests}
        counts: Counter[str] = Counter()
        for name, requests in self._board.in_flight():
            counts[name] += requests  # two processes that claim a slot at the same moment may give a client two
        return dict(counts)

    def _others(self, caller: Caller) -> Held:
        return _NOTHING if self._board is None else self._board.others(caller.key_name)

    def _keep(self, caller: Caller, held: Held) -> None:
        if held.is_idle:
            self._held.pop(caller.key_name, None)
        else:
            self._held[caller.key_name] = held
        if self._board is not None:
            self._board.note(caller.key_name, held)

    def _remember(self, name: str, full_again: float) -> None:
        self._full_again.pop(name, None)
        self._full_again[name] = full_again
        if len(self._full_again) > MAX_BUCKETS:
            del self._full_again[next(iter(self._full_again))]

    def _full_again_of(self, name: str, now: float) -> float:
        own = self._full_again.get(name, now)
        return own if self._board is None else max(own, self._board.full_again(name))

    def _wait_s(self, name: str, quota: Quota, now: float) -> float:
        """Until the bucket has one token; 0 where it has one."""
        one_s = quota.period_s / quota.rate
        wait_s = self._full_again_of(name, now) - now - (quota.period_s - one_s)
        return wait_s if wait_s > one_s * 1e-6 else 0.0  # sums of floats


def with_share(quota: Quota | None, usual: Quota) -> Quota:
    """The quota, with the usual one's share where it says none (0)."""
    if quota is None:
        return usual
    return quota if quota.share else replace(quota, share=usual.share)


def _subject(caller: Caller) -> str:
    return f"the key {caller.key_name!r}" if caller.key_name else "the caller without a key"
