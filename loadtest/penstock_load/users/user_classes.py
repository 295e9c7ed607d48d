"""Locust user classes: one for each kind of request, and ScenarioUser for the mix of a scenario."""

import random
from typing import Any

from gevent import GreenletExit
from locust import User, task
from locust.exception import StopUser
from locust.runners import STATE_CLEANUP

from penstock_load.results import Status
from penstock_load.scenario import Kind
from penstock_load.users.figures import RunTerms, failure_of
from penstock_load.users.sender import Sender

DEFAULT_HOST = "http://127.0.0.1:8000"
REQUEST_TYPES = {Kind.GRPC: "gRPC", Kind.GRPC_STREAM: "gRPC stream"}


class RequestUser(User):  # type: ignore[misc]  # locust is not type-checked here
    """Sends the requests of the run's terms, each after the answer to the last; in a scenario at its pace."""

    abstract = True
    host = DEFAULT_HOST
    kind: Kind | None = None

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.terms: RunTerms = environment.terms
        self.sender: Sender | None = environment.sender
        self.pace = self.terms.pace()
        self.choices = random.Random()
        self.mix = [ask for ask in self.terms.asks if self.kind in (None, ask.kind)]

    def wait_time(self) -> float:
        """Seconds until the next request; locust calls it."""
        return self.terms.wait_s(self.pace)

    def on_start(self) -> None:
        """In a scenario waits for its turn."""
        if self.terms.trouble:
            raise GreenletExit  # without a traceback a user: the reason is in the log once
        if self.terms.now:
            self.wait()

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """One request of the mix, by its shares; locust counts it. A refusal or an error has no latency."""
        if (
            self.environment.runner.state == STATE_CLEANUP
        ):  # locust ends users that it saw waiting, maybe in mid-request
            raise StopUser
        assert self.sender is not None
        (ask,) = self.choices.choices(self.mix, [ask.share for ask in self.mix])
        name = self.terms.name_of(ask)
        sent = self.sender.send(ask)
        has_latency = sent.answer.status in (Status.OK, Status.TIMEOUT)
        self.environment.events.request.fire(
            request_type=REQUEST_TYPES.get(ask.kind, "POST"),
            name=name,
            response_time=sent.took_s * 1000 if has_latency else None,
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
    """Sends a scenario's requests, each as often as its share says."""
