"""Whether the kernel still knows a connection."""

import socket
from pathlib import Path

import pytest

from penstock.gateway.shared_memory.regions import TCP_TABLES, closed_connections

needs_proc = pytest.mark.skipif(
    not TCP_TABLES[0].exists(), reason="this system tells of its connections in another way"
)


@needs_proc
def test_connection_is_gone_when_its_client_closes_it() -> None:
    """And not a moment before."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        served, (host, port) = listener.accept()
        peer = f"ipv4:{host}:{port}"
        assert closed_connections([peer], TCP_TABLES) == set()
        client.close()
        served.close()
        assert closed_connections([peer], TCP_TABLES) == {peer}


@needs_proc
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_connection_over_ipv6_and_to_a_listener_of_both_is_found() -> None:
    """The kernel keeps IPv4's among IPv6's then."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        for address, form in (("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:%5B::1%5D:{}")):
            with socket.create_connection((address, port)) as client:
                served, _ = listener.accept()
                peer = form.format(client.getsockname()[1])
                with served:
                    assert closed_connections([peer], TCP_TABLES) == set()


@pytest.mark.parametrize("word", ["unix:", "ipv4:127.0.0.1", "ipv4:nonsense:1", "", "vsock:3:4"])
def test_connection_that_is_no_tcp_is_never_gone(word: str) -> None:
    """Unknown connections are left to the lease."""
    assert closed_connections([word], TCP_TABLES) == set()


def test_connections_are_not_gone_where_the_kernel_tells_nothing(tmp_path: Path) -> None:
    """Other systems have no such tables."""
    assert closed_connections(["ipv4:127.0.0.1:1"], [tmp_path / "tcp"]) == set()
