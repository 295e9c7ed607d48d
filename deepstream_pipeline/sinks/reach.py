"""Keeps sinks from connecting to a cloud's metadata service, which returns credentials, unless it is allowed."""

import socket

from deepstream_pipeline.reach import why_host_refused
from deepstream_pipeline.sinks.link import LinkDown
from server.core.outbound import Outbound


def require_allowed_peer(connected: socket.socket, host: str, outbound: Outbound) -> None:
    """Checks the address that the socket is connected to. Call it before sending data.

    A DNS answer that changes makes no difference. Raises LinkDown, and closes the socket, for an address that is not
    allowed; OSError if the peer has already disconnected.
    """
    why = outbound.why_refused(host, connected.getpeername()[0])
    if why:
        connected.close()
        raise LinkDown(why)


def require_allowed_host(host: str, outbound: Outbound) -> None:
    """Checks the addresses of a name, for a library that connects by itself. Raises LinkDown."""
    if why := why_host_refused(host, outbound):
        raise LinkDown(why)
