"""Checks where a host name leads, for libraries that look the name up and connect by themselves."""

import socket

from server.core.outbound import Outbound


def why_host_refused(host: str, outbound: Outbound) -> str:
    """Why an address of that host may not be connected to; empty if each may, or if the name cannot be looked up.

    If the DNS answer changes between this look-up and the library's own, this does not notice.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return next((why for *_, address in found if (why := outbound.why_refused(host, str(address[0])))), "")
