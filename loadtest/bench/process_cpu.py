"""CPU seconds of a program with all its children, found by the port it listens on."""

from dataclasses import dataclass
from typing import Any

import psutil


class NotListening(Exception):
    """No process of this user listens on that port of this machine."""


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Reads the CPU time of a process and its descendants; what a child used stays counted when it ends."""

    root: psutil.Process

    def read_s(self) -> float:
        """Seconds of user and system time so far."""
        total = 0.0
        for process in (self.root, *self.root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:  # it ended between the listing and the reading; its parent has its time
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total


def meter_of_port(port: int) -> CpuMeter:
    """The meter of the program that listens there. Raises NotListening."""
    owners = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and _port(c) == port}
    processes = [psutil.Process(pid) for pid in owners if pid]
    outermost = [process for process in processes if process.ppid() not in owners]  # a child may hold the socket, too
    if not outermost:
        raise NotListening(
            f"no process of this user listens on port {port} of this machine: the gateway and its Triton must both run "
            "here (not --engine embedded), on the ports that are given"
        )
    return CpuMeter(outermost[0])


def _port(connection: Any) -> int | None:
    return connection.laddr.port if connection.laddr else None
