"""A model's copy for TensorRT in NGC's Triton: the calibration table, and the config that names it."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper
from onnxruntime.quantization.CalTableFlatBuffers.TrtTable import TrtTable
from tritonclient.grpc import model_config_pb2

from penstock.models.optimize.source import OptimizeError, Progress, SourceModel, read_samples
from penstock.models.optimize.tensorrt_int8 import (
    TABLE,
    Calibration,
    calibrate,
    copy_sentence,
    few_sentence,
    measure_magnitudes,
)


def test_calibration_writes_the_float_file_a_symmetric_table_and_the_config(
    source: SourceModel, pictures: list[Path], silent: Progress, tmp_path: Path
) -> None:
    """Every tensor has a range that its greatest magnitude does not exceed by far; TensorRT is to read that table."""
    staged = tmp_path / "staged"
    staged.mkdir()
    source.proto.parameters["max_batch_size"].string_value = "1"
    source.proto.parameters["max_batch_size_measured_on"].string_value = "cpu"
    found = calibrate(source, pictures, staged, folder=Path("/models/small-trt"), cache="", progress=silent)
    assert (staged / "1" / "model.onnx").read_bytes() == source.path.read_bytes()
    table = TrtTable.GetRootAsTrtTable((staged / "tensorrt" / TABLE).read_bytes(), 0)
    entries = [table.Dict(number) for number in range(table.DictLength())]
    ranges = {entry.Key().decode(): float(entry.Value()) for entry in entries}
    assert len(ranges) == found.tensors
    images = np.concatenate([sample.feed["image"] for sample in read_samples(pictures, source)])
    logits = ort.InferenceSession(str(source.path)).run(["logits"], {"image": images})[0]
    assert 0.2 * np.abs(images).max() < ranges["image"] <= 1.01 * np.abs(images).max()
    assert 0 < ranges["logits"] <= 1.01 * np.abs(logits).max()
    assert min(ranges.values()) > 0
    config = text_format.Parse((staged / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert config.parameters["max_batch_size"].string_value == "16"
    assert "max_batch_size_measured_on" not in config.parameters
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert (config.name, accelerator.name) == ("small-trt", "tensorrt")
    assert dict(accelerator.parameters) == {
        "precision_mode": "INT8",
        "max_workspace_size_bytes": "1073741824",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": "/models/small-trt/tensorrt",
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": "/models/small-trt/tensorrt",
        "int8_calibration_table_name": TABLE,
        "int8_use_native_calibration_table": "0",
        "trt_profile_min_shapes": "image:1x3x32x32",
        "trt_profile_opt_shapes": "image:16x3x32x32",
        "trt_profile_max_shapes": "image:16x3x32x32",
    }
    page = (staged / "MODEL.md").read_text()
    assert "TensorRT never ran it" in page
    assert not copy_sentence(found, staged)
    assert "copy " not in page


def test_cache_in_another_folder_needs_a_copy_of_the_table(
    source: SourceModel, pictures: list[Path], silent: Progress, tmp_path: Path
) -> None:
    """Report and MODEL.md say that the table must be copied to that folder."""
    staged, folder = tmp_path / "staged", tmp_path / "small-trt"
    staged.mkdir()
    found = calibrate(source, pictures[:8], staged, folder=folder, cache="/cache/x", progress=silent)
    wanted = f"copy {folder / 'tensorrt' / TABLE} to /cache/x as Triton sees it"
    assert copy_sentence(found, folder).startswith(wanted)
    assert f"Before Triton loads it, copy small-trt/tensorrt/{TABLE} to /cache/x" in (staged / "MODEL.md").read_text()


@pytest.mark.parametrize(("count", "is_few"), [(4, True), (49, True), (50, False)])
def test_few_pictures_give_a_warning(count: int, *, is_few: bool) -> None:
    """Half of the advised 100 pictures calibrate; with fewer the ranges are rough."""
    sentence = few_sentence(Calibration("m-tensorrt-int8", "m", count, 5, "/cache", ()))
    assert bool(sentence) is is_few
    assert not is_few or f"{count} pictures give rough ranges: calibrate with 100 or more" in sentence


def test_range_of_a_tensor_that_is_never_positive_is_its_magnitude(tmp_path: Path) -> None:
    """The entropy's upper end is negative there; tensors of nothing but zeros have no range."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y", "z")]
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["y"]),
        helper.make_node("Sub", ["x", "x"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "negative", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    feeds = [{"x": np.linspace(1, 3, 4, dtype=np.float32)[None]}, {"x": np.full((1, 4), 2, np.float32)}]
    found = measure_magnitudes(tmp_path / "m.onnx", feeds, lambda: None)
    assert {name: float(one.highest) for name, one in found.items()} == pytest.approx({"x": 3, "a": 3, "y": 3}, rel=0.1)


def test_file_that_is_not_the_whole_model_is_not_calibrated(
    source: SourceModel, pictures: list[Path], silent: Progress, tmp_path: Path
) -> None:
    """The copy would lack its weights; a damaged file is ONNX Runtime's sentence. Nothing is written."""
    staged = tmp_path / "staged"
    staged.mkdir()
    content = source.path.read_bytes()
    model = onnx.load(source.path)
    onnx.save(model, source.path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(OptimizeError, match="has its weights in other files: export it as one file"):
        calibrate(source, pictures, staged, folder=tmp_path / "small-trt", cache="/c", progress=silent)
    source.path.write_bytes(content[: len(content) // 2])
    with pytest.raises(OptimizeError, match="cannot open"):
        calibrate(source, pictures, staged, folder=tmp_path / "small-trt", cache="/c", progress=silent)
    assert list(staged.iterdir()) == []
