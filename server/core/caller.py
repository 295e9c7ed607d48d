"""Who asks, and what may be asked."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a caller may do.

    infer: run models. read: look. admin: load, unload, register shared memory, change trace and log settings.
    """

    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


EVERY_ROLE = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Quota:
    """How much one caller may ask for.

    rate: requests in each period_s, all at once or spread out; 0 for as many as it likes.
    share: of the requests and bytes that may be in flight together, in (0, 1].
    """

    rate: int = 0
    period_s: float = 1.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request.

    key_name: of its API key ("camera") or the subject of its token ("token:alice"), empty for a caller without one;
    never the secret itself.
    connection: gRPC's word for its connection ("ipv4:127.0.0.1:53210"), empty over HTTP.
    address: its host as seen from here, empty where it is not known.
    roles: what it may do. quota: how much of it, None for as much as there is.
    """

    key_name: str = ""
    connection: str = ""
    address: str = ""
    roles: frozenset[Role] = EVERY_ROLE
    quota: Quota | None = None

    @property
    def owner(self) -> str:
        """Who owns what this caller registers: its key, else its gRPC connection, else its address."""
        if self.key_name:
            return f"key {self.key_name}"
        return f"connection {self.connection}" if self.connection else f"address {self.address}"

    @property
    def client(self) -> str:
        """The client for fair queueing: its key, or else its address, however many connections it has."""
        return f"address {self.address}" if self.address and not self.key_name else self.owner


NOBODY = Caller()
