"""The whole way on a small network: the folder that comes out, the choice, the fusions, the judgement."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from penstock.engines.config_pbtxt import read_config
from penstock.models.optimize import optimize as judging
from penstock.models.optimize.optimize import choose, optimize
from penstock.models.optimize.profile import read_fusion
from penstock.models.optimize.quantize import Ranges
from penstock.models.optimize.report import NOT_JUDGED, Trial, as_json, config_text
from penstock.models.optimize.source import (
    OptimizeError,
    Progress,
    SourceModel,
    engine_options,
    open_model,
    read_source,
)
from penstock.protocol.vision_results import Detections
from penstock.vision.accuracy import Truth
from tests.models.optimize.conftest import RANDOM, write_model


@pytest.mark.usefixtures("quick_rounds")
def test_optimise_writes_a_model_that_the_engine_opens(
    source: SourceModel, pictures: list[Path], tmp_path: Path, silent: Progress
) -> None:
    """Same card and labels, another name and precision; the page has hashes and figures; the original is untouched."""
    before = {path: path.read_bytes() for path in source.folder.rglob("*") if path.is_file()}
    staged = tmp_path / "staged"
    staged.mkdir()
    report = optimize(source, pictures, {}, staged, silent)
    config = read_config_of(staged, "small-int8")
    assert config.parameters | {"precision": "", "optimized-from": ""} == {
        **source.config.parameters,
        "precision": "",
        "optimized-from": "",
    }
    assert (config.parameters["precision"], config.parameters["optimized-from"]) == ("int8", "small")
    assert "# A comment that must survive." in (staged / "config.pbtxt").read_text()
    page = (staged / "MODEL.md").read_text()
    assert all(word in page for word in (report.source_sha256, report.int8_sha256, "Apache-2.0", "10 pictures"))
    assert (staged / "labels.txt").read_bytes() == (source.folder / "labels.txt").read_bytes()
    assert sorted(path.name for path in (staged / "1").iterdir()) == ["model.onnx"]
    session = open_model(staged / "1" / "model.onnx", engine_options(source))
    assert session.run(None, {"image": np.zeros((3, 3, 32, 32), np.float32)})[0].shape == (3, 8)
    assert {path: path.read_bytes() for path in source.folder.rglob("*") if path.is_file()} == before
    twin = shutil.copytree(staged, tmp_path / "again" / "small-int8")
    (twin / "config.pbtxt").write_text((twin / "config.pbtxt").read_text().replace('"precision"', '"something"'))
    with pytest.raises(OptimizeError, match="computes in 8 bits already"):
        read_source(twin)
    assert report.judgement is not None
    assert report.judgement.agreement.pictures == 10
    assert [item.batch_size for item in report.comparisons] == [1, 8]
    document = json.loads(msgspec.json.encode(as_json(report)))
    assert document["comparisons"][0]["ratio"] == pytest.approx(report.comparisons[0].ratio)
    assert document["fusion"]["float_levels"][0]["counts"]["Conv"] == 2


@pytest.mark.usefixtures("quick_rounds")
def test_optimise_of_random_weights_judges_nothing(pictures: list[Path], tmp_path: Path, silent: Progress) -> None:
    """No agreement, no choice by it; the page says so in its first line and under Measured."""
    source = read_source(write_model(tmp_path / "models", "small", more=RANDOM))
    staged = tmp_path / "staged"
    staged.mkdir()
    report = optimize(source, pictures, {}, staged, silent)
    assert (report.judgement, report.trials, report.chosen.agreement) == (None, (), None)
    assert as_json(report)["accuracy"] == NOT_JUDGED
    page = (staged / "MODEL.md").read_text()
    assert "RANDOM WEIGHTS" in page.splitlines()[0]
    assert NOT_JUDGED in page


@pytest.mark.usefixtures("quick_rounds")
def test_optimise_of_a_model_with_external_data_writes_one_with_its_weights_inside(
    pictures: list[Path], tmp_path: Path, silent: Progress
) -> None:
    """Weights beside the source's ONNX file make no difference, and the INT8 file needs no other file."""
    folder = write_model(tmp_path / "models", "small")
    file = folder / "1" / "model.onnx"
    onnx.save(
        onnx.load(file), file, save_as_external_data=True, all_tensors_to_one_file=True,
        location="model.onnx.data", size_threshold=0,
    )  # fmt: skip
    assert (folder / "1" / "model.onnx.data").stat().st_size > 0
    staged = tmp_path / "staged"
    staged.mkdir()
    source = read_source(folder)
    report = optimize(source, pictures, {}, staged, silent)
    assert report.fusion.float_levels[0].counts["Conv"] == 2
    assert sorted(path.name for path in (staged / "1").iterdir()) == ["model.onnx"]
    session = open_model(staged / "1" / "model.onnx", engine_options(source))
    assert session.run(None, {"image": np.zeros((3, 3, 32, 32), np.float32)})[0].shape == (3, 8)


def test_read_fusion_names_what_became_of_the_first_convolution(source: SourceModel) -> None:
    """Conv + BatchNorm + ReLU is one node in the engine's graph, and the shortcut's Add is inside a convolution."""
    fusion = read_fusion(source, source.path)
    assert fusion.engine_level == "all"
    file, basic, _, everything = fusion.float_levels
    assert (file.counts["BatchNormalization"], file.counts["Relu"], file.counts["Add"]) == (1, 2, 1)
    assert "BatchNormalization" not in basic.counts
    assert not {"Relu", "Add", "BatchNormalization"} & set(everything.counts)
    assert (everything.has_relu, everything.has_sum) == (2, 1)
    assert fusion.example is not None
    assert fusion.example.before == ("Conv stem", "BatchNormalization stem.norm", "Relu stem.norm.relu")
    assert "with Relu inside" in fusion.example.float_after
    assert "stem" in fusion.example.float_after


def test_choose_leaves_nodes_float_only_where_that_gains_more_than_a_point() -> None:
    """Speed is not given away for what may be chance."""
    plain = Trial(Ranges.MINMAX, (), 0.90)
    better = Trial(Ranges.ENTROPY, (), 0.93)
    little, much = (Trial(Ranges.ENTROPY, ("head",), value) for value in (0.939, 0.95))
    assert choose([plain, better, little]) == better
    assert choose([plain, better, little, much]) == much
    assert choose([plain, Trial(Ranges.PERCENTILE, (), 0.90)]) == plain


def test_config_text_that_cannot_be_edited_as_text_is_rendered_anew(tmp_path: Path) -> None:
    """A config on one line still says the same under its new name."""
    folder = write_model(tmp_path, "small")
    config = (folder / "config.pbtxt").read_text().split("\n", 1)[1]
    (folder / "config.pbtxt").write_text(
        " ".join(config.split()).replace('name: "small"', 'version_policy { latest { } } name: "small"', 1)
    )
    (tmp_path / "small-int8").mkdir()
    (tmp_path / "small-int8" / "config.pbtxt").write_text(config_text(read_source(folder), "small-int8"))
    assert read_config(tmp_path / "small-int8" / "config.pbtxt").parameters["precision"] == "int8"


def test_judge_measures_precision_against_the_truth(
    source: SourceModel, pictures: list[Path], silent: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With annotations both models are held against them; pictures without any are left out."""
    box = np.array([[0, 0, 10, 10]], np.float32)
    seen = Detections(box, np.array([0.9], np.float32), np.array([0]))
    blind = Detections(box[:0], np.zeros(0, np.float32), np.zeros(0, np.int64))
    monkeypatch.setattr(judging, "run_samples", lambda session, source, samples: [session for _ in samples])
    unsure = Detections(box, np.array([0.1], np.float32), np.array([0]))
    truth = {path.name: Truth(box, np.array([0])) for path in pictures[:3]}
    (found,) = judging.evaluate(source, [seen, blind], pictures, truth, silent)  # type: ignore[list-item]
    assert (found.float_map, found.int8_map) == (1.0, 0.0)
    (found,) = judging.evaluate(source, [seen, unsure], pictures, truth, silent)  # type: ignore[list-item]
    assert found.int8_map == 1.0  # the curve counts what the card's threshold of 0.2 drops
    assert (found.agreement.share, found.agreement.pictures) == (0.0, 20)
    (other,) = judging.evaluate(source, [seen, seen], pictures, {}, silent)  # type: ignore[list-item]
    assert (other.float_map, other.agreement.share) == (None, 1.0)


def read_config_of(staged: Path, name: str):  # type: ignore[no-untyped-def]
    """The config as Triton would read it in a folder of that name."""
    folder = staged.parent / name
    folder.mkdir()
    (folder / "config.pbtxt").write_text((staged / "config.pbtxt").read_text())
    return read_config(folder / "config.pbtxt")
