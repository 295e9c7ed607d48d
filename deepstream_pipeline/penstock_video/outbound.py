"""Checks which addresses a host name resolves to, for libraries that resolve names and connect by themselves."""

import socket

from penstock.outbound import OutboundPolicy


def why_host_refused(host: str, outbound: OutboundPolicy) -> str:
    """Why an address of this host may not be connected to; empty if all may, or if it cannot be resolved. Does not
    notice a DNS answer that changes before the library's own lookup."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return next((why for *_, address in found if (why := outbound.why_refused(host, str(address[0])))), "")
