"""A server that stands still by a known schedule shows in an open loop's percentiles as it must.

100 requests a second for 10 s, and one stall of a second without an answer until it ends. The 100 requests of that
second wait 1.00, 0.99, ... 0.01 s, the 900 others none: so p90 is 0, p95 is 0.50 s, p99 is 0.90 s. A closed loop sends
one request in that second, and its p99 hides the stall.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from penstock_load.clients.client import Answer, Endpoint
from penstock_load.driver.loops import Asking, LoopAlarm, OpenLoop, RequestLane, run_callers
from penstock_load.driver.processes import Drivers
from penstock_load.driver.protocol import DriverSetup, PhasePlan
from penstock_load.measure.ledger import percentiles_of
from penstock_load.pacer import send_times
from penstock_load.results import Percentiles, Record, Side, Status
from penstock_load.scenario import Arrivals, Kind, RequestSpec, Shape
from tests.loadtest.virtual_time import VirtualTimeLoop, run_virtual

AT_100 = Arrivals(shape=Shape.CONSTANT, rate=100)


class StallingClient:
    """Answers after service_s, but between 4 and 5 s on the loop's clock not before 5 s."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s

    async def send(self, number: int) -> Answer:
        """OK, sooner or later."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep((5 - now if 4 <= now < 5 else 0) + self._service_s)
        return Answer(Status.OK)

    async def aclose(self) -> None:
        """Has nothing to close."""


def asking(loop: VirtualTimeLoop, service_s: float) -> Asking:
    """Asks that server, on the loop's clock."""
    return Asking(1, "p", Side.TARGET, [RequestLane("a", StallingClient(service_s))], [0], 0.0, loop.time)


def latencies_ms(records: list[Record]) -> list[float]:
    """From the intended moment."""
    return [(record.done_s - record.intended_s) * 1000 for record in records]


def percentiles(records: list[Record]) -> Percentiles:
    """As a report has them."""
    return percentiles_of(np.array(latencies_ms(records)))


def test_stall_shows_in_the_open_loop_exactly() -> None:
    """In virtual time, every percentile is the one that arithmetic says."""

    async def main(loop: VirtualTimeLoop) -> list[Record]:
        asks = asking(loop, 0)
        due = enumerate(send_times(AT_100, 10, seed=1))
        await OpenLoop(asks, due, max_in_flight=1000, alarms=LoopAlarm).run(timeout_s=2)
        return asks.take(2000)

    records = run_virtual(main)
    waited = sorted(latency for latency in latencies_ms(records) if latency > 1e-3)
    assert waited == pytest.approx([10.0 * i for i in range(1, 101)], abs=1e-3)
    seen = percentiles(records)
    figures = [seen.p50, seen.p90, seen.p95, seen.p99, seen.p999, seen.highest]
    assert figures == pytest.approx([0, 0, 500, 900, 990, 1000], abs=1e-3)
    assert seen.count == 1000


def test_closed_loop_hides_the_stall() -> None:
    """One caller of the same server, at 100/s while it works: its p99 is an undisturbed answer's."""

    async def main(loop: VirtualTimeLoop) -> list[Record]:
        asks = asking(loop, 0.01)
        await run_callers(asks, itertools.count(), callers=1, until_s=10, timeout_s=2)
        return asks.take(2000)

    records = run_virtual(main)
    seen = percentiles(records)
    assert [seen.p50, seen.p99] == pytest.approx([10, 10], abs=1e-3)
    assert sum(latency > 11 for latency in latencies_ms(records)) == 1


@asynccontextmanager
async def stalling_server() -> AsyncIterator[tuple[str, list[float]]]:
    """Stands still for the second that begins one second after its first request, else answers at once.

    Its URL, and how long it held each request of that second, in seconds.
    """
    first_s: list[float] = []
    held_s: list[float] = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        now = time.monotonic()
        first_s[:] = first_s or [now]
        since_s = now - first_s[0]
        if 1 <= since_s < 2:
            held_s.append(2 - since_s)
            await asyncio.sleep(held_s[-1])
        return web.json_response({"results": [{}]})

    application = web.Application()
    application.router.add_post("/v2/models/m/image", answer)
    runner = web.AppRunner(application, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", held_s
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("is_open", [True, False], ids=["open loop", "closed loop"])
async def test_stall_over_http_is_seen_by_the_open_loop_alone(is_open: bool) -> None:
    """With a real driver process: of 400 requests in 4 s the stalled 100 wait 0 to 1 s, evenly; one caller, once."""
    load = {"arrivals": AT_100} if is_open else {"callers": 1}
    records: list[Record] = []
    async with stalling_server() as (url, held_s):
        setup = DriverSetup(
            endpoints={Side.TARGET: Endpoint(http_url=url, grpc_address="")},
            asks=(RequestSpec(kind=Kind.IMAGE, model="m", picture_px=(16, 16)),),
            slo_p99_ms=1000,
            timeout_s=10,
            max_in_flight=1000,
            seed=1,
            epoch_s=time.monotonic(),
        )
        drivers = await Drivers.start(setup, processes=1)
        try:
            plan = PhasePlan(round=1, phase="p", side=Side.TARGET, seconds=4 if is_open else 2.5, **load)  # type: ignore[arg-type]
            await drivers.run(plan, records.extend)
        finally:
            await drivers.aclose()
    waits_ms = latencies_ms(records)
    assert {record.status for record in records} == {Status.OK}
    if is_open:
        assert len(records) == 400
        assert len(held_s) == pytest.approx(100, abs=40)
        assert sum(wait > 500 for wait in waits_ms) == pytest.approx(50, abs=20)
        assert sum(wait > 200 for wait in waits_ms) == pytest.approx(80, abs=30)
        assert percentiles(records).p95 == pytest.approx(800, abs=200)
    else:
        assert len(held_s) == 1
        assert 1 <= sum(wait > 500 for wait in waits_ms) <= 3  # a busy machine may stand still, too
