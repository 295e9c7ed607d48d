"""The ports an engine is to listen on: are they free, and does it answer yet."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping


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


async def answers_live(host: str, port: int, timeout_s: float) -> bool:
    """Whether `GET /v2/health/live` there is answered with 200 within the time."""
    request = f"GET /v2/health/live HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request.encode("ascii"))
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    return False


async def accepts(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
    return False
