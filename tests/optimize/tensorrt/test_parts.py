"""The pure parts: which card, which shapes, what the inspector says, how close two outputs are."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploy.models.graph import Graph
from server.optimize.errors import OptimizeError
from server.optimize.source import SourceModel, read_source
from server.optimize.tensorrt.cards import Precision, refusal
from server.optimize.tensorrt.closeness import closeness, cosine
from server.optimize.tensorrt.half import sorted_nodes
from server.optimize.tensorrt.layers import read_layers
from server.optimize.tensorrt.shapes import profile_of, timed_batches
from tests.optimize.conftest import write_model

FP16, INT8 = Precision.FP16, Precision.INT8

# Two layers of NVIDIA's own example: trt-engine-explorer, resnet, A100, fp16.
EXPLORER = """{"Layers": [{
  "Name": "Reformatting CopyNode for Input Tensor 0 to Conv_0 + Relu_1", "LayerType": "Reformat",
  "Inputs": [{"Name": "input.1", "Dimensions": [32,3,224,224], "Format/Datatype": "Row major linear FP32"}],
  "Outputs": [{"Name": "Reformatted Input Tensor 0 to Conv_0 + Relu_1", "Dimensions": [32,3,224,224],
    "Format/Datatype": "Channel major FP16 format where channel % 4 == 0"}],
  "ParameterType": "Reformat", "Origin": "REFORMAT", "TacticValue": "0x0000000000000000"
},{
  "Name": "Conv_0 + Relu_1", "LayerType": "CaskConvolution",
  "Inputs": [{"Name": "Reformatted Input Tensor 0 to Conv_0 + Relu_1", "Dimensions": [32,3,224,224],
    "Format/Datatype": "Channel major FP16 format where channel % 4 == 0"}],
  "Outputs": [{"Name": "onnx::MaxPool_125", "Dimensions": [32,64,112,112],
    "Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}],
  "Activation": "RELU", "HasReLU": 1
}], "Bindings": ["input.1", "343"]}"""


@pytest.mark.parametrize(
    ("version", "capability", "precision", "why"),
    [
        ((10, 4), (7, 0), FP16, None),
        ((10, 5), (7, 0), FP16, "TensorRT 10.5 does not build for compute capability 7.0 (Volta): 10.4 was the last"),
        ((11, 4), (7, 0), INT8, "(Volta): 10.4 was the last"),
        ((10, 0), (6, 1), INT8, "(Pascal): 8.6 was the last, in Triton's image 24.04"),
        ((8, 6), (6, 1), INT8, None),
        ((8, 6), (6, 1), FP16, "computes FP16 at a crawl: add --int8"),
        ((8, 6), (6, 0), FP16, None),
        ((8, 6), (6, 0), INT8, "has no 8-bit instructions: leave out --int8"),
        ((8, 5), (8, 0), FP16, "TensorRT 8.5 is too old"),
        ((10, 7), (10, 0), FP16, "(Blackwell): 10.8 was the first"),
        ((10, 8), (12, 0), INT8, None),
        ((11, 4), (9, 0), INT8, None),
        ((10, 13), (7, 5), FP16, None),
    ],
)
def test_refusal_of_a_tensorrt_and_a_card_that_do_not_fit_names_the_one_that_does(
    version: tuple[int, int], capability: tuple[int, int], precision: Precision, why: str | None
) -> None:
    """By NVIDIA's support matrices, before minutes of building."""
    found = refusal(version, capability, precision)
    assert (found is None) if why is None else (why in (found or ""))


def test_profile_goes_from_one_picture_to_max_batch_size(source: SourceModel) -> None:
    """Best at the most; speed is measured at 1, 8 and the most, as far as there are such."""
    profile = profile_of(source)
    assert (profile.least, profile.best, profile.most) == ((1, 3, 32, 32), (16, 3, 32, 32), (16, 3, 32, 32))
    assert str(profile) == "image 1x3x32x32 16x3x32x32 16x3x32x32"
    assert timed_batches(profile) == (1, 8, 16)


def test_profile_of_a_model_without_batch_axis_is_one_shape(tmp_path: Path) -> None:
    """As config.pbtxt declares it, the leading 1 too."""
    folder = write_model(tmp_path, "small")
    config = (folder / "config.pbtxt").read_text()
    config = config.replace("max_batch_size: 16", "max_batch_size: 0").replace("dims: [ 3, 32", "dims: [ 1, 3, 32")
    (folder / "config.pbtxt").write_text(config.replace("dims: [ 8 ]", "dims: [ 1, 8 ]"))
    profile = profile_of(read_source(folder))
    assert {profile.least, profile.best, profile.most} == {(1, 3, 32, 32)}
    assert timed_batches(profile) == (1,)


def test_profile_of_an_input_of_any_size_is_refused(source: SourceModel) -> None:
    """A plan needs an upper end, and nobody named one."""
    card = replace(source.card, prepare_spec=replace(source.card.prepare_spec, width=0, height=0))
    with pytest.raises(OptimizeError, match="takes pictures of any size, and a plan needs one"):
        profile_of(replace(source, card=card))


def test_read_layers_of_nvidias_own_example() -> None:
    """Reformats apart; a fused layer without metadata is told by its name."""
    layers = read_layers(EXPLORER, [("Conv", "Conv_0"), ("Relu", "Relu_1")])
    assert (layers.total, layers.copies, layers.fused, layers.network_nodes) == (2, 1, 1, 2)
    assert (layers.kinds, layers.precisions) == ({"Reformat": 1, "CaskConvolution": 1}, {"FP16": 1})
    assert layers.example is not None
    assert layers.example.nodes == ("Conv_0", "Relu_1")


def test_read_layers_takes_names_from_the_metadata_where_there_is_some() -> None:
    """Kernels that TensorRT generates have names that say nothing; Half and INT8 are types, too."""
    layer = {
        "Name": "__myl_ConvRelu_myl0_2",
        "LayerType": "kgen",
        "Outputs": [{"Format/Datatype": "Half"}],
        "Metadata": "[ONNX Layer: conv]\x1f[ONNX Layer: relu]\x1f[ONNX Layer: conv]",
    }
    eight = layer | {"Outputs": [{"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format."}]}
    layers = read_layers(json.dumps({"Layers": [layer, eight, "conv2 + relu2"]}), [("Conv", "conv")])
    assert layers.precisions == {"FP16": 1, "INT8": 1, "other": 1}
    assert layers.fused == 3
    assert layers.example is not None
    assert layers.example.nodes == ("conv", "relu")


@pytest.mark.parametrize("text", ["", "[]", '{"Layers": 3}', "null", "[1, null]"])
def test_read_layers_of_what_cannot_be_read_is_no_failure(text: str) -> None:
    """A report is no reason to lose a plan."""
    assert read_layers(text, [("Conv", "conv")]).example is None


def test_cosine_of_outputs() -> None:
    """Direction, not size; no numbers at all are as far as can be."""
    one = np.array([1.0, 2.0, 3.0], np.float32)
    assert cosine(one, one * 2) == pytest.approx(1.0)
    assert cosine(one, -one) == pytest.approx(-1.0)
    assert cosine(one * 0, one * 0) == 1.0
    assert cosine(one, one * 0) == 0.0
    assert cosine(one, one * np.float32("nan")) == 0.0
    assert cosine(one, one[:2]) == 0.0


def test_closeness_counts_pictures_that_overflowed() -> None:
    """Only where the float model has numbers."""
    fine, over = np.ones(3, np.float32), np.array([1, np.inf, 1], np.float32)
    (found,) = closeness(["x"], [[fine], [fine], [over]], [[fine], [over], [over]])
    assert (found.cosine, found.not_numbers) == (0.0, 1)


def test_sorted_nodes_follow_their_inputs() -> None:
    """TensorRT's parser and ONNX's checker read a graph from its beginning."""
    graph = Graph("small")
    graph.output(graph.relu(graph.relu(graph.input("image", (3, 8, 8)))))
    model = graph.model()
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(model)
    onnx.checker.check_model(sorted_nodes(model))
    model.graph.node[0].input[0] = "nobody's"
    with pytest.raises(OptimizeError, match="reads what no other makes"):
        sorted_nodes(model)
