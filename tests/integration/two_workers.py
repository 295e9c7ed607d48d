"""A stack with `--workers 2` as seen from outside: its processes, a connection to one of them, what they count."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import psutil

from tests.integration.living import family
from tests.support.http import call
from tests.support.stack import RunningStack
from tests.support.waiting import wait_for

X = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
PARTS = ("front-1", "front-2")
ENOUGH_CONNECTIONS = 100  # the system distributes them randomly


def part_of(stack: RunningStack, part: str) -> psutil.Process:
    """The process with that name among its arguments: core, front-1, front-2."""
    return next(
        child
        for child in family(stack)
        if child.cmdline()[1:3] == ["-m", "penstock.gateway"] and child.cmdline()[-1] == part
    )


def metric(stack: RunningStack, series: str) -> float:
    """The value of a series, 0 where there is none."""
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series))


class KeptConnection:
    """A kept-alive connection to one of the workers."""

    def __init__(self, stack: RunningStack) -> None:
        parts = urlsplit(stack.http_url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        self.connection.connect()

    def is_to(self, front: psutil.Process) -> bool:
        port = self.connection.sock.getsockname()[1]
        return any(seen.raddr and seen.raddr.port == port for seen in front.net_connections("tcp"))

    def infer(self, model: str = "identity") -> int:
        """The status of a tensor's answer."""
        body = json.dumps(X)
        self.connection.request("POST", f"/v2/models/{model}/infer", body, {"content-type": "application/json"})
        return self._status()

    def is_ready(self) -> bool:
        """Whether this worker says that it is."""
        self.connection.request("GET", "/v2/health/ready")
        return self._status() == 200

    def _status(self) -> int:
        answer = self.connection.getresponse()
        answer.read()
        return answer.status


def wait_until_both_serve(stack: RunningStack) -> None:
    """Returns when the core knows both workers, and each of them is ready.

    After a restart or a pause of the core, a worker that has not found it yet answers 503. The number of workers that
    the core counts does not show that: the core sends the engine's state a moment later, and it counts a worker that
    has given it up until it reads the end of that connection.
    """
    wait_for(lambda: metric(stack, "penstock_fronts ") == len(PARTS) and _are_ready(stack), 20, "both workers serve")


def _are_ready(stack: RunningStack) -> bool:
    """Whether each worker says that it is ready, to a connection of its own."""
    left = [part_of(stack, part) for part in PARTS]
    for _ in range(ENOUGH_CONNECTIONS):
        kept = KeptConnection(stack)
        with closing(kept.connection):
            if not kept.is_ready():
                return False
            left = [front for front in left if not kept.is_to(front)]
        if not left:
            return True
    raise AssertionError(f"of {ENOUGH_CONNECTIONS} connections none came to {left}")


@contextmanager
def connected_to(stack: RunningStack, part: str) -> Iterator[KeptConnection]:
    """A connection to this worker, while both serve."""
    wait_for(lambda: metric(stack, "penstock_fronts ") == len(PARTS), 20, "both workers are connected to the core")
    for _ in range(ENOUGH_CONNECTIONS):
        kept = KeptConnection(stack)
        with closing(kept.connection):
            assert kept.infer() == 200
            if kept.is_to(part_of(stack, part)):
                yield kept
                return
    raise AssertionError(f"of {ENOUGH_CONNECTIONS} connections none came to {part}")
