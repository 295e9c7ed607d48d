"""Floods of connections to the gRPC port: clients are served, and descriptors stay free."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_network

import grpc
import pytest

from penstock.gateway.grpc.server import GrpcLimits
from penstock.port_policy import PortLimits
from tests.grpc.harness import SERVICE, Front, infer_message, serving

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
LIMITS = PortLimits(max_connections=64, max_per_address=16)


@contextmanager
def flood(front: Front, count: int, hello: bytes) -> Iterator[list[socket.socket]]:
    """Idle connections from this address."""
    with ExitStack() as opened:
        connections = []
        for _ in range(count):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", front.server.port), 10))
            connection.sendall(hello)
            connections.append(connection)
        yield connections


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed it."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def closed_down_to(connections: list[socket.socket], count: int) -> None:
    """Waits until at most this many are open."""
    async with asyncio.timeout(60):
        while sum(map(is_open, connections)) > count:
            await asyncio.sleep(0.02)


async def new_client_is_served(front: Front) -> None:
    """Whether a call on a new connection is answered."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(front.address, own) as channel:
        await channel.unary_unary(f"{SERVICE}ModelInfer")(infer_message(), timeout=20, wait_for_ready=True)


@pytest.mark.parametrize("hello", [HELLO, b""], ids=["idle", "silent"])
async def test_flood_from_one_address_is_closed_down_to_its_limit_and_new_clients_are_served(hello: bytes) -> None:
    """Idle connections are closed, whether they spoke HTTP/2 or not; a client of the same address is served."""
    before = len(os.listdir("/proc/self/fd"))
    async with serving(GrpcLimits(connections=LIMITS)) as front:
        await front.call("ModelInfer", infer_message())
        with flood(front, 200, hello) as connections:
            await closed_down_to(connections, LIMITS.max_per_address)
            await new_client_is_served(front)
            assert "connections_full" in front.recorder.reasons
            open_here = len(os.listdir("/proc/self/fd")) - before - len(connections)
            assert open_here < LIMITS.max_connections + 40  # includes those of channels and event loops
        await new_client_is_served(front)


async def test_connection_in_use_outlives_a_flood_from_its_own_address() -> None:
    """The longest idle connections are closed first, so active calls do not lose theirs."""
    async with serving(GrpcLimits(connections=LIMITS)) as front:
        await front.call("ModelInfer", infer_message())
        with flood(front, 60, HELLO) as connections:
            async with asyncio.timeout(60):
                while sum(map(is_open, connections)) >= LIMITS.max_per_address:
                    await front.call("ModelInfer", infer_message())
                    await asyncio.sleep(0.02)
        assert len({caller.connection for caller in front.plane.callers}) == 1


async def test_trusted_proxy_has_the_whole_port() -> None:
    """For its connections only the total limit applies."""
    limits = PortLimits(max_connections=64, max_per_address=16, trusted_proxies=(ip_network("127.0.0.0/8"),))
    async with serving(GrpcLimits(connections=limits)) as front:
        with flood(front, 50, HELLO) as connections:
            async with asyncio.timeout(60):
                while front.server.connection_count < 50:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0)
            assert all(map(is_open, connections))
            assert front.recorder.reasons == []


async def test_connections_of_other_ports_are_left_alone() -> None:
    """The guard of one port closes nothing of another in the same process."""
    async with serving() as other, serving(GrpcLimits(connections=LIMITS)) as front:
        with flood(other, 40, HELLO) as elsewhere, flood(front, 40, HELLO) as here:
            await closed_down_to(here, LIMITS.max_per_address)
            assert all(map(is_open, elsewhere))
