"""A small classifier with batch normalisation and a shortcut, its folder, and pictures for it."""

from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest

from deploy.models.graph import Graph
from deploy.models.graph_weights import RandomWeights
from penstock.models.optimize import profile as timing
from penstock.models.optimize.source import Progress, SourceModel, read_source

CONFIG = """# A comment that must survive.
name: "{name}"
backend: "onnxruntime"
max_batch_size: 16
input [ {{ name: "image" data_type: TYPE_FP32 dims: [ 3, 32, 32 ] }} ]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ 8 ] }} ]
instance_group [ {{ count: 1 }} ]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
parameters {{ key: "network-type" value {{ string_value: "1" }} }}
parameters {{ key: "net-scale-factor" value {{ string_value: "0.0078125" }} }}
parameters {{ key: "offsets" value {{ string_value: "128;128;128" }} }}
"""
RANDOM = 'parameters { key: "weights" value { string_value: "random" } }\n'


def small_classifier(seed: int = 0) -> onnx.ModelProto:
    """Conv + BatchNorm + ReLU, a residual block, a softmax behind the last weights."""
    graph, weights = Graph("small"), RandomWeights(seed)
    x = graph.conv(graph.input("image", (3, 32, 32)), weights.conv(16, 3, 3), name="stem", stride=2, pad=1)
    x = graph.relu(graph.batch_norm(x, weights.normalisation(16), name="stem.norm"))
    branch = graph.conv(x, weights.conv(16, 16, 3), weights.bias(16), name="branch", pad=1)
    x = graph.relu(graph.add(branch, x, name="sum"))
    x = graph.flatten(graph.global_average_pool(x))
    x = graph.gemm(x, weights.linear(8, 16), weights.bias(8), name="head")
    graph.output(graph.softmax(x, name="logits"))
    return graph.model()


def write_model(repository: Path, name: str, *, more: str = "") -> Path:
    """The folder of the small classifier."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    onnx.save(small_classifier(), folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(CONFIG.format(name=name) + more)
    (folder / "labels.txt").write_text("".join(f"class {number}\n" for number in range(8)))
    (folder / "MODEL.md").write_text("# small\n\n| | |\n|---|---|\n| licence | Apache-2.0 |\n")
    return folder


def write_pictures(folder: Path, count: int) -> list[Path]:
    """JPEGs of smooth noise, all different."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(7)
    paths = [folder / f"{number:03d}.jpg" for number in range(count)]
    for path in paths:
        coarse = generator.integers(0, 256, (4, 4, 3), np.uint8)
        cv2.imwrite(str(path), cv2.resize(coarse, (48, 40), interpolation=cv2.INTER_CUBIC))
    return paths


@pytest.fixture
def source(tmp_path: Path) -> SourceModel:
    """The small classifier as read from its folder."""
    return read_source(write_model(tmp_path / "models", "small"))


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Twenty of them."""
    return write_pictures(tmp_path / "pictures", 20)


@pytest.fixture
def silent() -> Progress:
    """Progress that is not shown."""
    return Progress(step=lambda what, count: None, advance=lambda: None)


@pytest.fixture
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds too short to be a measurement, for tests that look at other things."""
    monkeypatch.setattr(timing, "ROUND_S", 0.001)
