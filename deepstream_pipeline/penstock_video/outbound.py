"""Checks which addresses a host name resolves to, for libraries that resolve names and connect by themselves."""

import socket

from penstock.outbound import OutboundPolicy


def why_host_refused(host: str, outbound: OutboundPolicy) -> str:
    """Why an address of this host may not be connected to, as of this DNS lookup; empty if it may, or is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return next((why for *_, address in found if (why := outbound.why_refused(host, str(address[0])))), "")
