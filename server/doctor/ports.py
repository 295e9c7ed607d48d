"""The ports that `penstock up` listens on: free, taken by whom, or by a penstock that runs."""

import errno
import os
import re
import socket
from dataclasses import dataclass

import psutil

from server.doctor.engine import runs_triton
from server.doctor.finding import Finding, Status
from server.doctor.plan import Plan
from server.loopback import family_of, listen_hosts

VIDEO = "video"
VIDEO_PORT = 8010
LOOPBACK = "127.0.0.1"
# The gateway's own process is started with its run directory's settings, Triton with its region prefix.
_OURS = re.compile(r"/run-[0-9a-f]{12}/settings\.json$|shm-region-prefix-name=penstock_[0-9a-f]{12}_")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who listens. is_ours: it belongs to a stack that `penstock up` runs."""

    pid: int
    name: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class PortFacts:
    """flag: `http-port`, …, or `video`. why: why it cannot be listened on, an errno's name; "" where it can.

    holder: None where that is not known, or nobody.
    """

    flag: str
    host: str
    port: int
    why: str = ""
    holder: Holder | None = None


def probe(plan: Plan) -> tuple[PortFacts, ...]:
    """Tries to listen on each for a moment; the engine's only where it would have a process of its own."""
    has_engine = runs_triton(plan)
    tried = [
        _facts(flag, host, port) for flag, host, port in [*_wanted(plan, has_engine), (VIDEO, LOOPBACK, VIDEO_PORT)]
    ]
    if all(one.why != "EADDRINUSE" for one in tried):
        return tuple(tried)
    holders = _holders({one.port for one in tried})
    return tuple(PortFacts(one.flag, one.host, one.port, one.why, holders.get(one.port)) for one in tried)


def _wanted(plan: Plan, has_engine: bool) -> list[tuple[str, str, int]]:
    return [
        (flag, LOOPBACK if flag.startswith("engine") else plan.host, port)
        for flag, port in plan.ports.items()
        if port and (has_engine or not flag.startswith("engine"))
    ]


def _facts(flag: str, host: str, port: int) -> PortFacts:
    """Facts about the port, with the address that cannot be listened on, if any."""
    hosts = (host,) if flag.startswith("engine") else listen_hosts(host)
    tried = [PortFacts(flag, each, port, _try(each, port)) for each in hosts]
    return next((one for one in tried if one.why), tried[0])


def _try(host: str, port: int) -> str:
    try:
        with socket.socket(family_of(host)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except socket.gaierror:
        return "EADDRNOTAVAIL"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""


def _holders(ports: set[int]) -> dict[int, Holder]:
    """By port; those of other users are visible to root only."""
    found: dict[int, Holder] = {}
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return found
    for connection in connections:
        port = connection.laddr.port if connection.laddr else 0
        if connection.status == psutil.CONN_LISTEN and connection.pid and port in ports:
            found[port] = _holder(connection.pid)
    return found


def _holder(pid: int) -> Holder:
    try:
        process = psutil.Process(pid)
        words = process.cmdline()
        return Holder(pid, _program(words) or process.name(), any(_OURS.search(word) for word in words))
    except (psutil.Error, OSError):
        return Holder(pid, "a process", False)


def _program(words: list[str]) -> str:
    """What a person knows it by: `python -m http.server`, not the path of an interpreter."""
    shown = [os.path.basename(words[0]), *words[1:3]] if words else []
    return " ".join(shown)[:60]


def findings_of(facts: tuple[PortFacts, ...]) -> list[Finding]:
    """One line for those that are free, one for each that is not."""
    free = [_named(one) for one in facts if not one.why]
    ours = [one for one in facts if one.holder is not None and one.holder.is_ours]
    findings = [Finding("ports.free", Status.OK, f"free: {' '.join(free)}")] if free else []
    if ours:
        shown = " ".join(map(_named, ours))
        findings.append(Finding("ports.ours", Status.OK, f"a penstock runs here: {shown}"))
    return findings + [_taken(one) for one in facts if one.why and one not in ours]


def _named(facts: PortFacts) -> str:
    """The number, and of the one that `penstock up` does not listen on whose it is."""
    return f"{facts.port} (for penstock video)" if facts.flag == VIDEO else f"{facts.port}"


def _taken(facts: PortFacts) -> Finding:
    name = f"ports.{facts.flag.removesuffix('-port').replace('-', '_')}"
    where = f"{facts.host} port {facts.port}"
    if facts.flag == VIDEO:
        return _taken_from_video(name, where, facts)
    if facts.why == "EADDRNOTAVAIL":
        return Finding(
            name, Status.PROBLEM, f"{where}: not an address of this machine", "choose another: --host 127.0.0.1"
        )
    if facts.why == "EACCES":
        return Finding(name, Status.PROBLEM, f"{where}: root only", f"choose one over 1023: --{facts.flag} N")
    if facts.why != "EADDRINUSE":
        return Finding(name, Status.PROBLEM, f"{where}: {facts.why}", f"choose another port: --{facts.flag} N")
    advice = f"stop what holds it, or choose another: penstock up --{facts.flag} N"
    return Finding(name, Status.PROBLEM, f"{where} is taken by {_who(facts)}", advice)


def _taken_from_video(name: str, where: str, facts: PortFacts) -> Finding:
    """Never more than a note: `penstock up` serves without it."""
    why = f"is taken by {_who(facts)}" if facts.why == "EADDRINUSE" else f"cannot be listened on ({facts.why})"
    advice = "`penstock up` does not need it; `penstock video run` does, or takes another with --api-port N"
    return Finding(name, Status.NOTE, f"{where} {why}", advice)


def _who(facts: PortFacts) -> str:
    holder = facts.holder
    return f"{holder.name} (process {holder.pid})" if holder else "a process that only root may see"
