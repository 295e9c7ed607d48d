"""Connections to a peer that vanished without a word."""

import asyncio
import socket

IDLE_S, PROBE_INTERVAL_S, PROBES = 10, 5, 2
UNACKNOWLEDGED_MS = 15_000


def detect_dead_peers(transport: asyncio.Transport) -> None:
    """Such a peer is noticed within 20 s, whether bytes are on their way to it or not; one on this host at once."""
    connected = transport.get_extra_info("socket")
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", PROBE_INTERVAL_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
