"""Who asks over gRPC."""

from urllib.parse import unquote

import grpc

from server.core.caller import Caller


def caller_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> Caller:
    """Whoever made the call."""
    peer = context.peer()
    return Caller(connection=peer, address=host_of(peer))


def host_of(peer: str) -> str:
    """The host of gRPC's word for a connection: "ipv4:127.0.0.1:53210", "ipv6:%5B::1%5D:53210"; empty for a socket."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")
