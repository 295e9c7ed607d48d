"""Locust user classes: one for each kind of request, and ScenarioUser for the mix of a scenario."""

import random
import time
from typing import Any

import gevent
from gevent import GreenletExit
from gevent.pool import Group
from locust import User, task
from locust.exception import StopUser
from locust.runners import STATE_CLEANUP

from penstock_load.results import Status
from penstock_load.scenario import Kind
from penstock_load.users.arrival_plan import SendClock
from penstock_load.users.figures import RunTerms, failure_of
from penstock_load.users.sender import Sender

DEFAULT_HOST = "http://127.0.0.1:8000"
REQUEST_TYPES = {Kind.GRPC: "gRPC", Kind.GRPC_STREAM: "gRPC stream"}


class RequestUser(User):  # type: ignore[misc]  # locust is not type-checked here
    """Sends the requests of the run's terms, each after the answer to the last."""

    abstract = True
    host = DEFAULT_HOST
    kind: Kind | None = None

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.terms: RunTerms = environment.terms
        self.sender: Sender | None = environment.sender
        self.choices = random.Random()
        self.mix = [ask for ask in self.terms.asks if self.kind in (None, ask.kind)]

    def on_start(self) -> None:
        """Ends the user if nothing can be sent."""
        if self.terms.trouble:
            raise GreenletExit  # without a traceback a user: the reason is in the log once

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """What this user does next; subclasses change `take_turn`, since locust would run the tasks of both classes."""
        self.take_turn()

    def take_turn(self) -> None:
        """One request of the mix."""
        if self.environment.runner.state == STATE_CLEANUP:  # locust ends users, maybe in the middle of a request
            raise StopUser
        self.send(time.perf_counter())

    def send(self, intended_s: float) -> None:
        """One request of the mix, by its shares; locust counts it. A refusal or an error has no latency."""
        assert self.sender is not None
        (ask,) = self.choices.choices(self.mix, [ask.share for ask in self.mix])
        name, late_s = self.terms.name_of(ask), time.perf_counter() - intended_s
        sent = self.sender.send(ask)
        has_latency = sent.answer.status in (Status.OK, Status.TIMEOUT)
        self.environment.events.request.fire(
            request_type=REQUEST_TYPES.get(ask.kind, "POST"),
            name=name,
            response_time=(late_s + sent.took_s) * 1000 if has_latency else None,
            response_length=sent.answer.received_bytes,
            exception=failure_of(sent.answer) or None,
            context={},
        )


class ImageUser(RequestUser):
    """Posts pictures to the image endpoint."""

    kind = Kind.IMAGE


class RestUser(RequestUser):
    """Sends tensors over HTTP."""

    kind = Kind.REST


class GrpcUser(RequestUser):
    """Sends tensors over gRPC."""

    kind = Kind.GRPC


class StreamUser(RequestUser):
    """Sends tensors over a gRPC stream."""

    kind = Kind.GRPC_STREAM


class ScenarioUser(RequestUser):
    """Sends this process's share of a scenario on schedule, independent of the answers."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.clock = SendClock(time.perf_counter(), self.choices.getrandbits(32))
        self.waiting = Group()

    def take_turn(self) -> None:
        """The next request, at its moment."""
        now = self.terms.now
        assert now is not None, "a scenario has a rate"
        at_s, is_due = self.clock.step(now.rate, is_poisson=now.is_poisson)
        gevent.sleep(max(0.0, at_s - time.perf_counter()))
        if is_due:
            self.waiting.spawn(self._send_planned, at_s)

    def _send_planned(self, intended_s: float) -> None:
        """An exception counts as locust counts those of a task; it would otherwise end with the greenlet."""
        try:
            self.send(intended_s)
        except Exception as error:  # noqa: BLE001 - as locust does for tasks
            self.environment.events.user_error.fire(user_instance=self, exception=error, tb=error.__traceback__)

    def on_stop(self) -> None:
        """Waits for the answers; locust ends the wait at its --stop-timeout."""
        self.waiting.join()
