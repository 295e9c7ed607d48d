"""Replaces model instances whose process died while Triton runs on.

Triton 2.51 does not restart the process of a Python-based instance: each of its requests fails after a second ("Stub
process … is not healthy"). So the model is loaded again beside itself, with a config that differs in an unused
parameter; Triton swaps when the new instances are ready. If there is no room for both, Triton is restarted.

A process that was stopped (SIGSTOP) is killed at once: Triton gives it up after a second and frees its shared memory;
if it continued, Triton would take its late answers for those of other calls and abort (boost's lock_exception).

Triton ends the old instances when they have answered their requests. One that died with requests never does, and its
siblings of the same load would stay; after OLD_GOES_S they are killed.
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
from typing import Any, Protocol
from urllib.parse import quote

from penstock.engines.triton.supervisor import RestartBackoff
from penstock.logs import get_logger
from penstock.protocol.call import HttpAnswer, HttpCall
from penstock.protocol.errors import InferenceError

log = get_logger("engine")
LOOK_S = 0.5
OLD_GOES_S = 30.0  # for what the old instances have in hand; Triton itself takes some 8 s
CONTROL_TIMEOUT_S = 600.0  # a load; calls on a connection whose Triton thread is busy with a load wait as long
RENEWAL_PARAMETER = "penstock-renewal"
_STUB = "triton_python_b"  # as the kernel shortens triton_python_backend_stub
_INSTANCE = re.compile(r"(.+)_\d+_\d+")


def model_of(instance: str, models: Iterable[str]) -> str:
    """The model of an instance MODEL_GROUP_NUMBER, or GROUP_NUMBER if its config names the group; empty if unknown."""
    known = set(models)
    usual = _INSTANCE.fullmatch(instance)
    if usual is not None and usual[1] in known:
        return usual[1]
    return max((name for name in known if instance.startswith(f"{name}_")), key=len, default="")


class InstanceMonitor:
    """Which of Triton's model processes died since the last check. name_of: of an instance, by its live process's PID.

    A process is lost if two checks in a row find it dead and not reaped: one that Triton ends is so for a moment.
    """

    def __init__(
        self,
        name_of: Callable[[int], str],
        proc: Path = Path("/proc"),
        kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL),
    ) -> None:
        self._name_of = name_of
        self._proc = str(proc)  # paths are joined as text: with Path a check takes three times as long
        self._kill = kill
        self._names: dict[int, str] = {}
        self._stopped: tuple[int, ...] = ()
        self._dead: set[int] = set()
        self._reported: set[int] = set()
        self._retired: set[int] = set()

    def retire(self, model: str, models: Iterable[str]) -> frozenset[int]:
        """Its processes, whose end will not count as lost. models: all that the engine knows."""
        found = self._of_model(model, models)
        self._retired |= found
        return found

    def end(self, engine_pid: int, retired: Collection[int]) -> tuple[int, ...]:
        """Kills those that are still alive as this Triton's children, and returns them."""
        children = set(self._children(engine_pid)) if retired else ()
        left = tuple(sorted(pid for pid in retired if pid in children and self._stub_state(pid) not in ("", "Z")))
        for pid in left:
            with suppress(ProcessLookupError):
                self._kill(pid)
        return left

    def end_stopped(self, engine_pid: int) -> tuple[int, ...]:
        """Kills this Triton's model processes that `lost` last found stopped by a signal; returns their PIDs."""
        return self.end(engine_pid, self._stopped)

    def of_model(self, model: str, models: Iterable[str]) -> frozenset[int]:
        """The model's processes at the last check, without retired ones."""
        return self._of_model(model, models) - self._retired

    def _of_model(self, model: str, models: Iterable[str]) -> frozenset[int]:
        known = tuple(models)
        return frozenset(pid for pid, name in self._names.items() if name and model_of(name, known) == model)

    def lost(self, engine_pid: int) -> tuple[str, ...]:
        """The lost instances; each is reported once. engine_pid: of the Triton that runs now."""
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
        """Children of all its threads. Not every kernel lists children by thread."""
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
        """Its letter; empty for a process that is no model's."""
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


class TritonControl(Protocol):
    """Triton's control calls: TritonBackend."""

    async def send(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        """Its answer. Raises InferenceError."""

    async def aclose(self) -> None:
        """Closes its connections."""


class InstanceReplacer:
    """Run it beside one Triton. A model whose processes keep dying is loaded after growing pauses.

    control: closed when it ends. engine_pid: None while Triton does not run. restart: restarts Triton; gets the reason.
    has_room: whether a model's processes may exist twice for a while. renewed: called when a model has new processes;
    `generations` counts how often.
    """

    def __init__(
        self,
        sight: InstanceMonitor,
        control: TritonControl,
        engine_pid: Callable[[], int | None],
        restart: Callable[[str], object],
        has_room: Callable[[str], bool] = lambda _: True,
        renewed: Callable[[], None] = lambda: None,
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
        """Kills the processes of a model that hangs or fails, and reloads it. Call it from the loop that runs this.

        Does nothing if the model's processes are newer than that generation. is_moved: another engine serves the model
        from now on, and this one was asked to unload it.
        """
        self._broken[model] = (reason, generation)
        if is_moved:
            self._moved.add(model)

    async def run(self) -> None:
        """Until cancelled."""
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
        """Kills the model's processes, which are then replaced as lost ones. A model without any is reloaded."""
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
        """Triton's JSON. Raises InferenceError, ValueError with its reason where it refuses."""
        call = HttpCall(method, path.encode(), ((b"content-type", b"application/json"),), body)
        answer = await self._control.send(call, deadline=time.monotonic() + CONTROL_TIMEOUT_S)
        if answer.status != 200:
            raise ValueError(f"{method} {path}: {answer.status} {answer.body[:200].decode(errors='replace')}")
        return json.loads(answer.body) if answer.body else {}
