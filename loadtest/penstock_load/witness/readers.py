"""Reads a server's counters: its metrics page, a Prometheus server, Triton's statistics extension."""

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from penstock_load.clients.client import Endpoint, without_user
from penstock_load.witness.counters import CounterReset, Labels, Page

MAX_PAGE_BYTES = 8 << 20
METRICS_PORT_OFFSET = 2  # Triton's custom (8000, 8001, 8002), and the gateway's
READ = (
    "penstock_",
    "nv_inference_",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
)


class MetricsError(Exception):
    """A metrics page or a Prometheus server did not answer, or not with metrics. One sentence."""


def default_metrics_url(http_url: str) -> str:
    """Two ports above the target's HTTP port; empty where that is no port."""
    parts = urlsplit(http_url)
    port = (parts.port or (443 if parts.scheme == "https" else 80)) + METRICS_PORT_OFFSET
    if port > 65535:
        return ""
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit((parts.scheme, f"{host}:{port}", "/metrics", "", ""))


async def fetch_page(session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> Page:
    """What the page says now, of the names that this room reads. Raises MetricsError."""
    body = await fetch_bytes(session, url, timeout_s=timeout_s)
    return parse_page(body.decode(errors="replace"), without_user(url))


async def fetch_bytes(
    session: aiohttp.ClientSession,
    url: str,
    *,
    timeout_s: float,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The body of a 200, up to 8 MiB. Raises MetricsError, which does not repeat user:password@."""
    timeout, asked, url = aiohttp.ClientTimeout(total=timeout_s), url, without_user(url)
    try:
        async with session.get(
            asked, params=query, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise MetricsError(f"{url} answers {response.status}, not 200")
            return await _read(response, url)
    except TimeoutError as error:
        raise MetricsError(f"{url} did not answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, ValueError, OSError) as error:  # ValueError: what is no URL
        raise MetricsError(f"{url} cannot be read: {error or type(error).__name__}") from error


def parse_page(text: str, url: str) -> Page:
    """The samples of the names that this room reads. Raises MetricsError where it is no metrics page.

    Types and help are left out: with its type the parser would rename a counter that does not end in _total.
    """
    lines = [line for line in text.splitlines() if line.startswith(READ)]
    samples: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    except ValueError as error:
        raise MetricsError(f"{url} is no metrics page: {error}") from error
    return Page(samples)


async def _read(response: aiohttp.ClientResponse, url: str) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > MAX_PAGE_BYTES:
            raise MetricsError(f"{url} is larger than {MAX_PAGE_BYTES >> 20} MiB; name the server's own metrics page")
        chunks.append(chunk)
    return b"".join(chunks)


SERIES = (
    "penstock_.+_seconds_(bucket|count|sum)|penstock_batch_size_(bucket|count|sum)|penstock_.*restarts_total"
    "|penstock_model_ready|nv_inference_.+"
)
INSTANCES = 'group by (instance, job) ({__name__=~"penstock_ready|nv_inference_count"})'
SCRAPED_AT = "timestamp(up) and up == 1"  # of a plain selector: timestamp(up == 1) would be the time of asking
SCRAPES_WAITED_FOR = 2
SLACK_S = 5.0
DEFAULT_INTERVAL_S = 15.0  # where the server does not say: older than its version 2.29
POLL_S = 0.2

UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Instance = tuple[str, str]
T = TypeVar("T")


class _Sample(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct, frozen=True):
    result: list[_Sample]


class _Query(msgspec.Struct, frozen=True):
    data: _Vector


class _Target(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    scrape_interval: str = msgspec.field(default="", name="scrapeInterval")


class _Active(msgspec.Struct, frozen=True):
    active: list[_Target] = msgspec.field(name="activeTargets")


class _Targets(msgspec.Struct, frozen=True):
    data: _Active


class PrometheusServer:
    """Reads what a Prometheus server knows of the gateways and Tritons that it scrapes, all instances together."""

    attempts, pause_s = 2, 0.0  # a second look sees the scrape after the one that was waited for

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self.name = f"Prometheus at {without_user(self._url)}"

    async def read_now(self) -> Page:
        """What it has scraped last. Raises MetricsError."""
        samples: dict[str, dict[Labels, float]] = {}
        for sample in await self._query(f'{{__name__=~"{SERIES}"}}'):
            labels = dict(sample.metric)
            name, value = labels.pop("__name__"), float(sample.value[1])
            if math.isfinite(value):
                samples.setdefault(name, {})[frozenset(labels.items())] = value
        return Page(samples)

    async def read(self, at_s: float) -> Page:
        """What it has scraped since at_s (wall clock), waited for up to two scrape intervals and 5 s.

        Raises MetricsError where it does not scrape in that time, or has nothing of a gateway or a Triton.
        """
        instances = {_instance(sample.metric) for sample in await self._query(INSTANCES)}
        if not instances:
            raise MetricsError(
                f"{self.name} has no series of a gateway or a Triton (penstock_ready, nv_inference_count)"
            )
        max_wait_s = SCRAPES_WAITED_FOR * await self._interval_s(instances) + SLACK_S
        until = time.monotonic() + max_wait_s
        while await self._oldest_scrape_s(instances) < at_s:
            if time.monotonic() >= until:
                raise MetricsError(f"{self.name} has not scraped the server within {max_wait_s:g} s; is it up there?")
            await asyncio.sleep(POLL_S)
        return await self.read_now()

    async def _oldest_scrape_s(self, instances: set[Instance]) -> float:
        """When the one that was scraped longest ago was scraped; by `up`, which is written with what was scraped."""
        found = {_instance(sample.metric): float(sample.value[1]) for sample in await self._query(SCRAPED_AT)}
        return min(found.get(instance, 0.0) for instance in instances)

    async def _interval_s(self, instances: set[Instance]) -> float:
        url = f"{self._url}/api/v1/targets"
        body = await fetch_bytes(self._session, url, timeout_s=self._timeout_s, query={"state": "active"})
        targets = _decoded(body, _Targets, url).data.active
        intervals = [seconds_of(target.scrape_interval) for target in targets if _instance(target.labels) in instances]
        return max(intervals, default=DEFAULT_INTERVAL_S)

    async def _query(self, expression: str) -> list[_Sample]:
        url = f"{self._url}/api/v1/query"
        body = await fetch_bytes(self._session, url, timeout_s=self._timeout_s, query={"query": expression})
        return _decoded(body, _Query, url).data.result


def seconds_of(duration: str) -> float:
    """Seconds of a duration as Prometheus writes it ("1m30s", "500ms"); 15 where it is none."""
    if not re.fullmatch(r"(\d+(ms|[smhd]))+", duration):
        return DEFAULT_INTERVAL_S
    return sum(float(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)(ms|[smhd])", duration))


def _instance(labels: dict[str, str]) -> Instance:
    return labels.get("job", ""), labels.get("instance", "")


def _decoded(body: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise MetricsError(f"{without_user(url)} does not answer as a Prometheus server does: {error}") from error


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
