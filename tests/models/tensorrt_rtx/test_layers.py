"""The fusion table of the builder's text, and how it is shown."""

from pathlib import Path

import pytest

from penstock.engines.ort_serving.placement import Precision
from penstock.models.tensorrt_rtx.build import BuildRequest, BuiltEngine, failure_reason, why_not_as_wished
from penstock.models.tensorrt_rtx.layers import EngineLayer, FusedPattern, FusionTable, OnnxNode, read_layers
from penstock.models.tensorrt_rtx.page import OWN_OPERATORS, as_json, operators_text, page, shape_text, summary_lines

_TENSOR = "{ Name: t, Dimensions: [-1,16,8,8], Strides: [1024,1,128,16], StrideOrder: [3,0,2,1], Datatype: Float, "
TEXT = "Layers:\n" + "\n".join(
    f"Name: {name}, LayerType: {kind}, Inputs: [ {_TENSOR}Format: (NHWC) Channel major format }}], Constants: [], "
    f"Outputs: [{outputs}], TacticName: , StreamId: 0, {event}Metadata: {nodes}"
    for name, kind, outputs, event, nodes in (
        ("shape", "shape_call", "", "", ""),
        ("wait_1", "wait", "", "EventId: 3, ", ""),
        ("__myl_MoveSlicSlic_myl0_3", "kgen", f" {_TENSOR}Format: (NHWC) Channel major format }}", "", ""),
        (
            "conv, fused",
            "runtime_fusion",
            f" {_TENSOR}Format: (Linear) Row major linear format }}",
            "",
            "[ONNX Layer: mul]\x1f[ONNX Layer: /a[0]/conv]\x1f[ONNX Layer: sigmoid]\x1f[ONNX Layer: ONNXTRT_cast]",
        ),
        ("again", "runtime_fusion", "", "", "[ONNX Layer: conv2]\x1f[ONNX Layer: relu]"),
    )
)
NODES = [
    OnnxNode("/a[0]/conv", "Conv"),
    OnnxNode("sigmoid", "Sigmoid"),
    OnnxNode("mul", "Mul"),
    OnnxNode("constant", "Constant"),
    OnnxNode("shape", "Shape"),
    OnnxNode("conv2", "Conv"),
    OnnxNode("relu", "Relu"),
]


@pytest.fixture
def table() -> FusionTable:
    """Of TEXT."""
    return read_layers(TEXT, NODES)


def test_layers_hold_their_nodes_in_the_graphs_order(table: FusionTable) -> None:
    """Layers that only order streams are counted apart; names that are not the graph's are left out."""
    assert [layer.operators for layer in table.layers] == [(), ("Conv", "Sigmoid", "Mul"), ("Conv", "Relu")]
    assert [layer.own_operators for layer in table.layers] == [("Move", "Slic", "Slic"), (), ()]
    assert table.layers[1].outputs == ("Float [-1,16,8,8] Linear",)
    assert (table.node_count, table.control_count, table.fused_count) == (6, 2, 3)
    assert table.folded == {"Shape": 1}


def test_layers_of_another_text_are_refused() -> None:
    """A new format of TensorRT is noticed, not reported as an engine without layers."""
    with pytest.raises(ValueError, match="names no layer"):
        read_layers("Layers:\nnothing that is known", NODES)


def test_report_shows_every_layer_and_who_can_run_it(table: FusionTable) -> None:
    """The page has the patterns and all layers; sentences and JSON have the same figures."""
    shapes = {"x": ((1, 3, 8, 8), (4, 3, 8, 8))}
    built = BuiltEngine((8, 9), Precision.FP16, "1.7.1.116", "ab" * 32, 5_000_000, 0.5, shapes, table)
    assert summary_lines(built)[:4] == [
        "for 8.9 (Ada: L4, L40, RTX 40) in FP16 by TensorRT-RTX 1.7.1.116: 5.0 MB in 0.5 s",
        "inputs: x [1–4, 3, 8, 8]",
        "6 ONNX nodes became 3 layers; 3 of them fuse several operators; not counted: 2 that synchronize CUDA "
        "streams or compute shapes",
        "computed in advance, not needed, or merged into a layer that names no nodes: 1 Shape",
    ]
    text = page("best", built)
    assert "| 1 | Conv + Sigmoid + Mul |" in text
    assert (
        "| 2 | runtime_fusion | Conv + Sigmoid + Mul | `/a[0]/conv`, `sigmoid`, `mul` | Float [-1,16,8,8] Linear |"
        in text
    )
    assert "no GPU ran it" in text
    assert OWN_OPERATORS in text
    plain = as_json(built, Path("model-sm89-0.onnx"))
    assert (plain["onnx_nodes"], plain["layer_count"], plain["is_served"]) == (6, 3, True)


def test_texts_are_short() -> None:
    """Repeated operators are counted, and equal sides are written once."""
    assert operators_text(FusedPattern(("Slice", "Slice", "Concat"), (), 1)) == "Slice × 2 + Concat"
    assert operators_text(FusedPattern((), ("Fc", "Mul", "Mul"), 1)) == "(Fc + Mul × 2 of TensorRT)"
    assert operators_text(EngineLayer("gemm_12", "gemm", (), ())) == "(a kernel of TensorRT)"
    assert shape_text((1, 3), (8, 3)) == "[1–8, 3]"


def test_engine_that_nothing_runs_begins_with_a_warning(table: FusionTable) -> None:
    """The warning for an A100 comes before the figures."""
    built = BuiltEngine((8, 0), Precision.FP32, "1.7.1.116", "ab" * 32, 5_000_000, 0.5, {}, table)
    first = summary_lines(built)[0]
    assert first.startswith("warning: ONNX Runtime's plug-in does not run this engine; for such a GPU use CUDA (run")


@pytest.mark.parametrize(
    ("max_batch", "size", "words"),
    [
        (16, (640, 640), "fixes its inputs: x [1, 3, 416, 416]; leave --max-batch and --input-size out"),
        (16, None, "leave --max-batch out"),
        (None, (640, 416), "leave --input-size out"),
        (1, (416, 416), ""),
        (None, None, ""),
    ],
)
def test_flags_that_a_fixed_file_would_ignore_are_refused(
    max_batch: int | None, size: tuple[int, int] | None, words: str
) -> None:
    """Not silently: the engine would have another shape. What the file has anyway may be given."""
    request = BuildRequest("m.onnx", (8, 9), max_batch or 8, size=size, has_batch_wish=max_batch is not None)
    why = why_not_as_wished(request, {"x": ((1, 3, 416, 416), (1, 3, 416, 416))})
    assert why.endswith(words)
    assert bool(why) is bool(words)


def test_builders_own_error_of_turing_is_the_cure() -> None:
    """Its matrix products need FP16; other errors are shown as they are, on one line."""
    turing = (
        "Error Code 1: Myelin ([pass.cpp:337: check] Cannot compile 'Gemm' for Turing: FP32 GEMM is not supported. In"
    )
    assert failure_reason([turing]) == "FP32 GEMM is not supported there: give --precision fp16"
    assert failure_reason(["first", "Error Code 9:\nno memory"]) == "Error Code 9: no memory"
    assert failure_reason([]) == "it gives no reason"
