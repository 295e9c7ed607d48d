"""Protocol of a connection to a message broker, and its check of the connected address."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import AfterValidator

from penstock.outbound import OutboundPolicy
from penstock_video.errors import PipelineError, SinkFailed
from penstock_video.outbound import why_host_refused
from penstock_video.sinks.spool import Message


class LinkDown(PipelineError):
    """The broker is unreachable, refuses, or went silent. Raised by links; the sender retries."""

    reason = "link_down"


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """Results of one `send`: each message is in one of the three. delivered: acknowledged. refused: never accepted;
    refusal says why. left: not delivered, or unknown, in order. trouble: why the link failed, empty if it did not; it
    is then reopened, after pause_s at least."""

    delivered: Sequence[Message] = ()
    refused: Sequence[Message] = ()
    refusal: str = ""
    left: Sequence[Message] = ()
    trouble: str = ""
    pause_s: float = 0.0


NO_TIME_LEFT = "no time was left"


class BrokerLink(Protocol):
    """A connection to a broker, used by the sender's thread only. Converts its library's errors. name: the short kind.
    place: the address for display, without secrets. max_messages, max_bytes: of one `send`. over_at: when `send`
    returns although answers are missing (monotonic seconds); set when the sink closes."""

    name: str
    place: str
    max_messages: int
    max_bytes: int
    over_at: float

    def open(self, timeout_s: float) -> bool:
        """Connects. Returns whether the broker answered (False if not asked yet). Raises LinkDown."""
        ...

    def send(self, messages: Sequence[Message]) -> DeliveryOutcome:
        """Sends messages in order and waits for their answers, until none comes for some seconds. Raises none of its
        library's errors."""
        ...

    def idle(self) -> None:
        """Keeps an idle connection alive. Called twice a second. Raises LinkDown."""
        ...

    def close(self) -> None:
        """Closes the connection at once. It can be opened again."""
        ...


def scrub(text: str, secrets: Iterable[str]) -> str:
    """A library's text on one line, with the secrets removed."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return " ".join(text.split())


def client_library(module: str, library: str, extra: str) -> Any:
    """The module of a client library. Raises SinkFailed, with what installs it, if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise SinkFailed(f"this sink needs the library {library}: install penstock[{extra}]") from error


def require_allowed_peer(connected: socket.socket, host: str, outbound: OutboundPolicy) -> None:
    """Closes the socket and raises LinkDown if its peer is not allowed; OSError if that has disconnected."""
    why = outbound.why_refused(host, connected.getpeername()[0])
    if why:
        connected.close()
        raise LinkDown(why)


def require_allowed_host(host: str, outbound: OutboundPolicy) -> None:
    """Checks the addresses of a name, for a library that connects by itself. Raises LinkDown."""
    if why := why_host_refused(host, outbound):
        raise LinkDown(why)


def address_of(*schemes: str) -> AfterValidator:
    """Validates an address of these protocols. Its error shows nothing of the address."""

    def checked(url: str) -> str:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in schemes and bool(parts.hostname or parts.scheme == "unix") and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError(f"an address such as {schemes[0]}://HOST[:PORT]/… is needed")
        return url

    return AfterValidator(checked)
