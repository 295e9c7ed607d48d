"""The user classes: each asks one kind of request of one model, but ScenarioUser a scenario's whole mix."""

import random
from collections.abc import Callable
from typing import Any

from gevent import GreenletExit
from locust import task
from locust.contrib.fasthttp import FastHttpUser
from locust.event import EventHook

from loadtest.clients.client import Endpoint
from loadtest.scenario import Ask, Kind
from loadtest.users import grpc, image, rest, stream
from loadtest.users.terms import Asker, CannotAsk, HttpSession, Line, Outcome, Terms

DEFAULT_HOST = "http://127.0.0.1:8000"


class AskingUser(FastHttpUser):  # type: ignore[misc]  # locust is not type-checked here
    """Asks what the run's terms say, and the next as soon as the answer is there; with a scenario at its pace."""

    abstract = True
    host = DEFAULT_HOST
    kind: Kind | None = None

    def __init__(self, environment: Any) -> None:
        self.terms: Terms = environment.terms
        self.network_timeout = self.connection_timeout = self.terms.timeout_s
        super().__init__(environment)
        self.client.request_event = EventHook()  # nobody listens: the asker says what became of it, and how it is named
        self.pace = self.terms.pace()
        self.choices = random.Random()

    def wait_time(self) -> float:
        """Seconds until the next request; locust asks."""
        return self.terms.wait_s(self.pace)

    def on_start(self) -> None:
        """Takes its askers, and in a scenario waits for its turn."""
        if self.terms.trouble:
            raise GreenletExit  # without a traceback a user: the reason was said once
        line = Line(self.terms.endpoint, self.client, self.terms.timeout_s, self.tell)
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

    def tell(self, outcome: Outcome) -> None:
        """Has locust count the request."""
        self.environment.events.request.fire(
            request_type=outcome.request_type,
            name=outcome.name,
            response_time=outcome.took_ms,
            response_length=outcome.size_bytes,
            exception=outcome.failure or None,
            context={},
        )


class ImageUser(AskingUser):
    """Posts pictures to the image endpoint."""

    kind = Kind.IMAGE


class RestUser(AskingUser):
    """Sends tensors over HTTP."""

    kind = Kind.REST


class GrpcUser(AskingUser):
    """Sends tensors over gRPC."""

    kind = Kind.GRPC


class StreamUser(AskingUser):
    """Sends tensors over a gRPC stream."""

    kind = Kind.GRPC_STREAM


class ScenarioUser(AskingUser):
    """Asks the scenario's requests, each as often as its share says."""


PLAIN_USERS = (ImageUser, RestUser, GrpcUser, StreamUser)


def prepare(terms: Terms, images: str, session: HttpSession) -> None:
    """Makes what is sent. Raises CannotAsk where that cannot be, and then nobody asks."""
    for ask in terms.asks:
        terms.askers[ask] = _askers_of(ask, terms.endpoint, terms.timeout_s, images=images, session=session)


def _askers_of(
    ask: Ask, endpoint: Endpoint, timeout_s: float, *, images: str, session: HttpSession
) -> Callable[[Line], Asker]:
    match ask.kind:
        case Kind.IMAGE:
            return image.prepare(ask, endpoint, images)
        case Kind.REST:
            return rest.prepare(ask, endpoint, session)
        case Kind.GRPC:
            return grpc.prepare(ask, endpoint, timeout_s)
        case Kind.GRPC_STREAM:
            return stream.prepare(ask, endpoint, timeout_s)
        case Kind.VIDEO:
            raise CannotAsk("a video stream is not asked for picture by picture; run it with `penstock load run`")
