"""Where the gateway answers a client otherwise than the bare Triton behind it, and why: the whole list.

A promise takes Triton's answer and gives the gateway's; whatever is not listed here is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.contract.clients.asking import Told

OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length"}
JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    """What a client's user sees, and the heads of every answer on the wire: (status, headers) over HTTP, for gRPC
    the blocks of headers, initial and trailing."""

    told: Told
    heads: list[Told]


@dataclass(frozen=True)
class Difference:
    """calls: their names in the tables. kinds: what the names of the clients begin with."""

    why: str
    calls: tuple[str, ...]
    promise: Callable[[Answer], Answer]
    kinds: str = ""


def is_json(answer: Answer) -> Answer:
    """The same, told to be JSON."""
    return Answer(answer.told, [(status, headers | JSON) for status, headers in answer.heads])


def is_ready(answer: Answer) -> Answer:
    """Ready, whatever Triton says; over HTTP with a body."""
    heads = [head if isinstance(head, dict) else (200, JSON) for head in answer.heads]
    return Answer(True, heads)


def says(error: str) -> Callable[[Answer], Answer]:
    """Triton's status with another text."""
    return lambda answer: Answer(answer.told | {"error": error}, answer.heads)


def alone(answer: Answer) -> Answer:
    """The same to the user; what is sent to one who has gone is not compared."""
    return Answer(answer.told, [])


DIFFERENCES = (
    Difference(
        "health has a JSON body, since KServe's client reads one; Triton's is empty",
        ("live",), is_json, "http",
    ),
    Difference(
        "requests are taken though a model of the repository cannot be loaded; Triton says that it is not ready",
        ("ready",), is_ready,
    ),
    Difference(
        "an unknown path is answered in JSON as every other error, which KServe's client needs to read it; Triton says "
        "text/plain of the same bytes",
        ("a version that is no number",), is_json, "http",
    ),
    Difference(
        "an input that is given twice is refused before it reaches Triton, with a text that does not name the request",
        ("an input twice",), says("input 'x' is given twice"), "http",
    ),
    Difference(
        "whoever gave up is not written to any more",
        ("too late",), alone, "grpc",
    ),
)  # fmt: skip
# grpcio writes an empty grpc-message where a call went well; Triton's C++ leaves it out. No client tells them apart.
EMPTY_MESSAGE = ("grpc-message", "")


def promised(kind: str, call: str, answer: Answer) -> Answer:
    """What the gateway has to answer where Triton answers this."""
    for difference in DIFFERENCES:
        if call in difference.calls and kind.startswith(difference.kinds):
            answer = difference.promise(answer)
    return answer


def comparable(told: Told, heads: list[Told]) -> Answer:
    """An answer without what belongs to a connection."""
    return Answer(told, [(head[0], _kept(head[1])) if isinstance(head, tuple) else _kept(head) for head in heads])


def _kept(headers: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name not in OF_THE_CONNECTION}
    return dict(pair for pair in kept.items() if pair != EMPTY_MESSAGE)
