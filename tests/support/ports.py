"""Ports of this machine."""

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
