"""Parses gRPC's names of peers."""

from urllib.parse import unquote

from server.core.connections import Client


def host_of(peer: str) -> str:
    """The host in a peer's name, such as "ipv4:127.0.0.1:53210" or "ipv6:%5B::1%5D:53210"; empty for a Unix socket."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")


def client_of(peer: str) -> Client | None:
    """The peer as a client; None for a Unix socket."""
    host, port = host_of(peer), peer.rpartition(":")[2]
    return Client(host, int(port)) if host and port.isdigit() else None
