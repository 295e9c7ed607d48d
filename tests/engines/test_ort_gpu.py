"""Runs of ONNX models on a GPU: buffers, graphs, copies and memory, on a fake GPU in host memory."""

import gc
from pathlib import Path

import numpy as np
import pytest

from penstock.engines.ort_serving.batch import BatchRunner, OrtRequest
from penstock.engines.ort_serving.config import OrtDeviceLost, OrtRequestError
from penstock.engines.ort_serving.device_tensor import DeviceTensor
from penstock.engines.ort_serving.host_memory import copy_in_parallel
from penstock.engines.ort_serving.session import OrtModel
from tests.engines import onnx_models
from tests.engines.fake_cuda import Bench, DeviceArray, rows, y_of


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


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


def test_answers_keep_their_numbers_while_they_are_held(bench: Bench) -> None:
    """Outputs lend page-locked blocks: twelve answers at once are right, and a block is used again when it is free."""
    opened = bench.open(onnx_models.plus(1))
    held = [y_of(opened, rows(number)) for number in range(12)]
    assert [y[0, 0] for y in held] == [number + 1 for number in range(12)]
    block = held.pop(0)
    address = block.ctypes.data
    del block
    assert y_of(opened, rows(50)).ctypes.data == address
    assert [y[0, 0] for y in held] == [number + 1 for number in range(1, 12)]


def test_answers_are_copied_where_no_more_memory_can_be_page_locked(bench: Bench) -> None:
    """Three answers of another size than any before are right, though none can have a block of its own."""
    opened = bench.open(onnx_models.identity(("N", 41)))
    bench.cuda.has_no_host_memory = True
    held = [y_of(opened, np.full((8, 41), number, np.float32)) for number in range(3)]
    assert [y[7, 40] for y in held] == [0, 1, 2]


def test_page_locked_input_is_copied_by_the_gpu_alone(bench: Bench) -> None:
    """The GPU reads the request's own memory; an array with gaps goes through the staging memory."""
    opened = bench.open(onnx_models.plus(1))
    x = rows(1, 2, 3)
    bench.cuda.page_locked = {x.ctypes.data}
    bench.cuda.sources.clear()
    assert y_of(opened, x)[:, 0].tolist() == [2, 3, 4]
    assert bench.cuda.sources[0] == x.ctypes.data
    assert y_of(opened, x[::2])[:, 0].tolist() == [2, 4]
    assert bench.cuda.sources[2] != x.ctypes.data


@pytest.mark.parametrize("shape", [(5, 300_000), (1, 3, 400_001), (2, 1, 700_000)])
def test_large_arrays_are_copied_by_several_threads(shape: tuple[int, ...]) -> None:
    """Every number arrives, also of a single row and with fewer rows than threads."""
    source = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    target = np.zeros_like(source)
    copy_in_parallel(target, source, threads=4)
    assert np.array_equal(target, source)


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


def test_input_of_another_shape_is_rejected(bench: Bench) -> None:
    """Four columns instead of three do not reach the buffers."""
    opened = bench.open(onnx_models.plus(1))
    with pytest.raises(OrtRequestError, match=r"the inputs 'x' \[2, 4\] do not fit"):
        y_of(opened, np.ones((2, 4), np.float32))
    assert y_of(opened, rows(1))[0, 0] == 2


def test_batch_above_the_largest_bucket_runs_in_parts(bench: Bench) -> None:
    """A GPU too small for the largest batches serves them in parts, and the facts have the reason."""

    def fail(count: int) -> None:
        if count > 2:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 1000")

    opened = bench.open(onnx_models.plus(1), fail=fail)
    assert opened.facts.graph_batch_sizes == (1, 2)
    assert opened.facts.fallbacks[-1] == "batches of more than 2 run in parts: the GPU's memory is too small for more"
    assert y_of(opened, rows(1, 2, 3, 4, 5))[:, 0].tolist() == [2, 3, 4, 5, 6]


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
