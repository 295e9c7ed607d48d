"""What a server's statistics extension says: GET /v2/models/{model}/stats. Triton has them, the gateway relays them."""

from collections.abc import Sequence
from urllib.parse import quote

import aiohttp
import msgspec

from loadtest.clients.client import Endpoint
from loadtest.witness.metrics_text import MetricsError, fetch_bytes
from loadtest.witness.page import CounterReset

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


class Duration(msgspec.Struct, frozen=True):
    """How often, and how long together."""

    count: int = 0
    ns: int = 0

    @property
    def mean_ms(self) -> float:
        """0 where it never was."""
        return self.ns / self.count / 1e6 if self.count else 0.0


class InferStats(msgspec.Struct, frozen=True):
    """The engine's requests; an inference of several requests at once counts for each of them."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()


class BatchStats(msgspec.Struct, frozen=True):
    """Executions of one batch size, in rows."""

    batch_size: int
    compute_infer: Duration = Duration()


class Statistics(msgspec.Struct, frozen=True):
    """A model's, or those of several together."""

    inference_stats: InferStats = InferStats()
    batch_stats: tuple[BatchStats, ...] = ()

    @property
    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """(rows, executions), ascending."""
        counts: dict[int, int] = {}
        for batch in self.batch_stats:
            counts[batch.batch_size] = counts.get(batch.batch_size, 0) + batch.compute_infer.count
        return tuple((rows, count) for rows, count in sorted(counts.items()) if count)

    @property
    def stages_ms(self) -> tuple[tuple[str, float], ...]:
        """Mean milliseconds of a request: engine_queue, engine_compute_input, …"""
        return tuple((f"engine_{stage}", getattr(self.inference_stats, stage).mean_ms) for stage in STAGES)


class _Answer(msgspec.Struct, frozen=True):
    model_stats: list[Statistics]


async def fetch_statistics(
    session: aiohttp.ClientSession, endpoint: Endpoint, models: Sequence[str], *, timeout_s: float
) -> Statistics:
    """Of all versions of these models together. Raises MetricsError where the server has no statistics."""
    found: list[Statistics] = []
    for model in sorted(set(models)):
        url = f"{endpoint.http_url.rstrip('/')}/v2/models/{quote(model, safe='')}/stats"
        body = await fetch_bytes(session, url, timeout_s=timeout_s, headers=dict(endpoint.headers))
        try:
            found += msgspec.json.decode(body, type=_Answer).model_stats
        except msgspec.MsgspecError as error:
            raise MetricsError(f"{url} does not answer as the statistics extension does: {error}") from error
    return _combined(found, sign=1)


def statistics_delta(before: Statistics, after: Statistics) -> Statistics:
    """What happened in between. Raises CounterReset where the model was loaded again, which begins them anew."""
    delta = _combined([after, _combined([before], sign=-1)], sign=1)
    stats = delta.inference_stats
    if any(duration.count < 0 for duration in (stats.success, stats.fail, stats.queue, stats.compute_infer)):
        raise CounterReset("the model's statistics began anew: it was loaded again, or the server started, meanwhile")
    return delta


def _combined(found: Sequence[Statistics], *, sign: int) -> Statistics:
    batches: dict[int, list[Duration]] = {}
    for statistics in found:
        for batch in statistics.batch_stats:
            batches.setdefault(batch.batch_size, []).append(batch.compute_infer)
    fields = InferStats.__struct_fields__
    return Statistics(
        InferStats(*(_sum([getattr(each.inference_stats, name) for each in found], sign) for name in fields)),
        tuple(BatchStats(rows, _sum(durations, sign)) for rows, durations in sorted(batches.items())),
    )


def _sum(durations: Sequence[Duration], sign: int) -> Duration:
    return Duration(sign * sum(each.count for each in durations), sign * sum(each.ns for each in durations))
