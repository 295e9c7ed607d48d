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


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request.

    key_name: of its API key or the subject of its token, empty for a caller without one; never the secret itself.
    connection: gRPC's word for its connection ("ipv4:127.0.0.1:53210"), empty over HTTP.
    address: its host as seen from here, empty where it is not known.
    """

    key_name: str = ""
    connection: str = ""
    address: str = ""

    @property
    def owner(self) -> str:
        """Who owns what this caller registers: its key, else its gRPC connection, else its address."""
        if self.key_name:
            return f"key {self.key_name}"
        return f"connection {self.connection}" if self.connection else f"address {self.address}"


NOBODY = Caller()
