"""The addresses that a server of one host listens on."""

import socket

from server.core.address import authority


def listen_hosts(host: str) -> tuple[str, ...]:
    """Addresses that a server with this host listens on: for 127.0.0.1 also ::1, if the machine has it.

    Most clients that connect to localhost try ::1 first: another user who listened there would receive their keys.
    """
    return (host, "::1") if host in ("127.0.0.1", "localhost") and _has_ipv6_loopback() else (host,)


def addresses_of(host: str, port: int) -> tuple[str, ...]:
    """Like listen_hosts, as host:port."""
    return tuple(authority(each, port) for each in listen_hosts(host))


def family_of(host: str) -> socket.AddressFamily:
    """The address family of an IP address; IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as attempt:
            attempt.bind(("::1", 0))
    except OSError:
        return False
    return True
