"""gRPC's word for the other end of a connection."""

from urllib.parse import unquote

from server.core.connections import Client


def host_of(peer: str) -> str:
    """The host of gRPC's word for a connection: "ipv4:127.0.0.1:53210", "ipv6:%5B::1%5D:53210"; empty for a socket."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")


def client_of(peer: str) -> Client | None:
    """The same as a client; None for a socket."""
    host, port = host_of(peer), peer.rpartition(":")[2]
    return Client(host, int(port)) if host and port.isdigit() else None
