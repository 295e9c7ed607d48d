"""What fronts and their core tell each other over the batch socket: records in MessagePack, each behind its length.

Guests (server.local.guests) say and hear the same, but for how they begin.

Deadlines are monotonic seconds, which the processes of one machine share.
"""

from functools import cache

import msgspec

from server.backends.known_model import KnownModel
from server.core.errors import InferenceError
from server.core.infer import InferRequest, InferResponse
from server.core.leaving import LeftAt
from server.core.model import ModelConfig
from server.local.slab_memory import Lent

PROTOCOL = 2  # increment it when records change: clients are other programs, which may be older or newer


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of those below. number: of a question, by which its answer is known; a front's own."""


class Hello(Record, frozen=True):
    """Front → core, first: which of the fronts this is."""

    index: int


class Visit(Record, frozen=True):
    """Guest → core, first, in the place of Hello. name: which program it is, for the log."""

    name: str


class Ask(Record, frozen=True):
    """Front → core: an inference. client, priority: see Batching.infer. An input that has a place has no data."""

    number: int
    request: InferRequest
    client: str
    priority: int


class GiveUp(Record, frozen=True):
    """Front → core: nobody waits for that answer any longer."""

    number: int


class Find(Record, frozen=True):
    """Front → core: what is this model's config?"""

    number: int
    model_name: str


class Served(Record, frozen=True):
    """Front → core: inferences of these models succeeded."""

    model_names: tuple[str, ...]


class Suspect(Record, frozen=True):
    """Front → core: a call could not reach the engine."""


class Late(Record, frozen=True):
    """Front → core: a call ended after waited_s without an answer from the engine. is_waiting: it has not ended."""

    model_name: str
    waited_s: float
    is_waiting: bool = False


class NotServed(Record, frozen=True):
    """Front → core: a valid inference failed in the engine."""

    model_name: str


class Known(Record, frozen=True):
    """Front → core: what was sent before that `Know` is known here."""

    number: int


class State(Record, frozen=True):
    """Core → front: the engine as the core sees it, at every change and each second. owned: by the gateway.

    apart: models with an engine process of their own, which only the core calls.
    """

    is_up: bool
    reason: str
    generation: int
    models: tuple[KnownModel, ...]
    owned: tuple[str, ...]
    apart: tuple[str, ...] = ()


class Know(Record, frozen=True):
    """Core → front: say when this is heard, and with it all that was sent before."""

    number: int


class Cut(Record, frozen=True):
    """Core → front: calls that are in the engine will not be answered any more."""

    reason: str


class Lend(Record, frozen=True):
    """Core → front: a part of the slab is the front's from now on, in the place of any former one."""

    lent: Lent


class Unwelcome(Record, frozen=True):
    """Core → guest, last: why it is not served."""

    reason: str


class Answer(Record, frozen=True):
    """Core → front: of an Ask."""

    number: int
    response: InferResponse


class Found(Record, frozen=True):
    """Core → front: of a Find."""

    number: int
    config: ModelConfig


class Left(Record, frozen=True):
    """Core → front: of an Ask that was given up; where it was."""

    number: int
    where: LeftAt


class Failed(Record, frozen=True):
    """Core → front: of an Ask or a Find. kind: the error's class. retry_after_s: None where it has none."""

    number: int
    kind: str
    message: str
    reason: str
    retry_after_s: float | None


UP = Hello | Visit | Ask | GiveUp | Find | Served | NotServed | Suspect | Late | Known
DOWN = State | Cut | Lend | Unwelcome | Answer | Found | Failed | Left | Know


def failed(number: int, error: InferenceError) -> Failed:
    """The error as a record."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return Failed(number, type(error).__name__, error.message, error.reason, retry_after_s)


def error_of(record: Failed) -> InferenceError:
    """The error again, of its own class; one that is not known here is an InferenceError."""
    kind = _kind_of(record.kind)
    error = kind.__new__(kind)
    InferenceError.__init__(error, record.message)
    if record.reason != kind.reason:
        error.reason = record.reason
    if record.retry_after_s is not None:
        vars(error)["retry_after_s"] = record.retry_after_s
    return error


@cache
def _kind_of(name: str) -> type[InferenceError]:
    """Of a class that the core has: there are a dozen, and the tree is searched once for each."""
    todo = [InferenceError]
    while todo:
        kind = todo.pop()
        if kind.__name__ == name:
            return kind
        todo += kind.__subclasses__()
    return InferenceError
