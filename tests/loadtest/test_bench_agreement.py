"""The agreement bench: its scenes, its random classifier, and the CPU with rounded weights in the card's place."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from loadtest.bench.gpu.agreement import LOGIT_SPREAD, main, rescale_last_layer
from loadtest.bench.gpu.figures import PointRun, ratios_of, results_of
from loadtest.bench.gpu.report import main as report
from loadtest.bench.gpu.scenes import Scenes
from penstock.vision.spec import ColorFormat
from penstock_load.committed import read_bench
from penstock_load.results import State
from penstock_load.targets import read_targets
from tests.models.stand_in import write_stand_in

MODELS = Path(__file__).resolve().parents[2] / "server" / "penstock" / "models"
CONDITIONS = {
    "machine": "1 × NVIDIA H200, Imagined 3000, 16 cores",
    "command": "python -m loadtest.bench.gpu.agreement model.onnx",
    "slo_p99_ms": "0",
}
RANDOM = np.random.default_rng(0)


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """A folder with the picture of a street that comes with the shipped detector."""
    folder = tmp_path / "media"
    folder.mkdir()
    shutil.copyfile(MODELS / "shipped" / "street" / "golden.jpg", folder / "street.jpg")
    return folder


def write_sharp_classifier(folder: Path) -> None:
    """A small classifier whose best class is clear."""
    shutil.copytree(MODELS / "folders" / "mobilenetv2", folder)
    file = write_stand_in(folder)
    proto = onnx.load(file)
    weights = next(one for one in proto.graph.initializer if one.name == "weights")
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * 100, "weights"))
    onnx.save(proto, file)


def test_scenes_are_the_same_in_every_run() -> None:
    """Two lists of scenes of the same pictures have the same crops, and a crop lies inside its picture."""
    pictures = [RANDOM.integers(0, 256, (90, 120, 3), dtype=np.uint8) for _ in range(3)]
    one, two = (Scenes(pictures, [4, 4, 4]) for _ in range(2))
    assert len(one) == 15
    for number in range(len(one)):
        decoded = one.decoded(number, ColorFormat.RGB)
        assert np.array_equal(decoded.pixels, two.decoded(number, ColorFormat.RGB).pixels)
        assert decoded.pixels.shape == (decoded.source_height, decoded.source_width, 3)
    assert np.array_equal(one.decoded(0, ColorFormat.RGB).pixels[..., ::-1], pictures[0])
    assert len(Scenes(pictures, [4, 4, 4], limit=5)) == 5


def test_rounded_weights_are_compared_with_the_model(tmp_path: Path, media: Path) -> None:
    """The bench compares a classifier and a detector with their copies in rounded weights, and the report shows it."""
    write_sharp_classifier(tmp_path / "mobilenetv2")
    folders = [str(tmp_path / "mobilenetv2"), str(MODELS / "shipped" / "street")]
    file = tmp_path / "agreement.json"
    options = ["--media", str(media), "--no-gpu", "--no-classifier", "--pictures", "9", "--json", str(file)]
    assert main([*folders, *options]) == 0
    rows = {row["model"]: row for row in json.loads(file.read_text())["results"] if row["kind"] == "agreement"}
    classes, boxes = rows["mobilenetv2"], rows["street"]
    assert classes["top1"]["median"] == 1.0
    assert 0 < classes["compared"]["median"] == 9 - classes["ties"]["median"]
    assert boxes["boxes"]["median"] > 10
    assert 0.9 < boxes["iou_min"]["median"] < 1.0  # rounding moves some box
    assert report([str(file)]) == 0
    assert "CPU, weights rounded to FP16" in file.with_suffix(".md").read_text()


def test_ratio_of_several_models_is_the_worst(tmp_path: Path) -> None:
    """Targets are judged by the model that agrees least, of each engine and precision."""
    runs = [
        PointRun("agreement", 1, {"network": model, "by": by}, {"iou_p01": value}, model)
        for model, by, value in (("a", "CUDA FP16", 0.99), ("b", "CUDA FP16", 0.97), ("a", "CUDA FP32", 1.0))
    ]
    rows = {row["measure"]: row for row in ratios_of(runs)}
    assert (rows["iou_p01_cuda_fp16"]["model"], rows["iou_p01_cuda_fp16"]["value"]["median"]) == ("b", 0.97)
    assert rows["iou_p01_cuda_fp32"]["value"]["median"] == 1.0
    content = {"conditions": CONDITIONS, "results": results_of(runs)}
    file = tmp_path / "agreement.json"
    file.write_text(json.dumps(content))
    judged = read_bench(file, read_targets())
    assert judged is not None
    states = {verdict.target_id: verdict.state for verdict in judged.verdicts}
    assert (states["h200-boxes-fp16"], states["h200-boxes-fp32"]) == (State.FAIL, State.PASS)


def test_missing_model_is_one_sentence(tmp_path: Path, media: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be added ends the bench with its name and the reason."""
    assert main([str(tmp_path / "none.onnx"), "--media", str(media), "--no-gpu", "--no-classifier"]) == 1
    assert "none.onnx" in capsys.readouterr().err


def test_last_layer_spreads_the_scores(tmp_path: Path) -> None:
    """After rescaling, each class has mean 0 and the given spread over the pictures."""
    weight, bias = (RANDOM.normal(5, 1, shape).astype(np.float32) for shape in ((3, 4), (3,)))
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    graph = helper.make_graph(
        [node], "head",
        [helper.make_tensor_value_info("x", 1, ["n", 4])], [helper.make_tensor_value_info("y", 1, ["n", 3])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )  # fmt: skip
    file = tmp_path / "head.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    pictures = RANDOM.normal(2, 1, (50, 4)).astype(np.float32)
    rescale_last_layer(file, pictures @ weight.T + bias)
    (scores,) = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": pictures})
    assert np.allclose(scores.mean(axis=0), 0, atol=1e-3)
    assert np.allclose(scores.std(axis=0), LOGIT_SPREAD, atol=1e-3)


def test_scenes_need_no_threads_in_common() -> None:
    """Scenes are read by several threads at once."""
    scenes = Scenes([np.zeros((20, 20, 3), np.uint8)], [8])
    with ThreadPoolExecutor(4) as pool:
        shapes = list(pool.map(lambda number: scenes.decoded(number, ColorFormat.GRAY).pixels.ndim, range(9)))
    assert shapes == [2] * 9
