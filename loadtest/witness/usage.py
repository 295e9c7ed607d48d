"""What a server's processes use: by the machine's own account where they run here, else by the server's word."""

import asyncio
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import psutil

from loadtest.clients.client import Endpoint
from loadtest.witness.metrics_text import MetricsError, default_metrics_url, fetch_page
from loadtest.witness.process_cpu import CpuMeter, NotListening, Usage, meter_of_server

CPU, MEMORY = "process_cpu_seconds_total", "process_resident_memory_bytes"


class UsageReader(Protocol):
    """Reads CPU seconds so far and resident memory."""

    async def read(self) -> Usage | None:
        """None where nobody says so just now."""
        ...


class ProcessUsage:
    """Of processes on this machine, found again by their port when the server was started again."""

    def __init__(self, meter: CpuMeter, host: str, port: int) -> None:
        self._meter = meter
        self._host = host
        self._port = port

    async def read(self) -> Usage | None:
        """In a thread: it looks at every process of the machine, some milliseconds."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Usage | None:
        try:
            return self._meter.read()
        except psutil.Error:
            pass
        try:
            self._meter = meter_of_server(self._host, self._port)
            return self._meter.read()
        except (NotListening, psutil.Error):
            return None


class PageUsage:
    """Of one process, by its metrics page."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s

    async def read(self) -> Usage | None:
        """None where the page has no such counter."""
        try:
            page = await fetch_page(self._session, self._url, timeout_s=self._timeout_s)
        except MetricsError:
            return None
        cpu, memory = page.select(CPU, {}), page.select(MEMORY, {})
        return Usage(sum(cpu.values()), sum(memory.values())) if cpu else None


async def find_usage(
    session: aiohttp.ClientSession, endpoint: Endpoint, *, metrics_url: str, timeout_s: float
) -> tuple[UsageReader | None, str]:
    """Who can say it, or None with a sentence that says why nobody can."""
    parts = urlsplit(endpoint.http_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        meter = await asyncio.to_thread(meter_of_server, host, port)
    except (NotListening, psutil.Error) as error:
        page = PageUsage(session, metrics_url or default_metrics_url(endpoint.http_url), timeout_s=timeout_s)
        return (page, "") if await page.read() else (None, f"no CPU of the server: {error}, and it does not say {CPU}")
    return ProcessUsage(meter, host, port), ""
