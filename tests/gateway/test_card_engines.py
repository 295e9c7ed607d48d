"""An engine for each of several cards: what is chosen before the start, and one whose card is lost and comes back."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from penstock.engines.run_directory import claim_run_directory
from penstock.engines.triton.client import DiskLoads
from penstock.engines.triton.runtime import Launch, TritonRuntime
from penstock.engines.triton.supervisor import EngineState
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.gateway.stack import triton_engine
from penstock.gateway.stack.card_choice import show_cards, with_cards
from penstock.gateway.stack.mps import Machine, MpsRequest, plan_card_mps
from penstock.gateway.stack.stack import merged_generations
from penstock.gateway.stack.startup import CannotStart, EngineChoice, EnginePlan, resolve_ports
from penstock.gateway.stack.triton_engine import EngineHooks, StackEngine
from penstock.gpu.cards import Card, choose_cards
from penstock.gpu.mps.control import MpsUnavailable
from penstock.gpu.mps.limits import ModelClients
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading
from penstock.network import bind
from tests.engines.test_triton_process import FAKE, program
from tests.gpu.mps_programs import programs
from tests.support.waiting import until

TWO = NvmlReading(
    NvmlOutcome.ANSWERED,
    cuda=(13, 0),
    cards=tuple(GpuDevice(index, "H200", (9, 0), 16 << 30, 0, uuid=f"GPU-{index}") for index in range(2)),
)
TRITON = TritonRuntime(Path("/opt/tritonserver"))


def machine(folder: Path, reading: NvmlReading = TWO, **environ: str) -> Machine:
    """With these cards and NVIDIA's programs."""
    control = programs(folder / "bin") / "nvidia-cuda-mps-control"
    return Machine(reading, str(control), environ, os.geteuid())


def choice(home: Path, triton: TritonRuntime | None = TRITON, **said: object) -> EngineChoice:
    flags = {"home": home, "model_repository": (home / "models",), **said}
    return EngineChoice(read_settings(flags, environ={}), triton)


def write_config(home: Path, name: str, text: str, size_bytes: int = 0) -> None:
    folder = home / "models" / name / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(text)
    with (folder / "model.pt2").open("wb") as file:
        file.truncate(size_bytes)  # sparse


def test_two_cards_get_an_engine_each_and_models_that_fit_are_on_both(tmp_path: Path) -> None:
    """A model that names a card, or that is too large for both with the others, is on one."""
    write_config(tmp_path, "small", 'backend: "torch"', 1 << 20)
    write_config(tmp_path, "pinned", 'backend: "torch" instance_group [{ kind: KIND_GPU gpus: [1] }]', 1 << 20)
    write_config(tmp_path, "large", 'backend: "torch"', 5 << 30)
    write_config(tmp_path, "larger", 'backend: "torch"', 6 << 30)
    write_config(tmp_path, "cpu", 'backend: "onnxruntime"', 1 << 20)
    chosen = with_cards(choice(tmp_path), machine(tmp_path))
    assert [(plan.card.label if plan.card else "", plan.mps) for plan in chosen.engine_plans] == [
        ("GPU 0", None),
        ("GPU 1", None),
    ]
    assert chosen.homes.keys() == {"pinned", "large", "larger"}
    assert chosen.homes["pinned"] == ("GPU 1",)
    assert {chosen.homes["large"], chosen.homes["larger"]} == {("GPU 0",), ("GPU 1",)}


def test_one_card_and_none_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine with what CUDA shows; a chosen card is shown alone to every process."""
    for reading, visible in ((NvmlReading(NvmlOutcome.NO_DRIVER), {}), (TWO, {"CUDA_VISIBLE_DEVICES": "1"})):
        chosen = with_cards(choice(tmp_path), machine(tmp_path, reading, **visible))
        assert chosen.engine_plans == (EnginePlan(),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    show_cards(chosen)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    show_cards(with_cards(choice(tmp_path, gpus="1"), machine(tmp_path)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    ("said", "triton", "reason"),
    [
        ({"gpus": "5"}, TRITON, "gpus has '5', and this machine has the GPUs 0"),
        ({"gpus": "0", "engine": "http://h:1"}, None, "--engine is a URL"),
        ({"gpus": "0,1", "engine": "embedded"}, None, "the embedded engine uses one GPU"),
        ({"engine_http_port": 65533}, TRITON, "the last of 2 GPUs would listen on port 65536"),
    ],
)
def test_cards_that_the_engine_cannot_use_are_refused_with_the_fix(
    said: dict[str, object], triton: TritonRuntime | None, reason: str, tmp_path: Path
) -> None:
    """Before anything starts."""
    with pytest.raises(CannotStart, match=reason):
        with_cards(choice(tmp_path, triton, **said), machine(tmp_path))
    with pytest.raises(SettingsError, match="gpus"):
        read_settings({"gpus": "first"}, environ={})


@pytest.mark.parametrize(("said", "count"), [({"gpus": "all"}, 1), ({}, 0)])
def test_all_gpus_where_none_is_are_logged_if_they_were_demanded(
    said: dict[str, object], count: int, tmp_path: Path
) -> None:
    """The stack serves on the CPU then; without the setting that is nothing special."""
    with structlog.testing.capture_logs() as logs:
        chosen = with_cards(choice(tmp_path, **said), machine(tmp_path, NvmlReading(NvmlOutcome.NO_DRIVER)))
    assert chosen.cards == ()
    assert [row["event"] for row in logs] == ["gpus is all and no NVIDIA GPU is here: models run on the CPU"] * count


def test_ports_of_further_engines_are_three_higher_and_must_be_free(tmp_path: Path) -> None:
    """This also holds for ports that the stack chooses itself."""
    chosen = with_cards(
        choice(
            tmp_path, http_port=0, grpc_port=0, metrics_port=0, engine_http_port=0, engine_grpc_port=0, console="off"
        ),
        machine(tmp_path),
    )
    settings = resolve_ports(chosen.settings, len(chosen.engine_plans))
    http, grpc, _ = settings.engine_ports
    assert http
    assert grpc
    assert settings.engine_ports_of(1) == (http + 3, grpc + 3, None)
    with (
        bind("127.0.0.1", http + 3, flag=""),
        pytest.raises(CannotStart, match=f"127.0.0.1:{http + 3} .* with --engine-http-port"),
    ):
        resolve_ports(settings, 2)
    assert resolve_ports(settings).engine_http_port == http
    assert [plan.index for plan in chosen.engine_plans] == [0, 1]


def test_each_card_has_an_mps_daemon_for_its_clients_alone(tmp_path: Path) -> None:
    """With its own limit of clients and memory, in its own folder; instances of other cards do not count."""
    cards = choose_cards("all", TWO, None)
    wanted = [ModelClients("a", 30), ModelClients("b", 17, (1,)), ModelClients("c", 15)]
    request = MpsRequest(True, tmp_path / "mps", "auto", "0=4G,1=2G")
    plans = plan_card_mps(request, wanted, machine(tmp_path), cards, {"c": ("GPU 0",)})
    first, second = plans.values()
    assert (first.card, [card.index for card in first.reading.cards]) == ("GPU-0", [0])
    assert [(row.model, row.count) for row in first.wanted] == [("a", 30), ("c", 15)]
    assert (first.request.pinned_memory, second.request.pinned_memory) == ("4G", "2G")
    assert first.request.directory != second.request.directory
    with pytest.raises(MpsUnavailable, match="MPS clients on GPU 1"):
        plan_card_mps(request, wanted, machine(tmp_path), cards, {})


def test_config_that_names_a_card_is_loaded_by_the_engine_that_has_it(tmp_path: Path) -> None:
    """There it is card 0, and the only one; other configs are read from disk."""
    write_config(tmp_path, "pinned", 'backend: "torch" instance_group [{ count: 2 kind: KIND_GPU gpus: [1] }]')
    write_config(tmp_path, "free", 'backend: "torch" instance_group [{ count: 2 kind: KIND_GPU }]')
    loads = DiskLoads((tmp_path / "models",), tmp_path / "labels", has_one_card=True)
    assert "gpus" not in (config := loads.config_for("pinned", is_overridden=False))
    assert '"count": 2' in config
    assert loads.config_for("free", is_overridden=False) == ""


def test_processes_of_a_model_are_new_when_they_are_new_everywhere() -> None:
    """An engine without a count has none that is new."""
    assert merged_generations([{"m": 2}, {"m": 1, "n": 1}]) == {"m": 1, "n": 0}
    assert merged_generations([]) == {}


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of run directories: a short path, for MPS's sockets."""
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def quick_triton(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> TritonRuntime:
    """A fake Triton, started as a real one is."""
    launch = program(tmp_path, f"#!{sys.executable} -IS\n{FAKE}")

    class Fake(TritonRuntime):
        def prepare(self, run_dir: Path, environ: object = None) -> Launch:
            return replace(launch, folder=run_dir)

    monkeypatch.setattr("penstock.gpu.mps.supervisor.OWN_POLL_S", 0.05)
    monkeypatch.setattr("penstock.gateway.stack.startup.run_folders", lambda: runs)
    return Fake(Path(launch.argv[0]))


async def test_engine_of_a_lost_card_is_ended_and_started_when_it_is_back(
    quick_triton: TritonRuntime, runs: Path, tmp_path: Path
) -> None:
    """It and its card's MPS daemon see that card only; meanwhile it is not started, whatever asks for it."""
    card = Card("GPU-1", 1, "H200", 16 << 30)
    (plan,) = plan_card_mps(MpsRequest(True), [], machine(tmp_path), [card], {}).values()
    states: list[EngineState] = []
    hooks = EngineHooks(lambda: states.append(engine.status.state), pytest.fail, _serves)
    run_dir, _ = claim_run_directory(runs)
    engine = StackEngine(EnginePlan(card, plan), choice(tmp_path, quick_triton), run_dir, hooks)
    try:
        await engine.start_sharing()
        assert engine.sharing is not None
        daemon = int((engine.sharing.directory / "nvidia-cuda-mps-control.pid").read_text())
        assert _environ(daemon)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        engine.start(())
        await until(lambda: engine.status.state is EngineState.RUNNING)
        assert engine.status.pid is not None
        environ = _environ(engine.status.pid)
        assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        assert environ["CUDA_MPS_PIPE_DIRECTORY"] == engine.place.mps_directory == str(engine.sharing.directory)
        engine.note_card("GPU 1 is lost")
        await until(lambda: engine.status.state is EngineState.RESTARTING and engine.status.pid is None)
        assert engine.status.reason == "GPU 1 is lost"
        assert not engine.restart("a gateway asks for it")
        engine.note_card("")
        await until(lambda: engine.status.state is EngineState.RUNNING)
        assert engine.status.restarts == 1
    finally:
        await engine.stop_renewal()
        await engine.stop(is_hurried=False)
        await engine.aclose()
    assert not run_dir.path.exists()


async def test_engine_that_cannot_start_is_tried_again_beside_others(
    quick_triton: TritonRuntime, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack ends only if each of them failed."""
    monkeypatch.setattr(triton_engine, "RETRY_S", 0.01)
    monkeypatch.setattr("penstock.engines.triton.supervisor.MAX_FAILED_STARTS", 1)
    failed: list[str] = []
    hooks = EngineHooks(_note(failed, lambda: engine), pytest.fail, _serves)
    run_dir, _ = claim_run_directory(runs)
    engine = StackEngine(EnginePlan(Card("GPU-1", 1)), choice(tmp_path, quick_triton), run_dir, hooks)
    engine.start((tmp_path / "nowhere",))
    await until(lambda: len(failed) > 1)
    assert "is not a folder" in failed[0]
    engine.kill()
    await engine.stop_renewal()
    await engine.stop(is_hurried=True)
    await engine.aclose()


async def _serves() -> bool:
    return True


def _note(failed: list[str], engine: Callable[[], StackEngine]) -> Callable[[], None]:
    def note() -> None:
        if engine().status.state is EngineState.FAILED:
            failed.append(engine().status.reason)

    return note


def _environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
