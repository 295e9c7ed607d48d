"""Replaces model instances whose process died, while Triton runs.

Triton 2.51 does not restart the process of a Python-based instance: its requests fail ("Stub process … is not
healthy"). So the model is loaded again with a config that differs in an unused parameter; Triton swaps when the new
instances are ready. Without space for both, Triton is restarted.

A stopped process (SIGSTOP) is killed: Triton gives it up after a second and frees its shared memory; late answers would
abort Triton (boost's lock_exception).

Triton ends old instances when their requests are answered. If one died with requests, its siblings would stay; they are
killed after OLD_GOES_S.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.engines.triton.supervisor import RestartBackoff
from penstock.logs import get_logger
from penstock.protocol.call import HttpCall
from penstock.protocol.engine import Engine
from penstock.protocol.errors import InferenceError

log = get_logger("engine")
LOOK_S = 0.5
OLD_GOES_S = 30.0  # for requests of the old instances; Triton needs some 8 s
CONTROL_TIMEOUT_S = 600.0  # for loads; other calls of the same Triton thread wait as long
RENEWAL_PARAMETER = "penstock-renewal"
_STUB = "triton_python_b"  # triton_python_backend_stub, truncated by the kernel
_INSTANCE = re.compile(r"(.+)_\d+_\d+")


def model_of(instance: str, models: Iterable[str]) -> str:
    """The model of an instance MODEL_GROUP_NUMBER, or GROUP_NUMBER for a named group; empty if unknown."""
    known = set(models)
    usual = _INSTANCE.fullmatch(instance)
    if usual is not None and usual[1] in known:
        return usual[1]
    return max((name for name in known if instance.startswith(f"{name}_")), key=len, default="")


class InstanceMonitor:
    """Finds Triton's model processes that died since the last check. name_of: instance by a live process's id.

    Two consecutive checks must find it dead, because processes that Triton ends are so for a moment.
    """

    def __init__(
        self,
        name_of: Callable[[int], str],
        proc: Path = Path("/proc"),
        kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL),
    ) -> None:
        self._name_of = name_of
        self._proc = str(proc)  # str, because Path takes three times as long
        self._kill = kill
        self._names: dict[int, str] = {}
        self._stopped: tuple[int, ...] = ()
        self._dead: set[int] = set()
        self._reported: set[int] = set()
        self._retired: set[int] = set()

    def retire(self, model: str, models: Iterable[str]) -> frozenset[int]:
        """The model's processes; their end will not count as lost. models: all models of the engine."""
        found = self._of_model(model, models)
        self._retired |= found
        return found

    def end(self, engine_pid: int, retired: Collection[int]) -> tuple[int, ...]:
        """Kills those that are still children of this Triton; returns them."""
        children = set(self._children(engine_pid)) if retired else ()
        left = tuple(sorted(pid for pid in retired if pid in children and self._stub_state(pid) not in ("", "Z")))
        for pid in left:
            with suppress(ProcessLookupError):
                self._kill(pid)
        return left

    def end_stopped(self, engine_pid: int) -> tuple[int, ...]:
        """Kills the processes that `lost` last found stopped by a signal; returns their ids."""
        return self.end(engine_pid, self._stopped)

    def of_model(self, model: str, models: Iterable[str]) -> frozenset[int]:
        """The model's processes at the last check, without retired ones."""
        return self._of_model(model, models) - self._retired

    def _of_model(self, model: str, models: Iterable[str]) -> frozenset[int]:
        known = tuple(models)
        return frozenset(pid for pid, name in self._names.items() if name and model_of(name, known) == model)

    def lost(self, engine_pid: int) -> tuple[str, ...]:
        """The lost instances, once each. engine_pid: of the running Triton."""
        states = {pid: state for pid in self._children(engine_pid) if (state := self._stub_state(pid))}
        self._stopped = tuple(pid for pid, state in states.items() if state == "T")
        dead = {pid for pid, state in states.items() if state == "Z"}
        self._retired &= states.keys()
        new = (dead & self._dead) - self._reported - self._retired
        self._names = {pid: self._named(pid, is_alive=pid not in dead) for pid in states}
        self._dead, self._reported = dead, (self._reported & dead) | new
        return tuple(sorted(self._names[pid] for pid in new if self._names[pid]))

    def _named(self, pid: int, *, is_alive: bool) -> str:
        name = self._names.get(pid, "")
        return self._name_of(pid) if is_alive and not _INSTANCE.fullmatch(name) else name

    def _children(self, pid: int) -> list[int]:
        """Children of all its threads. Some kernels do not list children by thread."""
        found: list[int] = []
        threads = f"{self._proc}/{pid}/task"
        try:
            for thread in os.listdir(threads):
                found += map(int, _read(f"{threads}/{thread}/children").split())
        except OSError:  # such a kernel, or a thread or Triton that has just ended
            return [child for child in self._processes() if self._parent(child) == pid]
        return found

    def _processes(self) -> list[int]:
        return [int(name) for name in os.listdir(self._proc) if name.isdecimal()]

    def _parent(self, pid: int) -> int:
        fields = self._stat(pid)[1]
        return int(fields[1]) if len(fields) > 1 else 0

    def _stub_state(self, pid: int) -> str:
        name, fields = self._stat(pid)
        return fields[0] if name == _STUB and fields else ""

    def _stat(self, pid: int) -> tuple[str, list[str]]:
        """The process's name, and the fields after it: state, parent and so on."""
        try:
            _, _, rest = _read(f"{self._proc}/{pid}/stat").partition(b"(")
        except OSError:
            return "", []
        name, _, fields = rest.rpartition(b")")
        return name.decode(errors="replace"), fields.decode().split()


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


class InstanceReplacer:
    """Replaces lost instances of one Triton. A model whose processes die repeatedly is loaded with backoff."""

    def __init__(
        self,
        sight: InstanceMonitor,
        control: Engine,  # closed at the end
        engine_pid: Callable[[], int | None],  # None while Triton does not run
        restart: Callable[[str], object],  # restarts Triton; gets the reason
        has_room: Callable[[str], bool] = lambda _: True,  # for a second set of a model's processes
        renewed: Callable[[], None] = lambda: None,  # a model has new processes; see `generations`
    ) -> None:
        self._on_renewed = renewed
        self._has_room = has_room
        self._sight = sight
        self._control = control
        self._backoff = RestartBackoff()
        self._engine_pid = engine_pid
        self._restart = restart
        self._renewed_at = time.monotonic()
        self._old: list[tuple[float, int, frozenset[int]]] = []  # (kill after, Triton's PID, processes)
        self._broken: dict[str, tuple[str, int]] = {}
        self.generations: dict[str, int] = {}
        self._moved: set[str] = set()
        self.renewals = 0

    def restart_model(self, model: str, reason: str, generation: int = 0, *, is_moved: bool = False) -> None:
        """Kills and replaces the processes of a hanging or failing model. Call it on run()'s loop.

        No effect if they are newer than that generation. is_moved: another engine now serves the model; this one
        unloads it.
        """
        self._broken[model] = (reason, generation)
        if is_moved:
            self._moved.add(model)

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            await self._run()
        finally:
            await self._control.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if (pid := self._engine_pid()) is None:
                continue
            lost = self._sight.lost(pid)
            if stopped := self._sight.end_stopped(pid):
                log.error("killed stopped model processes", pids=",".join(map(str, stopped)))
            self._end_old(pid)
            broken, self._broken = self._broken, {}
            for model, (reason, generation) in broken.items():
                if generation >= self.generations.get(model, 0):
                    await self._restart_broken(model, reason, pid)
            if lost:
                self._backoff.live(self._renewed_at)
                await asyncio.sleep(self._backoff.next_delay_s(time.monotonic()))
                await self._replace(lost, pid)
                self._renewed_at = time.monotonic()

    def _end_old(self, engine_pid: int) -> None:
        now = time.monotonic()
        due = [old for old in self._old if old[0] <= now]
        self._old = [old for old in self._old if old[0] > now]
        for _, of_pid, processes in due:
            if of_pid == engine_pid and (ended := self._sight.end(engine_pid, processes)):
                pids = ",".join(map(str, ended))
                log.warning("old processes of a model did not end; they are killed", pids=pids)

    async def _restart_broken(self, model: str, reason: str, engine_pid: int) -> None:
        """Kills the model's processes, which are then replaced as lost. A model without processes is reloaded."""
        try:
            rows = await self._ask("POST", "/v2/repository/index", b"{}")
            known = {str(row["name"]) for row in rows}
            killed = self._sight.end(engine_pid, self._sight.of_model(model, known))
            log.error("killed a model's processes", model=model, reason=reason, pids=",".join(map(str, killed)))
            if not killed and model not in self._moved:
                await self._renew(model, [])
        except (InferenceError, ValueError) as error:
            if self._engine_pid() == engine_pid:
                log.error("model cannot be restarted alone", model=model, reason=str(error))
                self._restart(f"model {model} cannot be loaded again: {reason}")

    async def _replace(self, instances: tuple[str, ...], engine_pid: int) -> None:
        try:
            rows = await self._ask("POST", "/v2/repository/index", b"{}")
            known = {
                str(row["name"]) for row in rows
            }  # also failed ones: their names can look like instances of others
            ready = {str(row["name"]) for row in rows if row.get("state") == "READY"}
            lost: dict[str, list[str]] = {}
            for instance in instances:
                lost.setdefault(model_of(instance, known), []).append(instance)
            if nameless := lost.pop("", None):
                log.warning("a process of some model died; its name does not say which", instances=",".join(nameless))
            for model in sorted(lost.keys() & ready - self._moved):
                old = self._sight.retire(model, known)
                await self._renew(model, lost[model])
                self._old.append((time.monotonic() + OLD_GOES_S, engine_pid, old))
        except (InferenceError, ValueError) as error:
            if self._engine_pid() == engine_pid:
                log.error("a dead instance cannot be replaced beside the others", reason=str(error))
                self._restart(f"the process of {', '.join(instances)} died, and no other took its place")

    async def _renew(self, model: str, instances: list[str]) -> None:
        if not self._has_room(model):
            raise ValueError(f"a second set of {model}'s processes would be more clients than MPS takes")
        began = time.monotonic()
        log.error(
            "a model's process died; the model is loaded anew beside it", model=model, instances=",".join(instances)
        )
        self.renewals += 1
        path = f"/v2/models/{quote(model, safe='')}"
        config = await self._ask("GET", f"{path}/config")
        config.setdefault("parameters", {})[RENEWAL_PARAMETER] = {"string_value": str(self.renewals)}
        body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
        await self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/load", body)
        log.info("all of the model's processes are new", model=model, seconds=round(time.monotonic() - began, 3))
        self.generations[model] = self.generations.get(model, 0) + 1
        self._on_renewed()

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Any:
        """Triton's JSON. Raises InferenceError; ValueError with Triton's reason."""
        call = HttpCall(method, path.encode(), ((b"content-type", b"application/json"),), body)
        answer = await self._control.send(call, deadline=time.monotonic() + CONTROL_TIMEOUT_S)
        if answer.status != 200:
            raise ValueError(f"{method} {path}: {answer.status} {answer.body[:200].decode(errors='replace')}")
        return json.loads(answer.body) if answer.body else {}
