"""Batch report of a model (GET /v2/models/{model}/explain), a proposed config.pbtxt, and queue metrics. Sans-IO."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

import msgspec

from penstock.gateway.batching.explanation import fit_report
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.batching.service_times import line_through
from penstock.protocol.batch_reports import BatchesOfRows, ModelBatchReport, OptionsReport, QueueReport
from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import BatchOwner, EngineTimeFit


@dataclass(frozen=True, slots=True)
class EngineBatches:
    """Engine calls by batch size. fit: line through their mean times; None with fewer than two sizes."""

    calls_by_rows: dict[int, int] = field(default_factory=dict)
    fit: EngineTimeFit | None = None


class _DurationStatistics(msgspec.Struct):
    count: int = 0
    ns: int = 0


class _BatchStatistics(msgspec.Struct):
    batch_size: int
    compute_input: _DurationStatistics = msgspec.field(default_factory=_DurationStatistics)
    compute_infer: _DurationStatistics = msgspec.field(default_factory=_DurationStatistics)
    compute_output: _DurationStatistics = msgspec.field(default_factory=_DurationStatistics)

    @property
    def calls(self) -> int:
        return self.compute_infer.count

    @property
    def mean_s(self) -> float:
        spent = (self.compute_input, self.compute_infer, self.compute_output)
        return sum(duration.ns / max(1, duration.count) for duration in spent) / 1e9


class _VersionStatistics(msgspec.Struct):
    batch_stats: list[_BatchStatistics] = msgspec.field(default_factory=list)


class _ModelStatistics(msgspec.Struct):
    model_stats: list[_VersionStatistics] = msgspec.field(default_factory=list)


def read_engine_batches(statistics: bytes) -> EngineBatches:
    """Batches of all versions of a model, from the body of GET /v2/models/{model}/stats. Raises EngineFailed."""
    try:
        parsed = msgspec.json.decode(statistics, type=_ModelStatistics)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"the engine's statistics cannot be read: {error}") from error
    batches = [batch for version in parsed.model_stats for batch in version.batch_stats if batch.calls]
    calls_by_rows: dict[int, int] = {}
    for batch in batches:
        calls_by_rows[batch.batch_size] = calls_by_rows.get(batch.batch_size, 0) + batch.calls
    return EngineBatches(calls_by_rows, _fit_of_sizes(batches))


def _fit_of_sizes(batches: Sequence[_BatchStatistics]) -> EngineTimeFit | None:
    if len({batch.batch_size for batch in batches}) < 2:
        return None
    alpha_s, beta_s = line_through([(batch.calls, batch.batch_size, batch.mean_s) for batch in batches])
    guard_s = max(0.0, *(batch.mean_s - alpha_s - beta_s * batch.batch_size for batch in batches))
    return EngineTimeFit(alpha_s, beta_s, guard_s, sum(batch.calls for batch in batches))


COLUMNS = 80  # of a comment's line


@dataclass(frozen=True, slots=True)
class _ProposedBatching:
    """reasons: comments. rows: preferred size; None if no size is known to be better."""

    reasons: list[str]
    rows: int | None = None
    delay_s: float = 0.0
    queue_timeout_s: float = 0.0


def propose_config(fit: EngineTimeFit | None, options: BatchOptions) -> str:
    """Fragment of config.pbtxt: Triton's dynamic_batching, or a comment if the model takes one row per call."""
    if options.max_batch_size == 1:
        return "# Nothing to propose: the model takes one row a call (max_batch_size).\n"
    choice = _choose(fit, options)
    is_ours = options.owner is BatchOwner.GATEWAY
    lead = "# For batches formed by Triton" + ("; take batch_owner out of the parameters." if is_ours else ".")
    comments = [line for comment in (lead, *choice.reasons) for line in wrap(comment, COLUMNS, subsequent_indent="# ")]
    lines = [*comments, "dynamic_batching {"]
    if choice.rows is not None and choice.rows > 1:
        lines.append(f"  preferred_batch_size: [ {choice.rows} ]")
    lines.append(f"  max_queue_delay_microseconds: {round(choice.delay_s * 1e6)}")
    lines.append("  default_queue_policy {")
    if choice.queue_timeout_s > 0:
        lines.append("    timeout_action: REJECT")
        lines.append(f"    default_timeout_microseconds: {max(1, round(choice.queue_timeout_s * 1e6))}")
        lines.append("    allow_timeout_override: true")
    lines += [f"    max_queue_size: {options.max_queue_size}", "  }", "}"]
    return "\n".join(lines) + "\n"


def _choose(fit: EngineTimeFit | None, options: BatchOptions) -> _ProposedBatching:
    """Preferred: the largest b with 2·t(b) + guard within the SLO, as a request may just miss a batch of b rows."""
    if fit is None:
        return _ProposedBatching(
            ["# No fit yet: a fit needs calls of two sizes or more. Triton's defaults are a start."]
        )
    line = f"# t(b) = {fit.alpha_s * 1e3:.3f} + {fit.beta_s * 1e3:.4f} b ms by {fit.samples} calls"
    if options.slo_s is None:
        why = f"{line}; no slo_p99_ms is declared, so the batch is bounded by max_batch_size only."
        return _ProposedBatching([why], options.max_batch_size, fit.alpha_s)
    rows = next((b for b in range(options.max_batch_size, 0, -1) if _worst_s(fit, b) <= options.slo_s), None)
    worst_s = _worst_s(fit, rows or 1)
    worst, slo = f"{worst_s * 1e3:.1f} ms", f"{options.slo_s * 1e3:g} ms"
    if rows is None:
        reasons = [
            f"{line}; not even one row keeps 2 t(b) + guard ({worst}) within the SLO of {slo}:",
            "# expect late answers under load, or declare a longer slo_p99_ms.",
        ]
    else:
        reasons = [f"{line}; {rows} rows behind another such call take {worst}, within the SLO of {slo}."]
    delay_s = max(0.0, min(fit.alpha_s, options.slo_s - worst_s))
    return _ProposedBatching(reasons, rows, delay_s, options.slo_s - fit.seconds(rows or 1) - fit.guard_s)


def _worst_s(fit: EngineTimeFit, rows: int) -> float:
    return 2 * fit.seconds(rows) + fit.guard_s


def explain_queue(model_name: str, options: BatchOptions, statistics: QueueStatistics | None) -> ModelBatchReport:
    """Report of a model whose batches the gateway forms. statistics: None before its first request."""
    if statistics is None:
        return _report(model_name, options, None, {})
    page = _report(model_name, options, statistics.fit, statistics.batches_by_rows)
    queue = QueueReport(
        statistics.depth,
        statistics.rows,
        statistics.size_bytes,
        statistics.in_flight,
        options.slots,
        statistics.max_rows,
        None if statistics.wait_s is None else round(statistics.wait_s * 1e3, 3),
    )
    dropped = dict(sorted(statistics.dropped.items()))
    return msgspec.structs.replace(page, queue=queue, closed_by=dict(statistics.closed_by), dropped=dropped)


def explain_engine(model_name: str, options: BatchOptions, batches: EngineBatches) -> ModelBatchReport:
    """Report of a model whose batches the engine forms, or that has no batching."""
    return _report(model_name, options, batches.fit, batches.calls_by_rows)


def with_misspelt(page: ModelBatchReport, misspelt: dict[str, str]) -> ModelBatchReport:
    """The report with these misspelt parameters."""
    return msgspec.structs.replace(page, misspelt=misspelt) if misspelt else page


def _report(
    model_name: str, options: BatchOptions, fit: EngineTimeFit | None, batches_by_rows: dict[int, int]
) -> ModelBatchReport:
    return ModelBatchReport(
        model=model_name,
        owner=options.owner,
        options=OptionsReport(
            options.max_batch_size,
            options.instances,
            None if options.slo_s is None else round(options.slo_s * 1e3, 6),
            round(options.max_queue_delay_s * 1e6, 3),
            options.max_queue_size,
            options.max_queue_bytes,
        ),
        queue=None,
        fit=fit_report(fit),
        batches=[BatchesOfRows(rows, batches) for rows, batches in sorted(batches_by_rows.items())],
        closed_by={},
        dropped={},
        proposed_config="" if options.unmerged else propose_config(fit, options),
        unmerged=options.unmerged,
    )


Readings = Mapping[tuple[str, ...], float]
ReadStatistics = Callable[[], Mapping[str, QueueStatistics]]


def queue_readers(statistics: ReadStatistics) -> dict[str, Callable[[], Readings]]:
    """Functions that read each metric's values at a scrape."""
    return {
        "batch_queue_requests": lambda: {(model,): queue.depth for model, queue in statistics().items()},
        "batch_queue_bytes": lambda: {(model,): queue.size_bytes for model, queue in statistics().items()},
        "batch_calls": lambda: {(model,): queue.in_flight for model, queue in statistics().items()},
        "batch_wait_seconds": lambda: {
            (model,): queue.wait_s for model, queue in statistics().items() if queue.wait_s is not None
        },
        "batches_total": lambda: _by_reason(statistics, lambda queue: queue.closed_by.items()),
        "batch_refused_total": lambda: _by_reason(statistics, lambda queue: queue.dropped.items()),
    }


def _by_reason(statistics: ReadStatistics, counts: Callable[[QueueStatistics], Iterable[tuple[str, int]]]) -> Readings:
    return {(model, str(reason)): count for model, queue in statistics().items() for reason, count in counts(queue)}
