"""Keeps sinks from a cloud's metadata service, which hands out the machine's credentials, unless it is allowed."""

import socket

from deepstream_pipeline.reach import why_host_refused
from deepstream_pipeline.sinks.link import LinkDown
from server.core.outbound import Outbound


def require_allowed_peer(connected: socket.socket, host: str, outbound: Outbound) -> None:
    """To be called before anything is sent.

    It checks the address that the socket is connected to, so a DNS answer that changes makes no difference. Raises
    LinkDown for an address that is refused, and closes the socket; OSError where the other end has hung up already.
    """
    why = outbound.why_refused(host, connected.getpeername()[0])
    if why:
        connected.close()
        raise LinkDown(why)


def require_allowed_host(host: str, outbound: Outbound) -> None:
    """The same for a library that connects by itself, by the addresses of the name. Raises LinkDown."""
    if why := why_host_refused(host, outbound):
        raise LinkDown(why)
