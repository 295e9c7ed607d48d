"""The counters of a server as a Prometheus server has scraped them."""

import asyncio
import math
import re
import time
from typing import TypeVar

import aiohttp
import msgspec

from loadtest.clients.client import without_user
from loadtest.witness.metrics_text import MetricsError, fetch_bytes
from loadtest.witness.page import Labels, Page

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
        patience_s = SCRAPES_WAITED_FOR * await self._interval_s(instances) + SLACK_S
        until = time.monotonic() + patience_s
        while await self._oldest_scrape_s(instances) < at_s:
            if time.monotonic() >= until:
                raise MetricsError(f"{self.name} has not scraped the server within {patience_s:g} s; is it up there?")
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
