"""Where the control API listens. Imports nothing that takes long: a command asks before it starts anything."""

import socket

from deepstream_pipeline.api.options import ApiOptions, ApiRefused
from server.loopback import family_of, listen_hosts

_BACKLOG = 256
_SEND_BUFFER_BYTES = 256 * 1024  # what a viewer that stops reading keeps in the kernel


def listeners_of(options: ApiOptions) -> list[socket.socket]:
    """Listening sockets: for 127.0.0.1 also on ::1. Raises ApiRefused if the address cannot be used."""
    listeners: list[socket.socket] = []
    try:
        for host in listen_hosts(options.host):
            port = options.port or (listeners[0].getsockname()[1] if listeners else 0)
            listeners.append(_listener_at(host, port))
    except ApiRefused:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listener_at(host: str, port: int) -> socket.socket:
    # With its protocol named, or asyncio leaves Nagle's algorithm on: each answer would take 40 ms.
    listener = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ApiRefused(
            f"the control API cannot listen on {host}, port {port} ({error.strerror}); choose another, or port 0"
        ) from error
    return listener


def check_address(options: ApiOptions) -> None:
    """Raises ApiRefused where nobody could listen there now."""
    for listener in listeners_of(options):
        listener.close()
