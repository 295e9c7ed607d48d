"""The queue of one model, under a manual clock."""

from server.batching.entry import Entry
from server.batching.options import BatchOptions
from server.batching.queue import BatchQueue


def test_pop_while_idle_sends_what_waits_at_once() -> None:
    """An idle engine gets what there is, without waiting for more."""
    queue = BatchQueue("m", BatchOptions(max_batch_size=8))
    entry = Entry("k", 1, 4, arrived_at=10.0)

    assert queue.push(entry, 10.0) == []
    batch = queue.pop(10.0)

    assert batch is not None
    assert batch.entries == (entry,)
    assert queue.pop(10.0) is None
