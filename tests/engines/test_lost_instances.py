"""A model's process that dies under a living Triton is noticed once, and its model loaded anew beside the others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton import instances as lost_instances
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.engines.triton.instances import RENEWAL_PARAMETER, InstanceMonitor, InstanceReplacer, model_of
from penstock.protocol.call import HttpAnswer, HttpCall

TRITON = 50


@pytest.mark.parametrize(
    ("instance", "model"),
    [("a_0_3", "a"), ("a_0_0_1", "a_0"), ("a_b_1_0", "a_b"), ("a_group_1", "a"), ("other_0_0", ""), ("a", "")],
)
def test_model_of_an_instance_is_found_by_its_name(instance: str, model: str) -> None:
    """Groups have numbers unless the config names them; a model's name may look like another's instance."""
    assert model_of(instance, ["a", "a_0", "a_b"]) == model


class FalseProc:
    """A /proc with one Triton of two threads, and its children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for thread in ("50", "51"):
            (folder / "50" / "task" / thread).mkdir(parents=True)
            (folder / "50" / "task" / thread / "children").touch()

    def child(self, pid: int, state: str, *, thread: str = "51", name: str = "triton_python_b") -> None:
        (self.folder / str(pid)).mkdir(exist_ok=True)
        (self.folder / str(pid) / "stat").write_text(f"{pid} ({name}) {state} 50 50")
        children = self.folder / "50" / "task" / thread / "children"
        children.write_text(" ".join({*children.read_text().split(), str(pid)}))


@pytest.fixture
def proc(tmp_path: Path) -> FalseProc:
    return FalseProc(tmp_path)


def sight(proc: FalseProc) -> InstanceMonitor:
    """Process 60 is instance m_0_60, and so on; a dead one has no name."""

    def name_of(pid: int) -> str:
        state = (proc.folder / str(pid) / "stat").read_text().split()[2]
        return "unknown" if state == "Z" else f"m_0_{pid}"

    return InstanceMonitor(name_of, proc.folder)


def test_instance_that_dies_is_reported_once_by_its_name(proc: FalseProc) -> None:
    """After two looks, for one that Triton ends is a zombie for a moment, too; whichever thread made it."""
    eyes = sight(proc)
    proc.child(60, "S")
    proc.child(61, "S", thread="50")
    assert [eyes.lost(TRITON), eyes.lost(TRITON)] == [(), ()]
    proc.child(60, "Z")
    proc.child(61, "Z")
    assert [eyes.lost(TRITON) for _ in range(3)] == [(), ("m_0_60", "m_0_61"), ()]


def test_instance_that_dies_is_seen_where_the_kernel_lists_no_children(proc: FalseProc) -> None:
    """Then every process is asked for its parent; those of another Triton are not ours."""
    eyes = sight(proc)
    for pid, parent in ((60, 50), (61, 49)):
        proc.child(pid, "S")
        (proc.folder / str(pid) / "stat").write_text(f"{pid} (triton_python_b) S {parent} 50")
    for thread in ("50", "51"):
        (proc.folder / "50" / "task" / thread / "children").unlink()
    eyes.lost(TRITON)
    for pid, parent in ((60, 50), (61, 49)):
        (proc.folder / str(pid) / "stat").write_text(f"{pid} (triton_python_b) Z {parent} 50")
    assert [eyes.lost(TRITON) for _ in range(3)] == [(), ("m_0_60",), ()]


def test_instance_that_dies_is_seen_while_a_thread_of_tritons_ends(
    proc: FalseProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a thread the kernel tells "No such process", also once its file is open: then every process is asked."""
    eyes = sight(proc)
    proc.child(60, "S")
    eyes.lost(TRITON)
    proc.child(60, "Z")
    assert eyes.lost(TRITON) == ()
    read = lost_instances._read

    def ended(path: str) -> bytes:
        if path.endswith("/children"):
            raise ProcessLookupError
        return read(path)

    monkeypatch.setattr(lost_instances, "_read", ended)
    assert eyes.lost(TRITON) == ("m_0_60",)


def test_processes_that_are_no_models_and_a_triton_that_is_gone_are_nothing(proc: FalseProc) -> None:
    """A child of another name; no such process."""
    eyes = sight(proc)
    proc.child(60, "S", name="sh")
    eyes.lost(TRITON)
    proc.child(60, "Z", name="sh")
    assert [eyes.lost(TRITON) for _ in range(3)] == [(), (), ()]
    assert eyes.lost(99) == ()


def test_processes_that_are_retired_are_no_loss_and_are_ended_if_they_stay(proc: FalseProc) -> None:
    """Those of the one model that live; who has ended, and a process of another parent by then, is left alone."""
    killed: list[int] = []
    names = {60: "m_0_0", 61: "m_0_1", 62: "other_0_0", 63: "m_0_2"}
    eyes = InstanceMonitor(names.__getitem__, proc.folder, killed.append)
    for pid in names:
        proc.child(pid, "S")
    eyes.lost(TRITON)
    old = eyes.retire("m", ["m", "other"])
    assert old == {60, 61, 63}
    proc.child(60, "Z")
    proc.child(63, "S", name="sh")
    assert [eyes.lost(TRITON) for _ in range(3)] == [(), (), ()]
    assert eyes.end(TRITON, old) == (61,)
    assert killed == [61]
    proc.child(62, "Z")
    assert [eyes.lost(TRITON) for _ in range(3)] == [(), ("other_0_0",), ()]


def test_processes_that_a_signal_stopped_are_killed(proc: FalseProc) -> None:
    """They are killed at the first check: Triton aborts if such a process continues after more than a second."""
    killed: list[int] = []
    eyes = InstanceMonitor(lambda pid: f"m_0_{pid}", proc.folder, killed.append)
    for pid, state in ((60, "S"), (61, "T"), (62, "Z"), (63, "R")):
        proc.child(pid, state)
    proc.child(64, "T", name="sh")
    eyes.lost(TRITON)
    assert eyes.end_stopped(TRITON) == (61,)
    assert killed == [61]


def test_process_that_ended_before_it_is_killed_is_left_alone(proc: FalseProc) -> None:
    """Its PID may belong to another process by then."""
    eyes = InstanceMonitor(lambda pid: f"m_0_{pid}", proc.folder, lambda _: None)
    proc.child(60, "T")
    eyes.lost(TRITON)
    proc.child(60, "S", name="sh")
    assert eyes.end_stopped(TRITON) == ()


def test_look_reads_each_file_of_proc_once(proc: FalseProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has 200 threads with a file each: reading each three times per check took 4 % of a core."""
    eyes = sight(proc)
    for pid in (60, 61):
        proc.child(pid, "S")
    paths: list[str] = []
    read = lost_instances._read

    def noted(path: str) -> bytes:
        paths.append(path)
        return read(path)

    monkeypatch.setattr(lost_instances, "_read", noted)
    eyes.lost(TRITON)
    eyes.end_stopped(TRITON)
    assert sorted(paths) == sorted(
        f"{proc.folder}/{name}" for name in ("50/task/50/children", "50/task/51/children", "60/stat", "61/stat")
    )


class FalseTriton:
    """Its repository API. refuses: loads."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.refuses = False
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(size)
                path = head.split()[1]
                self.asked.append((path, json.loads(body or b"{}")))
                status, answer = self._answer(path)
                text = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
        writer.close()

    def _answer(self, path: str) -> tuple[int, Any]:
        if path.endswith("index"):
            states = {"m": "READY", "n": "UNAVAILABLE", "m_big": "UNAVAILABLE"}
            return 200, [{"name": name, "state": state} for name, state in states.items()]
        if path.endswith("config"):
            return 200, {"name": "m", "parameters": {"a": {"string_value": "b"}}}
        return (400, {"error": "no memory"}) if self.refuses else (200, {})


@pytest.fixture
async def triton() -> AsyncIterator[FalseTriton]:
    one = FalseTriton()
    server = await asyncio.start_server(one.answer, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield one
    server.close()
    await asyncio.sleep(0.01)  # for its connections to see that the other end has gone


class OverHttp:
    """All of it by HTTP, which a false Triton is asked by."""

    def __init__(self, url: str) -> None:
        self._http = TritonHttpClient(parse_engine_url(url), max_connections=1, timeouts=CallTimeouts())

    async def send(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        return await self._http.relay(call, deadline=deadline)

    async def aclose(self) -> None:
        await self._http.aclose()


class ScriptedSight(InstanceMonitor):
    """Says what it is given, look by look."""

    def __init__(self, *looks: tuple[str, ...]) -> None:
        super().__init__(str)
        self._looks, self.count = list(looks), 0
        self.ended: list[frozenset[int]] = []
        self.processes: frozenset[int] = frozenset()

    def retire(self, model: str, models: Iterable[str]) -> frozenset[int]:
        assert (model, set(models)) == ("m", {"m", "n", "m_big"})
        return frozenset({60, 61})

    def of_model(self, model: str, models: Iterable[str]) -> frozenset[int]:
        assert (model, set(models)) == ("m", {"m", "n", "m_big"})
        return self.processes

    def end(self, engine_pid: int, retired: Iterable[int]) -> tuple[int, ...]:
        self.ended.append(frozenset(retired))
        return tuple(retired)

    def end_stopped(self, engine_pid: int) -> tuple[int, ...]:
        return ()

    def lost(self, engine_pid: int) -> tuple[str, ...]:
        self.count += 1
        return self._looks.pop(0) if self._looks else ()


async def renewed(
    eyes: InstanceMonitor,
    triton: FalseTriton,
    *,
    until: str,
    has_room: bool = True,
    broken: str = "",
    is_moved: bool = False,
) -> list[str]:
    """Why Triton was restarted, if it was. until: the path that ends it, or restart. broken: a model to restart."""
    restarts: list[str] = []
    renewal = InstanceReplacer(
        eyes, OverHttp(triton.url), engine_pid=lambda: TRITON, restart=restarts.append, has_room=lambda _: has_room
    )
    if broken:
        renewal.restart_model(broken, "it answered nothing for 30 s", is_moved=is_moved)
    task = asyncio.create_task(renewal.run())
    async with asyncio.timeout(60):
        while not (restarts if until == "restart" else any(until in path for path, _ in triton.asked)):
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait({task})
    return restarts


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_instances, "LOOK_S", 0.001)


async def test_model_of_lost_instances_is_loaded_once_more_with_its_own_config(triton: FalseTriton) -> None:
    """Two of one model at once are one load; a parameter more makes it a new one to Triton."""
    assert await renewed(ScriptedSight(("m_0_1", "m_0_2")), triton, until="/load") == []
    loads = [body for path, body in triton.asked if path.endswith("/load")]
    assert len(loads) == 1
    config = json.loads(loads[0]["parameters"]["config"])
    assert config["parameters"] == {"a": {"string_value": "b"}, RENEWAL_PARAMETER: {"string_value": "1"}}


@pytest.mark.parametrize(("old_goes_s", "ended"), [(0.0, [{60, 61}]), (60.0, [])])
async def test_old_processes_are_ended_when_their_time_is_over(
    triton: FalseTriton, monkeypatch: pytest.MonkeyPatch, old_goes_s: float, ended: list[set[int]]
) -> None:
    """Triton waits for ever for those of a load of which one died with requests in hand; once, and not before."""
    monkeypatch.setattr(lost_instances, "OLD_GOES_S", old_goes_s)
    eyes = ScriptedSight(("m_0_1",))
    await renewed(eyes, triton, until="/load")
    assert eyes.ended == ended


@pytest.mark.parametrize("instance", ["n_0_1", "m_big_0_0", "unknown"])
async def test_instance_of_a_model_that_is_not_loaded_any_more_is_left(triton: FalseTriton, instance: str) -> None:
    """It was unloaded meanwhile; nor is it taken for one of a model whose name begins its own."""
    assert await renewed(ScriptedSight((instance,)), triton, until="index") == []
    assert not any(path.endswith("/load") for path, _ in triton.asked)


@pytest.mark.parametrize("is_known", [True, False])
async def test_model_that_has_no_room_beside_itself_has_triton_restarted(triton: FalseTriton, is_known: bool) -> None:
    """As where MPS takes no more clients, which is known before, or the card has no memory left, which Triton says."""
    triton.refuses = True
    (reason,) = await renewed(ScriptedSight(("m_0_1",)), triton, until="restart", has_room=not is_known)
    assert "m_0_1" in reason
    assert any(path.endswith("/load") for path, _ in triton.asked) is not is_known


def test_processes_of_a_model_are_those_that_live_and_are_not_retired(proc: FalseProc) -> None:
    """Processes of a model whose name only begins with its name are not included."""
    names = {60: "m_0_0", 61: "m_0_1", 62: "m_big_0_0"}
    eyes = InstanceMonitor(names.__getitem__, proc.folder)
    for pid in names:
        proc.child(pid, "T")
    eyes.lost(TRITON)
    assert eyes.of_model("m", ["m", "m_big"]) == {60, 61}
    eyes.retire("m", ["m", "m_big"])
    assert eyes.of_model("m", ["m", "m_big"]) == frozenset()


async def test_model_that_hangs_has_its_processes_killed_and_no_others(triton: FalseTriton) -> None:
    """They are replaced like processes that died; Triton and its other models continue."""
    eyes = ScriptedSight()
    eyes.processes = frozenset({60, 61})
    assert await renewed(eyes, triton, until="index", broken="m") == []
    assert eyes.ended == [{60, 61}]
    assert not any(path.endswith("/load") for path, _ in triton.asked)


async def test_model_that_hangs_in_tritons_own_process_is_loaded_anew_beside_itself(triton: FalseTriton) -> None:
    """A C++ backend has no processes: new instances get the calls, and the old ones are abandoned."""
    assert await renewed(ScriptedSight(), triton, until="/load", broken="m") == []
    assert [path for path, _ in triton.asked if path.endswith("/load")] == ["/v2/repository/models/m/load"]


async def test_model_that_another_engine_serves_is_not_loaded_again(triton: FalseTriton) -> None:
    """It is neither reloaded while it hangs nor to replace processes that died."""
    assert await renewed(ScriptedSight(), triton, until="index", broken="m", is_moved=True) == []
    assert await renewed(ScriptedSight(("m_0_1",)), triton, until="index", broken="m", is_moved=True) == []
    assert not any(path.endswith("/load") for path, _ in triton.asked)


async def test_model_that_hangs_and_cannot_be_loaded_again_has_triton_restarted(triton: FalseTriton) -> None:
    """Triton is restarted with the model's reason."""
    triton.refuses = True
    (reason,) = await renewed(ScriptedSight(), triton, until="restart", broken="m")
    assert reason == "model m cannot be loaded again: it answered nothing for 30 s"


async def test_restart_that_means_an_earlier_process_is_not_done(triton: FalseTriton) -> None:
    """A restart requested while the new process loads is dropped; one that means the new process is executed."""
    eyes, message = ScriptedSight(("m_0_1",)), asyncio.Event()
    eyes.processes = frozenset({60, 61})
    renewal = InstanceReplacer(eyes, OverHttp(triton.url), lambda: TRITON, [].append, renewed=message.set)
    task = asyncio.create_task(renewal.run())
    async with asyncio.timeout(60):
        await message.wait()
        assert renewal.generations == {"m": 1}
        renewal.restart_model("m", "it answered nothing for 30 s", 0)
        looks = eyes.count
        while eyes.count < looks + 3:
            await asyncio.sleep(0.005)
        assert eyes.ended == []
        renewal.restart_model("m", "it answered nothing for 30 s", 1)
        while not eyes.ended:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait({task})
