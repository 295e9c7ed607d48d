"""CPU seconds and memory of a program with all its children, found by the port it listens on."""

import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from penstock_load.hardware import own_addresses

FORWARDERS = ("docker-proxy", "rootlessport", "slirp4netns", "kubectl", "ssh", "sshd")
WILDCARDS = {"0.0.0.0", "::"}


class NotListening(Exception):
    """No process that this user may see listens on that port of this machine. One sentence."""


class Usage(NamedTuple):
    """cpu_s: user and system seconds so far. rss_bytes: resident now; what processes share counts in each."""

    cpu_s: float
    rss_bytes: float


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Reads a process and its descendants; the CPU time that a child used stays counted when it ends.

    without: the process ID of a descendant that is not part of the program, with its own descendants; 0 for none.
    """

    root: psutil.Process
    without: int = 0

    def read_s(self) -> float:
        """Seconds of user and system time so far. Raises psutil.NoSuchProcess when the program has ended."""
        return self.read().cpu_s

    def read(self) -> Usage:
        """CPU and memory now. Raises psutil.NoSuchProcess when the program has ended."""
        cpu_s, rss_bytes = 0.0, 0
        for process in self.processes():
            try:
                times, rss = process.cpu_times(), process.memory_info().rss
            except psutil.NoSuchProcess:  # it ended between the listing and the reading; its parent has its time
                continue
            cpu_s += times.user + times.system + times.children_user + times.children_system
            rss_bytes += rss
        return Usage(cpu_s, rss_bytes)

    def processes(self) -> list[psutil.Process]:
        """The program's processes now, the root first. Raises psutil.NoSuchProcess when the program has ended."""
        found = [self.root, *self.root.children(recursive=True)]
        if self.without not in {process.pid for process in found}:
            return found
        strangers = {self.without, *(child.pid for child in psutil.Process(self.without).children(recursive=True))}
        return [process for process in found if process.pid not in strangers]


def meter_of_port(port: int) -> CpuMeter:
    """The meter of the program that listens there, whatever the address. Raises NotListening."""
    outermost = _listeners(port, None)
    if not outermost:
        raise NotListening(
            f"no process of this user listens on port {port} of this machine: the gateway and its Triton must both run "
            "here (not --engine embedded), on the ports that are given"
        )
    return CpuMeter(outermost[0])


def meter_of_starter(pid: int) -> CpuMeter:
    """The meter of a server whose process `pid` started this load test; without this process and its descendants.

    Its root is found from that process by the rule of meter_of_server: parents with the same program and user. Raises
    psutil.NoSuchProcess.
    """
    root = psutil.Process(pid)
    while (parent := root.parent()) and _is_same_program(parent, root):
        root = parent
    return CpuMeter(root, os.getpid())


def meter_of_server(host: str, port: int) -> CpuMeter:
    """The meter of the whole server whose front listens there, with what supervises the front and its other children.

    The rule: up from the listening process as long as the parent runs the same interpreter or binary for the same user
    and is neither this process nor one that started it. `penstock up` is so found from its gateway, and Triton with
    it; Triton asked by its own port is found alone. Raises NotListening, also where this process itself listens, or
    something that only passes connections on (a container's proxy, a tunnel).
    """
    where = f"{host}:{port}"
    addresses = _addresses(host)
    if not is_this_machine(host):
        raise NotListening(f"{where} is another machine, whose processes cannot be seen from here")
    found = _listeners(port, addresses | WILDCARDS)
    if not found:
        raise NotListening(f"no process that this user may see listens on {where}")
    root, ourselves = found[0], {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if root.name() in FORWARDERS:
        raise NotListening(f"{root.name()} listens on {where}, which only passes connections on")
    if root.pid in ourselves:
        raise NotListening(f"{where} is served by this process itself, whose CPU is not the server's alone")
    while (parent := root.parent()) and parent.pid not in ourselves and _is_same_program(parent, root):
        root = parent
    return CpuMeter(root)


def is_this_machine(host: str) -> bool:
    """Whether a name or an address is one of this machine's. Raises NotListening where the name has no address."""
    return bool(_addresses(host) & (_own_addresses() | WILDCARDS))


def _is_same_program(parent: psutil.Process, child: psutil.Process) -> bool:
    try:
        return parent.uids().real == child.uids().real and _program(parent) == _program(child)
    except psutil.Error:  # another user's, or just gone
        return False


def _program(process: psutil.Process) -> str:
    """The interpreter or binary as it was called: a virtual environment's python is not the system's it links to."""
    called = (process.cmdline() or [""])[0]
    if os.path.basename(called) == called:
        called = shutil.which(called, path=process.environ().get("PATH")) or process.exe()
    return os.path.normpath(os.path.join(process.cwd(), called))


def _listeners(port: int, addresses: Iterable[str] | None) -> list[psutil.Process]:
    """Who listens there, without the children that hold the socket, too."""
    owners = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and (addresses is None or connection.laddr.ip in addresses)
    }
    try:
        processes = [psutil.Process(pid) for pid in owners if pid]
        return [process for process in processes if process.ppid() not in owners]
    except psutil.NoSuchProcess as error:
        raise NotListening(f"the process that listened on port {port} has just ended") from error


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise NotListening(f"{host} has no address: {error}") from error


def _own_addresses() -> set[str]:
    return own_addresses() | {"127.0.0.1", "::1"}
