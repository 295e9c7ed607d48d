"""Resource usage of a stack's processes: the gateway's parent and its descendants."""

import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from penstock.gpu.telemetry.cards import command_name
from penstock.logs import PARENT, PROCESS_VARIABLE
from penstock.protocol.system_reports import ProcessUsage

MAX_PROCESSES = 500
MAX_ROLE = 64
_GATEWAY = "penstock.gateway"
_COMMAND_LINE = "penstock.cli.main"  # its role is the sub-command
_ROLES = {
    "penstock.vision.decoder_worker": "decoder",
    "penstock.gpu.telemetry": "gpu telemetry",
    "penstock_video": "video",
}


def process_usage(parent_pid: int) -> list[ProcessUsage]:
    """The parent first, then its descendants by PID. Blocks for milliseconds: reads the status of all processes."""
    try:
        parent = psutil.Process(parent_pid)
        family = [parent, *sorted(parent.children(recursive=True), key=lambda process: process.pid)]
    except psutil.Error:
        return []
    found = []
    for process in family[:MAX_PROCESSES]:
        with suppress(psutil.Error), process.oneshot():
            found.append(_usage(process, is_parent=process is parent))
    return found


def _usage(process: psutil.Process, *, is_parent: bool) -> ProcessUsage:
    cpu = process.cpu_times()
    return ProcessUsage(
        process.pid,
        PARENT if is_parent else _role(process),
        process.memory_info().rss,
        round(cpu.user + cpu.system, 2),
        round(max(0.0, time.time() - process.create_time()), 1),
    )


def _role(process: psutil.Process) -> str:
    arguments = process.cmdline()
    if _module(arguments) == _GATEWAY:
        return process.environ().get(PROCESS_VARIABLE, "gateway")[:MAX_ROLE]
    return role_of(arguments) or process.name()[:MAX_ROLE]


def role_of(arguments: Sequence[str]) -> str:
    """The role of a process, from its command line; empty for an empty command line."""
    module = _module(arguments)
    if module == _COMMAND_LINE:
        return next(iter(arguments[arguments.index(module) + 1 :]), module)[:MAX_ROLE]
    known = (role for name, role in _ROLES.items() if module == name or module.startswith(f"{name}."))
    return next(known, "") or (module or (command_name(arguments) if arguments else ""))[:MAX_ROLE]


def _module(arguments: Sequence[str]) -> str:
    """The module of `python -m MODULE`; empty for other commands."""
    with suppress(ValueError):
        at = arguments.index("-m", 0, 4)
        return arguments[at + 1] if at + 1 < len(arguments) else ""
    return ""
