"""A whole stack on two cards of a stand-in for NVML, with the real Triton twice: no request notices what changes."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.engines.onnx_models import plus, save, slow
from tests.gpu.mps_programs import programs
from tests.integration.living import family, write_quick_models
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
FAKE_NVML = Path(__file__).parents[1] / "gpu" / "fake_nvml"
X = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}
BACK_S = 60.0


@pytest.fixture(params=[1, 2])
def stack(
    request: pytest.FixtureRequest, tmp_path: Path, triton_environment: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    """With one process for the clients, and with workers; an MPS daemon for each card."""
    path = f"{programs(tmp_path_factory.mktemp('p'))}:{os.environ['PATH']}"
    environ = fake_cards(tmp_path, 1 << 36) | {"PATH": path}
    repository = write_quick_models(tmp_path / "models")
    config = repository / "identity" / "config.pbtxt"
    config.write_text(config.read_text().replace("kind: KIND_CPU", ""))  # it may use a GPU, so each card has it
    flags = ("--gpus", "0,1", "--mps", "on", "--workers", str(request.param), "--model-repository", str(repository))
    started = start_stack(tmp_path / "home", *flags, environ=environ)
    try:
        yield started
    finally:
        stop_stack(started)


def fake_cards(folder: Path, size_bytes: int) -> dict[str, str]:
    """The environment in which NVML shows two cards of that size."""
    state = folder / "nvml.json"
    state.write_text(json.dumps({"cards": [{"uuid": f"GPU-{index}", "total": size_bytes} for index in range(2)]}))
    return {"FAKE_NVML": str(state), "PYTHONPATH": str(FAKE_NVML)}


def by_card(stack: RunningStack, name: str) -> dict[str, psutil.Process]:
    """Processes of that name by what CUDA would show them."""
    found = [one for one in family(stack) if one.name().startswith(name)]
    return {one.environ().get("CUDA_VISIBLE_DEVICES", ""): one for one in found}


def slabs(stack: RunningStack) -> list[str]:
    """The gateway's memory in each engine."""
    maps = [map.path for one in by_card(stack, "tritonserver").values() for map in one.memory_maps()]
    return [path.split()[0] for path in maps if path.split()[0].endswith("_slab")]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + BACK_S
    while not is_so():
        assert time.monotonic() < end, "it did not come"
        threading.Event().wait(0.05)


def details(stack: RunningStack) -> list[str]:
    answer = call("GET", f"{stack.http_url}/v2/health/ready")
    assert answer.status == 200
    found: list[str] = answer.json.get("details", [])
    return found


def test_end_of_one_cards_engine_costs_no_request(stack: RunningStack) -> None:
    """The other's does its calls; it is named while it is away; then it reads the gateway's memory again."""
    tritons = by_card(stack, "tritonserver")
    assert set(tritons) == {"GPU-0", "GPU-1"}
    until(lambda: len(slabs(stack)) == 2)
    (slab,) = set(slabs(stack))
    (file,) = {triton.environ()["PENSTOCK_SLAB_FILE"] for triton in tritons.values()}  # by which models find pictures
    assert Path(file).read_text()
    with clients(stack, {"identity": X}) as outcomes:
        until(lambda: outcomes[200] > 100)
        tritons["GPU-1"].kill()
        until(lambda: details(stack) == ["the engine of GPU 1 does not answer; it is started again"])
        until(lambda: not details(stack))
    assert outcomes.keys() == {200}
    assert set(by_card(stack, "tritonserver")) == {"GPU-0", "GPU-1"}
    until(lambda: slabs(stack) == [slab, slab])
    report = call("GET", f"{stack.http_url}/v1/system").json["engine"]
    assert [(row["url"], row["state"]) for row in report["replicas"]] == [("GPU 0", "up"), ("GPU 1", "up")]
    assert report["restarts"] == 1
    assert report["placements"]["identity"].startswith("GPU 0, GPU 1: ")
    assert report["placements"]["slow"] == "GPU 0: it runs on the CPU, so one engine loads it"


def test_model_of_a_busy_card_is_copied_and_no_request_fails(tmp_path: Path, triton_environment: Path) -> None:
    """Each card has memory for two of three models. The idle model, which is on both, makes room on one."""
    repository = tmp_path / "models"
    config = 'backend: "onnxruntime"\nmax_batch_size: 8\n'
    save(slow(), repository, "hot", config=config)
    save(plus(1.0), repository, "idle", config=config)
    save(plus(2.0), repository, "other", config=config)
    flags = ("--gpus", "0,1", "--workers", "2", "--model-repository", str(repository), "--models", "hot,idle,other")
    stack = start_stack(tmp_path / "home", *flags, environ=fake_cards(tmp_path, 1300 << 20))
    try:
        placements = stack.logged("model is placed")
        assert [line for line in placements if "idle" in line and "GPU 0, GPU 1" in line], placements
        trips = {"inputs": [{"name": "trips", "shape": [1, 1], "datatype": "INT64", "data": [100]}]}
        x = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}]}
        with clients(stack, {"hot": trips, "idle": x}) as outcomes:
            stack.wait_for_log("hot .*GPU 0, GPU 1: GPU . is busy|GPU 0, GPU 1: GPU . is busy.*hot")
        report = call("GET", f"{stack.http_url}/v1/system").json["engine"]
    finally:
        stop_stack(stack)
    assert outcomes.keys() == {200}
    assert report["placements"]["hot"].startswith("GPU 0, GPU 1: GPU")
    assert "hot needs the memory of GPU" in report["placements"]["idle"]


@contextmanager
def clients(stack: RunningStack, bodies: dict[str, object]) -> Iterator[Counter[int]]:
    """Two clients for each model; their answers by status."""
    outcomes: Counter[int] = Counter()
    is_over = threading.Event()

    def client(model: str, body: object) -> None:
        while not is_over.is_set():
            outcomes[post_json(f"{stack.http_url}/v2/models/{model}/infer", body).status] += 1

    threads = [threading.Thread(target=client, args=pair) for pair in bodies.items() for _ in range(2)]
    for one in threads:
        one.start()
    try:
        yield outcomes
    finally:
        is_over.set()
        for one in threads:
            one.join()
