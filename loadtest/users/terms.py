"""What the users of one process go by in a run: whom they ask, what, and how fast."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.arrival_plan import PACE_S, Pace
from loadtest.clients.client import Endpoint
from loadtest.scenario import Ask


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request as locust counts it. took_ms: None where the time is no latency (a refusal, an error)."""

    request_type: str
    name: str
    took_ms: float | None
    size_bytes: int
    failure: str = ""


class HttpAnswer(Protocol):
    """What locust's session gives back."""

    status_code: int
    content: bytes | None


class HttpSession(Protocol):
    """FastHttpUser's client, as far as it is used here: no HTTP status and no broken connection raises."""

    def get(self, url: str, **options: object) -> HttpAnswer:
        """The answer; a status of 0 where none came."""
        ...

    def post(self, url: str, **options: object) -> HttpAnswer:
        """The answer; a status of 0 where none came."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """What a user asks over. tell: has locust count a request. session: silent, its requests are not counted."""

    endpoint: Endpoint
    session: HttpSession
    timeout_s: float
    tell: Callable[[Outcome], None]


class Asker(Protocol):
    """Sends the requests of one kind for one user, one at a time."""

    def send(self, name: str) -> None:
        """Sends the next request and tells locust under that name what became of it."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class CannotAsk(Exception):
    """What is to be sent cannot be made (no picture, no such model, nothing listens). One sentence."""


@dataclass(slots=True)
class Now:
    """What a scenario asks at the moment, as the shape says every second. gap_s: between two requests of a user."""

    phase: str = ""
    gap_s: float = PACE_S
    is_poisson: bool = False


@dataclass(slots=True)
class Terms:
    """Of the run at hand; locust's environment carries it as `terms`.

    askers: of each ask, made ready before the load begins. now: where a scenario is asked. trouble: why nothing can be
    asked, else empty.
    """

    endpoint: Endpoint
    asks: tuple[Ask, ...]
    timeout_s: float
    now: Now | None = None
    askers: dict[Ask, Callable[[Line], Asker]] = field(default_factory=dict)
    trouble: str = ""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def name_of(self, ask: Ask) -> str:
        """How the statistics name a request that is sent now."""
        return phase_name(ask.label, self.now.phase) if self.now else ask.label

    def pace(self) -> Pace:
        """One more user's."""
        return Pace(next(self._numbers), time.perf_counter())

    def wait_s(self, pace: Pace) -> float:
        """How long that user waits now: not at all where nothing paces it."""
        if self.now is None:
            return 0.0
        return pace.wait_s(time.perf_counter(), gap_s=self.now.gap_s, is_poisson=self.now.is_poisson)


def phase_name(label: str, phase: str) -> str:
    """A row of the statistics: what was asked in which phase."""
    return f"{label} · {phase}"
