"""The driver process that sends the requests of one locust process."""

import itertools
import subprocess
import sys
from typing import Any

import gevent
import msgspec
import psutil
from gevent.event import AsyncResult
from gevent.lock import Semaphore

from penstock_load.clients.client import Answer, Endpoint
from penstock_load.driver.protocol import (
    Begin,
    DriverError,
    DriverSetup,
    Failed,
    FromDriver,
    Ready,
    Send,
    Sent,
    ToDriver,
)
from penstock_load.results import Side, Status
from penstock_load.scenario import RequestSpec

SEED = 1
LOST = "the driver process ended"
_DECODER = msgspec.json.Decoder(FromDriver)


class Sender:
    """Runs penstock_load.driver.child, through which all users of this process send their requests."""

    def __init__(self) -> None:
        """Returns when the process runs: its imports take a second, which is no part of a run."""
        self._lanes: dict[RequestSpec, int] = {}
        self._numbers = itertools.count()
        self._waiting: dict[int, AsyncResult] = {}
        self._ready = AsyncResult()
        self._lock = Semaphore()
        self._process: Any = subprocess.Popen(  # locust has made it gevent's: its pipes give way to the other users
            [sys.executable, "-P", "-m", "penstock_load.driver.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._reader = gevent.spawn(self._receive)
        self.connect((), Endpoint(http_url="", grpc_address=""), images="", timeout_s=1.0)

    def connect(self, asks: tuple[RequestSpec, ...], endpoint: Endpoint, *, images: str, timeout_s: float) -> None:
        """Prepares the requests of a run. Raises DriverError if they cannot be; then this object is of no more use."""
        setup = DriverSetup(
            endpoints={Side.TARGET: endpoint}, asks=asks, slo_p99_ms=0.0, timeout_s=timeout_s, max_in_flight=1,
            seed=SEED, epoch_s=0.0, images=images,
        )  # fmt: skip
        self._ready = AsyncResult()
        try:
            self._say(Begin(setup, 0, 1))
        except OSError:
            raise DriverError(LOST) from None
        if failure := self._ready.get():
            raise DriverError(failure)
        self._lanes = {ask: lane for lane, ask in enumerate(asks)}

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def send(self, ask: RequestSpec) -> Sent:
        """Sends the next request of that kind and waits for its answer."""
        number = next(self._numbers)
        reply = self._waiting[number] = AsyncResult()
        try:
            self._say(Send(number, self._lanes[ask]))
            sent: Sent = reply.get()
        except OSError:
            gevent.sleep(1.0)  # else the users of a lost process would leave no time to end the run
            return _lost(number)
        finally:
            del self._waiting[number]
        return sent

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: ToDriver) -> None:
        with self._lock:
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> None:
        """Until the process ends."""
        for line in self._process.stdout:
            match _DECODER.decode(line):
                case Sent() as sent if sent.number in self._waiting:
                    self._waiting[sent.number].set(sent)
                case Ready():
                    self._ready.set("")
                case Failed(why):
                    self._ready.set(why)
        if not self._ready.ready():
            self._ready.set(LOST)
        for number, reply in self._waiting.items():
            reply.set(_lost(number))


def _lost(number: int) -> Sent:
    return Sent(number, Answer(Status.FAILED, error=LOST), 0.0)
