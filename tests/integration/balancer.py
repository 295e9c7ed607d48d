"""A real HAProxy with the example that users are given, its addresses and times those of a test."""

import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.engines.triton.endpoints import pick_free_ports
from tests.support.stack import CHECKOUT
from tests.support.waiting import wait_for

EXAMPLE = CHECKOUT / "deploy" / "haproxy" / "haproxy.cfg"
LISTENS_WITHIN_S = 10.0


def haproxy() -> str:
    """The program; the test skips where there is none."""
    program = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("no haproxy here: Debian's package haproxy has it")
    return program


def example_for(gateways: list[tuple[str, str]], http_port: int, grpc_port: int, *, check_interval_ms: int) -> str:
    """The example with other addresses and another interval of checks, and nothing else changed.

    gateways: each one's HTTP and gRPC address, for the two that the example names.
    """
    changes = {"bind :8000": f"bind 127.0.0.1:{http_port}", "bind :8001": f"bind 127.0.0.1:{grpc_port}"}
    changes["inter 1s"] = f"inter {check_interval_ms}ms"
    for number, (http, grpc) in enumerate(gateways, start=1):
        changes |= {f" gateway-{number}:8000": f" {http}", f" gateway-{number}:8001": f" {grpc}"}
    text = EXAMPLE.read_text()
    for old, new in changes.items():
        directives = [line for line in text.splitlines() if old in line and not line.lstrip().startswith("#")]
        assert len(directives) == 1, f"{EXAMPLE.name} says {old!r} in {len(directives)} directives"
        text = text.replace(directives[0], directives[0].replace(old, new))
    return text


@dataclass(frozen=True)
class Balancer:
    """It runs. states: a Unix socket."""

    http_address: str
    grpc_address: str
    states: Path

    def state(self, number: int, backend: str = "http") -> str:
        """Of the gateway of that number, as HAProxy calls it: UP, DOWN, UP 1/2, …"""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self.states))
            asking.sendall(b"show stat\n")
            rows = b"".join(iter(lambda: asking.recv(1 << 16), b"")).decode().splitlines()
        names = rows[0].removeprefix("# ").split(",")
        table = [dict(zip(names, row.split(","), strict=False)) for row in rows[1:] if row]
        (state,) = [r["status"] for r in table if (r["pxname"], r["svname"]) == (backend, f"gateway-{number}")]
        return state


@contextmanager
def balancer(folder: Path, gateways: list[tuple[str, str]], *, check_interval_ms: int) -> Iterator[Balancer]:
    """HAProxy before the gateways, until the end of the with."""
    program = haproxy()
    http_port, grpc_port = pick_free_ports("127.0.0.1", 2)
    file, states = folder / "haproxy.cfg", folder / "states"
    file.write_text(example_for(gateways, http_port, grpc_port, check_interval_ms=check_interval_ms))
    beside = folder / "beside.cfg"
    beside.write_text(f"global\n    stats socket {states}\n")
    with (folder / "haproxy.log").open("wb") as log:
        process = subprocess.Popen([program, "-f", file, "-f", beside], stdout=log, stderr=log)
    running = Balancer(f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", states)
    try:
        wait_for(lambda: process.poll() is not None or _listens(http_port), LISTENS_WITHIN_S, "HAProxy listens")
        assert process.poll() is None, (folder / "haproxy.log").read_text()
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def check_interval_s() -> tuple[float, int]:
    """Of the example: seconds between checks, and how many must fail."""
    (found,) = re.findall(r"^ +default-server inter (\d+)s fall (\d+)", EXAMPLE.read_text(), re.MULTILINE)
    return float(found[0]), int(found[1])
