"""The ports an engine is to listen on: are they free, and does it answer yet."""

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from server.backends.triton_http import origin_of
from server.loopback import family_of, listen_hosts

LOWEST_PORT = 10_000
DEFAULT_FIRST_EPHEMERAL = 32_768
PORT_TRIES = 64


def pick_free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that nobody listens on right now, for a program that cannot say which one the system gave it.

    They lie below the range that the system hands to outgoing connections, so that none of those takes one before
    the program does, and none is given twice, by this process or another of ours, while the process lives that got it.
    """
    candidates = random.SystemRandom().sample(range(LOWEST_PORT, _first_ephemeral_port()), PORT_TRIES)
    with contextlib.ExitStack() as held:
        picked: list[int] = []
        for port in candidates:
            if len(picked) == count:
                break
            with contextlib.suppress(OSError):
                for each in listen_hosts(host):
                    held.enter_context(socket.create_server((each, port), family=family_of(each)))
                _claim(port)
                picked.append(port)
    if len(picked) < count:
        raise OSError(f"{count} free ports on {host} cannot be had")
    return tuple(picked)


def _claim(port: int) -> None:
    """Raises OSError where another process of ours has claimed it. The claim, a name without a file, ends with us."""
    if sys.platform != "linux":
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as claim:
        claim.bind(f"\0penstock-port-{port}")
        claim.detach()


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return DEFAULT_FIRST_EPHEMERAL
    return first if first >= LOWEST_PORT + PORT_TRIES else DEFAULT_FIRST_EPHEMERAL


def port_in_use(host: str, ports: Mapping[str, int]) -> str:
    """One line on the first of these ports (what for → port) that cannot be listened on; empty where all can."""
    for purpose, port in ports.items():
        try:
            _try_to_bind(host, port)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            return f"port {port} on {host}, wanted for {purpose}: {why}; free it or choose another port"
    return ""


def _try_to_bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        attempt.bind(address)


async def answers_live(url: str, timeout_s: float, *, question: str = "live") -> bool:
    """Whether `GET /v2/health/<question>` at that http:// or unix:// address returns 200 within timeout_s.

    question: live or ready.
    """
    host = origin_of(url).authority.decode()
    request = f"GET /v2/health/{question} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(url)
            try:
                writer.write(request.encode("ascii"))
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    return False


async def accepts(url: str, timeout_s: float) -> bool:
    """Whether a server accepts connections at that http:// or unix:// address."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            _, writer = await _connect(url)
            writer.close()
            return True
    return False


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError."""
    origin = origin_of(url)
    if origin.socket_path:
        return await asyncio.open_unix_connection(origin.socket_path)
    return await asyncio.open_connection(origin.host, origin.port)
