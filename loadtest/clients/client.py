"""The seam between the drivers and the ways to ask: one request out, one Answer back, never an exception."""

import re
from typing import Protocol

import msgspec

from loadtest.results import Stages, Status


class TargetError(Exception):
    """The target cannot be asked this at all (nothing listens, no such model, no such extension). One sentence."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server under test. grpc_address: host:port. image_path may hold {model}. headers go with every request."""

    http_url: str
    grpc_address: str
    image_path: str = "/v2/models/{model}/image"
    headers: tuple[tuple[str, str], ...] = ()


def without_user(url: str) -> str:
    """The URL without user:password@, to be shown and kept."""
    return re.sub(r"(?<=//)[^/?#]*@", "", url, count=1)


class Answer(msgspec.Struct, frozen=True):
    """What became of one request. code: HTTP's or gRPC's, empty where none came. error: at most 200 characters."""

    status: Status
    code: str = ""
    error: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    batch_size: int = 0
    stages: Stages | None = None


class Client(Protocol):
    """Sends requests of one kind to one endpoint; many at once."""

    async def send(self, number: int) -> Answer:
        """The request with that number (it chooses the payload), and what became of it; deadlines are kept here."""
        ...

    async def aclose(self) -> None:
        """Closes the connections."""
        ...
