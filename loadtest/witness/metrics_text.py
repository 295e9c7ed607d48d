"""A server's own /metrics page, fetched and read."""

import math
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from loadtest.clients.client import without_user
from loadtest.witness.page import Labels, Page

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
