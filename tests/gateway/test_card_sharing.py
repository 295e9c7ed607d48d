"""MPS beside a Triton: what is decided before a start, and a fault's whole way with a stand-in for each program."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.engines.config_pbtxt import GpuInstances, gpu_instances
from penstock.engines.run_directory import ENGINE_ID_VARIABLE, claim_run_directory, reap
from penstock.engines.torch_serving.config import THREADS_VARIABLE
from penstock.engines.triton.runtime import TritonRuntime
from penstock.engines.triton.supervisor import EngineState, EngineStatus, TritonSupervisor
from penstock.gateway.settings import Settings
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.gateway.stack.mps import (
    Machine,
    MpsPlan,
    MpsRequest,
    MpsSharing,
    engine_observer,
    plan_mps,
    visible_cards,
)
from penstock.gateway.stack.stack import Stack as WholeStack
from penstock.gateway.stack.startup import CannotStart, EngineChoice, choose_mps, model_clients
from penstock.gpu.mps.control import MpsUnavailable
from penstock.gpu.mps.daemon import PLAN_FILE
from penstock.gpu.mps.limits import ModelClients
from penstock.gpu.mps.planner import plan_models
from penstock.gpu.mps.supervisor import EngineHandle, MpsState, processes_with_mark
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading
from tests.engines.supervision import Watcher, claimed_options, quick
from tests.engines.test_triton_process import FAKE, program
from tests.gpu.mps_programs import programs

H200 = NvmlReading(NvmlOutcome.ANSWERED, cuda=(13, 0), cards=(GpuDevice(0, "H200", (9, 0), 1 << 37, 0),))
P4 = NvmlReading(NvmlOutcome.ANSWERED, cuda=(12, 4), cards=(GpuDevice(0, "P4", (6, 1), 1 << 33, 0),))
MUST, MAY = MpsRequest(is_must=True), MpsRequest(is_must=False)


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """With an H200 and NVIDIA's programs."""
    folder = programs(tmp_path_factory.mktemp("mps") / "bin")
    return Machine(H200, str(folder / "nvidia-cuda-mps-control"), {}, os.geteuid())


def test_plan_on_a_usual_machine_is_a_daemon_of_our_own(machine: Machine) -> None:
    """Nothing is said of a directory: it gets one of its own."""
    wanted = (ModelClients("m", 47),)
    models = plan_models(wanted, 1, limit=0.0)
    assert plan_mps(MUST, wanted, machine) == MpsPlan(MUST, machine.program, False, 0.0, wanted, H200, models)


def test_plan_by_models_limits_each_by_itself(machine: Machine) -> None:
    """The daemon limits none; and whether a model fits beside itself, for a while."""
    wanted = [ModelClients("a", 6, max_rows=8, is_merged=True), ModelClients("b", 30, is_checked=True)]
    plan = plan_mps(replace(MUST, active_thread_percentage="auto"), wanted, machine)
    assert (plan.threads, [model.threads for model in plan.models]) == (0.0, [0.0, 12.0])
    assert plan.has_room_beside("a")
    assert not plan.has_room_beside("b")


def test_plan_with_the_pipes_of_an_external_daemon_takes_that(machine: Machine, tmp_path: Path) -> None:
    """Named in the environment it is waited for; by the setting it is his where he listens, else ours to start."""
    expected = replace(machine, environ={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert plan_mps(MUST, [], expected).is_foreign
    assert plan_mps(MUST, [], expected).request.directory == tmp_path
    said = plan_mps(replace(MUST, directory=tmp_path), [], expected)
    assert (said.is_foreign, said.request.directory) == (False, tmp_path)
    with pytest.raises(MpsUnavailable, match="was started by others, who set its clients' limits"):
        plan_mps(replace(MUST, pinned_memory="4G"), [], expected)
    (tmp_path / "control").touch()
    if os.geteuid() == 0:  # root serves every user
        os.chown(tmp_path / "control", 7, 7)
    with pytest.raises(MpsUnavailable, match="one user at a time"):
        plan_mps(MUST, [], replace(expected, uid=12345))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"reading": NvmlReading(NvmlOutcome.NO_LIBRARY)}, "this machine has none"),
        ({"program": ""}, "nvidia-cuda-mps-control is not on PATH"),
    ],
)
def test_machine_without_what_mps_needs_is_reported_in_one_sentence(
    machine: Machine, changed: dict[str, object], expected: str
) -> None:
    """A GPU, and the driver's programs."""
    with pytest.raises(MpsUnavailable, match=expected):
        plan_mps(MUST, [], replace(machine, **changed))  # type: ignore[arg-type]


def test_more_instances_than_clients_are_refused_before_anything_starts(machine: Machine) -> None:
    """48 of them and Triton's own context are 49."""
    with pytest.raises(MpsUnavailable, match="more than the 48"):
        plan_mps(MUST, [ModelClients("m", 48)], machine)


def test_card_before_volta_is_shared_only_where_it_must_be_and_without_limits(machine: Machine) -> None:
    """There is no isolation: `auto` does without, `on` takes it so, a limit is refused."""
    old = replace(machine, reading=P4)
    with pytest.raises(MpsUnavailable, match="older than Volta"):
        plan_mps(MAY, [], old)
    assert not plan_mps(MUST, [], old).is_foreign
    with pytest.raises(MpsUnavailable, match="leave out --mps-active-thread-percentage"):
        plan_mps(replace(MUST, active_thread_percentage=50), [], old)


def test_cards_that_cuda_is_not_shown_are_not_counted(machine: Machine) -> None:
    """A card from before Volta beside one after is no trouble where only one of them is named."""
    both = msgspec.structs.replace(H200, cards=(P4.cards[0], msgspec.structs.replace(H200.cards[0], index=1)))
    with pytest.raises(MpsUnavailable, match="not both"):
        plan_mps(MUST, [], replace(machine, reading=both))
    shown = replace(machine, reading=both, environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert plan_mps(MUST, [ModelClients("m", 47, (0,))], shown).reading.cards[0].name == "H200"
    assert visible_cards(both, {"CUDA_VISIBLE_DEVICES": "MIG-7"}) is both
    assert visible_cards(both, {"CUDA_VISIBLE_DEVICES": ""}).cards == ()


def settings(mps: str, engine: str = "auto", **more: object) -> Settings:
    return read_settings({"mps": mps, "engine": engine, **more}, environ={})


def test_clients_of_a_model_are_described_by_its_config_and_the_settings(tmp_path: Path) -> None:
    """Its largest batch, who forms it, whether it checks its answers, its own limit; bad options count as none."""
    folder = tmp_path / "m"
    folder.mkdir()
    tensors = (
        "input [{ name: 'x' data_type: TYPE_FP32 dims: [3] }] output [{ name: 'y' data_type: TYPE_FP32 dims: [1] }]"
    )
    text = f"backend: 'torch' max_batch_size: 8 {tensors} instance_group [{{ count: 3 kind: KIND_GPU }}]"

    def of(more: str = "", **batching: str) -> list[ModelClients]:
        (folder / "config.pbtxt").write_text(text + more)
        chosen = {"m": batching} if batching else {}
        return model_clients(settings("on", "triton", model_repository=[str(tmp_path)], batching=chosen))

    def parameter(name: str, value: str) -> str:
        return f" parameters {{ key: '{name}' value {{ string_value: '{value}' }} }}"

    assert of() == [ModelClients("m", 3, max_rows=8, is_checked=True)]
    merged = ModelClients("m", 3, max_rows=8, is_merged=True, is_checked=True)
    assert of(" dynamic_batching { }") == [merged]
    assert of(batch_owner="gateway", max_batch_size="4") == [replace(merged, max_rows=4)]
    assert of(parameter("check-answers", "0") + parameter("active-thread-percentage", "25")) == [
        ModelClients("m", 3, max_rows=8, threads=25)
    ]
    for wrong in ("9" * 5000, "\u0663", "101", "0", "half"):  # the model is refused when it is loaded
        assert of(parameter("active-thread-percentage", wrong)) == of()
    assert of(parameter("program-process", "shared")) == [ModelClients("m", 1, max_rows=8, is_checked=True)]
    assert of(parameter("batch_owner", "everyone")) == [ModelClients("m", 3)]


def test_sharing_where_no_triton_is_started_is_refused_or_left_out() -> None:
    """`on` is a promise; `auto` takes what there is; the settings then say what is so."""
    with pytest.raises(CannotStart, match="no Triton is started here"):
        choose_mps(EngineChoice(settings("on")))
    chosen = choose_mps(EngineChoice(settings("auto")))
    assert (chosen.settings.mps, chosen.mps) == ("off", None)
    assert choose_mps(EngineChoice(settings("off"))).mps is None


@pytest.mark.parametrize("limit", [{"mps_active_thread_percentage": 50}, {"mps_pinned_memory": "4G"}])
def test_limits_of_clients_without_mps_are_refused(limit: dict[str, object]) -> None:
    """Limits without effect are rejected."""
    with pytest.raises(CannotStart, match="and --mps is off: say --mps on, or auto, or leave them out"):
        choose_mps(EngineChoice(settings("off", **limit)))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"mps": "on", "engine": "embedded"}, "leave it out, or use --engine triton"),
        ({"mps": "on", "engine": "http://h:1"}, "CUDA_MPS_PIPE_DIRECTORY"),
        ({"mps": "perhaps"}, "'off', 'on' or 'auto'"),
        ({"mps_pinned_memory": "much"}, "has 'much'; use 4G"),
        ({"mps_active_thread_percentage": 101}, "it takes a percentage up to 100"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_fix(flags: dict[str, object], expected: str) -> None:
    """At start, not when the daemon refuses them."""
    with pytest.raises(SettingsError) as caught:
        read_settings(flags, environ={})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('backend: "torch" instance_group [{ count: 8 kind: KIND_GPU }]', (GpuInstances(8),)),
        ('backend: "torch"', (GpuInstances(1),)),
        ('backend: "torch" instance_group [{ count: 2 kind: KIND_GPU gpus: [0, 1] }, { kind: KIND_CPU }]',
         (GpuInstances(2, (0, 1)),)),
        ('backend: "python"', ()),
        ('backend: "python" instance_group [{ count: 3 kind: KIND_GPU }]', (GpuInstances(3),)),
        ('backend: "onnxruntime" instance_group [{ count: 3 kind: KIND_GPU }]', ()),
        ("backend: [", ()),
    ],
)  # fmt: skip
def test_processes_of_a_model_are_counted_by_its_config(
    text: str, found: tuple[GpuInstances, ...], tmp_path: Path
) -> None:
    """Of backends that run each instance in a process of its own, on the cards that it names, or on all."""
    (tmp_path / "config.pbtxt").write_text(text)
    assert gpu_instances(tmp_path / "config.pbtxt") == found
    assert gpu_instances(tmp_path / "none") == ()


@pytest.mark.parametrize("is_must", [True, False])
async def test_stack_whose_daemon_does_not_start_ends_or_tells_its_gateway_that_it_does_without(
    is_must: bool, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is no daemon that is down, which would be an alert for ever; no folder of it is left either way."""
    runs, seen = Path(machine.program).parents[1] / "runs", []

    def engine_is_next(expected: Settings) -> tuple[Path, ...]:
        read = [json.loads(file.read_text())["mps"] for file in runs.glob("run-*/settings.json")]
        seen.append((expected.mps, read, len(list(runs.glob("run-*")))))
        raise CannotStart("that was all")

    monkeypatch.setenv("FAKE_MPS_SICK", "dead")
    monkeypatch.setattr("penstock.gateway.stack.startup.run_folders", lambda: runs)
    monkeypatch.setattr("penstock.gateway.stack.stack.check_repositories", engine_is_next)
    plan = plan_mps(replace(MAY, is_must=is_must), [], machine)
    choice = EngineChoice(settings("on", workers=1), TritonRuntime(tmp_path / "tritonserver"), plan)
    with pytest.raises(CannotStart, match="ended at once" if is_must else "that was all"):
        await WholeStack(choice, announce=pytest.fail).run()
    assert seen == ([] if is_must else [("off", ["off"], 1)])
    assert list(runs.glob("run-*")) == []


class Stack:
    """A fake Triton under a real supervisor, MPS beside it; the stub that the fake starts is the client."""

    def __init__(self) -> None:
        self.watcher = Watcher()
        self.engine: TritonSupervisor | None = None
        self.sharing: MpsSharing | None = None
        self.message: list[MpsState] = []
        self.refused: list[str] = []
        self.engine_id = ""

    def status(self) -> EngineStatus | None:
        return self.engine.status if self.engine is not None else None

    def end(self, reason: str, is_lost: bool) -> bool:
        return self.engine is not None and self.engine.restart(reason, is_lost=is_lost)

    async def serves(self) -> bool:
        return True

    @property
    def pipes(self) -> Path:
        assert self.sharing is not None
        return self.sharing.directory

    def attach(self) -> None:
        """Every process of the engine is a client from now on."""
        pids = processes_with_mark(f"{ENGINE_ID_VARIABLE}={self.engine_id}")
        (self.pipes / "clients").write_text("\n".join(map(str, pids)))

    async def until(self, is_so: Callable[[MpsState], bool]) -> MpsState:
        async with asyncio.timeout(60):
            while not (self.message and is_so(self.message[-1])):
                await asyncio.sleep(0.01)
        return self.message[-1]


@pytest.fixture
async def stack(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """All at work; afterwards nothing of it is left."""
    monkeypatch.setattr("penstock.gpu.mps.supervisor.OWN_POLL_S", 0.05)
    runs = machine.program.rpartition("/bin/")[0]
    one = Stack()
    crowd = ModelClients("crowd", 9, is_checked=True)
    plan = replace(plan_mps(MUST, [], machine), models=plan_models([crowd], 1, limit=None))
    with claimed_options(tmp_path) as (run_dir, options):
        one.engine_id = run_dir.engine_id
        one.sharing = MpsSharing(plan, lambda: claim_run_directory(Path(runs, "runs"))[0])
        eyes = engine_observer(one.engine_id, one.status, one.serves)
        await one.sharing.start(EngineHandle(eyes, one.end, one.refused.append, one.message.append))
        launch = one.sharing.shared(program(tmp_path, f"#!{sys.executable} -IS\n{FAKE}"))
        one.engine = TritonSupervisor(
            launch, options, emit=one.watcher.emit, on_status=one.watcher.on_status, backoff=quick(),
            before_start=one.sharing.until_clients_may_start,
        )  # fmt: skip
        task = asyncio.create_task(one.engine.run())
        await one.watcher.until(EngineState.RUNNING)
        yield one
        await one.engine.stop(5.0)
        await task
        await one.sharing.aclose()
        reap(one.engine_id)


async def test_models_find_their_limits_and_status_the_plan(stack: Stack) -> None:
    """Triton's models inherit the limits; a line about each stands beside the pipes, also after a new daemon."""
    pids = processes_with_mark(f"{ENGINE_ID_VARIABLE}={stack.engine_id}")
    assert pids
    assert pids == processes_with_mark(f"{THREADS_VARIABLE}=crowd=12")
    line = "crowd: 9 processes, 12 % of the threads each: 9 processes with single rows share the GPU\n"
    assert (stack.pipes / PLAN_FILE).read_text() == line
    assert stack.sharing is not None
    await stack.sharing._daemon.stop()
    assert (stack.pipes / PLAN_FILE).read_text() == line


async def test_fault_of_a_client_restarts_all_once_the_server_takes_them_again(stack: Stack) -> None:
    """Seen, all ended, waited for, started, counted and timed; nothing is left of daemon and engine at the end."""
    stack.attach()
    assert (await stack.until(lambda message: message.clients >= 1)).is_up
    (stack.pipes / "state").write_text("FAULT")
    down = await stack.watcher.until(EngineState.RESTARTING)
    assert "FAULT" in down.reason
    back = await stack.watcher.until(EngineState.RUNNING)
    assert back.restarts == 1
    message = await stack.until(lambda message: message.recovery_s > 0)
    assert (message.restarts, message.is_up, stack.refused) == (1, True, [])


async def test_daemon_that_dies_is_started_anew_before_its_clients(stack: Stack) -> None:
    """They find the new one; what the old one left behind is gone."""
    stack.attach()
    await stack.until(lambda message: message.clients >= 1)
    old = int((stack.pipes / "nvidia-cuda-mps-control.pid").read_text())
    os.kill(old, 9)
    await stack.watcher.until(EngineState.RUNNING)
    assert int((stack.pipes / "nvidia-cuda-mps-control.pid").read_text()) != old
    assert (await stack.until(lambda message: message.recovery_s > 0)).restarts == 1
