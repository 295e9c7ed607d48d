"""The throughput models against the numbers that the world knows of their architectures."""

import hashlib
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from deploy.models import googlenet, resnet50
from deploy.models.graph import multiply_accumulates
from deploy.models.graph_folder import RandomModel, main
from penstock.engines.config_pbtxt import read_config
from penstock.vision.card import card_from_config

TORCHVISION_RESNET50_PARAMETERS = 25_557_032
TORCHVISION_RESNET50_MACS = 4_089_184_256  # "4.09 G" of its model card
CAFFE_GOOGLENET_PARAMETERS = 6_998_552  # of bvlc_googlenet, without the auxiliary heads
MODELS = (resnet50.MODEL, googlenet.MODEL)


@cache
def built(name: str, seed: int = 0) -> tuple[onnx.ModelProto, int]:
    """Each model once."""
    return next(model for model in MODELS if model.name == name).build(seed)


def operators(model: onnx.ModelProto) -> Counter[str]:
    """How many nodes of each operator."""
    return Counter(node.op_type for node in model.graph.node)


def test_resnet50_has_the_published_parameters_work_and_nodes() -> None:
    """The parameters are torchvision's to the last one, and so is the work of v1.5."""
    model, parameter_count = built("resnet50-random")
    assert parameter_count == TORCHVISION_RESNET50_PARAMETERS
    assert multiply_accumulates(model) == TORCHVISION_RESNET50_MACS
    found = operators(model)
    assert (found["Conv"], found["BatchNormalization"], found["Add"]) == (53, 53, 16)


def test_googlenet_has_the_published_parameters_work_and_nodes() -> None:
    """57 convolutions with biases in nine blocks, response normalisation twice, no batch normalisation."""
    model, parameter_count = built("googlenet-random")
    assert parameter_count == CAFFE_GOOGLENET_PARAMETERS
    assert multiply_accumulates(model) == pytest.approx(1.58e9, rel=0.005)
    found = operators(model)
    assert (found["Conv"], found["Concat"], found["LRN"], found["MaxPool"]) == (57, 9, 2, 13)
    assert found["BatchNormalization"] == 0


def test_random_model_of_a_seed_is_one_file() -> None:
    """The same seed gives the same bytes, another seed others."""
    first = built("googlenet-random")[0].SerializeToString(deterministic=True)
    again, other = (googlenet.MODEL.build(seed)[0].SerializeToString(deterministic=True) for seed in (0, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.name))
def test_random_model_runs_at_any_batch_with_sane_activations(model: RandomModel) -> None:
    """A row's answer does not depend on its batch, no class drowns the others, and pictures differ."""
    session = ort.InferenceSession(built(model.name)[0].SerializeToString(), providers=["CPUExecutionProvider"])
    pictures = np.random.default_rng(1).standard_normal((2, 3, 224, 224), np.float32)
    (scores,) = session.run([model.output_name], {"image": pictures})
    (alone,) = session.run([model.output_name], {"image": pictures[:1]})
    assert scores.shape == (2, 1000)
    np.testing.assert_allclose(alone[0], scores[0], rtol=1e-3, atol=1e-4)
    logits = np.log(scores) if model.is_softmax_in_graph else scores
    assert 0.5 < float(logits.std()) < 10.0
    assert float(logits.std(axis=0).mean()) > 0.01


def test_random_model_written_is_a_complete_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder says in its first line, in its name and to programs that the weights are random; the hash is right."""
    main(googlenet.MODEL, ["--home", str(tmp_path)])
    folder = tmp_path / "models" / "googlenet-random"
    assert str(folder) in capsys.readouterr().out
    config = read_config(folder / "config.pbtxt")
    card = card_from_config(config)
    assert card is not None
    assert len(card.labels) == len((folder / "labels.txt").read_text().splitlines()) == 1000
    assert (config.max_batch_size, config.has_dynamic_batching, config.parameters["weights"]) == (64, True, "random")
    facts = (folder / "MODEL.md").read_text()
    assert "RANDOM WEIGHTS" in facts.splitlines()[0]
    assert hashlib.sha256((folder / "1" / "model.onnx").read_bytes()).hexdigest() in facts
    assert sorted(item.name for item in folder.iterdir()) == ["1", "MODEL.md", "config.pbtxt", "labels.txt"]
    assert list((tmp_path / "staging").iterdir()) == []
