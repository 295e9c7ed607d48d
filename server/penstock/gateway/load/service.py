"""Starts, stops and lists load test runs. One runs at a time, in a child process, only against allowed targets."""

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.gateway.audit import NO_AUDIT, OK, AuditLog
from penstock.gateway.load.child import COMMAND, ChildError, LoadChild, LoadLimits, short_output
from penstock.gateway.load.folders import (
    PROGRESS_FILE,
    REPORT_FILE,
    RESULT_FILE,
    LoadFolders,
    RunEnd,
    new_id,
    time_text,
    utc_now,
)
from penstock.logs import get_logger
from penstock.protocol.errors import Conflict, InferenceError, InvalidRequest, NotSupported, StorageFull
from penstock.protocol.identity import Identity
from penstock.protocol.load_reports import (
    LoadComparison,
    LoadRun,
    LoadRunProgress,
    LoadRunRequest,
    LoadRuns,
    LoadScenario,
    LoadScenarios,
)

ACTION = "load_test"  # in the audit log
CLOSE_S = 5.0  # for the run to end when the gateway stops
_SLACK = 3.0  # a run may take _START_S plus this multiple of the duration of its phases
_START_S, _UNKNOWN_S = 300.0, 1800.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_COMMAND = "No such command"
_INSTALL = "load tests are not installed; install them with: pip install 'penstock[load]'"

log = get_logger("load")


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """URLs of this gateway for a client on this machine."""

    url: str
    grpc: str
    metrics_url: str


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """home: PENSTOCK_HOME. own: this gateway. targets: further URLs that runs may target."""

    home: Path
    own: OwnAddress
    targets: tuple[str, ...] = ()
    command: tuple[str, ...] = COMMAND
    limits: LoadLimits = field(default_factory=LoadLimits)


class _Phase(msgspec.Struct):
    seconds: float = 0.0
    is_judged: bool = False


class _Request(msgspec.Struct):
    kind: str
    model: str = ""


class _Scenario(msgspec.Struct):
    """A scenario in the output of `penstock load scenarios --json`."""

    name: str
    about: str
    slo_p99_ms: float
    request: tuple[_Request, ...]
    phase: tuple[_Phase, ...]


@dataclass(slots=True)
class _Live:
    """The run in progress. child: None while it starts."""

    run: LoadRun
    child: LoadChild | None = None
    is_stopped: bool = False
    task: "asyncio.Task[None] | None" = None


class LoadTests:
    """Create it inside the running loop; end with aclose."""

    def __init__(
        self, options: LoadOptions, *, audit: AuditLog = NO_AUDIT, is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        self._options, self._audit, self._is_draining = options, audit, is_draining
        self._folders = LoadFolders(options.home)
        self._live: _Live | None = None
        self._scenarios: tuple[_Scenario, ...] = ()
        self._short = asyncio.Lock()  # one short command at a time

    async def scenarios(self) -> LoadScenarios:
        """Scenarios and allowed targets. Raises NotSupported if load tests are not installed."""
        rows = tuple(
            LoadScenario(
                name=one.name,
                about=one.about,
                slo_p99_ms=one.slo_p99_ms,
                models=tuple(dict.fromkeys(request.model for request in one.request if request.model)),
                seconds=sum(phase.seconds for phase in one.phase),
            )
            for one in await self._known()
        )
        return LoadScenarios(scenarios=rows, targets=(self._options.own.url, *self._options.targets))

    async def start(self, request: LoadRunRequest, caller: Identity, credential: str) -> LoadRun:
        """Starts a run. credential: the caller's key, for this gateway only; "" for none.

        Raises Conflict while one runs, InvalidRequest, NotSupported, StorageFull.
        """
        target = request.target.rstrip("/") or self._options.own.url
        try:
            run = await self._start(request, target, caller, credential)
        except InferenceError as error:
            self._record(caller, f"{request.scenario} {target}", error.reason)
            raise
        self._record(caller, f"{request.scenario} {target}", OK)
        return run

    async def stop(self, run_id: str, caller: Identity) -> LoadRun:
        """Stops the run: it writes the report of what it measured. Raises LoadRunNotFound, InvalidRequest."""
        folder = await asyncio.to_thread(self._folders.folder, run_id)
        live = self._live
        if live is None or live.run.id != run_id or live.child is None or live.task is None:
            raise InvalidRequest(f"the load test run {run_id} is not running")
        live.is_stopped = True
        self._record(caller, f"stop {run_id}", OK)
        await live.child.stop()
        await asyncio.wait({live.task})
        return await self._read(folder)

    async def runs(self) -> LoadRuns:
        """All stored runs."""
        running = self._live.run.id if self._live is not None else None
        return LoadRuns(runs=await asyncio.to_thread(self._folders.runs, running), running=running)

    async def run(self, run_id: str, after: int) -> LoadRunProgress:
        """One run, and its progress since `after`. Raises LoadRunNotFound."""
        folder = await asyncio.to_thread(self._folders.folder, run_id)
        run = await self._read(folder)  # before the progress: a run that has ended has written all of it
        progress, end = await asyncio.to_thread(self._folders.progress, folder, after)
        return LoadRunProgress(run=run, progress=progress, next=end)

    async def report(self, run_id: str) -> bytes:
        """The report as HTML. Raises LoadRunNotFound."""
        return await asyncio.to_thread(self._folders.file, run_id, REPORT_FILE)

    async def result(self, run_id: str) -> bytes:
        """The result as JSON. Raises LoadRunNotFound."""
        return await asyncio.to_thread(self._folders.file, run_id, RESULT_FILE)

    async def comparison(self, a: str, b: str) -> LoadComparison:
        """Compares run B with run A. Raises LoadRunNotFound, InvalidRequest."""
        paths = [await asyncio.to_thread(self._folders.folder, run_id) for run_id in (a, b)]
        try:
            output = await self._output("compare", *map(str, paths), "--json")
        except ChildError as error:
            raise InvalidRequest(f"the runs cannot be compared: {error}") from error
        return msgspec.json.decode(output, type=LoadComparison)

    async def aclose(self) -> None:
        """Stops the run in progress."""
        live = self._live
        if live is None or live.task is None:
            return
        live.is_stopped = True
        if live.child is not None:
            await live.child.stop(CLOSE_S)
        await asyncio.wait({live.task})

    async def _start(self, request: LoadRunRequest, target: str, caller: Identity, credential: str) -> LoadRun:
        is_own = target == self._options.own.url
        if not is_own and target not in self._options.targets:
            raise InvalidRequest(
                f"the target {target[:200]!r} is not allowed: use {self._options.own.url}, or start the gateway "
                "with --load-target URL"
            )
        if not request.model.isprintable():
            raise InvalidRequest(f"the model {request.model[:80]!r} has control characters; give a model's name")
        scenario = next((one for one in await self._known() if one.name == request.scenario), None)
        if scenario is None:
            raise InvalidRequest(f"there is no scenario {request.scenario!r}; GET /v1/load/scenarios lists them")
        if self._live is not None:
            raise Conflict(f"the load test run {self._live.run.id} is running; wait until it ends, or stop it")
        if self._is_draining():
            raise Conflict("this gateway is stopping; start the load test after its restart")
        now = utc_now()
        run = LoadRun(
            id=new_id(request.scenario, now),
            scenario=request.scenario,
            target=target,
            state="running",
            started_at=time_text(now),
            client=caller.key_name,
            model=request.model,
            duration_s=request.duration_s,
            rate_per_s=request.rate_per_s,
            rounds=request.rounds,
        )
        self._live = live = _Live(run)
        try:
            folder = await asyncio.to_thread(self._folders.create, run)
            live.child = await LoadChild.start(
                self._arguments(request, run, folder),
                folder,
                api_key=request.api_key or (credential if is_own else ""),
                command=self._options.command,
                limits=self._options.limits,
            )
        except OSError as error:
            self._live = None
            text = f"{self._folders.path} cannot be written: {error.strerror or error}"
            raise (StorageFull(text) if error.errno in _DISK_FULL else NotSupported(text)) from error
        except BaseException:
            self._live = None
            raise
        live.task = asyncio.create_task(self._until_ended(live, live.child, folder, _limit_s(scenario, request)))
        log.info("load test started", run=run.id, target=target, pid=live.child.pid)
        return run

    def _arguments(self, request: LoadRunRequest, run: LoadRun, folder: Path) -> Sequence[str]:
        own = self._options.own
        place: tuple[str, ...] = ()
        if run.target == own.url:
            place = (f"--grpc={own.grpc}", f"--metrics={own.metrics_url}", f"--server-pid={os.getpid()}")
        values = {
            "model": request.model or None,
            "duration": request.duration_s,
            "rate": request.rate_per_s,
            "slo-p99-ms": request.slo_p99_ms,
        }
        given = [f"--{name}={value}" for name, value in values.items() if value is not None]
        files = (f"--out={folder}", f"--progress={folder / PROGRESS_FILE}")
        switches = (f"--rounds={request.rounds}", "--json", "--quiet")
        return ("run", run.scenario, f"--target={run.target}", *place, *given, *files, *switches)

    async def _until_ended(self, live: _Live, child: LoadChild, folder: Path, limit_s: float) -> None:
        """Waits for the process and stores how it ended."""
        try:
            code = await child.wait(limit_s)
            end = await asyncio.to_thread(self._end_of, live, child, folder, code)
            log.info("load test ended", run=live.run.id, state=end.state, code=code, error=end.error)
            await asyncio.to_thread(self._folders.end, folder, end)
        except OSError as error:
            log.error("cannot store the end of a load test", run=live.run.id, error=str(error))
        finally:
            self._live = None

    def _end_of(self, live: _Live, child: LoadChild, folder: Path, code: int) -> RunEnd:
        ended_at, outcome = time_text(utc_now()), self._folders.outcome(folder)
        if live.is_stopped:
            return RunEnd("stopped", ended_at)
        if outcome is not None:
            return RunEnd({"pass": "passed", "fail": "failed"}.get(outcome, "no_verdict"), ended_at)
        how = f"its process was killed by signal {-code}" if code < 0 else f"its process exited with code {code}"
        return RunEnd("error", ended_at, child.error() or how)

    async def _known(self) -> tuple[_Scenario, ...]:
        """The built-in scenarios, except those of the video program. Raises NotSupported."""
        if not self._scenarios:
            try:
                output = await self._output("scenarios", "--json")
            except ChildError as error:
                raise NotSupported(_INSTALL if _NO_COMMAND in str(error) else str(error)) from error
            found = msgspec.json.decode(output, type=tuple[_Scenario, ...])
            self._scenarios = tuple(one for one in found if all(request.kind != "video" for request in one.request))
        return self._scenarios

    async def _output(self, *arguments: str) -> bytes:
        async with self._short:
            try:
                return await short_output(
                    arguments, self._folders.path, command=self._options.command, limits=self._options.limits
                )
            except OSError as error:
                raise NotSupported(f"the load test cannot be started: {error.strerror or error}") from error

    async def _read(self, folder: Path) -> LoadRun:
        running = self._live.run.id if self._live is not None else None
        run = await asyncio.to_thread(self._folders.read, folder, running)
        if run is None:
            raise InvalidRequest(
                f"the files of the load test run {folder.name} are damaged; remove that folder in {self._folders.path}"
            )
        return run

    def _record(self, caller: Identity, what: str, outcome: str) -> None:
        self._audit.record(caller.key_name, caller.address, ACTION, what, outcome)


def _limit_s(scenario: _Scenario, request: LoadRunRequest) -> float:
    """Seconds after which a run is stopped."""
    duration_s = request.duration_s
    seconds = sum(
        duration_s if duration_s is not None and phase.is_judged else phase.seconds for phase in scenario.phase
    )
    return _START_S + _SLACK * request.rounds * (seconds or _UNKNOWN_S)
