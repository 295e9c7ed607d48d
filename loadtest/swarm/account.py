"""What one process of locust sent by its own count, and whether it was the bottleneck."""

import time
from dataclasses import dataclass

import msgspec

BUSY_SHARE = 0.9
SHORTEST_JUDGED_S = 5.0


class Account(msgspec.Struct, frozen=True):
    """What one process sent, and how busy its core was with that. seconds: how long it asked."""

    worker: str
    requests: int
    failures: int
    cpu_share: float
    seconds: float

    @property
    def complaint(self) -> str:
        """Where the generator was the bottleneck: a sentence, else empty. A run of a few seconds says nothing."""
        if self.cpu_share < BUSY_SHARE or self.seconds < SHORTEST_JUDGED_S:
            return ""
        return (
            f"the load generator was the bottleneck: {self.worker} used {self.cpu_share:.0%} of its core "
            f"(limit {BUSY_SHARE:.0%}); give it more processes (--processes) or machines (--worker)"
        )


@dataclass(slots=True)
class Tally:
    """Counts what this process sends, by itself and not by locust's statistics."""

    requests: int = 0
    failures: int = 0
    began_s: float = 0.0
    cpu_s: float = 0.0

    def begin(self) -> None:
        """A run begins, and everything is prepared."""
        self.requests = self.failures = 0
        self.began_s, self.cpu_s = time.perf_counter(), time.process_time()

    def count(self, exception: object = None, **_: object) -> None:
        """One request: locust's event."""
        self.requests += 1
        self.failures += exception is not None

    def account(self, worker: str) -> Account:
        """What it came to."""
        seconds = time.perf_counter() - self.began_s
        share = (time.process_time() - self.cpu_s) / seconds if seconds and self.began_s else 0.0
        return Account(worker, self.requests, self.failures, share, seconds)
