"""Whatever is done to a queue, in whatever order: nothing is lost, and no promise is broken."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gateway.batching.entries import Batch, Entry, Stage
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import BatchQueue, Dropped
from penstock.protocol.errors import DeadlineExceeded, InferenceError, Overloaded


class QueueMachine(RuleBasedStateMachine):
    """Clients, an engine of any speed and a clock, all of them without manners."""

    @initialize(max_batch_size=st.integers(1, 8), instances=st.integers(1, 3), max_queue_size=st.integers(1, 12))
    def start(self, max_batch_size: int, instances: int, max_queue_size: int) -> None:
        self.options = BatchOptions(
            max_batch_size=max_batch_size, instances=instances, max_queue_size=max_queue_size, max_queue_bytes=200
        )
        self.queue = BatchQueue("m", self.options)
        self.now = 50.0
        self.waiting: dict[int, Entry] = {}
        self.running: list[Batch] = []
        self.last_served: dict[tuple[str, str | None, int, bool], int] = {}

    @rule(
        within_s=st.none() | st.floats(-0.01, 0.2),
        key=st.sampled_from(["a", "b", None]),
        rows=st.integers(1, 10),
        client=st.sampled_from("xyz"),
        priority=st.integers(0, 2),
    )
    def push(self, within_s: float | None, key: str | None, rows: int, client: str, priority: int) -> None:
        deadline = None if within_s is None else self.now + within_s
        entry = Entry(key, rows, rows * 4, self.now, deadline, priority, client)
        try:
            dropped = self.queue.push(entry, self.now)
        except (Overloaded, DeadlineExceeded):
            assert entry.stage is Stage.GONE
            return
        self._dropped(dropped)
        self.waiting[id(entry)] = entry

    @rule(count=st.integers(2, 30), client=st.sampled_from("xyz"))
    def flood(self, count: int, client: str) -> None:
        for _ in range(count):
            self.push(0.05, "a", 1, client, 1)

    @rule()
    def pump(self) -> None:
        self._dropped(self.queue.expire(self.now))
        while isinstance(due := self.queue.due(self.now), Batch):
            self._formed(due)
        assert self.queue.next_wakeup(self.now, due) == self.queue.next_wakeup(self.now)
        self._dropped(self.queue.expire(self.now))

    @rule(seconds=st.floats(0.0, 0.3))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @rule(times=st.integers(1, 20))
    def wake(self, times: int) -> None:
        """A wake-up that is followed leads on: never for ever to the same moment."""
        for _ in range(times):
            wakeup_at = self.queue.next_wakeup(self.now)
            if wakeup_at is None:
                return
            self.now = max(self.now, wakeup_at)
            self.pump()
        wakeup_at = self.queue.next_wakeup(self.now)
        assert wakeup_at is None or wakeup_at > self.now

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), how=st.sampled_from(["done", "done", "done", "failed", "memory", "released"]))
    def end(self, which: int, how: str) -> None:
        batch = self.running.pop(which % len(self.running))
        if how == "memory":
            self.queue.failed(batch, self.now, out_of_memory=True)
        elif how == "done":
            self.queue.done(batch, self.now)
            self.queue.delivered(batch, len(self.waiting) / 1000)
        elif how == "failed":
            self.queue.failed(batch, self.now)
        else:
            self.queue.released(batch, self.now)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 11))
    def cancel(self, which: int) -> None:
        entry = list(self.waiting.values())[which % len(self.waiting)]
        assert self.queue.cancel(entry, self.now) is Stage.QUEUE
        del self.waiting[id(entry)]

    @precondition(lambda self: self.running)
    @rule()
    def cancel_in_batch(self) -> None:
        batch = self.running[0]
        entries = batch.entries
        assert self.queue.cancel(entries[0], self.now) is Stage.BATCH
        assert batch.entries is entries

    @invariant()
    def nothing_is_lost(self) -> None:
        """Pushed = popped + dropped + cancelled + waiting: those that the queue counts are those that we know of."""
        statistics = self.queue.statistics()
        known = list(self.waiting.values())
        assert statistics.depth <= self.options.max_queue_size
        assert statistics.in_flight == len(self.running) <= self.options.slots
        assert statistics.depth + self._on_the_way() == len(known)
        assert all(entry.stage in (Stage.QUEUE, Stage.GONE) for entry in known)

    def teardown(self) -> None:
        """The drain: the engine answers, and every waiting request has its end."""
        while self.running:
            self.end(0, "done")
            self.pump()
        self._dropped(self.queue.close(self.now))
        statistics = self.queue.statistics()
        assert not self.waiting
        assert (statistics.depth, statistics.rows, statistics.size_bytes, statistics.in_flight) == (0, 0, 0, 0)
        assert self.queue.next_wakeup(self.now) is None

    def _on_the_way(self) -> int:
        """Given up, and not yet reported."""
        return sum(entry.stage is Stage.GONE for entry in self.waiting.values())

    def _dropped(self, dropped: list[Dropped]) -> None:
        for one in dropped:
            assert isinstance(one.error, InferenceError)
            assert one.entry.stage is Stage.GONE
            del self.waiting[id(one.entry)]

    def _formed(self, batch: Batch) -> None:
        self.running.append(batch)
        entries = batch.entries
        assert entries
        assert batch.rows == sum(entry.rows for entry in entries)
        assert len(entries) == 1 or batch.rows <= self.options.max_batch_size
        assert len({entry.key for entry in entries}) == 1
        assert len(entries) == 1 or entries[0].key is not None
        for entry in entries:
            assert entry.stage is Stage.BATCH
            assert entry.deadline is None or entry.deadline > self.now
            del self.waiting[id(entry)]
            assert not [
                other
                for other in self.waiting.values()
                if other.number < entry.number
                and _is_alike(other, entry)
                and other not in entries
                and other.stage is Stage.QUEUE
            ]


def _is_alike(one: Entry, other: Entry) -> bool:
    """Of one client, and neither goes before the other for any other reason than having come first."""
    return (
        (one.client, one.key, one.priority, one.rows) == (other.client, other.key, other.priority, other.rows)
        and one.key is not None
        and one.deadline == other.deadline
    )


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
