"""What one process's end costs the others: a client of MPS killed, one that faults, the daemon and its server killed.

`penstock up --mps on` with models of one instance each, a caller each, through the gateway. While they are asked, one
thing is broken. The result is who got no good answer, and how long it took until every caller was answered again.
"""

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from loadtest.bench.gpu.callers import OK, BrokenConnection, CallerLane, CallerRequest, CallersRun, exchange
from loadtest.bench.gpu.generators import START_S
from loadtest.bench.gpu.programs import CHECKOUT, PenstockUp
from loadtest.bench.gpu.stretch import GpuBench, noise_of
from loadtest.bench.gpu.tritons import Face, as_sent
from loadtest.bench.wire import BadAnswer, http_infer
from penstock.gpu.mps.control import PIPE_DIRECTORY
from penstock.gpu.mps.control import PROGRAM as CONTROL
from penstock.protocol.inference import Datatype, Tensor

BEFORE_S, AFTER_S, MOST_S, CALM_S, CALM_WITHIN_S = 1.5, 2.0, 45.0, 1.5, 15.0
PROBE_S = 2.0
CLIENT_KILLED, CLIENT_FAULTS = "one client killed", "another client makes an illegal memory access"
SERVER_KILLED, DAEMON_KILLED = "MPS server killed", "MPS control daemon killed"
FAULTS = (CLIENT_KILLED, CLIENT_FAULTS, SERVER_KILLED, DAEMON_KILLED)
SERVER = "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """models: of one instance each, in home's repository; face: what they take."""

    home: Path
    environment: Path
    models: tuple[str, ...]
    face: Face
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Of one fault. failed: by caller, how many of its requests. silent_s: by caller, the longest without an answer.

    silent_from_s: when that began, after the fault.
    recovery_s: from the fault until every affected caller was answered again; None if one never was.
    """

    fault: str
    victim: str
    answered: int
    failed: dict[str, int]
    silent_s: dict[str, float]
    silent_from_s: dict[str, float]
    recovery_s: float | None
    said: dict[str, int]
    note: str = ""


def measure_faults(bench: GpuBench, faults: FaultPlan) -> None:
    """Each fault once, on a stack that has recovered from the one before. Raises BadAnswer, OSError."""
    left = list(FAULTS if bench.plan.is_gpu else FAULTS[:1])
    while left:
        with ExitStack() as stack:
            up = stack.enter_context(
                PenstockUp(faults.home, faults.models, *faults.flags, environment=faults.environment)
            )
            bench.tell("faults stack is ready", functools.partial(up.wait, time.monotonic() + bench.plan.load_s))
            lanes = _lanes(faults, up.port)
            while left and _until_calm(lanes, CALM_WITHIN_S):  # else a new stack, for the rest of them
                name = left.pop(0)
                outcome = _break(bench, lanes, name, functools.partial(_break_it, name, up, faults.models[0]))
                bench.ledger.faults.append(asdict(outcome))
                bench.save()
            if len(left) == len(FAULTS):
                raise BadAnswer("not every model of the faults answers")


def _break_it(fault: str, up: PenstockUp, victim: str) -> tuple[str, str]:
    """(whom it hit, a note)."""
    stub = up.stub_of(victim)
    if fault == CLIENT_KILLED:
        return victim, _killed(stub)
    pipes = stub.environ().get(PIPE_DIRECTORY, "")
    if not pipes:
        raise BadAnswer(f"the process of {victim} has no {PIPE_DIRECTORY}, so it is no client of MPS")
    if fault == CLIENT_FAULTS:
        return "", _stray(pipes)
    return "", _killed(_mps_process(SERVER if fault == SERVER_KILLED else CONTROL, pipes))


def _killed(process: psutil.Process) -> str:
    process.send_signal(signal.SIGKILL)
    return f"kill -9 of {process.pid}"


def _mps_process(name: str, pipes: str) -> psutil.Process:
    """The daemon or server of that pipe directory; their names are longer than the 15 letters that Linux keeps."""
    for process in psutil.process_iter():
        try:
            if Path(process.exe()).name == name and process.environ().get(PIPE_DIRECTORY) == pipes:
                return process
        except psutil.Error:
            continue
    raise BadAnswer(f"no {name} with {PIPE_DIRECTORY}={pipes} was found")


def _stray(pipes: str) -> str:
    """A client of its own that faults, beside the models'."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.bench.gpu.rogue"], text=True, cwd=CHECKOUT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {PIPE_DIRECTORY: pipes},
    )  # fmt: skip
    try:
        said, _ = process.communicate("now\n", timeout=30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    return " ".join(said.split())


def _break(
    bench: GpuBench, lanes: Sequence[CallerLane], name: str, break_it: Callable[[], tuple[str, str]]
) -> FaultOutcome:
    stop = bench.plan.work / f"stop-{time.monotonic_ns()}"
    begin_s = time.monotonic() + START_S
    wait = bench.generators.closed(lanes, settle_s=0.0, seconds=BEFORE_S + MOST_S, stop=stop)
    time.sleep(max(0.0, begin_s + BEFORE_S - time.monotonic()))
    broken_s = time.monotonic()
    victim, note = break_it()
    time.sleep(AFTER_S)
    _until_calm(lanes, MOST_S - AFTER_S - 1.0)
    stop.touch()
    return outcome_of(wait(), lanes, broken_s - begin_s, fault=name, victim=victim, note=note)


def outcome_of(
    run: CallersRun, lanes: Sequence[CallerLane], broken_at_s: float, *, fault: str, victim: str, note: str
) -> FaultOutcome:
    """Who failed after that moment of the run, for how long. Pure."""
    end_s = max((ask.at_s for ask in run.asks), default=broken_at_s)
    failed: dict[str, int] = {}
    silent: dict[str, float] = {}
    silent_from: dict[str, float] = {}
    said: dict[str, int] = {}
    again: list[float | None] = []
    for number, lane in enumerate(lanes):
        asks = sorted((ask for ask in run.asks if ask.lane == number), key=lambda ask: ask.at_s)
        bad = [ask for ask in asks if ask.failure and ask.at_s >= broken_at_s]
        began_s, ended_s = _longest_silence(asks, broken_at_s, end_s)
        silent[lane.name], silent_from[lane.name] = round(ended_s - began_s, 3), round(began_s - broken_at_s, 3)
        good_s = [ask.at_s for ask in asks if not ask.failure and ask.at_s > (bad[-1].at_s if bad else broken_at_s)]
        if bad:
            failed[lane.name] = len(bad)
        if bad or not good_s:  # a caller whose last request hangs has no failure, and is not served either
            again.append(good_s[0] - broken_at_s if good_s else None)
        for ask in bad:
            said[ask.failure[:120]] = said.get(ask.failure[:120], 0) + 1
    times = [at for at in again if at is not None]
    recovery = None if len(times) < len(again) else round(max(times, default=0.0), 3)
    answered = sum(not ask.failure for ask in run.asks)
    return FaultOutcome(fault, victim, answered, failed, silent, silent_from, recovery, said, note)


def _longest_silence(asks: Sequence[CallerRequest], from_s: float, until_s: float) -> tuple[float, float]:
    good = [from_s, *(ask.at_s for ask in asks if not ask.failure and ask.at_s > from_s), until_s]
    return max(itertools.pairwise(good), key=lambda pair: pair[1] - pair[0])


def _lanes(faults: FaultPlan, port: int) -> list[CallerLane]:
    face = faults.face.input
    shape = (1, *face.dims) if faults.face.has_batch else face.dims
    tensor = Tensor(face.name, Datatype(face.datatype), shape, memoryview(noise_of(faults.face, 1)))
    return [CallerLane(model, port, as_sent(http_infer(model, tensor))) for model in faults.models]


def _until_calm(lanes: Sequence[CallerLane], seconds: float) -> bool:
    """Until every lane was answered well for CALM_S on end; False where that does not come in time."""
    until_s, calm_since_s = time.monotonic() + seconds, 0.0
    while (now := time.monotonic()) < until_s:
        if all(map(_is_served, lanes)):
            calm_since_s = calm_since_s or now
            if time.monotonic() - calm_since_s >= CALM_S:
                return True
            time.sleep(0.1)
        else:
            calm_since_s = 0.0
            time.sleep(0.1)
    return False


def _is_served(lane: CallerLane) -> bool:
    try:
        return exchange(lane.port, lane.request, timeout_s=PROBE_S).status == OK
    except (BrokenConnection, OSError):
        return False
