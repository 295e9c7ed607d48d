"""Quotas of each client: request rate, share of requests in flight, and calls without a valid key. Sans-IO."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.protocol.errors import QuotaExceeded
from penstock.protocol.identity import Identity, Quota

SHARE_RETRY_AFTER_S = 0.2
MAX_BUCKETS = 10_000  # clients whose rate is stored; the least recently active is dropped first
_NO_QUOTA = Quota()


@dataclass(slots=True)
class ClientUsage:
    """A client's requests and bytes in flight."""

    requests: int = 0
    size_bytes: int = 0
    receiving_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.requests and not self.receiving_bytes


_NO_USAGE = ClientUsage()


class QuotaStore(Protocol):
    """Quota counts shared by several processes, by key name."""

    def others(self, name: str) -> ClientUsage:
        """The client's usage in other processes."""
        ...

    def note(self, name: str, usage: ClientUsage) -> None:
        """Stores the client's usage in this process."""
        ...

    def full_again(self, name: str) -> float:
        """When the client's bucket will be full, in monotonic seconds; 0 if it is full."""
        ...

    def set_full_again(self, name: str, at: float) -> None:
        """Stores when the client's bucket will be full."""
        ...

    def in_flight(self) -> Iterable[tuple[str, int]]:
        """Clients with requests in flight in any process, with their number."""
        ...


class RateLimiter:
    """Limits each client's rate and share. Clients are identified by key name; anonymous ones count as one."""

    def __init__(self, *, max_requests: int, max_bytes: int, board: QuotaStore | None = None) -> None:
        """max_requests, max_bytes: limits of all clients together. board: shared with other processes."""
        self._board = board
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._full_again: dict[str, float] = {}  # by client: when its bucket is full again; oldest use first
        self._usage: dict[str, ClientUsage] = {}

    def __len__(self) -> int:
        """Clients whose rate is stored."""
        return len(self._full_again)

    def check_rate(self, caller: Identity, now: float) -> None:
        """Raises QuotaExceeded if the client's bucket is empty; takes nothing. now: monotonic seconds."""
        quota = caller.quota
        if quota is None or not quota.rate:
            return
        wait_s = self._wait_s(caller.key_name, quota, now)
        if wait_s > 0:
            self._remember(caller.key_name, self._full_again.get(caller.key_name, now))  # keep active clients
            raise QuotaExceeded(
                f"{_subject(caller)} has sent its {quota.rate} requests per {quota.period_s:g} s; "
                f"retry after {wait_s:.2g} s",
                retry_after_s=wait_s,
            )

    def take(self, caller: Identity, now: float) -> None:
        """Takes one request from the client's bucket. Raises QuotaExceeded if it is empty."""
        quota = caller.quota
        if quota is None or not quota.rate:
            return
        self.check_rate(caller, now)
        name = caller.key_name
        full_again = max(self._full_again_of(name, now), now) + quota.period_s / quota.rate
        self._remember(name, full_again)
        if self._board is not None:
            self._board.set_full_again(name, full_again)

    def enter(self, caller: Identity, size_bytes: int) -> None:
        """Takes a slot of the client's share, until `leave`. Raises QuotaExceeded."""
        share = (caller.quota or _NO_QUOTA).share
        usage = self._usage.get(caller.key_name) or ClientUsage()
        others = self._others(caller)
        requests, held_bytes = usage.requests + others.requests, usage.size_bytes + others.size_bytes
        max_requests = max(1, int(self._max_requests * share))
        max_bytes = int(self._max_bytes * share)
        if requests >= max_requests:
            raise _share_used_up(caller, f"{requests} requests in flight", max_requests)
        if requests and held_bytes + size_bytes > max_bytes:
            raise _share_used_up(caller, f"{held_bytes} bytes in flight and asks for {size_bytes} more", max_bytes)
        usage.requests += 1
        usage.size_bytes += size_bytes
        self._store(caller, usage)

    def leave(self, caller: Identity, size_bytes: int) -> None:
        """Releases the slot of an `enter` with the same size."""
        usage = self._usage[caller.key_name]
        usage.requests -= 1
        usage.size_bytes -= size_bytes
        self._store(caller, usage)

    def receive(self, caller: Identity, size_bytes: int, *, before: int) -> None:
        """Counts received bytes of an incomplete body. before: counted earlier. Raises QuotaExceeded."""
        usage = self._usage.get(caller.key_name) or ClientUsage()
        receiving_bytes = usage.receiving_bytes + self._others(caller).receiving_bytes
        max_bytes = int(self._max_bytes * (caller.quota or _NO_QUOTA).share)
        if receiving_bytes + size_bytes > max_bytes and receiving_bytes > before:
            raise _share_used_up(caller, f"{receiving_bytes} bytes of bodies on their way", max_bytes)
        usage.receiving_bytes += size_bytes
        self._store(caller, usage)

    def received(self, caller: Identity, size_bytes: int) -> None:
        """Subtracts the bytes of a body that is complete or was dropped."""
        usage = self._usage[caller.key_name]
        usage.receiving_bytes -= size_bytes
        self._store(caller, usage)

    def receiving_bytes(self) -> int:
        """Bytes of incomplete bodies of all clients."""
        return sum(usage.receiving_bytes for usage in self._usage.values())

    def in_flight(self) -> dict[str, int]:
        """Requests in flight by key name, without zeros; "" stands for anonymous clients."""
        if self._board is None:
            return {name: usage.requests for name, usage in self._usage.items() if usage.requests}
        counts: Counter[str] = Counter()
        for name, requests in self._board.in_flight():
            counts[name] += requests  # a race of two processes may give a client two slots
        return dict(counts)

    def _others(self, caller: Identity) -> ClientUsage:
        return _NO_USAGE if self._board is None else self._board.others(caller.key_name)

    def _store(self, caller: Identity, usage: ClientUsage) -> None:
        if usage.is_idle:
            self._usage.pop(caller.key_name, None)
        else:
            self._usage[caller.key_name] = usage
        if self._board is not None:
            self._board.note(caller.key_name, usage)

    def _remember(self, name: str, full_again: float) -> None:
        self._full_again.pop(name, None)
        self._full_again[name] = full_again
        if len(self._full_again) > MAX_BUCKETS:
            del self._full_again[next(iter(self._full_again))]

    def _full_again_of(self, name: str, now: float) -> float:
        own = self._full_again.get(name, now)
        return own if self._board is None else max(own, self._board.full_again(name))

    def _wait_s(self, name: str, quota: Quota, now: float) -> float:
        """Seconds until the bucket has a token; 0 if it has one."""
        one_s = quota.period_s / quota.rate
        wait_s = self._full_again_of(name, now) - now - (quota.period_s - one_s)
        return wait_s if wait_s > one_s * 1e-6 else 0.0  # rounding error of float sums


def with_default_share(quota: Quota | None, usual: Quota) -> Quota:
    """The quota, with the default's share if its own is 0."""
    if quota is None:
        return usual
    return quota if quota.share else replace(quota, share=usual.share)


def _share_used_up(caller: Identity, used: str, share: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"{_subject(caller)} has {used} (its share is {share}); retry after {SHARE_RETRY_AFTER_S} s",
        retry_after_s=SHARE_RETRY_AFTER_S,
    )


def _subject(caller: Identity) -> str:
    return f"the key {caller.key_name!r}" if caller.key_name else "the caller without a key"


CALLS_PER_S = 100.0
BURST_CALLS = 200.0
FLOOD_HOLD_S = 10.0  # seconds from the last refused call to the end of a flood
MAX_ADDRESSES = 4096


class RefusedCallCounter:
    """Counts refused calls by client address (`now`: monotonic), and detects more than BURST_CALLS or CALLS_PER_S."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # count, and when it was updated
        self._flooding: set[str] = set()

    @property
    def has_floods(self) -> bool:
        """Whether an address may be flooding. A cheap check before `flooding`."""
        return bool(self._flooding)

    def note(self, address: str, now: float) -> bool:
        """Counts a refused call of this address. Returns True if a flood begins with it."""
        count = self._count(address, now) + 1.0
        is_flooding = count > BURST_CALLS
        begins = is_flooding and address not in self._flooding
        self._counts[address] = (BURST_CALLS + FLOOD_HOLD_S * CALLS_PER_S if is_flooding else count), now
        if begins:
            self._flooding.add(address)
        if len(self._counts) > MAX_ADDRESSES:
            self._forget(now)
        return begins

    def flooding(self, now: float) -> frozenset[str]:
        """The addresses that are flooding."""
        return frozenset(address for address in list(self._flooding) if self.is_flooding(address, now))

    def is_flooding(self, address: str, now: float) -> bool:
        if address not in self._flooding:
            return False
        if self._count(address, now) > BURST_CALLS:
            return True
        self._flooding.discard(address)
        return False

    def _count(self, address: str, now: float) -> float:
        count, at = self._counts.get(address, (0.0, now))
        return max(0.0, count - (now - at) * CALLS_PER_S)

    def _forget(self, now: float) -> None:
        """Removes expired addresses, and the older half if there are too many."""
        left = {address: found for address, found in self._counts.items() if self._count(address, now) > 0}
        newest = sorted(left, key=lambda address: left[address][1])[-MAX_ADDRESSES // 2 :]
        self._counts = {address: left[address] for address in newest}
        self._flooding &= set(newest)
