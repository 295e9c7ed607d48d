"""What a Triton tells of the batches that it formed, as the gateway tells of its own. Sans-IO."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from server.core.batching import Fit
from server.core.errors import BackendFailed


@dataclass(frozen=True, slots=True)
class EngineBatches:
    """calls_by_rows: engine calls by their rows. fit: through their mean times, None where one size was seen only."""

    calls_by_rows: dict[int, int] = field(default_factory=dict)
    fit: Fit | None = None


class _Duration(msgspec.Struct):
    count: int = 0
    ns: int = 0


class _Batch(msgspec.Struct):
    batch_size: int
    compute_input: _Duration = msgspec.field(default_factory=_Duration)
    compute_infer: _Duration = msgspec.field(default_factory=_Duration)
    compute_output: _Duration = msgspec.field(default_factory=_Duration)

    @property
    def calls(self) -> int:
        return self.compute_infer.count

    @property
    def mean_s(self) -> float:
        spent = (self.compute_input, self.compute_infer, self.compute_output)
        return sum(duration.ns / max(1, duration.count) for duration in spent) / 1e9


class _Version(msgspec.Struct):
    batch_stats: list[_Batch] = msgspec.field(default_factory=list)


class _Statistics(msgspec.Struct):
    model_stats: list[_Version] = msgspec.field(default_factory=list)


def read_engine_batches(statistics: bytes) -> EngineBatches:
    """Of all versions of a model. statistics: the body of GET /v2/models/{model}/stats. Raises BackendFailed."""
    try:
        told = msgspec.json.decode(statistics, type=_Statistics)
    except msgspec.DecodeError as error:
        raise BackendFailed(f"the engine's statistics cannot be read: {error}") from error
    batches = [batch for version in told.model_stats for batch in version.batch_stats if batch.calls]
    calls_by_rows: dict[int, int] = {}
    for batch in batches:
        calls_by_rows[batch.batch_size] = calls_by_rows.get(batch.batch_size, 0) + batch.calls
    return EngineBatches(calls_by_rows, _fit(batches))


def _fit(batches: Sequence[_Batch]) -> Fit | None:
    """Weighted least squares, a size by its calls; its guard is what the worst size is above the line."""
    if len({batch.batch_size for batch in batches}) < 2:
        return None
    calls = sum(batch.calls for batch in batches)
    mean_rows = sum(batch.calls * batch.batch_size for batch in batches) / calls
    mean_s = sum(batch.calls * batch.mean_s for batch in batches) / calls
    spread = sum(batch.calls * (batch.batch_size - mean_rows) ** 2 for batch in batches)
    slope = sum(batch.calls * (batch.batch_size - mean_rows) * (batch.mean_s - mean_s) for batch in batches) / spread
    beta_s = min(max(0.0, slope), mean_s / mean_rows)  # neither may be below zero
    alpha_s = mean_s - beta_s * mean_rows
    guard_s = max(0.0, *(batch.mean_s - alpha_s - beta_s * batch.batch_size for batch in batches))
    return Fit(alpha_s, beta_s, guard_s, calls)
