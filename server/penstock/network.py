"""Host and port notation, addresses to listen on, and the TLS settings of our own clients."""

import os
import socket
import ssl
from ipaddress import ip_address
from pathlib import Path

from penstock.protocol.errors import InvalidRequest


def host_and_port(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this address; False for names other than localhost."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen_hosts(host: str) -> tuple[str, ...]:
    """Addresses that a server with this host listens on: for 127.0.0.1 also ::1, if the machine has it.

    Most clients of localhost try ::1 first, where another user's server would receive their keys.
    """
    return (host, "::1") if host in ("127.0.0.1", "localhost") and _has_ipv6_loopback() else (host,)


def addresses_of(host: str, port: int) -> tuple[str, ...]:
    """Like listen_hosts, as host:port."""
    return tuple(host_and_port(each, port) for each in listen_hosts(host))


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


CERTIFICATE_VARIABLE, CA_VARIABLE = "PENSTOCK_CLIENT_CERTIFICATE", "SSL_CERT_FILE"


def client_context() -> ssl.SSLContext:
    """Trusts the system's CAs, or those in SSL_CERT_FILE. Raises InvalidRequest for an unusable client certificate."""
    context = ssl.create_default_context()
    if file := os.environ.get(CERTIFICATE_VARIABLE):
        try:
            context.load_cert_chain(file)
        except (ssl.SSLError, OSError) as error:
            raise _unusable(file, getattr(error, "reason", None) or error.strerror or str(error)) from error
    return context


def trusted_roots() -> bytes | None:
    """The CAs in SSL_CERT_FILE, as PEM; None for the default of the TLS library."""
    file = os.environ.get(CA_VARIABLE)
    try:
        return Path(file).read_bytes() if file else None
    except OSError:  # as OpenSSL does: the server's certificate is then not trusted
        return None


def client_certificate() -> bytes | None:
    """The client certificate and its key, as PEM; None to send none. Raises InvalidRequest."""
    file = os.environ.get(CERTIFICATE_VARIABLE)
    try:
        return Path(file).read_bytes() if file else None
    except OSError as error:
        raise _unusable(str(file), error.strerror or str(error)) from error


def _unusable(file: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{CERTIFICATE_VARIABLE} is {file!r}, which cannot be loaded ({reason}): set it to a PEM file with the "
        "certificate and its key"
    )
