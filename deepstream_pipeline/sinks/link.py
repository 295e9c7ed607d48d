"""A connection to a broker, as the sink behind it sees one: what kafka, mqtt, redis_stream and webhook each are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepstream_pipeline.errors import PipelineError, SinkFailed
from deepstream_pipeline.sinks.spool import Message


class LinkDown(PipelineError):
    """The broker cannot be reached, refuses, or went silent. By links, for the sender, which tries again later."""

    reason = "link_down"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of messages that a link was given, now or in an earlier call.

    delivered: the broker said so. refused: it will never take them, refusal says why. left: they were not delivered, or
    nobody knows, in their old order. trouble: why it does not go on; a link that still has messages goes on by itself,
    any other is closed and opened again. pause_s: not before so long.
    """

    delivered: Sequence[Message] = ()
    refused: Sequence[Message] = ()
    refusal: str = ""
    left: Sequence[Message] = ()
    trouble: str = ""
    pause_s: float = 0.0


class Link(Protocol):
    """One broker's connection, used by one thread: the sender's. It converts its library's errors, and no other do.

    name: short, of the kind. place: where it leads, for people, without secrets. max_messages, max_bytes: of what one
    `send` is given.
    """

    name: str
    place: str
    max_messages: int
    max_bytes: int

    def open(self, timeout_s: float) -> bool:
        """Connects; whether the broker answered (else nobody asked it yet). Raises LinkDown."""
        ...

    def send(self, messages: Sequence[Message]) -> Outcome:
        """Sends them in order, behind those it still has, and waits for answers: for about a second where it can.

        What is in no outcome stays the link's; it is asked again with `send(())`. Raises nothing of its library.
        """
        ...

    def idle(self) -> None:
        """What keeps a connection alive while nothing is to be sent. Raises LinkDown. Called twice a second."""
        ...

    def close(self) -> None:
        """Lets go of the connection and of messages that it still has; at once. It can be opened again."""
        ...


def scrub(text: str, secrets: Iterable[str]) -> str:
    """A library's text on one line, without those secrets: for logs and for people."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return " ".join(text.split())


def missing(library: str, extra: str) -> SinkFailed:
    """That this sink's client library is not installed, and how it gets there."""
    return SinkFailed(f"this sink needs the library {library}: install penstock[{extra}]")
