"""Floods of calls without a key: their connections are closed, and clients with a key are served meanwhile."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network

from penstock.gateway.auth.rate_limiter import BURST_CALLS
from penstock.gateway.grpc.connections import CALLS_OF_PROXY
from penstock.gateway.grpc.server import GrpcLimits
from penstock.port_policy import PortLimits
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, door
from tests.grpc.harness import SERVICE, Front, infer_message, serving
from tests.grpc.test_connections import HELLO, is_open
from tests.grpc.test_header_bombs import END_HEADERS, HEADERS, field, frame

ATTACKER = "127.0.0.2"
KEY = (("x-api-key", KEYS[Role.INFER]),)
DATA, END_STREAM = 0, 1
PROXIED = GrpcLimits(connections=PortLimits(trusted_proxies=(ip_network(f"{ATTACKER}/32"),)))


def calls(count: int, first: int = 0, key: str = "") -> bytes:
    """This many inferences, numbered from `first`."""
    head = {":method": "POST", ":scheme": "http", ":path": f"{SERVICE}ModelInfer", ":authority": "x", "te": "trailers"}
    head |= {"content-type": "application/grpc"} | ({"x-api-key": key} if key else {})
    block = b"".join(field(name.encode(), value.encode()) for name, value in head.items())
    message = infer_message()
    data = b"\0" + len(message).to_bytes(4, "big") + message
    streams = range(2 * first + 1, 2 * (first + count) + 1, 2)
    return b"".join(
        frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, data) for stream in streams
    )


@contextmanager
def connected(front: Front) -> Iterator[socket.socket]:
    """A connection from the attacker's address. Raises TimeoutError if it is not accepted."""
    with socket.socket() as one:
        one.settimeout(0.5)
        one.bind((ATTACKER, 0))
        one.connect(("127.0.0.1", front.server.port))
        one.sendall(HELLO)
        yield one


def is_taken(front: Front) -> bool:
    """Whether connections from the attacker's address are accepted."""
    try:
        with connected(front):
            return True
    except TimeoutError:
        return False


async def until_closed(one: socket.socket) -> None:
    async with asyncio.timeout(30):
        while is_open(one):
            await asyncio.sleep(0.02)


async def infer(front: Front) -> None:
    await front.call("ModelInfer", infer_message(), metadata=KEY, timeout=20)


async def test_flood_without_a_key_is_closed_and_its_address_not_connected_again() -> None:
    """Clients of other addresses are served, on old connections and on new ones."""
    async with serving(door=door()) as front:
        await infer(front)
        with connected(front) as idle, connected(front) as flood:
            flood.sendall(calls(900))
            await until_closed(flood)
            assert is_open(idle)  # it carried no call
            assert "refused_calls" in front.recorder.reasons
            async with asyncio.timeout(30):
                while is_taken(front):
                    await asyncio.sleep(0.02)
            await infer(front)
            with socket.create_connection(("127.0.0.1", front.server.port), 5):
                pass


async def test_few_refused_calls_close_nothing() -> None:
    """A client with a wrong key gets the error."""
    async with serving(door=door()) as front:
        with connected(front) as wrong:
            wrong.sendall(calls(20, key="wrong") + calls(20, first=20))
            async with asyncio.timeout(30):
                while front.recorder.reasons.count("unauthenticated") < 40:
                    await asyncio.sleep(0.02)
            assert is_open(wrong)
            assert is_taken(front)


async def test_calls_with_a_key_are_served_from_an_address_that_floods() -> None:
    """They are served on connections that were open before."""
    async with serving(door=door()) as front:
        with connected(front) as neighbour, connected(front) as flood:
            flood.sendall(calls(900))
            await until_closed(flood)
            neighbour.setblocking(True)
            neighbour.sendall(calls(1, key=KEYS[Role.INFER]))
            async with asyncio.timeout(30):
                while not front.plane.relayed:
                    await asyncio.sleep(0.02)
            assert is_open(neighbour)


async def test_flood_through_a_proxy_closes_its_own_connection_alone() -> None:
    """The proxy may connect again, and a connection that also carries calls with a key stays."""
    async with serving(PROXIED, door=door()) as front:
        with connected(front) as shared, connected(front) as flood:
            flood.sendall(calls(900))
            await until_closed(flood)
            key, count = KEYS[Role.INFER], CALLS_OF_PROXY // 2
            for turn in range(6):
                start, before = turn * (count + 1), front.recorder.reasons.count("unauthenticated")
                shared.setblocking(True)
                shared.sendall(calls(count, first=start))
                async with asyncio.timeout(30):
                    while front.recorder.reasons.count("unauthenticated") < before + count:
                        await asyncio.sleep(0.02)
                    relayed = len(front.plane.relayed)
                    shared.sendall(calls(1, first=start + count, key=key))
                    while len(front.plane.relayed) == relayed:
                        await asyncio.sleep(0.02)
            assert 6 * count > BURST_CALLS
            assert is_open(shared)
            assert is_taken(front)
