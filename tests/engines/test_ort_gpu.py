"""ONNX models on a GPU: buffers, graphs, precision and fallbacks, on a fake GPU in host memory."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from penstock.engines.ort_serving import opening
from penstock.engines.ort_serving.batch import BatchRunner, OrtRequest
from penstock.engines.ort_serving.config import (
    OrtDeviceLost,
    OrtLoadError,
    OrtRequestError,
    Signature,
    complete,
    validate,
)
from penstock.engines.ort_serving.cudart import CudaUnavailable
from penstock.engines.ort_serving.device_tensor import DeviceTensor
from penstock.engines.ort_serving.opening import Opened, Placement, open_model
from penstock.engines.ort_serving.session import OrtModel
from tests.engines import onnx_models
from tests.engines.fake_cuda import CUDA_PROVIDER, DeviceArray, FakeCuda, FakeSession, fake_open_session

Patch = pytest.MonkeyPatch


class Bench:
    """Opens models on the fake GPU. sessions: those on the GPU, in the order of opening."""

    def __init__(self, folder: Path, patch: Patch) -> None:
        self.cuda = FakeCuda()
        self.sessions: list[FakeSession] = []
        self._folder = folder
        self._patch = patch
        patch.setattr(ort, "get_available_providers", lambda: [CUDA_PROVIDER, "CPUExecutionProvider"])

    def open(
        self,
        model: onnx.ModelProto,
        parameters: dict[str, str] | None = None,
        *,
        max_batch_size: int = 8,
        kind: str = "GPU",
        open_cuda: Callable[[int], FakeCuda] | None = None,
        **behaviour: Any,
    ) -> Opened:
        """The opened model. behaviour: of FakeSession."""
        path = self._folder / "m" / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        values = {key: {"string_value": value} for key, value in (parameters or {}).items()}
        config: dict[str, Any] = {"name": "m", "max_batch_size": max_batch_size, "parameters": values}

        def completed(signature: Signature) -> dict[str, Any]:
            complete(config, signature)
            validate(config, signature)
            return config

        self._patch.setattr(opening, "open_session", fake_open_session(self.sessions, **behaviour))
        return open_model(
            path, Placement(kind), ort.SessionOptions, completed, open_cuda=open_cuda or (lambda _: self.cuda)
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: Patch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def rows(*values: float) -> Any:
    return np.array([[value] * 3 for value in values], np.float32)


def y_of(opened: Opened, x: Any) -> Any:
    """The output of x [N, 3] → y."""
    return OrtModel(opened.session, opened.signature, opened.config).run(["y"], {"x": x})[0]


def test_every_batch_size_is_answered_by_the_graph_of_its_bucket(bench: Bench) -> None:
    """A batch is padded to the next power of two; each answer has its own rows."""
    opened = bench.open(onnx_models.plus(1))
    assert opened.facts.graph_batch_sizes == (1, 2, 4, 8)
    assert (opened.facts.device, opened.facts.precision, opened.facts.fallbacks) == ("cuda:0", "fp32", ())
    (session,) = bench.sessions
    assert len(session.graphs) == 4
    for count in range(1, 9):
        session.runs.clear()
        x = rows(*range(10 * count, 11 * count))
        assert y_of(opened, x).tolist() == (x + 1).tolist()
        ((graph_id, size),) = session.runs
        assert graph_id in session.graphs
        assert size == next(bucket for bucket in (1, 2, 4, 8) if bucket >= count)


def test_session_gets_the_options_for_graphs_and_its_stream(bench: Bench) -> None:
    """Copies and runs are on one stream, and the arena has a limit."""
    bench.open(onnx_models.plus(1))
    options = bench.sessions[0].options
    assert (options["enable_cuda_graph"], options["user_compute_stream"]) == ("1", str(bench.cuda.stream))
    assert 0 < int(options["gpu_mem_limit"]) < 1 << 30


def test_outputs_come_back_by_one_copy(bench: Bench) -> None:
    """Two outputs are one copy; an answer stays valid after the next run."""
    opened = bench.open(onnx_models.add_and_multiply())
    model = OrtModel(opened.session, opened.signature, opened.config)
    bench.cuda.copies.clear()
    first = model.run(["product", "sum"], {"a": rows(2, 3), "b": rows(4, 5)})
    assert len(bench.cuda.copies) == 3  # two inputs, and the outputs
    model.run(["sum"], {"a": rows(9, 9), "b": rows(9, 9)})
    assert [array[:, 0].tolist() for array in first] == [[8, 15], [6, 8]]


def test_input_on_the_gpu_is_not_copied_through_the_cpu(bench: Bench) -> None:
    """The producer's stream is waited for, then one copy goes from its address into the session's buffer."""
    opened = bench.open(onnx_models.plus(1))
    bench.cuda.copies.clear()
    y = y_of(opened, DeviceArray(rows(1, 2), stream=5))
    assert y[:, 0].tolist() == [2, 3]
    assert bench.cuda.waited == [5]
    assert len(bench.cuda.copies) == 2


def test_input_on_the_gpu_with_gaps_is_rejected(bench: Bench) -> None:
    """A view with strides would be read wrongly, so it is the client's error."""
    opened = bench.open(onnx_models.plus(1))
    with pytest.raises(OrtRequestError, match="input 'x' on the GPU is not contiguous") as raised:
        y_of(opened, DeviceArray(rows(1, 2), strides=(24, 4)))
    assert raised.value.is_client_error


def test_requests_in_gpu_memory_share_a_run(bench: Bench) -> None:
    """Tensors by DLPack and one in host memory: one run, each is copied once to its place, answers are their own."""
    opened = bench.open(onnx_models.plus(1))
    model = OrtModel(opened.session, opened.signature, opened.config)
    arrays = [DeviceTensor(rows(1, 2).__dlpack__()), rows(3), DeviceTensor(rows(4).__dlpack__())]
    bench.sessions[0].runs.clear()
    bench.cuda.copies.clear()
    outcomes = BatchRunner(model.run, is_batching=True).answer([OrtRequest({"x": x}, ("y",)) for x in arrays])
    assert [outcome["y"][:, 0].tolist() for outcome in outcomes if isinstance(outcome, dict)] == [[2, 3], [4], [5]]
    assert [size for _, size in bench.sessions[0].runs] == [4]
    assert bench.cuda.copies[:3] == [24, 12, 12]


def test_device_tensor_has_the_type_shape_and_address_of_its_capsule() -> None:
    """Every type that numpy has, and a view with gaps, whose strides are in bytes."""
    for dtype in ("bool", "uint8", "int64", "float16", "float64"):
        array = np.zeros((2, 3), dtype)
        tensor = DeviceTensor(array.__dlpack__())
        assert (tensor.dtype, tensor.shape) == (array.dtype, (2, 3))
        assert tensor.__cuda_array_interface__["data"][0] == array.ctypes.data
    view = np.zeros((4, 6), np.float32)[:, ::2]
    assert DeviceTensor(view.__dlpack__()).__cuda_array_interface__["strides"] == view.strides
    with pytest.raises(ValueError, match="DLPack's type 5 of 64 bits"):
        DeviceTensor(np.zeros(2, np.complex64).__dlpack__())


def test_input_of_another_shape_gets_onnx_runtimes_error(bench: Bench) -> None:
    """Four columns instead of three do not reach the buffers."""
    opened = bench.open(onnx_models.plus(1))
    with pytest.raises(OrtRequestError, match="Got: 4 Expected: 3"):
        y_of(opened, np.ones((2, 4), np.float32))
    assert y_of(opened, rows(1))[0, 0] == 2


def test_batch_above_the_largest_bucket_runs_in_parts(bench: Bench) -> None:
    """A GPU too small for the largest batches serves them in parts, and says so."""

    def fail(count: int) -> None:
        if count > 2:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 1000")

    opened = bench.open(onnx_models.plus(1), fail=fail)
    assert opened.facts.graph_batch_sizes == (1, 2)
    assert opened.facts.fallbacks[-1] == "batches of more than 2 run in parts: the GPU's memory is too small for more"
    assert y_of(opened, rows(1, 2, 3, 4, 5))[:, 0].tolist() == [2, 3, 4, 5, 6]


def test_model_with_variable_dimensions_runs_without_a_graph(bench: Bench) -> None:
    """Its runs may have any shape; the facts name the input."""
    opened = bench.open(onnx_models.square(("N", "W")), max_batch_size=8)
    assert opened.facts.device == "cuda:0"
    assert opened.facts.graph_batch_sizes == ()
    assert "no CUDA graph: input 'x' has variable dimensions [-1]" in opened.facts.fallbacks
    assert bench.sessions[-1].options["enable_cuda_graph"] == "0"
    assert y_of(opened, np.full((2, 5), 3, np.float32)).tolist() == [[9] * 5] * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "cannot use the graph capture feature as requested by the user as the model has control flow nodes",
            "If, Loop",
        ),
        ("as all compute graph nodes have not been partitioned to the CUDAExecutionProvider", "run on the CPU"),
        ("cudaStreamEndCapture: operation failed", "cudaStreamEndCapture: operation failed"),
    ],
)
def test_model_that_cannot_be_captured_runs_without_a_graph(bench: Bench, text: str, reason: str) -> None:
    """A failed capture costs the graph only: fixed buffers and the GPU are still used."""

    def fail(_: int) -> None:
        if bench.sessions[-1].has_graphs:
            raise RuntimeError(text)

    opened = bench.open(onnx_models.plus(1), fail=fail)
    assert (opened.facts.device, opened.facts.graph_batch_sizes) == ("cuda:0", ())
    assert opened.facts.fallbacks[0].startswith("no CUDA graph: ")
    assert reason in opened.facts.fallbacks[0]
    assert y_of(opened, rows(1, 2, 3))[:, 0].tolist() == [2, 3, 4]
    assert bench.sessions[-1].runs[-1] == ("-1", 3)


def test_cuda_graphs_0_runs_without_a_graph_and_is_no_fallback(bench: Bench) -> None:
    """What the configuration asks for is not reported as a failure."""
    opened = bench.open(onnx_models.plus(1), {"cuda-graphs": "0"})
    assert (opened.facts.device, opened.facts.graph_batch_sizes, opened.facts.fallbacks) == ("cuda:0", (), ())


def test_model_whose_rows_depend_on_each_other_is_not_padded(bench: Bench) -> None:
    """Rows of padding would change its answers, so each batch runs at its own size."""
    opened = bench.open(onnx_models.minus_batch_mean())
    assert opened.facts.graph_batch_sizes == ()
    assert "differs by" in opened.facts.fallbacks[0]
    assert y_of(opened, rows(1, 2, 6))[:, 0].tolist() == [-2, -1, 3]


def test_fp16_keeps_the_types_of_inputs_and_outputs(bench: Bench) -> None:
    """The network is converted in memory; clients see FP32."""
    opened = bench.open(onnx_models.plus(0.1), {"precision": "fp16"})
    assert (opened.facts.precision, opened.facts.fallbacks) == ("fp16", ())
    y = y_of(opened, rows(1))
    assert y.dtype == np.float32
    assert y[0, 0] != np.float32(1.1)
    assert abs(y[0, 0] - 1.1) < 1e-3


def test_fp16_that_answers_otherwise_is_refused_with_the_figure(bench: Bench) -> None:
    """A weight above FP16's largest number makes another answer: FP32 serves, and the log has the difference."""
    opened = bench.open(onnx_models.plus(100_000), {"precision": "fp16"})
    assert opened.facts.precision == "fp32"
    assert opened.facts.graph_batch_sizes == (1, 2, 4, 8)
    (sentence,) = opened.facts.fallbacks
    assert sentence.startswith("precision fp16 is not used: output 'y' with 3 rows differs by ")
    assert "from FP32 on the CPU (limit 3.0%" in sentence
    assert y_of(opened, rows(1))[0, 0] == 100_001


def test_check_answers_0_uses_fp16_unchecked(bench: Bench) -> None:
    """The user decides for a model whose outputs cannot be compared."""
    opened = bench.open(onnx_models.plus(100_000), {"precision": "fp16", "check-answers": "0"})
    assert (opened.facts.precision, opened.facts.fallbacks) == ("fp16", ())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda array: array * 1.01, "differs by 1.0% from FP32 on the CPU (limit 0.5%)"),
        (lambda array: array * np.nan, "has another shape than FP32 on the CPU, infinity or NaN"),
    ],
)
def test_gpu_that_answers_otherwise_in_fp32_is_not_used(
    bench: Bench, wrong: Callable[[Any], Any], sentence: str
) -> None:
    """A wrong kernel or driver: the CPU serves, and the reason has the output and the difference."""
    opened = bench.open(onnx_models.plus(1), change=wrong)
    assert opened.facts.device == "cpu"
    assert opened.facts.fallbacks == (f"the model runs on the CPU instead of GPU 0: output 'y' with 3 rows {sentence}",)
    assert y_of(opened, rows(1))[0, 0] == 2
    assert bench.cuda.is_closed


def test_gpu_on_which_the_faster_kernels_fail_uses_the_plain_ones(bench: Bench) -> None:
    """NHWC and fused convolutions cost the GPU nothing but their speed."""

    def fail(_: int) -> None:
        if bench.sessions[-1].options["prefer_nhwc"] == "1":
            raise RuntimeError("CUDNN_FE failure: no valid execution plans")

    opened = bench.open(onnx_models.plus(1), fail=fail)
    assert (opened.facts.device, opened.facts.graph_batch_sizes) == ("cuda:0", (1, 2, 4, 8))
    assert opened.facts.fallbacks == (
        "channels-last and fuse are not used in fp32: CUDNN_FE failure: no valid execution plans",
    )
    assert bench.sessions[-1].options["fuse_conv_bias"] == "0"
    assert y_of(opened, rows(1))[0, 0] == 2


def test_gpu_that_cannot_be_opened_leaves_the_cpu_serving(bench: Bench) -> None:
    """No driver, no device or a missing library costs the GPU only."""

    def open_cuda(_: int) -> FakeCuda:
        raise CudaUnavailable("GPU 0 cannot be used: cudaSetDevice: no CUDA-capable device is detected")

    opened = bench.open(onnx_models.plus(1), open_cuda=open_cuda)
    assert opened.facts.fallbacks == (
        "the model runs on the CPU instead of GPU 0: GPU 0 cannot be used: cudaSetDevice: no CUDA-capable device is "
        "detected",
    )
    assert y_of(opened, rows(1))[0, 0] == 2


def test_session_that_failed_is_freed_before_the_gpus_memory(bench: Bench) -> None:
    """ONNX Runtime's session uses the stream until it is destroyed: no error may keep it alive."""
    alive: list[int] = []

    def close() -> None:
        alive.append(sum(session() is not None for session in sessions))

    def change(array: Any) -> Any:
        sessions.extend(map(weakref.ref, bench.sessions))
        bench.sessions.clear()
        return array + 1

    sessions: list[weakref.ref[FakeSession]] = []
    bench.cuda.close = close  # type: ignore[method-assign]
    gc.disable()
    try:
        opened = bench.open(onnx_models.plus(1), {"cuda-graphs": "0", "channels-last": "0", "fuse": "0"}, change=change)
    finally:
        gc.enable()
    assert opened.facts.device == "cpu"
    assert alive == [0]


def test_gpu_without_memory_leaves_the_cpu_serving(bench: Bench) -> None:
    """Not even one row fits."""
    bench.cuda = FakeCuda(memory_bytes=256)
    opened = bench.open(onnx_models.plus(1), {"cuda-graphs": "0"})
    assert opened.facts.device == "cpu"
    assert "out of memory" in opened.facts.fallbacks[-1]


@pytest.mark.parametrize(
    ("kind", "has_driver", "device"), [("CPU", True, "cpu"), ("AUTO", False, "cpu"), ("AUTO", True, "cuda:0")]
)
def test_kind_decides_where_the_model_runs(
    bench: Bench, monkeypatch: Patch, kind: str, has_driver: bool, device: str
) -> None:
    """KIND_CPU never uses a GPU; without a kind, the GPU is used where a driver is."""
    monkeypatch.setattr(opening, "has_nvidia_driver", lambda: has_driver)
    opened = bench.open(onnx_models.plus(1), kind=kind)
    assert (opened.facts.device, opened.facts.fallbacks) == (device, ())


def test_wrong_parameter_fails_the_load_on_any_machine(bench: Bench) -> None:
    """A typing error does not wait for a machine with a GPU."""
    with pytest.raises(OrtLoadError, match="parameter precision is 'half'"):
        bench.open(onnx_models.plus(1), {"precision": "half"}, kind="CPU")


def test_lost_context_is_an_error_of_its_own(bench: Bench) -> None:
    """After a fatal fault the caller ends the process; an ordinary failure is only the request's."""
    failing: list[str] = []

    def fail(_: int) -> None:
        if failing:
            raise RuntimeError(failing[0])

    opened = bench.open(onnx_models.plus(1), fail=fail)
    failing.append("CUDNN_STATUS_EXECUTION_FAILED")
    with pytest.raises(OrtRequestError, match="CUDNN_STATUS_EXECUTION_FAILED") as raised:
        y_of(opened, rows(1))
    assert not isinstance(raised.value, OrtDeviceLost)
    bench.cuda.lost = True
    with pytest.raises(OrtDeviceLost, match="the CUDA context is lost, and the process restarts"):
        y_of(opened, rows(1))


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_model_that_is_unloaded_or_dropped_frees_the_gpus_memory(bench: Bench, how: str) -> None:
    """An unloaded model leaves the GPU as it was, and so does one that is dropped because another part failed."""
    opened = bench.open(onnx_models.plus(1))
    thread, before = opened.session._thread, bench.cuda.free_bytes()
    if how == "close":
        OrtModel(opened.session, opened.signature, opened.config).close()
    del opened
    gc.collect()
    thread.join()
    assert bench.cuda.is_closed
    assert bench.cuda.free_bytes() > before
