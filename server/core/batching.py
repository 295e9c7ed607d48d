"""What is said of a batch that the gateway formed, and the seam to whoever forms them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.core.infer import InferRequest, InferResponse


class Owner(StrEnum):
    """Who forms a model's batches: one owner, since two batchers in series add two delays."""

    GATEWAY = "gateway"
    TRITON = "triton"
    OFF = "off"


class CloseReason(StrEnum):
    """Why a batch took no more rows."""

    SLOT_FREE = "slot_free"
    DEADLINE = "deadline"
    FULL = "full"
    DELAY = "delay"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True)
class Fit:
    """The line through what the engine's calls took: t(b) = alpha_s + beta_s * b seconds for b rows.

    guard_s: what a call may take longer than that, by the spread of those seen. samples: calls behind it. deliver_s:
    what each row takes from the engine's answer until its caller has it.
    """

    alpha_s: float
    beta_s: float
    guard_s: float
    samples: int
    deliver_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """What a call of so many rows takes, without the guard."""
        return self.alpha_s + self.beta_s * rows

    def told_s(self, rows: int) -> float:
        """The same until the callers have their answers; the engine has gone on meanwhile."""
        return self.alpha_s + (self.beta_s + self.deliver_s) * rows


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of one request in the gateway's batcher. Times in seconds.

    arrived_unix_s: when it came to the queue, on the wall clock. queued_s: until its batch was formed. expected_s: what
    the fit said that the engine's call would take, None without a fit; engine_s: what it took. requests, rows: of the
    whole batch. ahead: requests that waited in the queue when it came. slots: engine calls that may run at once;
    busy: how many did when the batch was formed, this one not among them. slack_s: from the batch's expected end to
    the request's deadline, None where either is not known.
    """

    model_name: str
    arrived_unix_s: float
    queued_s: float
    engine_s: float
    batch_number: int
    requests: int
    rows: int
    close_reason: CloseReason
    ahead: int
    slots: int
    busy: int
    fit: Fit | None = None
    expected_s: float | None = None
    slack_s: float | None = None


class Batching(Protocol):
    """Forms the batches of the models that the gateway owns. Raises of the InferenceError tree only."""

    def owns(self, model_name: str) -> bool:
        """Whether requests for that model are to come here."""
        ...

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """For who has work to do before there is a request, such as decoding: it would be for nothing.

        rows: of the request, and of those that are being made ready before it. Raises Overloaded where all that is
        ahead of them takes the engine until after the deadline, as far as it is known here.
        """
        ...

    async def infer(self, request: "InferRequest", *, client: str, priority: int = 0) -> "InferResponse":
        """The request's own rows of its batch's answer, explained.

        client: whom the queue is fair to. priority: as v2 has it, 1 the highest, 0 for the model's default. Cancelling
        gives the place up at once, wherever the request is. Raises Overloaded where the deadline cannot be met or the
        queue is full, DeadlineExceeded where it passed, and what the engine raised for the batch.
        """
        ...
