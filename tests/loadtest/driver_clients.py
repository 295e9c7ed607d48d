"""Clients for driver processes under test: how one behaves is the model's name."""

import asyncio
import os
import sys
import time

from penstock_load.clients.client import Answer, Endpoint, TargetError
from penstock_load.results import Status
from penstock_load.scenario import RequestSpec

CONNECT = "tests.loadtest.driver_clients:connect"


class BehavingClient:
    """instant: answers at once; never: not within the deadline; burner: uses 4 ms of the processor; raises: a mistake;
    chatty: prints, as a library might; exits: the process ends with its first request."""

    def __init__(self, model: str, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s

    async def send(self, number: int) -> Answer:
        """Behaves."""
        match self._model:
            case "never":
                await asyncio.sleep(self._timeout_s)
                return Answer(Status.TIMEOUT, error="no answer")
            case "burner":
                until_s = time.thread_time() + 0.004
                while time.thread_time() < until_s:
                    pass
            case "raises":
                raise ZeroDivisionError("a mistake in a client")
            case "chatty":
                os.write(1, b"a library says hello\n")
            case "exits":
                sys.stderr.write("out of memory, say\n")
                sys.stderr.flush()
                os._exit(3)
        return Answer(Status.OK, str(number))

    async def aclose(self) -> None:
        """Has nothing to close."""


async def connect(ask: RequestSpec, endpoint: Endpoint, *, seed: int, images: str, timeout_s: float) -> BehavingClient:
    """A client that behaves as the model's name says. unreachable: TargetError."""
    if ask.model == "unreachable":
        raise TargetError(f"nothing listens at {endpoint.http_url}")
    return BehavingClient(ask.model, timeout_s)
