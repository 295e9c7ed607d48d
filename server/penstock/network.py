"""Host and port notation, bound sockets, and the TLS settings of our own clients."""

import errno
import os
import socket
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from penstock.protocol.errors import InvalidRequest

Sockets = tuple[socket.socket, ...]

BACKLOG = 2048
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


class HasSocketOptions(Protocol):
    """A socket, or what a transport gives as its socket."""

    def getsockopt(self, level: int, name: int, size_bytes: int, /) -> bytes: ...


def tcp_info(connection: HasSocketOptions | None, size_bytes: int) -> bytes | None:
    """The first bytes of Linux's struct tcp_info, padded with zeros; None if the socket or the system has none."""
    if _TCP_INFO is None or connection is None:
        return None
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, size_bytes).ljust(size_bytes, b"\0")
    except OSError:
        return None


def host_and_port(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connectable_host(host: str) -> str:
    """The address at which this machine reaches a listener on the host: loopback if it listens on all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this address; False for names other than localhost."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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


class PortTaken(Exception):
    """An address cannot be listened on. The message names it, and the flag that chooses another."""


def bind(host: str, port: int, *, flag: str, is_shared: bool = False) -> socket.socket:
    """A listening TCP socket; port 0 lets the system pick. Raises PortTaken.

    is_shared: other processes of this user may listen there, too, with is_shared; the system distributes connections.
    """
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"cannot listen on {host_and_port(host, port)} ({error.strerror}); {_fix(error, flag)}"
        ) from error
    return listener


def bind_all(host: str, port: int, *, flag: str, is_shared: bool = False) -> Sockets:
    """A socket for each address of `listen_hosts`, all with one port. See `bind`."""
    listeners: list[socket.socket] = []
    try:
        for each in listen_hosts(host):
            same = port or (listeners[0].getsockname()[1] if listeners else 0)
            listeners.append(bind(each, same, flag=flag, is_shared=is_shared))
    except PortTaken as error:
        for listener in listeners:
            listener.close()
        if not listeners:
            raise
        raise PortTaken(f"{error}. Clients of localhost try ::1 first") from error
    return tuple(listeners)


def _fix(error: OSError, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"stop what holds it, or choose another port with {flag}"
    if error.errno == errno.EACCES:
        return f"choose a port over 1023 with {flag}"
    return "give an address of this machine with --host"


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
