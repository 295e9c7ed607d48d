"""On a real GPU: ONNX models in ort_serving's CUDA session, against FP32 on the CPU, and how fast they are.

Needs onnxruntime-gpu (make gpu). Models of ../shared/models; a test whose model is absent skips.
"""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as grpc_client

from loadtest.bench.gpu.stretch import CudaRegions, noise_of
from loadtest.bench.gpu.tritons import Face, TensorFace
from penstock.engines.ort_serving.answers import difference
from penstock.engines.ort_serving.config import Signature, complete
from penstock.engines.ort_serving.cudart import CudaRuntime
from penstock.engines.ort_serving.opening import Opened, Placement, open_model
from penstock.engines.ort_serving.placement import EngineFacts, read_facts
from penstock.engines.ort_serving.session import OrtModel
from penstock.engines.triton.runtime import TritonUnavailable, find_triton
from tests.engines import onnx_models
from tests.engines.triton_of_onnx_models import RunningTriton, running_triton
from tests.support.waiting import until
from tests.test_architecture import CHECKOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MODELS = CHECKOUT.parent / "shared" / "models"
YOLOX, FASTEST = "yolox_nano_free_batch", "FastestDet"
ROWS = 16
LIMITS = {"fp32": 0.002, "tf32": 0.06, "fp16": 0.06}  # of a channel's largest value; YOLOX in TF32: 0.038

Open = Callable[..., tuple[Opened, OrtModel]]


@pytest.fixture
def open_on() -> Open:
    """Opens a file on the GPU or the CPU; its sessions are closed by their threads."""
    if not hasattr(ort, "preload_dlls") or "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu (make gpu)")
    return open_file


def open_file(path: Path, kind: str, *, max_batch_size: int = 0, **parameters: str) -> tuple[Opened, OrtModel]:
    """The opened model. parameters: of config.pbtxt, with _ for -."""
    if not path.is_file():
        pytest.skip(f"needs {path}")
    values = {key.replace("_", "-"): {"string_value": value} for key, value in parameters.items()}
    values |= {"network-type": {"string_value": "0"}, "net-scale-factor": {"string_value": "1"}}
    config: dict[str, Any] = {"name": path.stem, "max_batch_size": max_batch_size, "parameters": values}

    def completed(signature: Signature) -> dict[str, Any]:
        complete(config, signature)
        return config

    def new_options() -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        return options

    opened = open_model(path, Placement(kind), new_options, completed)
    return opened, OrtModel(opened.session, opened.signature, opened.config)


def outputs_of(model: tuple[Opened, OrtModel], feed: dict[str, Any]) -> dict[str, Any]:
    """All outputs by name."""
    opened, runner = model
    names = [spec.name for spec in opened.signature.outputs]
    return dict(zip(names, runner.run(names, feed), strict=True))


def pictures(count: int, side: int, seed: int = 0) -> Any:
    """Blocks of colour, with values of 0 to 255."""
    coarse = np.random.default_rng(seed).random((count, 3, side // 16, side // 16), np.float32) * 255
    return np.ascontiguousarray(coarse.repeat(16, axis=2).repeat(16, axis=3))


@pytest.mark.parametrize("precision", LIMITS)
def test_graph_of_every_batch_size_gives_the_cpus_outputs(open_on: Open, precision: str) -> None:
    """All batch sizes up to 16, of which 1, 2, 4, 8 and 16 have a graph; FP32 stays FP32."""
    path = MODELS / f"{YOLOX}.onnx"
    on_gpu = open_on(path, "GPU", max_batch_size=ROWS, precision=precision)
    facts = on_gpu[0].facts
    assert (facts.device, facts.precision, facts.graph_batch_sizes) == ("cuda:0", precision, (1, 2, 4, 8, 16)), facts
    on_cpu = open_on(path, "CPU", max_batch_size=ROWS)
    x = pictures(ROWS, 416)
    expected = outputs_of(on_cpu, {"images": x})["output"]
    worst = 0.0
    for count in range(1, ROWS + 1):
        found = outputs_of(on_gpu, {"images": x[:count]})
        worst = max(worst, difference({"output": expected[:count]}, found)[0])
    sys.stdout.write(f"{YOLOX} {precision}: largest difference {worst:.2e}\n")
    assert worst <= LIMITS[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_graph_gives_the_outputs_of_runs_without_a_graph(open_on: Open, precision: str) -> None:
    """A model of one fixed row: 20 pictures by the graph, and the same without."""
    path = MODELS / f"{FASTEST}.onnx"
    by_graph = open_on(path, "GPU", precision=precision)
    without = open_on(path, "GPU", precision=precision, cuda_graphs="0")
    assert (by_graph[0].facts.graph_batch_sizes, without[0].facts.graph_batch_sizes) == ((1,), ())
    on_cpu = open_on(path, "CPU")
    worst = [0.0, 0.0]
    for seed in range(20):
        feed = {"input.1": pictures(1, 352, seed) / 255}
        found, plain, expected = (outputs_of(model, feed) for model in (by_graph, without, on_cpu))
        worst = [max(worst[0], difference(plain, found)[0]), max(worst[1], difference(expected, found)[0])]
    sys.stdout.write(f"{FASTEST} {precision}: by graph, without {worst[0]:.2e}, from the CPU {worst[1]:.2e}\n")
    assert worst[0] <= LIMITS[precision] / 2
    assert worst[1] <= LIMITS[precision]


def test_model_with_control_flow_or_on_the_cpu_runs_without_a_graph(open_on: Open, tmp_path: Path) -> None:
    """A Loop cannot be captured: the model is served on the GPU, and the facts say why there is no graph."""
    onnx_models.save(onnx_models.slow(), tmp_path, "slow")
    opened, model = open_on(tmp_path / "slow" / "1" / "model.onnx", "GPU", max_batch_size=4)
    assert (opened.facts.device, opened.facts.graph_batch_sizes) == ("cuda:0", ())
    assert "no CUDA graph" in opened.facts.fallbacks[0], opened.facts
    assert model.run(["done"], {"trips": np.array([[2], [1]], np.int64)})[0].tolist() == [[2], [1]]


def test_two_models_and_threads_share_the_gpu(open_on: Open) -> None:
    """Runs of two sessions from four threads, while a third is opened, all give the CPU's outputs."""
    from concurrent.futures import ThreadPoolExecutor

    first = open_on(MODELS / f"{FASTEST}.onnx", "GPU")
    second = open_on(MODELS / f"{YOLOX}.onnx", "GPU", max_batch_size=2)
    feeds = ({"input.1": pictures(1, 352) / 255}, {"images": pictures(2, 416)})
    expected = [outputs_of(model, feed) for model, feed in zip((first, second), feeds, strict=True)]
    with ThreadPoolExecutor(5) as threads:
        third = threads.submit(open_on, MODELS / f"{FASTEST}.onnx", "GPU")
        runs = [threads.submit(outputs_of, (first, second)[i % 2], feeds[i % 2]) for i in range(200)]
        assert third.result()[0].facts.graph_batch_sizes == (1,)
        for number, run in enumerate(runs):
            assert difference(expected[number % 2], run.result())[0] <= 1e-4


def test_tensor_of_pytorch_on_the_gpu_is_taken_as_it_is(open_on: Open) -> None:
    """A CUDA tensor is an input; the answer is that of the same numbers in host memory."""
    torch = pytest.importorskip("torch")
    model = open_on(MODELS / f"{YOLOX}.onnx", "GPU", max_batch_size=4)
    x = pictures(3, 416)
    expected = outputs_of(model, {"images": x})
    found = outputs_of(model, {"images": torch.from_numpy(x).cuda()})
    assert difference(expected, found)[0] <= 1e-5


def test_jpegs_reach_the_session_on_the_gpu(open_on: Open) -> None:
    """nvJPEG and the kernel fill a CUDA tensor that the session reads: nearly the CPU's answer for its own pixels."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    from penstock.engines.torch_serving.picture_spec import PictureSpec
    from penstock.engines.torch_serving.session_pictures import SessionPictures

    photo = CHECKOUT.parent / "shared" / "media"
    encoded = [path.read_bytes() for path in sorted(photo.glob("*.jpg"))[:4]]
    if not encoded:
        pytest.skip(f"no photos in {photo}")
    path = MODELS / f"{YOLOX}.onnx"
    found = []
    for kind, device in (("GPU", "cuda:0"), ("CPU", "cpu")):
        _, model = open_on(path, kind, max_batch_size=4)
        spec = PictureSpec(416, 416, color="BGR")
        session = SessionPictures(spec, model.run, input_name="images", max_batch_size=4, device=device)
        found.append(session.run(["output"], {"images": np.array([[one] for one in encoded], object)})[0])
    gap = difference({"output": found[1]}, {"output": found[0]})[0]
    sys.stdout.write(
        f"{len(encoded)} JPEGs by nvJPEG and by the CPU: largest difference {gap:.2e} ({torch.__version__})\n"
    )
    assert gap <= 0.1


TENSORS = """backend: "onnxruntime" max_batch_size: 8
input [ { name: "images" data_type: TYPE_FP32 dims: [ 3, 416, 416 ] } ]
output [ { name: "output" data_type: TYPE_FP32 dims: [ 3549, 85 ] } ]
instance_group [ { kind: KIND_GPU count: 1 } ] dynamic_batching { }
parameters { key: "precision" value { string_value: "fp16" } }
parameters { key: "network-type" value { string_value: "0" } }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""
SIDE, ANCHORS = 416, 3549
FACE = Face(
    TensorFace("images", "FP32", (3, SIDE, SIDE), 4 * 3 * SIDE * SIDE),
    TensorFace("output", "FP32", (ANCHORS, 85), 4 * ANCHORS * 85),
    True,
)
PICTURES = (
    TENSORS.replace("TYPE_FP32 dims: [ 3, 416, 416 ]", "TYPE_STRING dims: [ 1 ]")
    + """parameters { key: "image-decoder" value { string_value: "engine" } }
parameters { key: "infer-dims" value { string_value: "3;416;416" } }
parameters { key: "model-color-format" value { string_value: "1" } }
"""
)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """The real Triton of PENSTOCK_ENGINE_ENVIRONMENT, with one model by its tensors and by pictures."""
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT")
    root: Path = tmp_path_factory.mktemp("triton")
    try:
        runtime = find_triton(environment=Path(environment) if environment else None)
    except TritonUnavailable as error:
        pytest.skip(str(error))
    for name, text in (("tensors", TENSORS), ("pictures", PICTURES)):
        folder = root / "models" / name / "1"
        folder.mkdir(parents=True)
        shutil.copyfile(MODELS / f"{YOLOX}.onnx", folder / "model.onnx")
        (folder.parent / "config.pbtxt").write_text(text)
    with running_triton(runtime.prepare(root), root / "models", root, ready_timeout_s=120) as running:
        yield running


def test_triton_serves_the_model_on_the_gpu(triton: RunningTriton, open_on: Open) -> None:
    """The backend's log line has device, precision and graphs; requests of several sizes get the CPU's outputs."""
    facts = [read_facts(line) for line in triton.log().splitlines() if "onnxruntime backend ready" in line]
    on_gpu = EngineFacts("cuda", 0, "fp16", (1, 2, 4, 8))
    assert facts == [on_gpu, on_gpu], triton.log()[-3000:]
    on_cpu = open_on(MODELS / f"{YOLOX}.onnx", "CPU", max_batch_size=8)
    with grpc_client.InferenceServerClient(triton.grpc_address) as client:
        for count in (1, 3, 8):
            x = pictures(count, 416, seed=count)
            tensor = grpc_client.InferInput("images", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            found = {"output": client.infer("tensors", [tensor], client_timeout=60).as_numpy("output")}
            assert difference(outputs_of(on_cpu, {"images": x}), found)[0] <= LIMITS["fp16"]
        encoded = np.array(
            [[photo.read_bytes()] for photo in sorted((MODELS.parent / "media").glob("*.jpg"))[:3]], object
        )
        tensor = grpc_client.InferInput("images", list(encoded.shape), "BYTES")
        tensor.set_data_from_numpy(encoded)
        assert client.infer("pictures", [tensor], client_timeout=60).as_numpy("output").shape == (
            len(encoded),
            3549,
            85,
        )


def test_embedded_engine_serves_on_the_gpu_and_frees_it(open_on: Open, tmp_path: Path) -> None:
    """A model without a kind is on the GPU; after three loads and unloads the memory is as after the first."""
    from penstock.engines.embedded.engine import EmbeddedEngine
    from penstock.protocol.inference import InferRequest, tensor_from_numpy

    assert open_on
    folder = tmp_path / "yolox" / "1"
    folder.mkdir(parents=True)
    if not (MODELS / f"{YOLOX}.onnx").is_file():
        pytest.skip(f"needs {MODELS}")
    shutil.copyfile(MODELS / f"{YOLOX}.onnx", folder / "model.onnx")
    text = TENSORS.replace("instance_group [ { kind: KIND_GPU count: 1 } ] dynamic_batching { }", "")
    (folder.parent / "config.pbtxt").write_text(text)
    free: list[int] = []

    async def serve() -> None:
        engine = EmbeddedEngine((tmp_path,))
        for _ in range(3):
            await engine.load("yolox")
            assert engine.facts("yolox") == EngineFacts("cuda", 0, "fp16", (1, 2, 4, 8))
            asked = InferRequest("yolox", (tensor_from_numpy("images", pictures(3, 416)),))
            answers = await asyncio.gather(*(engine.infer(asked) for _ in range(8)))
            assert {answer.outputs[0].shape for answer in answers} == {(3, 3549, 85)}
            await engine.unload("yolox")
            await until(lambda: not any("cuda-yolox" in one.name for one in threading.enumerate()))
            free.append(CudaRuntime(0).free_bytes())
        await engine.aclose()

    asyncio.run(serve())
    assert free[2] >= free[0] - (64 << 20), free


def test_triton_passes_cuda_shared_memory_to_the_session(triton: RunningTriton) -> None:
    """Rows in the GPU's memory, alone and in batches that Triton forms, are answered as the same rows in a request."""
    rows = np.frombuffer(noise_of(FACE, 4), np.float32).reshape(4, 3, SIDE, SIDE)
    port = int(triton.http_url.rpartition(":")[2])
    with CudaRegions(FACE, 2, 4) as regions, grpc_client.InferenceServerClient(triton.grpc_address) as client:
        regions.register(port)
        for region, count in itertools.product(regions.regions, (1, 4)):
            by_value = grpc_client.InferInput("images", [count, 3, SIDE, SIDE], "FP32")
            by_value.set_data_from_numpy(rows[:count])
            shared = grpc_client.InferInput("images", [count, 3, SIDE, SIDE], "FP32")
            shared.set_shared_memory(region.name, count * FACE.input.row_bytes)
            found, expected = (
                {"output": client.infer("tensors", [tensor], client_timeout=60).as_numpy("output")}
                for tensor in (shared, by_value)
            )
            assert difference(expected, found)[0] <= 1e-3
        client.unregister_cuda_shared_memory()


LOSE_CONTEXT = """
import sys, numpy, pathlib
import torch
from tests.gpu.test_onnx_gpu import open_file, outputs_of, pictures
from penstock.engines.ort_serving.config import OrtDeviceLost
model = open_file(pathlib.Path(sys.argv[1]), "GPU")
feed = {"input.1": pictures(1, 352) / 255}
outputs_of(model, feed)
try:
    torch.zeros(1).cuda()[torch.tensor([5]).cuda()].cpu()
except RuntimeError as error:
    print("torch:", str(error).splitlines()[0])
try:
    outputs_of(model, feed)
except OrtDeviceLost as error:
    print("LOST", error, flush=True)
    import os
    os._exit(3)
"""


def test_lost_context_is_detected_at_the_next_run(open_on: Open) -> None:
    """A kernel's assertion ends the CUDA context of its process: the next run raises OrtDeviceLost."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", LOSE_CONTEXT, str(MODELS / f"{FASTEST}.onnx")]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "the CUDA context is lost" in ended.stdout


def test_rates_are_printed(open_on: Open) -> None:
    """Rows a second on the CPU, on the GPU without and with graphs, and in FP16; not judged."""
    cases = [("CPU", {}), ("GPU", {"cuda_graphs": "0"}), ("GPU", {}), ("GPU", {"precision": "fp16"})]
    for name, side, rows in ((FASTEST, 352, 0), (YOLOX, 416, ROWS)):
        for kind, parameters in cases:
            opened, model = open_on(MODELS / f"{name}.onnx", kind, max_batch_size=rows, **parameters)
            specs = opened.signature
            rates = []
            for count in (1, 8, 16) if rows else (1,):
                feed = {specs.inputs[0].name: pictures(count, side) / 255}
                run = partial(model.run, [specs.outputs[0].name], feed)
                rates.append(f"{count}: {count * runs_per_s(run):.0f}")
            sys.stdout.write(f"{name} {opened.facts.log_fields()} rows/s by batch {', '.join(rates)}\n")


def runs_per_s(run: Callable[[], object], seconds: float = 0.4) -> float:
    """After a warm-up of three runs."""
    for _ in range(3):
        run()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        run()
        count += 1
    return count / (time.perf_counter() - begin)
