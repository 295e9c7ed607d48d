"""The server's own counters for a phase, read before and after it, beside the client's figures."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

import aiohttp

from penstock_load.clients.client import Endpoint, without_user
from penstock_load.results import RequestSummary, Witness
from penstock_load.scenario import RequestSpec
from penstock_load.witness.counters import (
    Counted,
    CounterReset,
    Page,
    answers_expected,
    count_requests,
    disagreements,
    is_counted,
    knows_one_of,
)
from penstock_load.witness.readers import (
    MetricsError,
    PrometheusServer,
    Statistics,
    default_metrics_url,
    fetch_page,
    fetch_statistics,
    statistics_delta,
)


class Source(Protocol):
    """A server's counters. It counts an answer a moment after sending it, so that a reading too low is repeated.

    name: for a person. attempts, pause_s: how often to read where the first reading is too low, and what lies between.
    """

    name: str
    attempts: int
    pause_s: float

    async def read(self, at_s: float) -> Page:
        """The counters as they were at that wall clock time or later. Raises MetricsError."""
        ...


class MetricsPage:
    """The server's own page."""

    attempts, pause_s = 20, 0.05

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s
        self.name = without_user(url)

    async def read(self, at_s: float) -> Page:
        """The page now, which is never before at_s. Raises MetricsError."""
        return await fetch_page(self._session, self._url, timeout_s=self._timeout_s)


class ModelStatistics:
    """The statistics of some models together, from the server's own HTTP port; a gateway's canaries count in them."""

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, models: Sequence[str], *, timeout_s: float
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._models = tuple(models)
        self._timeout_s = timeout_s
        self.name = f"statistics of {endpoint.http_url}"

    async def read(self) -> Statistics:
        """As they are now. Raises MetricsError."""
        return await fetch_statistics(self._session, self._endpoint, self._models, timeout_s=self._timeout_s)


class Given(NamedTuple):
    """Where the server's own figures are; empty where it was not given.

    server_pid: the process of the server that started this load test; 0: no process of the server did.
    """

    metrics_url: str = ""
    prometheus_url: str = ""
    server_pid: int = 0


class Found(NamedTuple):
    """Who can be asked; notes: one sentence for each who cannot."""

    source: Source | None
    statistics: ModelStatistics | None
    notes: tuple[str, ...]


async def find_sources(
    session: aiohttp.ClientSession, endpoint: Endpoint, models: Sequence[str], given: Given, *, timeout_s: float
) -> Found:
    """Prometheus where it is given, else the metrics page that is given, else one two ports above the HTTP port.

    The last is taken only where it speaks of one of the models. Raises MetricsError where what was given has nothing.
    """
    notes: list[str] = []
    source: Source | None = None
    try:
        source = await _source(session, endpoint, models, given, timeout_s=timeout_s)
    except MetricsError as error:
        if any(given):
            raise
        notes.append(f"no metrics of the server: {error}; --metrics says where they are")
    statistics = ModelStatistics(session, endpoint, models, timeout_s=timeout_s)
    try:
        await statistics.read()
    except MetricsError as error:
        return Found(source, None, (*notes, f"no statistics of the models: {error}"))
    return Found(source, statistics, tuple(notes))


async def _source(
    session: aiohttp.ClientSession, endpoint: Endpoint, models: Sequence[str], given: Given, *, timeout_s: float
) -> Source:
    if given.prometheus_url:
        server = PrometheusServer(session, given.prometheus_url, timeout_s=timeout_s)
        await server.read(0.0)
        return server
    url = given.metrics_url or default_metrics_url(endpoint.http_url)
    if not url:
        raise MetricsError(f"there is no port two above that of {endpoint.http_url}")
    page = MetricsPage(session, url, timeout_s=timeout_s)
    found = await page.read(0.0)
    if not is_counted(found):
        raise MetricsError(f"{page.name} has no counters of a gateway or a Triton (penstock_…, nv_inference_…)")
    if not given.metrics_url and not knows_one_of(found, models):
        raise MetricsError(f"{page.name} speaks of other models than {', '.join(sorted(set(models)))}")
    return page


TIMEOUT_S = 5.0

T = TypeVar("T")


class _Reading(NamedTuple):
    """None: no source. An error: it did not answer this time."""

    at_s: float
    page: Page | MetricsError | None
    statistics: Statistics | MetricsError | None


class Witnesses:
    """Who can be asked about one server. An async context; `open_witnesses` makes it.

    notes: one sentence for each who cannot be asked.
    """

    def __init__(self, session: aiohttp.ClientSession, found: Found) -> None:
        self.notes = found.notes
        self._session = session
        self._source = found.source
        self._statistics = found.statistics
        self._before: _Reading | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def before(self) -> None:
        """Reads where a phase begins, while nothing of this run is in flight.

        With Prometheus it waits for the next scrape (two intervals and 5 s at most), so that nothing from before the
        phase counts.
        """
        self._before = await self._read()

    async def after(self, client: RequestSummary, asks: Sequence[RequestSpec]) -> Witness | None:
        """What the server says of the time since `before`, and where that differs from the client's "all".

        None if the server has no counters. What could not be read is a sentence among the disagreements.
        """
        before, self._before = self._before, None
        if before is None or (self._source is None and self._statistics is None):
            return None
        try:
            after, counted = await self._settled(before, client, asks)
        except (MetricsError, CounterReset) as error:
            return Witness(self._name, 0, 0.0, disagreements=(f"the server's own figures are missing: {error}",))
        return self._witness(client, counted, _statistics_between(before, after), after.at_s - before.at_s)

    async def _settled(
        self, before: _Reading, client: RequestSummary, asks: Sequence[RequestSpec]
    ) -> tuple[_Reading, Counted | None]:
        """The reading after the phase; taken again for a moment where not every answer is counted in it yet."""
        expected, _ = answers_expected(client)
        attempts, pause_s = (self._source.attempts, self._source.pause_s) if self._source else (1, 0.0)
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(pause_s)
            after = await self._read()
            counted = _counted(before, after, asks)
            if counted is None or counted.answered >= expected:
                break
        return after, counted

    def _witness(
        self, client: RequestSummary, counted: Counted | None, statistics: Statistics | str, seconds: float
    ) -> Witness:
        sentences = disagreements(client, counted, seconds=seconds) if counted else ()
        known = statistics if isinstance(statistics, Statistics) else Statistics()
        if counted is None:  # the engine alone: with a gateway in front its requests need not be the client's
            success = known.inference_stats.success
            counted = Counted(success.count, success.mean_ms)
        if statistics and isinstance(statistics, str):
            sentences = (*sentences, statistics)
        return Witness(
            self._name,
            counted.answered,
            counted.mean_ms,
            counted.quantiles,
            _stages(counted, known),
            known.batch_sizes or counted.batch_sizes,
            sentences,
        )

    async def _read(self) -> _Reading:
        at_s = time.time()  # as Prometheus stamps its scrapes
        page = await _or_error(self._source.read(at_s)) if self._source else None
        return _Reading(at_s, page, await _or_error(self._statistics.read()) if self._statistics else None)

    @property
    def _name(self) -> str:
        return " and ".join(who.name for who in (self._source, self._statistics) if who)


async def open_witnesses(
    endpoint: Endpoint,
    models: Sequence[str],
    *,
    metrics_url: str = "",
    prometheus_url: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Witnesses:
    """Who can be asked about this server: Prometheus, else its metrics page, and its statistics extension.

    metrics_url: empty: two ports above the HTTP port, where a page there speaks of one of the models. timeout_s: of
    each reading. Raises MetricsError where an address that was given has no figures.
    """
    session = aiohttp.ClientSession()
    try:
        given = Given(metrics_url, prometheus_url)
        return Witnesses(session, await find_sources(session, endpoint, models, given, timeout_s=timeout_s))
    except BaseException:
        await session.close()
        raise


async def _or_error(reading: Awaitable[T]) -> T | MetricsError:
    try:
        return await reading
    except MetricsError as error:
        return error


def _counted(before: _Reading, after: _Reading, asks: Sequence[RequestSpec]) -> Counted | None:
    """None without a source. Raises CounterReset, and MetricsError for a reading that failed."""
    if isinstance(before.page, Page) and isinstance(after.page, Page):
        return count_requests(before.page, after.page, asks)
    for failure in (before.page, after.page):
        if isinstance(failure, MetricsError):
            raise failure
    return None


def _statistics_between(before: _Reading, after: _Reading) -> Statistics | str:
    """The counts, or why there are none; empty if none were expected."""
    if isinstance(before.statistics, Statistics) and isinstance(after.statistics, Statistics):
        try:
            return statistics_delta(before.statistics, after.statistics)
        except CounterReset as error:
            return str(error)
    failures = [failure for failure in (before.statistics, after.statistics) if isinstance(failure, MetricsError)]
    return f"the models' statistics are missing: {failures[0]}" if failures else ""


def _stages(counted: Counted, statistics: Statistics) -> tuple[tuple[str, float], ...]:
    """Statistics are exact where counters are rounded to microseconds, so they replace them."""
    exact = statistics.stages_ms if statistics.inference_stats.success.count else ()
    return tuple((dict(counted.stages_ms) | dict(exact)).items())
