"""CUDA's Multi-Process Service: whether it is installed and running, for which user, and its number of clients."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.doctor.finding import Finding, Severity
from penstock.gateway.workers.running_stacks import run_folders
from penstock.gpu.mps.control import PIPE_DIRECTORY, daemon_listens, find_program
from penstock.gpu.mps.control import PROGRAM as CONTROL
from penstock.gpu.mps.limits import VOLTA, client_limit
from penstock.gpu.nvml import GpuDevice, NvmlReading

__all__ = ["MpsFacts", "client_limit", "mps_findings", "probe_mps"]

DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"


@dataclass(frozen=True, slots=True)
class MpsFacts:
    """CUDA's MPS on this machine."""

    control: str  # the program's path; empty if it is not on PATH
    pipe_directory: str
    has_pipe: bool  # a daemon listens in the pipe directory
    daemon_uids: tuple[int, ...]  # users with a visible control daemon
    uid: int  # of this process


def probe_mps() -> MpsFacts:
    """Searches PATH, the processes, and the pipe directories: CUDA's default, ours, and those of running stacks."""
    usual = os.environ.get(PIPE_DIRECTORY, DEFAULT_PIPE_DIRECTORY)
    folders = [Path(usual), run_folders() / "mps", *sorted(run_folders().glob("run-*"))]
    listening = next((folder for folder in folders if daemon_listens(folder)), None)
    return MpsFacts(
        control=find_program(),
        pipe_directory=str(listening or usual),
        has_pipe=listening is not None,
        daemon_uids=_daemon_uids(),
        uid=os.geteuid(),
    )


def _daemon_uids() -> tuple[int, ...]:
    found: set[int] = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        arguments, uids = process.info["cmdline"], process.info["uids"]
        if arguments and uids and os.path.basename(arguments[0]) == CONTROL:
            found.add(uids.effective)
    return tuple(sorted(found))


def mps_findings(facts: MpsFacts, reading: NvmlReading) -> list[Finding]:
    """The service and its limits, and an exclusive compute mode."""
    if not reading.cards:
        return [Finding("mps.service", Severity.OK, "no NVIDIA GPU to share")]
    return [_service(facts), _clients(reading), *_modes(facts, reading.cards)]


def _service(facts: MpsFacts) -> Finding:
    directory = facts.pipe_directory
    if not facts.daemon_uids and not facts.has_pipe:
        if not facts.control:
            advice = f"several processes share a GPU in turns without it; {CONTROL} comes with NVIDIA's driver"
            return Finding("mps.service", Severity.NOTE, f"{CONTROL} is not on PATH", advice)
        advice = "for several model processes on one GPU: penstock up --mps on"
        return Finding("mps.service", Severity.NOTE, "not running: processes on one GPU take turns", advice)
    if facts.daemon_uids and facts.uid not in facts.daemon_uids and 0 not in facts.daemon_uids:
        found = f"user {facts.daemon_uids[0]} runs it and we are user {facts.uid}: it serves one user at a time"
        return Finding("mps.service", Severity.WARNING, found, "start the stack and the MPS daemon as the same user")
    if not facts.has_pipe:
        found = f"a daemon runs, but its pipe is not in {directory}"
        advice = "start the stack with the daemon's CUDA_MPS_PIPE_DIRECTORY and --mps on"
        return Finding("mps.service", Severity.WARNING, found, advice)
    where = "running" if facts.daemon_uids else "it listens, its daemon not visible from here,"
    return Finding("mps.service", Severity.OK, f"{where} in {directory}; all clients must be of one user")


def _clients(reading: NvmlReading) -> Finding:
    limits = {client_limit(card.capability, reading.cuda) for card in reading.cards}
    found = f"{min(limits)} client contexts a GPU"
    oldest, newest = (pick(card.capability for card in reading.cards) for pick in (min, max))
    if oldest < VOLTA <= newest:
        advice = "MPS serves GPUs from Volta on, or those before, not both: name them in CUDA_VISIBLE_DEVICES"
        return Finding("mps.clients", Severity.NOTE, found, advice)
    if oldest < VOLTA:
        return Finding("mps.clients", Severity.OK, f"{found}; before Volta no limits a client and no isolation")
    return Finding("mps.clients", Severity.OK, found)


def _modes(facts: MpsFacts, cards: Sequence[GpuDevice]) -> list[Finding]:
    """In exclusive mode without MPS, only one process can use the card."""
    if facts.daemon_uids or facts.has_pipe:
        return []
    exclusive = [card.index for card in cards if card.compute_mode.startswith("EXCLUSIVE")]
    if not exclusive:
        return []
    found = f"GPU {exclusive[0]} is in an exclusive mode and MPS does not run: only one process can use it"
    return [Finding("mps.mode", Severity.WARNING, found, f"start MPS, or nvidia-smi -i {exclusive[0]} -c DEFAULT")]
