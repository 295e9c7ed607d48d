"""Which replica reads which source: rendezvous hashing over ordinals, the same answer everywhere, nobody elected."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

SHARD_VARIABLE, COUNT_VARIABLE = "PENSTOCK_SHARD", "PENSTOCK_SHARDS"
MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True)
class Shard:
    """This replica is number `index`, from 0, of `count`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= MAX_SHARDS:
            raise ValueError(f"shard {self.index}/{self.count}: 0 ≤ i < n ≤ {MAX_SHARDS} is needed")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, source_id: str) -> bool:
        """Whether the source is this replica's."""
        return owner(source_id, self.count) == self.index


ALONE = Shard()


def owner(source_id: str, count: int) -> int:
    """The ordinal with the highest weight for this source: one more replica takes 1/(n+1) of each, none else move."""
    return max(range(count), key=lambda ordinal: _weight(source_id, ordinal))


def shard_of(text: str) -> Shard:
    """From i/n. Raises ValueError with what is allowed."""
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if not found:
        raise ValueError(f"{text!r}: i/n is needed, such as 0/3 for the first of three")
    return Shard(int(found[1]), int(found[2]))


def shard_here(environ: Mapping[str, str], hostname: str) -> Shard:
    """Of this replica, by its environment: PENSTOCK_SHARD=i/n, or a StatefulSet's NAME-i with PENSTOCK_SHARDS=n.

    The only one where neither is said. Raises ValueError with the variable and what is allowed.
    """
    if text := environ.get(SHARD_VARIABLE, ""):
        if "/" not in text and COUNT_VARIABLE in environ:
            text = f"{text}/{environ[COUNT_VARIABLE]}"
        return _named(SHARD_VARIABLE, text)
    if count := environ.get(COUNT_VARIABLE, ""):
        ordinal = re.fullmatch(r".*-(\d+)", hostname.partition(".")[0])
        if not ordinal:
            if count == "1":
                return ALONE
            raise ValueError(
                f"{COUNT_VARIABLE} is {count!r}, but {hostname!r} ends in no ordinal as a StatefulSet's pods do; "
                f"set {SHARD_VARIABLE}=i/n"
            )
        return _named(COUNT_VARIABLE, f"{ordinal[1]}/{count}")
    return ALONE


def _named(variable: str, text: str) -> Shard:
    try:
        return shard_of(text)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def _weight(source_id: str, ordinal: int) -> bytes:
    return hashlib.blake2b(f"{ordinal}/{source_id}".encode(), digest_size=8).digest()
