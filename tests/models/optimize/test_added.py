"""INT8 twins of models that `models add` added, of all kinds of results."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.engines.config_pbtxt import read_config
from penstock.models.add import AddOptions, add_model
from penstock.models.inspect.inspection import Hints
from penstock.models.optimize.optimize import optimize
from penstock.models.optimize.report import as_json, evaluation_lines
from penstock.models.optimize.source import (
    OptimizeError,
    Progress,
    engine_options,
    open_model,
    read_sample,
    read_source,
)
from tests.integration.added_models import MADE, Make
from tests.support import made_networks

UNIT = Hints(scale=1 / 255)
PLAIN = Hints(mean=(0.0,) * 3, std=(1.0,) * 3, color="rgb")
CASES: dict[str, tuple[Make, Hints, str, str]] = {
    "yolox": (made_networks.yolox, Hints(layout="yolox", color="bgr"), "detections", "mAP@0.5 "),
    "dfine": (MADE["dfine"][0], Hints(), "detections", "mAP@0.5 "),
    "masks": (lambda path: made_networks.ultralytics(path, task="segment"), UNIT, "detections", "mAP@0.5 "),
    "persons": (made_networks.embedding, Hints(), "embeddings", "cosine with the float model's vectors: 0.9"),
    "areas": (made_networks.segmentation, PLAIN, "segmentation", "IoU with the float model's maps: mean of "),
}


@pytest.mark.usefixtures("quick_rounds")
@pytest.mark.parametrize("case", CASES)
def test_twin_of_an_added_model_keeps_its_card_and_batches_and_says_what_it_lost(
    tmp_path: Path, pictures: list[Path], silent: Progress, case: str
) -> None:
    """Freed batch, second input, masks, vectors, maps: the loss is in the task's own measure, without any labels."""
    make, hints, kind, line = CASES[case]
    added = add_model(make(tmp_path / "m.onnx"), "m", AddOptions(hints), home=tmp_path)
    source = read_source(added.folder)
    staged = tmp_path / "m-int8"
    staged.mkdir()
    report = optimize(source, pictures, {}, staged, silent)
    twin, config = read_config(staged / "config.pbtxt"), read_config(added.folder / "config.pbtxt")
    assert (twin.max_batch_size, twin.inputs, twin.outputs) == (8, config.inputs, config.outputs)
    assert twin.parameters == {**config.parameters, "precision": "int8", "optimized-from": "m"}
    assert report.judgement is not None
    assert 0.5 < report.judgement.agreement.share <= 1.0
    assert report.judgement.agreement.pictures == len(pictures) // 2
    assert evaluation_lines(report.judgement)[0].startswith(line)
    assert as_json(report)["judgement"]["agreement"]["kind"] == kind  # type: ignore[index]
    session = open_model(staged / "1" / "model.onnx", engine_options(source))
    feed = read_sample(pictures[0], source).feed
    rows = session.run(None, {name: np.repeat(array, 3, axis=0) for name, array in feed.items()})
    assert all(len(row) == 3 for row in rows)


def test_model_whose_loss_is_not_measured_is_refused_before_any_work(tmp_path: Path) -> None:
    """Depth: an agreement of nothing would read as a whole one."""
    source = made_networks.depth(tmp_path / "m.onnx")
    hints = replace(PLAIN, layout="depth")
    added = add_model(source, "m", AddOptions(hints), home=tmp_path)
    with pytest.raises(OptimizeError, match="layout 'depth', whose loss is not measured"):
        read_source(added.folder)
