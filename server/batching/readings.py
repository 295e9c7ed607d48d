"""The queues as metrics read them: by model, and by reason where there is one."""

from collections.abc import Callable, Iterable, Mapping

from server.batching.queue import QueueStatistics

Readings = Mapping[tuple[str, ...], float]
Statistics = Callable[[], Mapping[str, QueueStatistics]]


def queue_readers(statistics: Statistics) -> dict[str, Callable[[], Readings]]:
    """What to ask at a scrape, by the metric's name."""
    return {
        "batch_queue_requests": lambda: {(model,): told.depth for model, told in statistics().items()},
        "batch_queue_bytes": lambda: {(model,): told.size_bytes for model, told in statistics().items()},
        "batch_calls": lambda: {(model,): told.in_flight for model, told in statistics().items()},
        "batch_wait_seconds": lambda: {
            (model,): told.wait_s for model, told in statistics().items() if told.wait_s is not None
        },
        "batches_total": lambda: _by_reason(statistics, lambda told: told.closed_by.items()),
        "batch_refused_total": lambda: _by_reason(statistics, lambda told: told.dropped.items()),
    }


def _by_reason(statistics: Statistics, counts: Callable[[QueueStatistics], Iterable[tuple[str, int]]]) -> Readings:
    return {(model, str(reason)): count for model, told in statistics().items() for reason, count in counts(told)}
