"""One stretch of load on one contender: a closed loop for the rate, an open one at a given rate for the latency."""

import itertools
import time
from collections.abc import Sequence

import aiohttp

from loadtest.bench.closed_loop import Lap, make_lap, run_closed_loop
from loadtest.bench.wire import BadAnswer, HttpPort, HttpRequest
from loadtest.clients.client import Answer
from loadtest.driver.asking import Asking, Lane
from loadtest.driver.open_loop import OpenLoop
from loadtest.pacer import send_times
from loadtest.results import Side, Status
from loadtest.scenario import Arrivals, Shape

LEAD_S = 0.1
TIMEOUT_S = 30.0
MAX_IN_FLIGHT = 512


class Caller:
    """Asks one server for the pictures in turn. renew: every so many requests a connection is opened anew, 0 never.

    Servers of several workers share one listening socket: whoever accepts a connection keeps it. Eight connections
    that live for ever can all end up with one worker, which then does the work of all.
    """

    def __init__(self, port: HttpPort, requests: Sequence[HttpRequest], *, renew: int) -> None:
        self._port = port
        self._requests = requests
        self._last = [_closing(request) for request in requests]
        self._renew = renew

    async def ask(self, number: int) -> bytes:
        """The answer's body. Raises BadAnswer, also where the connection breaks."""
        is_last = self._renew and number % self._renew == self._renew - 1
        request = (self._last if is_last else self._requests)[number % len(self._requests)]
        try:
            return await self._port.post(request)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BadAnswer(f"{request.path} was not answered: {error or type(error).__name__}") from error

    async def send(self, number: int) -> Answer:
        """As the driver wants it: never an exception."""
        try:
            return Answer(Status.OK, received_bytes=len(await self.ask(number)))
        except BadAnswer as error:
            return Answer(Status.FAILED, error=str(error)[:200])

    async def aclose(self) -> None:
        """The connections are the port's."""


async def closed_lap(caller: Caller, *, concurrency: int, seconds: float) -> Lap:
    """Raises BadAnswer."""

    async def call(number: int) -> None:
        await caller.ask(number)

    return await run_closed_loop(call, concurrency=concurrency, seconds=seconds)


async def open_lap(caller: Caller, *, rate: float, seconds: float, seed: int) -> Lap:
    """Poisson arrivals at that rate whatever the answers do; latencies from the intended moments. Raises BadAnswer."""
    epoch_s = time.monotonic() + LEAD_S
    lanes, clock = [Lane("image", caller)], time.monotonic
    asking = Asking(round=0, phase="latency", side=Side.TARGET, lanes=lanes, slots=[0], epoch_s=epoch_s, clock=clock)
    moments = (epoch_s + at_s for at_s in send_times(Arrivals(shape=Shape.POISSON, rate=rate), seconds, seed=seed))
    loop = OpenLoop(asking, zip(itertools.count(), moments, strict=False), max_in_flight=MAX_IN_FLIGHT)
    await loop.run(timeout_s=TIMEOUT_S)
    for record in asking.records:
        if record.status is not Status.OK:
            raise BadAnswer(f"at {rate:.0f} requests a second one was not answered: {record.error}")
    return make_lap([record.done_s - record.intended_s for record in asking.records], seconds)


def _closing(request: HttpRequest) -> HttpRequest:
    return HttpRequest(request.path, {**request.headers, "connection": "close"}, request.body)
