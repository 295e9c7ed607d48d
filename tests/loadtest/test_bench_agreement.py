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

from loadtest.bench.gpu.agreement import main
from loadtest.bench.gpu.figures import PointRun, ratios_of, results_of
from loadtest.bench.gpu.random_classifier import LOGIT_SPREAD, rescale_last_layer
from loadtest.bench.gpu.reference import Answers, ModelReference, Reference, read_reference, write_reference
from loadtest.bench.gpu.report import main as report
from loadtest.bench.gpu.scenes import Scenes
from loadtest.bench.wire import BadAnswer
from penstock.models.check.answers import NO_RIVALS, Rivals, compare_answers
from penstock.protocol.vision_results import Classes, Detections, Embedding
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


def test_stored_reference_gives_the_same_figures(tmp_path: Path, media: Path) -> None:
    """Results of the CPU that were stored are used for the same models, and the file says where they were made."""
    write_sharp_classifier(tmp_path / "mobilenetv2")
    folders = [str(tmp_path / "mobilenetv2"), str(MODELS / "shipped" / "street")]
    stored, files = tmp_path / "reference.npz", [tmp_path / "computed.json", tmp_path / "stored.json"]
    options = ["--media", str(media), "--no-gpu", "--no-classifier", "--pictures", "3"]
    assert main([*folders, *options, "--write-reference", str(stored)]) == 0
    assert main([*folders, *options, "--json", str(files[0])]) == 0
    assert main([*folders, *options, "--json", str(files[1]), "--reference", str(stored)]) == 0
    computed, used = (json.loads(file.read_text()) for file in files)
    rows = [[row for row in one["results"] if row["kind"] == "agreement"] for one in (computed, used)]
    timed = {"cpu_s", "variant_s"}
    same = [[{name: row[name] for name in row if name not in timed} for row in side] for side in rows]
    assert same[0] == same[1]
    assert len(same[0]) == 2
    assert "cpu_s" not in rows[1][0]
    origin = "agreement street, the CPU's results"
    assert computed["facts"][origin] == "computed in this run"
    assert f"ONNX Runtime {ort.__version__}" in used["facts"][origin]


def test_reference_of_other_pictures_or_models_is_not_used(
    tmp_path: Path, media: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another crop, or another threshold in config.pbtxt, the CPU's results are computed."""
    folder = tmp_path / "street"
    shutil.copytree(MODELS / "shipped" / "street", folder)
    stored, file = tmp_path / "reference.npz", tmp_path / "agreement.json"
    options = [str(folder), "--media", str(media), "--no-gpu", "--no-classifier", "--json", str(file)]
    assert main([*options, "--pictures", "2", "--write-reference", str(stored)]) == 0
    assert main([*options, "--pictures", "1", "--reference", str(stored)]) == 0
    assert "is of other pictures" in capsys.readouterr().err
    config = folder / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "topk" value { string_value: "3" } }\n')
    assert main([*options, "--pictures", "2", "--reference", str(stored)]) == 0
    assert json.loads(file.read_text())["facts"]["agreement street, the CPU's results"] == "computed in this run"


def test_results_of_each_kind_survive_the_reference_file(tmp_path: Path) -> None:
    """Boxes with their rivals, classes and vectors; a picture may have no box."""
    none = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
    some = Detections(
        np.array([[0, 0, 9, 9], [20, 0, 29, 9]], np.float32), np.array([0.9, 0.8], np.float32), np.array([3, 1])
    )
    rivals = [NO_RIVALS, Rivals(np.array([1]), np.full((1, 4), 2, np.float32))]
    classes = Classes(np.linspace(0.9, 0.1, 9, dtype=np.float32), np.arange(9))
    answers = {
        "boxes": Answers([none, some], rivals),
        "classes": Answers([classes, classes]),
        "vectors": Answers([Embedding(np.array([0.25, -2], np.float32))]),
    }
    file = tmp_path / "reference.npz"
    models = {name: ModelReference(name, one) for name, one in answers.items()}
    write_reference(file, Reference("0", {"machine": "Imagined 3000"}, models))
    found = read_reference(file)
    assert found.origin == "machine Imagined 3000"
    boxes = found.models["boxes"].answers
    assert [len(one.score) for one in boxes.results if isinstance(one, Detections)] == [0, 2]
    assert [near.box.tolist() for near in boxes.rivals] == [[], [1]]
    agreement = compare_answers([none, some], boxes.results, threshold=0.2, rivals=boxes.rivals)
    assert agreement.overlaps == (1.0, 1.0)
    best = found.models["classes"].answers.results[1]
    assert isinstance(best, Classes)
    assert (best.class_id.tolist(), best.score[0]) == ([0, 1, 2, 3, 4], np.float32(0.9))
    vector = found.models["vectors"].answers.results[0]
    assert isinstance(vector, Embedding)
    assert vector.vector.tolist() == [0.25, -2]


def test_file_that_is_no_reference_is_one_sentence(tmp_path: Path, media: Path) -> None:
    """Text where results should be ends with the file's name and what writes one."""
    file = tmp_path / "reference.npz"
    file.write_text("no results")
    with pytest.raises(BadAnswer, match=r"reference\.npz is no reference .* --write-reference"):
        read_reference(file)
    assert main([str(tmp_path), "--media", str(media), "--no-gpu", "--no-classifier", "--reference", str(file)]) == 1


def test_ratio_of_several_models_is_the_worst(tmp_path: Path) -> None:
    """Targets are judged by the model that agrees least, of each engine and precision."""
    runs = [
        PointRun("agreement", 1, {"network": model, "by": by}, {"iou_p01": value}, model)
        for model, by, value in (("a", "CUDA FP16", 0.99), ("b", "CUDA FP16", 0.97), ("a", "CUDA FP32", 1.0))
    ]
    runs.append(PointRun("agreement", 1, {"network": "a", "by": "CUDA FP16"}, {"box_share": 0.995}, "a"))
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
    assert states["h200-box-share-fp16"] is State.PASS


def test_model_that_is_not_served_in_a_precision_is_named(tmp_path: Path) -> None:
    """FP16 is judged by the models that keep it; FP32, which has no other precision behind it, by all of them."""
    runs = [
        PointRun("agreement", 1, {"network": model, "by": by}, {"iou_p01": value, "served": served}, model)
        for model, by, value, served in (
            ("a", "CUDA FP16", 0.99, 1.0), ("b", "CUDA FP16", 0.9, 0.0), ("a", "CUDA FP32", 0.9, 0.0)
        )
    ]  # fmt: skip
    rows = {row["measure"]: row for row in ratios_of(runs)}
    assert rows["iou_p01_cuda_fp16"]["value"]["median"] == 0.99
    assert rows["iou_p01_cuda_fp16"]["of"].endswith("lowest of 1 models; not served in it: b")
    assert rows["iou_p01_cuda_fp32"]["value"]["median"] == 0.9


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
    logits = pictures @ weight.T + bias
    rescale_last_layer(file, logits.mean(axis=0), logits.std(axis=0))
    (scores,) = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": pictures})
    assert np.allclose(scores.mean(axis=0), 0, atol=1e-3)
    assert np.allclose(scores.std(axis=0), LOGIT_SPREAD, atol=1e-3)


def test_scenes_need_no_threads_in_common() -> None:
    """Scenes are read by several threads at once."""
    scenes = Scenes([np.zeros((20, 20, 3), np.uint8)], [8])
    with ThreadPoolExecutor(4) as pool:
        shapes = list(pool.map(lambda number: scenes.decoded(number, ColorFormat.GRAY).pixels.ndim, range(9)))
    assert shapes == [2] * 9
