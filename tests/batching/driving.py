"""A queue with an engine of known times under a manual clock, and entries in few words."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import BatchQueue, Dropped
from penstock.planning.simulation import EngineModel

ALPHA_S, BETA_S = 0.002, 0.0001


def call_s(rows: int) -> float:
    """What the engine of these tests takes for so many rows."""
    return ALPHA_S + BETA_S * rows


@dataclass(frozen=True, slots=True)
class OddEngine(EngineModel):
    """An engine that is not as its profile says. factor: of the duration of a call that begins then."""

    factor: Callable[[float], float] = lambda begin: 1.0

    def call_s(self, rows: int, begin: float) -> float:
        """See EngineModel."""
        return self.profile.seconds(rows) * self.factor(begin)


class Bench:
    """A queue and the time. Nothing happens by itself."""

    def __init__(
        self,
        *,
        max_batch_size: int = 64,
        instances: int = 1,
        max_queue_delay_s: float = 0.0,
        max_queue_size: int = 512,
        max_queue_bytes: int = 1 << 20,
    ) -> None:
        options = BatchOptions(
            max_batch_size=max_batch_size,
            instances=instances,
            max_queue_delay_s=max_queue_delay_s,
            max_queue_size=max_queue_size,
            max_queue_bytes=max_queue_bytes,
        )
        self.queue = BatchQueue("m", options)
        self.now = 100.0

    def entry(
        self,
        *,
        within_s: float | None = None,
        key: str | None = "k",
        rows: int = 1,
        client: str = "",
        priority: int = 0,
    ) -> Entry:
        """An entry that comes now, with so much time."""
        deadline = None if within_s is None else self.now + within_s
        return Entry(key, rows, rows * 8, self.now, deadline, priority, client)

    def push(
        self,
        count: int = 1,
        *,
        within_s: float | None = None,
        key: str | None = "k",
        rows: int = 1,
        client: str = "",
        priority: int = 0,
    ) -> list[Entry]:
        """So many entries, pushed; they must displace none."""
        entries = [
            self.entry(within_s=within_s, key=key, rows=rows, client=client, priority=priority) for _ in range(count)
        ]
        for entry in entries:
            assert self.queue.push(entry, self.now) == []
        return entries

    def pop(self) -> Batch:
        """The batch that is due now."""
        batch = self.queue.pop(self.now)
        assert batch is not None
        return batch

    def expire(self) -> list[Dropped]:
        """Who is given up now."""
        return list(self.queue.expire(self.now))

    def after(self, seconds: float) -> None:
        """Time goes on."""
        self.now += seconds

    def done(self, batch: Batch, took_s: float | None = None) -> None:
        """The engine answers the batch; it began now."""
        self.after(call_s(batch.rows) if took_s is None else took_s)
        self.queue.done(batch, self.now)

    def teach(self, calls: int = 32, *, takes: Callable[[int], float] = call_s, client: str = "") -> None:
        """Calls of 1 to 16 rows, each alone, so that there is a fit."""
        for call in range(calls):
            self.push(call % 16 + 1, client=client)
            self.after(self.queue.options.max_queue_delay_s)
            while (batch := self.queue.pop(self.now)) is not None:
                self.done(batch, takes(batch.rows))
        self.after(0.05)
