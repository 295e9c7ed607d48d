"""ONNX models opened on a GPU: graphs, precision, kernels and what serves instead, on a fake GPU in host memory."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from penstock.engines.ort_serving import opening
from penstock.engines.ort_serving.config import OrtLoadError
from penstock.engines.ort_serving.cudart import CudaUnavailable
from tests.engines import onnx_models
from tests.engines.fake_cuda import Bench, FakeCuda, FakeSession, rows, y_of


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


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


def refuse_free_batch(session: ort.InferenceSession, options: dict[str, str]) -> None:
    """As ONNX Runtime refuses a model whose shapes it computes on the CPU."""
    if options["enable_cuda_graph"] == "1" and isinstance(session.get_inputs()[0].shape[0], str):
        raise OrtLoadError("all compute graph nodes have not been partitioned to the CUDAExecutionProvider")


def test_model_that_computes_shapes_gets_a_session_for_each_batch_size(bench: Bench) -> None:
    """With a fixed batch size its shapes are constants, and all operators run on the GPU."""
    opened = bench.open(onnx_models.plus(1), refuse=refuse_free_batch)
    assert (opened.facts.graph_batch_sizes, opened.facts.fallbacks) == ((1, 2, 4, 8), ())
    assert len(bench.sessions) == 4
    for count in range(1, 9):
        assert y_of(opened, rows(*range(count)))[:, 0].tolist() == list(range(1, count + 1))
    assert all(len(session.graphs) == 1 for session in bench.sessions)


def test_graphs_that_break_each_other_get_a_session_each(bench: Bench) -> None:
    """A session whose earlier graphs answer NaN after it has captured another size is replaced by one per size."""

    def change(array: Any) -> Any:
        return array * np.nan if len(bench.sessions[-1].graphs) > 1 else array

    opened = bench.open(onnx_models.plus(1), change=change)
    assert (opened.facts.graph_batch_sizes, opened.facts.fallbacks) == ((1, 2, 4, 8), ())
    assert [len(session.graphs) for session in bench.sessions] == [4, 1, 1, 1, 1]
    assert y_of(opened, rows(1, 2, 3))[:, 0].tolist() == [2, 3, 4]


def test_graph_that_a_later_size_spoils_is_noticed(bench: Bench) -> None:
    """One row is right until eight rows ran: then the sizes get a session each, whose memory is their own."""
    has_run_eight: set[int] = set()

    def change(array: Any) -> Any:
        session = bench.sessions[-1]
        if len(session.graphs) > 1 and len(array) == 8:
            has_run_eight.add(id(session))
        return array + 1000 if id(session) in has_run_eight and len(array) == 1 else array

    opened = bench.open(onnx_models.plus(1), change=change)
    assert len(bench.sessions) == 5
    assert opened.facts.graph_batch_sizes == (1, 2, 4, 8)
    assert [y_of(opened, rows(*range(count)))[0, 0] for count in (8, 1)] == [1, 1]


def test_graphs_that_are_wrong_in_any_session_are_not_used(bench: Bench) -> None:
    """Two rows are NaN from each graph: runs without graphs serve, and the sentence has output and rows."""

    def change(array: Any) -> Any:
        return array * np.nan if bench.sessions[-1].graphs and len(array) == 2 else array

    opened = bench.open(onnx_models.plus(1), change=change)
    assert (opened.facts.device, opened.facts.graph_batch_sizes) == ("cuda:0", ())
    (sentence,) = opened.facts.fallbacks
    assert sentence == ("no CUDA graph: output 'y' with 2 rows has another shape than FP32 on the CPU, infinity or NaN")
    assert y_of(opened, rows(1, 2))[:, 0].tolist() == [2, 3]


@pytest.mark.parametrize("wrong_rows", [1, 8])
def test_each_batch_size_is_checked_without_graphs_too(bench: Bench, wrong_rows: int) -> None:
    """A kernel that is wrong for one batch size leaves the model on the CPU."""

    def change(array: Any) -> Any:
        return array * np.nan if len(array) == wrong_rows else array

    opened = bench.open(onnx_models.plus(1), {"cuda-graphs": "0"}, change=change)
    assert opened.facts.device == "cpu"
    assert f"output 'y' with {wrong_rows} rows has another shape" in opened.facts.fallbacks[0]


def test_nan_is_noticed_in_outputs_that_cannot_be_compared(bench: Bench) -> None:
    """A model that sorts its outputs is not compared, but NaN for some batch size takes it off the GPU."""
    opened = bench.open(onnx_models.sorted_rows(), change=lambda array: array * np.nan if len(array) == 4 else array)
    assert opened.facts.device == "cpu"
    assert "output 'y' with 4 rows has infinity or NaN" in opened.facts.fallbacks[0]
    assert bench.open(onnx_models.sorted_rows()).facts.graph_batch_sizes == (1, 2, 4, 8)


def test_weights_that_fit_only_once_are_not_loaded_for_each_batch_size(bench: Bench) -> None:
    """A GPU with little memory runs such a model without a graph."""
    bench.cuda = FakeCuda(memory_bytes=2_000)
    opened = bench.open(onnx_models.plus(1), refuse=refuse_free_batch)
    assert opened.facts.graph_batch_sizes == ()
    assert opened.facts.fallbacks == ("no CUDA graph: some of its operators run on the CPU",)


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
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, has_driver: bool, device: str
) -> None:
    """KIND_CPU never uses a GPU; without a kind, the GPU is used where a driver is."""
    monkeypatch.setattr(opening, "has_nvidia_driver", lambda: has_driver)
    opened = bench.open(onnx_models.plus(1), kind=kind)
    assert (opened.facts.device, opened.facts.fallbacks) == (device, ())


def test_wrong_parameter_fails_the_load_on_any_machine(bench: Bench) -> None:
    """A typing error does not wait for a machine with a GPU."""
    with pytest.raises(OrtLoadError, match="parameter precision is 'half'"):
        bench.open(onnx_models.plus(1), {"precision": "half"}, kind="CPU")
