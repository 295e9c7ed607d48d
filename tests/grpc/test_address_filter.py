"""Filtering the connections of a listening socket by address."""

import socket
from collections.abc import Iterator

import pytest

from penstock.gateway.grpc.connections import refuse_connections

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture(params=[(V4, "127.0.0.1"), (V6, "::")], ids=["IPv4", "both"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, host = request.param
    with socket.socket(family) as one:
        try:
            if family == V6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            one.bind((host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        one.listen()
        yield one


def connects(listener: socket.socket, address: str) -> bool:
    with socket.socket(V6 if ":" in address else V4) as one:
        one.settimeout(0.2)  # a dropped packet gets no answer
        one.bind((address, 0))
        try:
            one.connect(("::1" if ":" in address else "127.0.0.1", listener.getsockname()[1]))
        except TimeoutError:
            return False
        return True


def test_blocked_addresses_are_not_connected_and_all_others_are(listener: socket.socket) -> None:
    """This holds for many addresses of both IP versions, until they are allowed again."""
    others = [*(f"192.0.2.{number}" for number in range(20)), "2001:db8::1", "fe80::1%eth0", "::2"]
    refuse_connections(listener, [*others, "127.0.0.2", "::1"])
    assert not connects(listener, "127.0.0.2")
    assert connects(listener, "127.0.0.3")
    if listener.family == V6:
        assert not connects(listener, "::1")
    refuse_connections(listener, others)
    assert connects(listener, "127.0.0.2")
    if listener.family == V6:
        assert connects(listener, "::1")
    refuse_connections(listener, [])
    assert connects(listener, "127.0.0.2")
