"""Where a server's counters can be read: found once, before a run."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import aiohttp

from loadtest.clients.client import Endpoint, without_user
from loadtest.witness.counted import is_counted, knows_one_of
from loadtest.witness.metrics_text import MetricsError, default_metrics_url, fetch_page
from loadtest.witness.page import Page
from loadtest.witness.prometheus import PrometheusServer
from loadtest.witness.triton_statistics import Statistics, fetch_statistics


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
    """Addresses that a person gave; empty where none was."""

    metrics_url: str = ""
    prometheus_url: str = ""


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
