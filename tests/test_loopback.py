"""Where a server of 127.0.0.1 listens: clients of localhost try ::1 first."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import network as loopback
from penstock.doctor import engine as ports
from penstock.engines.triton.endpoints import pick_free_ports
from penstock.gateway.settings import Settings
from penstock.gateway.stack import startup
from penstock.gateway.stack.startup import CannotStart, resolve_ports
from penstock.gateway.workers.running_stacks import RunningStack
from penstock.network import PortTaken, addresses_of, bind_all, listen_hosts
from penstock_video.api.options import ApiOptions, ApiRefused, listeners_of

needs_ipv6 = pytest.mark.skipif(len(listen_hosts("127.0.0.1")) < 2, reason="no IPv6 here")


def held_on_ipv6() -> socket.socket:
    """A listener of another user, on ::1 only."""
    return socket.create_server(("::1", pick_free_ports("127.0.0.1", 1)[0]), family=socket.AF_INET6)


@needs_ipv6
def test_loopback_has_both_versions_and_no_other_host_has() -> None:
    """Other addresses from the operator are used unchanged."""
    assert addresses_of("127.0.0.1", 8000) == ("127.0.0.1:8000", "[::1]:8000")
    assert listen_hosts("localhost") == ("localhost", "::1")
    assert [listen_hosts(host) for host in ("0.0.0.0", "::1", "::", "127.0.0.2")] == [
        ("0.0.0.0",),
        ("::1",),
        ("::",),
        ("127.0.0.2",),
    ]


def test_without_ipv6_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on IPv4 only, without an error."""

    def refuse(*_: object) -> socket.socket:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(loopback.socket, "socket", refuse)
    assert listen_hosts("127.0.0.1") == ("127.0.0.1",)


@needs_ipv6
@pytest.mark.parametrize("is_shared", [False, True])
def test_both_versions_have_the_same_port(is_shared: bool) -> None:
    """This holds also if the system picks the port; several fronts share both addresses."""
    first = bind_all("127.0.0.1", 0, flag="--http-port", is_shared=is_shared)
    port = first[0].getsockname()[1]
    more = bind_all("127.0.0.1", port, flag="--http-port", is_shared=True) if is_shared else ()
    try:
        assert [one.getsockname()[:2] for one in first] == [("127.0.0.1", port), ("::1", port)]
        assert len(more) == (2 if is_shared else 0)
    finally:
        for one in (*first, *more):
            one.close()


def test_ports_in_use_are_named_at_once_with_the_stack_that_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One sentence: the running Penstock's home, all taken ports, and flags that choose others."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        http_port, grpc_port = one.getsockname()[1], other.getsockname()[1]
        stack = RunningStack(tmp_path, f"http://127.0.0.1:{http_port}", "127.0.0.1:1", 1, home="/srv/theirs")
        monkeypatch.setattr(startup, "running_stacks", lambda: (stack,))
        with pytest.raises(CannotStart) as refused:
            resolve_ports(Settings(http_port=http_port, grpc_port=grpc_port, metrics_port=0, console="off"))
    text = str(refused.value)
    assert text.startswith(f"a Penstock runs already at {stack.label}, see `penstock status`: cannot listen on ")
    assert text.endswith(
        f"Ports {http_port}, {grpc_port} cannot be had; any free ones are taken with --http-port 0 --grpc-port 0"
    )


@needs_ipv6
def test_port_that_another_process_holds_on_ipv6_is_refused() -> None:
    """`up`, `doctor` and the video program refuse it; ports that were already bound are released."""
    with held_on_ipv6() as holder:
        port = holder.getsockname()[1]
        asked: tuple[tuple[type[Exception], Callable[[], object]], ...] = (
            (PortTaken, lambda: bind_all("127.0.0.1", port, flag="--http-port")),
            (CannotStart, lambda: resolve_ports(Settings(http_port=port, grpc_port=0, metrics_port=0))),
        )
        for kind, ask in asked:
            with pytest.raises(kind, match=rf"\[::1\]:{port} \(.*--http-port.*localhost try ::1 first"):
                ask()
        with pytest.raises(ApiRefused, match=f"cannot listen on ::1, port {port}"):
            listeners_of(ApiOptions(port=port))
        assert ports._facts("http-port", "127.0.0.1", port).host == "::1"
        socket.create_server(("127.0.0.1", port)).close()
