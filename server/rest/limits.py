"""What the REST front takes, at most."""

from dataclasses import dataclass

from server.core.connections import PortLimits


@dataclass(frozen=True, slots=True)
class RestLimits:
    """max_body_bytes: of a body as sent, and decompressed. body_timeout_s: from the head to the body's last byte."""

    max_body_bytes: int = 64 << 20
    body_timeout_s: float = 30.0
    max_json_depth: int = 64
    max_parts: int = 100


@dataclass(frozen=True, slots=True)
class ConnectionLimits(PortLimits):
    """Limits of a connection, in addition to the number of connections.

    max_head_bytes: of a request line and its headers. head_timeout_s: from a head's first byte to its last.
    idle_timeout_s: without a request. max_pipelined: requests waiting behind the one that runs.
    write_timeout_s, min_write_bytes_per_s: a client with an unread answer must take that many bytes a second, on
    average over that time; one that takes less is cut.
    """

    max_head_bytes: int = 64 << 10
    max_headers: int = 1024
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    max_pipelined: int = 64
    write_timeout_s: float = 30.0
    min_write_bytes_per_s: int = 4 << 10
