"""Where the control API listens. Imports nothing that takes long: a command asks before it starts anything."""

import socket

from deepstream_pipeline.api.options import ApiOptions, ApiRefused

_BACKLOG = 256
_SEND_BUFFER_BYTES = 256 * 1024  # what a viewer that stops reading keeps in the kernel


def listener_of(options: ApiOptions) -> socket.socket:
    """A socket that listens there. Raises ApiRefused where that cannot be."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # With its protocol named, or asyncio leaves Nagle's algorithm on: each answer would take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((options.host, options.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ApiRefused(
            f"the control API cannot listen on {options.host}, port {options.port} ({error.strerror}); "
            "choose another, or port 0"
        ) from error
    return listener


def check_address(options: ApiOptions) -> None:
    """Raises ApiRefused where nobody could listen there now."""
    listener_of(options).close()
