"""How many calls without a valid key an address may make before its calls are cancelled. Sans-IO."""

CALLS_PER_S = 100.0
BURST_CALLS = 200.0
HOLD_S = 10.0  # time that a flood lasts after its last refused call
MAX_ADDRESSES = 4096


class RefusedCalls:
    """Counts refused calls by client address. `now` is in monotonic seconds.

    If more than BURST_CALLS of an address are refused at once, or CALLS_PER_S over time, it is flooding until HOLD_S
    after it stopped.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # number of counted calls, and when they were counted
        self._flooding: set[str] = set()

    @property
    def has_floods(self) -> bool:
        """Whether an address may be flooding. A cheap check to make before `flooding`."""
        return bool(self._flooding)

    def note(self, address: str, now: float) -> bool:
        """Counts a refused call of this address. Returns True if a flood begins with it."""
        count = self._count(address, now) + 1.0
        is_flooding = count > BURST_CALLS
        begins = is_flooding and address not in self._flooding
        self._counts[address] = (BURST_CALLS + HOLD_S * CALLS_PER_S if is_flooding else count), now
        if begins:
            self._flooding.add(address)
        if len(self._counts) > MAX_ADDRESSES:
            self._forget(now)
        return begins

    def flooding(self, now: float) -> frozenset[str]:
        """The addresses that are flooding."""
        return frozenset(address for address in list(self._flooding) if self.is_flooding(address, now))

    def is_flooding(self, address: str, now: float) -> bool:
        """Whether the address is flooding."""
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
        """Removes addresses whose calls no longer count, and the older half if there are too many."""
        left = {address: found for address, found in self._counts.items() if self._count(address, now) > 0}
        kept = sorted(left, key=lambda address: left[address][1])[-MAX_ADDRESSES // 2 :]
        self._counts = {address: left[address] for address in kept}
        self._flooding &= set(kept)
