"""`penstock mps`: an MPS daemon for programs that share a GPU; `penstock up --mps on` has one of its own."""

import asyncio
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import AsJson, fail, one_line, print_json, waiting
from penstock.engines.run_directory import RunDirectoryRefused, make_private
from penstock.gateway.workers.running_stacks import run_folders
from penstock.gpu.mps.control import (
    PIPE_DIRECTORY,
    PROGRAM,
    DaemonStatus,
    MpsControl,
    MpsError,
    MpsOptions,
    daemon_listens,
    find_program,
)
from penstock.gpu.mps.daemon import PLAN_FILE, start_background, stop_background
from penstock.gpu.mps.limits import client_limit, memory_limit_error, unlimited
from penstock.gpu.nvml import NvmlReading, read_cards
from penstock.gpu.telemetry.cards import process_name
from penstock.gpu.telemetry.messages import CardLoad, ProcessLoad
from penstock.gpu.telemetry.sampler import TelemetryUnavailable, sample

SAMPLE_S = 0.3  # NVML's figures of a card are of a stretch of time
NO_GPU = "MPS shares a GPU and this machine has none; see penstock doctor"
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Directory = Annotated[
    Path | None, typer.Option(help="folder of the daemon's pipes [CUDA_MPS_PIPE_DIRECTORY, else one of this user]")
]


@dataclass(frozen=True, slots=True)
class MpsView:
    """One daemon's status. client_limit: per GPU; 0 if no GPU answers. loads: of the GPUs, from NVML.

    models: a line about each model of the stack that runs the daemon.
    """

    directory: str
    status: DaemonStatus
    client_limit: int
    loads: tuple[CardLoad, ...] = ()
    models: tuple[str, ...] = ()

    def load_of(self, pid: int) -> ProcessLoad | None:
        """A client's GPU memory and time share, or None if NVML does not list it."""
        return next((one for card in self.loads for one in card.processes if one.pid == pid), None)


@app.callback()
def _mps() -> None:
    """Share a GPU between processes: start, show and stop CUDA's Multi-Process Service.

    `penstock up --mps on` runs a daemon of its own and needs none of this; one that is started here is used by every
    program with its CUDA_MPS_PIPE_DIRECTORY, `penstock up --mps on` among them.
    """


@app.command(short_help="Start a daemon in the background, and say how programs find it.")
def start(
    directory: Directory = None,
    active_thread_percentage: Annotated[
        int, typer.Option(min=0, max=100, help="percent of a GPU's threads that each client may use; 0: no limit [0]")
    ] = 0,
    pinned_memory: Annotated[
        str,
        typer.Option(help="memory that each client may use, such as 4G, or for each GPU number: 0=4G,1=2G [no limit]"),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Start an MPS daemon; its last line is the variable to set in the programs that share the GPU.

    It is this user's, and so must its clients be. Exit code 1 where it does not start, or where there is no GPU.
    """
    reading = _cards_or_fail()
    if mistake := memory_limit_error(pinned_memory):
        fail(f"--pinned-memory {mistake}")
    if (active_thread_percentage or pinned_memory) and (why := unlimited(reading.cards)):
        fail(f"{why}; leave the limits out")
    program = find_program()
    if not program:
        fail(f"{PROGRAM} is not on PATH; it comes with NVIDIA's driver")
    options = MpsOptions(directory or _usual_directory(), active_thread_percentage, pinned_memory)
    try:
        make_private(run_folders())
        with waiting("starting the MPS daemon"):
            asyncio.run(start_background(options, program, os.environ, len(reading.cards)))
    except (MpsError, RunDirectoryRefused, OSError) as error:
        fail(str(error), code=1)
    if as_json:
        print_json({"directory": str(options.directory), "environment": options.env_vars()})
        return
    _write(f"an MPS daemon runs in {options.directory}; penstock mps stop ends it\n")
    _write(f"export {PIPE_DIRECTORY}={options.directory}")


@app.command(short_help="Show the daemons of this user, their servers and clients.")
def status(directory: Directory = None, as_json: AsJson = False) -> None:
    """Show each daemon that listens: the one that was named, or all of this user's, those of running stacks among them.

    Exit code 1 where none answers.
    """
    found = [directory] if directory is not None else _listening()
    reading = read_cards()
    if not found and not reading.cards:
        fail(NO_GPU, code=1)
    loads = _loads() if found and reading.cards else ()
    shown = [
        MpsView(str(path), asyncio.run(_sample_loads(path)), _limit(reading), loads, _planned_models(path))
        for path in found
    ]
    if as_json:
        print_json({"daemons": [_as_object(one) for one in shown]})
    elif shown:
        _write("\n".join(line for one in shown for line in lines_of(one)))
    else:
        _write("no MPS daemon of this user runs: processes on one GPU take turns; penstock mps start, or up --mps on")
    if not any(one.status.is_up for one in shown):
        raise typer.Exit(1)


@app.command(short_help="End a daemon that `start` left in the background.")
def stop(
    directory: Directory = None,
    grace_s: Annotated[int, typer.Option(min=0, help="seconds for its clients to end in [10]")] = 10,
    as_json: AsJson = False,
) -> None:
    """End the daemon and its servers; clients that still compute fail. Exit code 1 where there is none to end."""
    directory = directory or _usual_directory()
    if not daemon_listens(directory):
        fail(f"no MPS daemon listens in {directory}: there is none to end, or --directory names another", code=1)
    if (directory / "owner").exists():
        fail(f"the MPS daemon in {directory} belongs to a running `penstock up`; stop that", code=1)
    try:
        asyncio.run(stop_background(MpsControl(directory), quit_s=grace_s))
    except MpsError as error:
        fail(str(error), code=1)
    if as_json:
        print_json({"directory": str(directory)})
    else:
        _write(f"the MPS daemon in {directory} has ended")


def lines_of(shown: MpsView) -> list[str]:
    """For a person: the daemon, then each server and each client of it."""
    status = shown.status
    if not status.is_up:
        return [f"{shown.directory}: down: {one_line(status.reason)}"]
    limit = f", at most {shown.client_limit} a GPU" if shown.client_limit else ""
    threads = "" if status.threads is None else f", {status.threads:g} % of the threads for a client by default"
    lines = [f"{shown.directory}: up, {len(status.clients)} clients{limit}{threads}"]
    lines += [f"  model {one_line(text)}" for text in shown.models]
    lines += [f"  {text}" for card in shown.loads if (text := _card_text(card))]
    for server in status.servers:
        lines.append(f"  server {server.pid}: {server.state}")
        for pid in sorted(set(server.clients)):
            lines.append(f"    client {pid}: {one_line(process_name(pid))}{_memory_text(shown.load_of(pid))}")
    return lines


def _card_text(card: CardLoad) -> str:
    if card.activity.sm is None or card.kernel_running is None:
        return ""
    return f"GPU {card.index}: SM activity {card.activity.sm:.1%} by {card.source}, util {card.kernel_running:.0%}"


def _memory_text(load: ProcessLoad | None) -> str:
    if load is None or load.memory_bytes is None:
        return ""
    time_share = "" if load.time_share is None else f", a kernel ran {load.time_share:.0%} of the time"
    return f", {load.memory_bytes / (1 << 30):.2f} GiB{time_share}"


def _as_object(shown: MpsView) -> dict[str, object]:
    status = shown.status
    servers = [
        {**asdict(server), "clients": [_client_object(shown, pid) for pid in sorted(set(server.clients))]}
        for server in status.servers
    ]
    return {
        "directory": shown.directory,
        "is_up": status.is_up,
        "reason": status.reason,
        "active_thread_percentage": status.threads,
        "client_limit": shown.client_limit or None,
        "models": list(shown.models),
        "servers": servers,
    }


def _client_object(shown: MpsView, pid: int) -> dict[str, object]:
    """memory_bytes, time_share: of the GPU, None if NVML does not report them."""
    load = shown.load_of(pid) or ProcessLoad(pid, "")
    shares = {"memory_bytes": load.memory_bytes, "time_share": load.time_share}
    return {"pid": pid, "name": process_name(pid), **shares}


def _planned_models(directory: Path) -> tuple[str, ...]:
    try:
        return tuple((directory / PLAN_FILE).read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return ()


def _loads() -> tuple[CardLoad, ...]:
    try:
        return sample(SAMPLE_S)
    except TelemetryUnavailable:
        return ()


async def _sample_loads(directory: Path) -> DaemonStatus:
    return await MpsControl(directory).status(with_threads=True)


def _limit(reading: NvmlReading) -> int:
    return min((client_limit(card.capability, reading.cuda) for card in reading.cards), default=0)


def _cards_or_fail() -> NvmlReading:
    reading = read_cards()
    if not reading.cards:
        fail(NO_GPU, code=1)
    return reading


def _usual_directory() -> Path:
    directory = os.environ.get(PIPE_DIRECTORY)
    return Path(directory) if directory else run_folders() / "mps"


def _listening() -> list[Path]:
    """Where a daemon of this user's listens."""
    directories = dict.fromkeys([_usual_directory(), run_folders() / "mps", *sorted(run_folders().glob("run-*"))])
    return [directory for directory in directories if daemon_listens(directory)]


def _write(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
