"""Locust user classes: one for each kind of request, and ScenarioUser for the mix of a scenario."""

import random
from collections.abc import Callable
from typing import Any

from gevent import GreenletExit
from locust import task
from locust.contrib.fasthttp import FastHttpUser
from locust.event import EventHook

from penstock_load.clients.client import Endpoint
from penstock_load.scenario import Kind, RequestSpec
from penstock_load.users import requests as grpc
from penstock_load.users import requests as image
from penstock_load.users import requests as rest
from penstock_load.users import requests as stream
from penstock_load.users.figures import (
    HttpSession,
    RequestOutcome,
    RequestSender,
    RequestsError,
    RunTerms,
    UserConnection,
)

DEFAULT_HOST = "http://127.0.0.1:8000"


class RequestUser(FastHttpUser):  # type: ignore[misc]  # locust is not type-checked here
    """Asks what the run's terms say, and the next as soon as the answer is there; with a scenario at its pace."""

    abstract = True
    host = DEFAULT_HOST
    kind: Kind | None = None

    def __init__(self, environment: Any) -> None:
        self.terms: RunTerms = environment.terms
        self.network_timeout = self.connection_timeout = self.terms.timeout_s
        super().__init__(environment)
        self.client.request_event = EventHook()  # unused: the sender reports the outcome and the name
        self.pace = self.terms.pace()
        self.choices = random.Random()

    def wait_time(self) -> float:
        """Seconds until the next request; locust asks."""
        return self.terms.wait_s(self.pace)

    def on_start(self) -> None:
        """Takes its askers, and in a scenario waits for its turn."""
        if self.terms.trouble:
            raise GreenletExit  # without a traceback a user: the reason was said once
        line = UserConnection(self.terms.endpoint, self.client, self.terms.timeout_s, self.tell)
        self.mix = [ask for ask in self.terms.asks if self.kind in (None, ask.kind)]
        self.askers = {ask: self.terms.askers[ask](line) for ask in self.mix}
        if self.terms.now:
            self.wait()

    def on_stop(self) -> None:
        """Closes the connections."""
        for asker in getattr(self, "askers", {}).values():
            asker.close()

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        """One request, one answer; which of the mix, its shares decide."""
        (ask,) = self.choices.choices(self.mix, [ask.share for ask in self.mix])
        self.askers[ask].send(self.terms.name_of(ask))

    def tell(self, outcome: RequestOutcome) -> None:
        """Has locust count the request."""
        self.environment.events.request.fire(
            request_type=outcome.request_type,
            name=outcome.name,
            response_time=outcome.took_ms,
            response_length=outcome.size_bytes,
            exception=outcome.failure or None,
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
    """Asks the scenario's requests, each as often as its share says."""


PLAIN_USERS = (ImageUser, RestUser, GrpcUser, StreamUser)


def prepare(terms: RunTerms, images: str, session: HttpSession) -> None:
    """Makes the requests. Raises CannotAsk if it cannot, and then no user sends any."""
    for ask in terms.asks:
        terms.askers[ask] = _senders_of(ask, terms.endpoint, terms.timeout_s, images=images, session=session)


def _senders_of(
    ask: RequestSpec, endpoint: Endpoint, timeout_s: float, *, images: str, session: HttpSession
) -> Callable[[UserConnection], RequestSender]:
    match ask.kind:
        case Kind.IMAGE:
            return image.prepare_image(ask, endpoint, images)
        case Kind.REST:
            return rest.prepare_rest(ask, endpoint, session)
        case Kind.GRPC:
            return grpc.prepare_grpc(ask, endpoint, timeout_s)
        case Kind.GRPC_STREAM:
            return stream.prepare_stream(ask, endpoint, timeout_s)
        case Kind.VIDEO:
            raise RequestsError("a video stream is not asked for picture by picture; run it with `penstock load run`")
