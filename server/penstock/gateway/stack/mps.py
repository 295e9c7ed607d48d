"""NVIDIA MPS: planned before anything starts, then a control daemon beside Triton."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from penstock.engines.run_directory import ENGINE_ID_VARIABLE, RunDirectory, reap
from penstock.engines.torch_serving.config import THREADS_VARIABLE
from penstock.engines.triton import launch as triton_launch
from penstock.engines.triton.runtime import Launch
from penstock.engines.triton.supervisor import EngineState, EngineStatus
from penstock.gpu.cards import ALL, Card, choose_cards
from penstock.gpu.mps.control import (
    PIPE_DIRECTORY,
    PROGRAM,
    VISIBLE_CARDS,
    MpsOptions,
    MpsUnavailable,
    daemon_listens,
    find_program,
)
from penstock.gpu.mps.daemon import PLAN_FILE, Daemon, DaemonProcess, ForeignDaemon, OwnDaemon, server_program
from penstock.gpu.mps.limits import AUTO, VOLTA, ModelClients, memory_by_card, too_many_clients, unlimited
from penstock.gpu.mps.planner import ModelPlan, plan_models
from penstock.gpu.mps.recovery import EngineObservation
from penstock.gpu.mps.supervisor import EngineHandle, MpsSupervisor, processes_using_gpu, processes_with_mark
from penstock.gpu.nvml import NvmlReading, read_cards
from penstock.logs import get_logger

log = get_logger("mps")


@dataclass(frozen=True, slots=True)
class MpsRequest:
    """MPS settings. is_must: fail at start if MPS is unavailable. directory: None for our own daemon."""

    is_must: bool
    directory: Path | None = None
    active_thread_percentage: float | Literal["auto"] = 0
    pinned_memory: str = ""


@dataclass(frozen=True, slots=True)
class MpsPlan:
    """How MPS is started. is_foreign: external daemon. threads: percentage of every client, 0 for no limit. card: UUID
    of the only card that the daemon serves; empty for every visible one."""

    request: MpsRequest
    program: str
    is_foreign: bool
    threads: float
    wanted: tuple[ModelClients, ...]
    reading: NvmlReading
    models: tuple[ModelPlan, ...] = ()
    card: str = ""

    def has_room_beside(self, model: str) -> bool:
        """Whether its GPUs have room for the model a second time."""
        return not too_many_clients([*self.wanted, *(row for row in self.wanted if row.model == model)], self.reading)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan depends on. program: path of NVIDIA's control program, "" if it is not on PATH."""

    reading: NvmlReading
    program: str
    environ: Mapping[str, str]
    uid: int


def this_machine() -> Machine:
    """This machine's GPUs and environment. Waits for NVML until its time-out."""
    return Machine(read_cards(), find_program(), os.environ, os.geteuid())


def plan_mps(request: MpsRequest, wanted: Sequence[ModelClients], machine: Machine) -> MpsPlan:
    """How to start MPS here. wanted: processes of the models. Raises MpsUnavailable."""
    machine = replace(machine, reading=visible_cards(machine.reading, machine.environ))
    if not machine.reading.cards:
        raise MpsUnavailable("MPS shares a GPU and this machine has none; leave --mps out, or see penstock doctor")
    if not machine.program:
        raise MpsUnavailable(
            f"{PROGRAM} is not on PATH; it comes with NVIDIA's driver, and into a container with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    refusal = too_many_clients(wanted, machine.reading)
    if refusal:
        raise MpsUnavailable(refusal)
    pipes = machine.environ.get(PIPE_DIRECTORY, "")
    directory = request.directory or (Path(pipes) if pipes else None)
    if len({card.capability >= VOLTA for card in machine.reading.cards}) > 1:
        raise MpsUnavailable(
            "MPS serves GPUs from Volta on, or those before, not both; name one kind in CUDA_VISIBLE_DEVICES"
        )
    is_foreign = directory is not None and (request.directory is None or daemon_listens(directory))
    if is_foreign and directory is not None:
        _check_foreign(request, directory, machine.uid)
    else:
        _check_own(request, machine)
    percentage = request.active_thread_percentage
    limit = None if percentage == AUTO else percentage
    return MpsPlan(
        replace(request, directory=directory),
        machine.program,
        is_foreign,
        limit or 0.0,
        tuple(wanted),
        machine.reading,
        plan_models(wanted, len(machine.reading.cards), limit=limit),
    )


def plan_card_mps(
    request: MpsRequest,
    wanted: Sequence[ModelClients],
    machine: Machine,
    cards: Sequence[Card],
    homes: Mapping[str, Sequence[str]],
) -> dict[Card, MpsPlan]:
    """One daemon for each card, so that a fault ends the clients of its card only. An external daemon serves all.

    homes: labels by model, see EngineChoice. Raises MpsUnavailable.
    """
    plans = {}
    for at, card in enumerate(cards):
        of_card = [
            replace(row, cards=())
            for row in wanted
            if (not row.cards or at in row.cards) and card.label in homes.get(row.model, (card.label,))
        ]
        own = replace(machine, environ={**machine.environ, VISIBLE_CARDS: card.uuid})
        memory = memory_by_card(request.pinned_memory, len(cards)).get(at, "")
        directory = request.directory / f"card-{at}" if request.directory is not None else None
        plan = plan_mps(replace(request, pinned_memory=memory, directory=directory), of_card, own)
        plans[card] = replace(plan, card=card.uuid)
    return plans


def visible_cards(reading: NvmlReading, environ: Mapping[str, str]) -> NvmlReading:
    """The GPUs in CUDA_VISIBLE_DEVICES, in its order; all with a MIG instance, whose name does not show its card."""
    visible = environ.get(VISIBLE_CARDS)
    chosen = choose_cards(ALL, reading, visible)
    if visible is None or any(card.index is None for card in chosen):
        return reading
    by_index = {card.index: card for card in reading.cards}
    return msgspec.structs.replace(
        reading, cards=tuple(by_index[card.index] for card in chosen if card.index is not None)
    )


def _check_foreign(request: MpsRequest, directory: Path, uid: int) -> None:
    if request.active_thread_percentage or request.pinned_memory:
        raise MpsUnavailable(
            f"the MPS daemon in {directory} was started by others, who set its clients' limits; leave out "
            "--mps-active-thread-percentage and --mps-pinned-memory"
        )
    try:
        owner = (directory / "control").stat().st_uid
    except OSError:
        return
    if owner not in (0, uid):
        raise MpsUnavailable(
            f"user {owner} runs the MPS daemon in {directory} and we are user {uid}: it serves one user at a time; "
            "start both as the same user"
        )


def _check_own(request: MpsRequest, machine: Machine) -> None:
    if not server_program(machine.program):
        raise MpsUnavailable("nvidia-cuda-mps-server is not on PATH; it comes with NVIDIA's driver")
    why = unlimited(machine.reading.cards)
    if why and (request.active_thread_percentage or request.pinned_memory):
        raise MpsUnavailable(f"{why}; leave out --mps-active-thread-percentage and --mps-pinned-memory")
    if why and not request.is_must:
        raise MpsUnavailable(f"{why} and none is kept from another's memory; --mps on takes it so")
    if why:
        log.warning("MPS without isolation", reason=f"{why} and none is kept from another's memory")


class MpsSharing:
    """MPS beside one engine: `start` it before the engine, `aclose` it last. claim: creates a run directory."""

    def __init__(self, plan: MpsPlan, claim: Callable[[], RunDirectory]) -> None:
        self.plan = plan
        self.is_must = plan.request.is_must
        self._run_dir = None if plan.is_foreign else claim()
        self._daemon = compose_daemon(plan, self._run_dir)
        self._supervisor: MpsSupervisor | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Path:
        """The daemon's pipe directory."""
        return self._daemon.options.directory

    async def start(self, engine: EngineHandle) -> None:
        """Returns when clients may start. Raises MpsError."""
        must_attach = self.is_must and bool(self.plan.wanted)
        supervisor = MpsSupervisor(self._daemon, engine, must_attach=must_attach)
        await supervisor.start()
        self._publish_models()
        self._supervisor, self.task = supervisor, asyncio.create_task(supervisor.run())

    def _publish_models(self) -> None:
        """Logs the plan of each model, and writes it beside our daemon's pipes for `penstock mps status`."""
        for model in self.plan.models:
            log.info("MPS plan", model=model.model, plan=model.line)
        if self._run_dir is not None:
            try:
                (self.directory / PLAN_FILE).write_text("".join(f"{model.line}\n" for model in self.plan.models))
            except OSError as error:
                log.warning("penstock mps status will not show the models", reason=error.strerror)

    async def until_clients_may_start(self) -> None:
        """Returns when the engine may start."""
        if self._supervisor is not None:
            await self._supervisor.until_clients_may_start()

    def shared(self, launch: Launch) -> Launch:
        """The launch with the environment of an MPS client, which child processes inherit."""
        environ = self._daemon.options.client_environ(launch.env)
        limits = [f"{one.model}={one.threads:g}" for one in self.plan.models if one.threads]
        if limits and not self.plan.threads:
            environ[THREADS_VARIABLE] = " ".join(limits)
        return replace(launch, env=environ)

    async def aclose(self) -> None:
        """Stops our daemon and its clients. May be called again."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
        await self._daemon.stop()
        if self._run_dir is not None:
            (self.directory / PLAN_FILE).unlink(missing_ok=True)
            self._run_dir.release()


def compose_daemon(plan: MpsPlan, run_dir: RunDirectory | None) -> Daemon:
    """The plan's daemon. run_dir: of our own daemon; its leftovers are found by the run's ID."""
    if plan.is_foreign or run_dir is None:
        return ForeignDaemon(MpsOptions(plan.request.directory or Path()), program=plan.program)
    options = MpsOptions(plan.request.directory or run_dir.path, plan.threads, plan.request.pinned_memory)
    engine_id = run_dir.engine_id
    others = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    hold = DaemonProcess(
        plan.program,
        bond=(sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid())),
        environ={**others, ENGINE_ID_VARIABLE: engine_id, **({VISIBLE_CARDS: plan.card} if plan.card else {})},
        clear=lambda child_pid: reap(engine_id, child_pid=child_pid),
        card_count=len(plan.reading.cards),
    )
    return OwnDaemon(options, hold, emit=log.log)


def engine_observer(
    engine_id: str, status: Callable[[], EngineStatus | None], serves: Callable[[], Awaitable[bool]]
) -> Callable[[bool], Awaitable[EngineObservation]]:
    """Function that observes this engine's processes and, on request, whether it serves requests."""
    mark = f"{ENGINE_ID_VARIABLE}={engine_id}"

    async def observe(includes_serving: bool) -> EngineObservation:
        now = status()
        if now is None or now.pid is None:
            return EngineObservation()
        ours, computing = await asyncio.to_thread(_processes, mark)
        is_running = now.state is EngineState.RUNNING
        does_serve = is_running and includes_serving and await serves()
        return EngineObservation(now.pid, is_running, ours, computing, does_serve)

    return observe


def _processes(mark: str) -> tuple[frozenset[int], frozenset[int]]:
    ours = processes_with_mark(mark)
    return ours, processes_using_gpu(ours)
