"""The server's own word on a phase: its counters and statistics, read before and after, beside the client's figures."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import aiohttp

from loadtest.clients.client import Endpoint
from loadtest.results import RequestSummary, Witness
from loadtest.scenario import Ask
from loadtest.witness.agreement import answers_expected, disagreements
from loadtest.witness.counted import Counted, count_requests
from loadtest.witness.metrics_text import MetricsError
from loadtest.witness.page import CounterReset, Page
from loadtest.witness.sources import Found, Given, find_sources
from loadtest.witness.triton_statistics import Statistics, statistics_delta

TIMEOUT_S = 5.0

T = TypeVar("T")


class _Reading(NamedTuple):
    """None: nobody to ask. An error: it did not answer this time."""

    at_s: float
    page: Page | MetricsError | None
    statistics: Statistics | MetricsError | None


class Witnesses:
    """Who can be asked about one server. An async context; `open_witnesses` makes it.

    notes: one sentence for each who cannot be asked. wall_clock: seconds, as Prometheus stamps its scrapes.
    """

    def __init__(
        self, session: aiohttp.ClientSession, found: Found, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.notes = found.notes
        self._session = session
        self._source = found.source
        self._statistics = found.statistics
        self._wall_clock = wall_clock
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

    async def after(self, client: RequestSummary, asks: Sequence[Ask]) -> Witness | None:
        """What the server says of the time since `before`, and where that differs from the client's "all".

        None where there is nobody to ask. What could not be read is a sentence among the disagreements.
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
        self, before: _Reading, client: RequestSummary, asks: Sequence[Ask]
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
        at_s = self._wall_clock()
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


def _counted(before: _Reading, after: _Reading, asks: Sequence[Ask]) -> Counted | None:
    """None where nobody counts. Raises CounterReset, and MetricsError for a reading that failed."""
    if isinstance(before.page, Page) and isinstance(after.page, Page):
        return count_requests(before.page, after.page, asks)
    for failure in (before.page, after.page):
        if isinstance(failure, MetricsError):
            raise failure
    return None


def _statistics_between(before: _Reading, after: _Reading) -> Statistics | str:
    """What they counted, or why they did not; empty where nobody was to."""
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
