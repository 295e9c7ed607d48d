"""What is told of a model's batches: who forms them, how, how it went, and how Triton could. Sans-IO."""

import msgspec

from server.batching.engine_statistics import EngineBatches
from server.batching.explanation import FitTold, fit_told
from server.batching.options import BatchOptions
from server.batching.proposal import propose
from server.batching.queue import QueueStatistics
from server.core.batching import CloseReason, Fit, Owner


class OptionsTold(msgspec.Struct, frozen=True):
    """What was declared, in the words of config.pbtxt. instances: engine calls that run at once."""

    max_batch_size: int
    instances: int
    slo_p99_ms: float | None
    max_queue_delay_us: float
    max_queue_size: int
    max_queue_bytes: int


class QueueTold(msgspec.Struct, frozen=True):
    """What waits now, and until when a request of one row that came now would wait (null where that is not known).

    max_rows: of a batch, now; less than max_batch_size while the engine is short of memory or not known yet.
    """

    depth: int
    rows: int
    size_bytes: int
    in_flight: int
    slots: int
    max_rows: int
    wait_ms: float | None


class BatchesOfRows(msgspec.Struct, frozen=True):
    """How many batches there were of so many rows."""

    rows: int
    batches: int


class ModelExplained(msgspec.Struct, frozen=True):
    """The answer to GET /v2/models/{model}/explain.

    queue, closed_by, dropped: of a model whose batches the gateway forms; null and empty else. batches, fit: of the
    gateway's batches, else of the engine's own statistics. proposed_config: for batches formed by Triton; empty if
    requests may not share a call.
    misspelt: parameters of the config that nobody reads, by the option that was meant.
    unmerged: why each request, picture and frame has a call of its own; empty if they may share one.
    """

    model: str
    owner: Owner
    options: OptionsTold
    queue: QueueTold | None
    fit: FitTold | None
    batches: list[BatchesOfRows]
    closed_by: dict[CloseReason, int]
    dropped: dict[str, int]
    proposed_config: str
    misspelt: dict[str, str] = {}
    unmerged: str = ""


def explain_queue(model_name: str, options: BatchOptions, statistics: QueueStatistics | None) -> ModelExplained:
    """Of a model whose batches the gateway forms; statistics: None before its first request."""
    if statistics is None:
        return _page(model_name, options, None, {})
    page = _page(model_name, options, statistics.fit, statistics.batches_by_rows)
    return msgspec.structs.replace(
        page,
        queue=_queue(options, statistics),
        closed_by=dict(statistics.closed_by),
        dropped=dict(sorted(statistics.dropped.items())),
    )


def explain_engine(model_name: str, options: BatchOptions, batches: EngineBatches) -> ModelExplained:
    """Of a model whose batches somebody else forms, or nobody."""
    return _page(model_name, options, batches.fit, batches.calls_by_rows)


def with_misspelt(page: ModelExplained, misspelt: dict[str, str]) -> ModelExplained:
    """The page, telling of these parameters, too."""
    return msgspec.structs.replace(page, misspelt=misspelt) if misspelt else page


def _page(model_name: str, options: BatchOptions, fit: Fit | None, batches_by_rows: dict[int, int]) -> ModelExplained:
    return ModelExplained(
        model=model_name,
        owner=options.owner,
        options=_options(options),
        queue=None,
        fit=fit_told(fit),
        batches=[BatchesOfRows(rows, batches) for rows, batches in sorted(batches_by_rows.items())],
        closed_by={},
        dropped={},
        proposed_config="" if options.unmerged else propose(fit, options).text,
        unmerged=options.unmerged,
    )


def _options(options: BatchOptions) -> OptionsTold:
    return OptionsTold(
        options.max_batch_size,
        options.instances,
        None if options.slo_s is None else round(options.slo_s * 1e3, 6),
        round(options.max_queue_delay_s * 1e6, 3),
        options.max_queue_size,
        options.max_queue_bytes,
    )


def _queue(options: BatchOptions, statistics: QueueStatistics) -> QueueTold:
    return QueueTold(
        statistics.depth,
        statistics.rows,
        statistics.size_bytes,
        statistics.in_flight,
        options.slots,
        statistics.max_rows,
        None if statistics.wait_s is None else round(statistics.wait_s * 1e3, 3),
    )
