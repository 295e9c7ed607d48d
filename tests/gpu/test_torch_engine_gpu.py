"""On a real card: the torch backend by CUDA graphs, in this process and inside the real Triton.

Stated tolerance against FP32 on the CPU, of the largest number: 2 % for FP16, 4 % for BF16, 1 % for FP32, whose
convolutions are TF32 as PyTorch has them by default.
PENSTOCK_ENGINE_ENVIRONMENT names the environment of Triton and its models, which must have torch.
"""

import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from loadtest.bench.gpu.stretch import CudaRegions, SystemRegions, noise_of
from loadtest.bench.gpu.tritons import Face, TensorFace
from penstock.engines.torch_serving.config import EngineSpec, engine_spec
from penstock.engines.triton.runtime import TritonUnavailable, find_triton
from tests.engines.test_torch_settings import config
from tests.engines.triton_of_onnx_models import RunningTriton, running_triton

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TOLERANCES = {"fp16": 0.02, "bf16": 0.04, "fp32": 0.01}
ROWS, CLASSES, WORDS = 8, 10, 50
FACE = Face(
    TensorFace("image", "FP32", (3, 32, 32), 3 * 32 * 32 * 4),
    TensorFace("logits", "FP32", (CLASSES,), 4 * CLASSES),
    True,
)


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch", reason="needs torch")
    if not module.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return module


@pytest.fixture(scope="module")
def programs(torch: Any) -> Any:
    from tests.engines import torch_programs

    return torch_programs


@pytest.fixture(scope="module")
def reference(torch: Any, programs: Any) -> Callable[[Any], Any]:
    """The small network in FP32 on the CPU."""
    network = programs.small_resnet()

    def answer(images: Any) -> Any:
        with torch.no_grad():
            return network(images)

    return answer


@pytest.fixture(scope="module")
def folder(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version folders of the small network, for FP32 and for pixels."""
    root: Path = tmp_path_factory.mktemp("programs")
    programs.save(programs.small_resnet(), programs.images(2), root / "fp32" / "model.pt2")
    pixels = (programs.images(2) * 255).byte()
    programs.save(programs.OfPixels(), pixels, root / "uint8" / "model.pt2")
    return root


def runner_of(torch: Any, path: Path, spec: EngineSpec, slots: int = 1, *, is_lent: bool = False) -> Any:
    """As the backend makes it, on the first card."""
    from penstock.engines.torch_serving.device import pinned_regions
    from penstock.engines.torch_serving.program import load_program
    from penstock.engines.torch_serving.runners import GraphRunner

    device = torch.device("cuda", 0)
    program = load_program(path / "model.pt2", spec, device).program
    return GraphRunner(program, spec, device, pinned=pinned_regions(), slots=slots, is_lent=is_lent)


def assert_near(answer: Any, expected: Any, tolerance: float) -> None:
    """No number is off by more than that share of the largest."""
    assert answer.shape == expected.shape
    largest = float(abs(expected).max())
    assert float(abs(answer - expected).max()) <= tolerance * largest


@pytest.mark.parametrize("fuse", ["0", "1"])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_graphs_of_every_bucket_answer_what_the_cpu_answers(
    torch: Any, programs: Any, reference: Callable[[Any], Any], folder: Path, precision: str, fuse: str
) -> None:
    """Whole buckets and every size between, from host memory and from the card's, however the program is fused."""
    spec = engine_spec(config({"precision": precision, "fuse": fuse}), is_gpu=True)
    runner = runner_of(torch, folder / "fp32", spec)
    for rows in range(1, ROWS + 1):
        images = programs.images(rows, seed=rows)
        for tensor in (images, images.cuda()):
            (answer,) = runner.begin([[tensor]], rows).outputs()
            assert answer.dtype is torch.float32
            assert_near(answer, reference(images), TOLERANCES[precision])


def test_graphs_of_pixels_answer_what_the_cpu_answers(
    torch: Any, programs: Any, reference: Callable[[Any], Any], folder: Path
) -> None:
    """UINT8 travels as it is; the program casts it to its own precision."""
    model = config(input=[{"name": "image", "data_type": "TYPE_UINT8", "dims": [3, 32, 32]}])
    runner = runner_of(torch, folder / "uint8", engine_spec(model, is_gpu=True))
    pixels = (programs.images(5) * 255).byte()
    (answer,) = runner.begin([[pixels[:2], pixels[2:]]], 5).outputs()
    assert_near(answer, reference(pixels.float() / 255), TOLERANCES["fp16"])


def test_requests_in_shared_memory_are_gathered_by_few_copies(
    torch: Any, programs: Any, reference: Callable[[Any], Any], folder: Path
) -> None:
    """One copy at equal distances, as Triton's backend lays them out; otherwise several, with the same answers."""
    runner = runner_of(torch, folder / "fp32", engine_spec(config(), is_gpu=True))
    images, calls = programs.images(ROWS, seed=7), []
    copy = runner._pinned._copy
    runner._pinned._copy = lambda *arguments: calls.append(copy(*arguments)) or calls[-1]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        size, gap = images[0].nbytes, 992
        file.truncate((ROWS + 1) * (size + gap))
        region = torch.from_file(file.name, shared=True, size=(ROWS + 1) * (size + gap), dtype=torch.uint8)

        def placed(offsets: list[int]) -> list[Any]:
            parts = [region[at : at + size].view(torch.float32).view(1, 3, 32, 32) for at in offsets]
            for part, image in zip(parts, images, strict=True):
                part.copy_(image[None])
            return parts

        even = [number * (size + gap) for number in range(ROWS)]
        for offsets, copies in ((even, [True]), ([*even[:-1], even[-1] + 16], [True, True])):
            calls.clear()
            (answer,) = runner.begin([placed(offsets)], ROWS).outputs()
            assert_near(answer, reference(images), TOLERANCES["fp16"])
            assert calls == copies


@pytest.mark.parametrize("slots", [2, 4])
def test_batches_in_flight_keep_their_own_rows(
    torch: Any, programs: Any, reference: Callable[[Any], Any], folder: Path, slots: int
) -> None:
    """A hundred batches of unlike sizes, some in GPU memory that is overwritten as soon as their run has begun."""
    runner = runner_of(torch, folder / "fp32", engine_spec(config(), is_gpu=True), slots, is_lent=True)
    batches = [programs.images(1 + number % ROWS, seed=number).pin_memory() for number in range(16)]
    expected = [reference(images) for images in batches]
    lent = {number: batches[number % 16].cuda() for number in range(0, 100, 3)}
    torch.cuda.synchronize()
    in_flight: deque[tuple[int, Any]] = deque()
    for number in range(100 + slots):
        if len(in_flight) == slots or number >= 100:
            begun, pending = in_flight.popleft()
            assert_near(pending.outputs()[0].clone(), expected[begun % 16], TOLERANCES["fp16"])
        if number >= 100:
            continue
        images = lent.get(number, batches[number % 16])
        in_flight.append((number, runner.begin([[images]], len(images))))
        if number in lent:
            with torch.cuda.stream(torch.cuda.Stream()):
                images.zero_()


@pytest.fixture(scope="module")
def triton(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """One Triton with the small network in two instances, one that batches, and a lookup that can be made to fault."""
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT")
    root: Path = tmp_path_factory.mktemp("triton")
    try:
        launch = find_triton(environment=Path(environment) if environment else None).prepare(root)
    except TritonUnavailable as error:
        pytest.skip(str(error))
    network, sample = programs.small_resnet(), programs.images(2)
    programs.write_model(root / "models", "two", network, sample, kind="GPU", instances=2)
    batching = "dynamic_batching { max_queue_delay_microseconds: 20000 }"
    programs.write_model(root / "models", "batched", network, sample, kind="GPU", rest=batching)
    process = 'dynamic_batching { } parameters { key: "program-process" value { string_value: "shared" } }'
    programs.write_model(root / "models", "shared", network, sample, kind="GPU", instances=6, rest=process)
    programs.write_lookup(root / "models", "lookup", kind="GPU")
    with running_triton(launch, root / "models", root, ready_timeout_s=200) as running:
        yield running


@pytest.fixture(scope="module")
def client(triton: RunningTriton) -> Iterator[grpc_client.InferenceServerClient]:
    with grpc_client.InferenceServerClient(triton.grpc_address) as connected:
        for name in ("two", "batched", "shared", "lookup"):
            assert connected.is_model_ready(name), triton.log()[-3000:]
        yield connected


def ask(client: grpc_client.InferenceServerClient, model: str, name: str, array: Any, output: str) -> Any:
    datatype = {"float32": "FP32", "int64": "INT64"}[str(array.dtype)]
    tensor = grpc_client.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor], client_timeout=60).as_numpy(output)


@pytest.mark.parametrize("model", ["two", "batched", "shared"])
def test_served_answers_are_the_cpus_in_any_batch(
    client: grpc_client.InferenceServerClient, programs: Any, reference: Callable[[Any], Any], model: str
) -> None:
    """Forty requests of one to eight rows at once: over two instances, in batches of Triton's, in a shared process."""
    asked = [programs.images(1 + seed % ROWS, seed=seed) for seed in range(40)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda images: ask(client, model, "image", images.numpy(), "logits"), asked))
    for images, answer in zip(asked, answers, strict=True):
        assert_near(answer, reference(images).numpy(), TOLERANCES["fp16"])


@pytest.mark.parametrize("memory", ["system", "cuda"])
def test_served_from_shared_memory_answers_what_the_cpu_answers(
    triton: RunningTriton,
    client: grpc_client.InferenceServerClient,
    torch: Any,
    reference: Callable[[Any], Any],
    memory: str,
) -> None:
    """Inputs in the system's and in the card's shared memory, several requests for each region."""
    port = int(triton.http_url.rpartition(":")[2])
    made: Any = (CudaRegions if memory == "cuda" else SystemRegions)(FACE, 2, ROWS)
    images = torch.frombuffer(bytearray(noise_of(FACE, ROWS)), dtype=torch.float32).reshape(ROWS, 3, 32, 32)
    with made as regions:
        regions.register(port)
        for region, rows in itertools.product(regions.regions, (1, 3, ROWS)):
            tensor = grpc_client.InferInput("image", [rows, 3, 32, 32], "FP32")
            tensor.set_shared_memory(region.name, rows * FACE.input.row_bytes)
            answer = client.infer("two", [tensor], client_timeout=60).as_numpy("logits")
            assert_near(answer, reference(images[:rows]).numpy(), TOLERANCES["fp16"])
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()


def shared_processes() -> list[psutil.Process]:
    """Those that run the programs of several instances; no other Triton runs beside this one."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if "torch_serving.program_process" in " ".join(one.info["cmdline"] or ())]


def test_shared_process_that_is_killed_is_started_again(
    client: grpc_client.InferenceServerClient, programs: Any, reference: Callable[[Any], Any]
) -> None:
    """By the next request; no instance of the model is restarted."""
    images = programs.images(2, seed=1)
    assert ask(client, "shared", "image", images.numpy(), "logits").shape == (2, CLASSES)
    before = shared_processes()
    assert len(before) == 1
    before[0].kill()
    until = time.monotonic() + 20.0
    while not set(shared_processes()) - set(before) and time.monotonic() < until:
        with suppress(InferenceServerException):  # a run that is sent while the process ends is lost with it
            ask(client, "shared", "image", images.numpy(), "logits")
    answer = ask(client, "shared", "image", images.numpy(), "logits")
    assert_near(answer, reference(images).numpy(), TOLERANCES["fp16"])


def test_fault_of_the_card_is_an_error_and_ends_the_instances_process(
    triton: RunningTriton, client: grpc_client.InferenceServerClient
) -> None:
    """A word beyond the table is a device-side assertion: that request fails, its process ends, others serve on."""
    good = ask(client, "lookup", "word", np.array([[3]], np.int64), "vector")
    assert good.shape == (1, 4)
    with pytest.raises(InferenceServerException, match="model 'lookup'"):
        ask(client, "lookup", "word", np.array([[WORDS * 1000]], np.int64), "vector")
    assert "the CUDA context is lost" in triton.log()
    assert ask(client, "two", "image", np.zeros((1, 3, 32, 32), np.float32), "logits").shape == (1, CLASSES)
