"""TensorRT-RTX engines, built on this CPU: the fusion of two real models, the file, and builds that fail."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from penstock.engines.ort_serving.placement import Precision
from penstock.gpu.tensorrt import ARCHITECTURES, capability_text
from penstock.models.tensorrt_rtx.build import BuildLimits, BuildRequest, CannotBuild, build_engine
from tests.models.tensorrt_rtx.conftest import needs_tensorrt, real_model, request_for

pytestmark = [pytest.mark.xdist_group("tensorrt-rtx"), needs_tensorrt]


def write(file: Path, operator: str, shape: list[object], domain: str = "") -> Path:
    """An ONNX file of one node without a name, whose input has this shape."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], domain=domain)], "g", value[:1], value[1:])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)
    return file


def test_engine_of_yolox_nano_holds_convolution_and_activation_in_one_layer(shared_dir: Path, tmp_path: Path) -> None:
    """369 nodes become at most 140 layers, and each SiLU and shortcut is in its convolution's layer."""
    model = real_model(shared_dir, tmp_path, "yolox_nano_free_batch.onnx")
    phases: list[str] = []
    built, file = build_engine(request_for(model), lambda phase, _done, _count: phases.append(phase))
    table = built.table
    assert table.node_count == 369
    assert len(table.layers) <= 140
    patterns = {" ".join(one.operators): one.layers for one in table.patterns}
    assert patterns["Conv Sigmoid Mul"] == 97
    assert patterns["Conv Sigmoid Mul Add"] == 7
    assert built.shapes == {"images": ((1, 3, 416, 416), (4, 3, 416, 416))}
    assert "Optimizing graph" in phases
    (node,) = onnx.load(file).graph.node
    values = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    assert (node.op_type, node.domain, list(node.input)) == ("EPContext", "com.microsoft", ["images"])
    assert (values["hardware_architecture"], values["embed_mode"]) == (b"89", 1)
    assert len(values["ep_cache_context"]) == built.engine_bytes
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_engine_of_fastestdet_holds_channel_shuffles_in_one_layer(shared_dir: Path, tmp_path: Path) -> None:
    """211 nodes become at most 100 layers; ReLUs are in their convolutions, shuffles are one layer each."""
    built, _ = build_engine(request_for(real_model(shared_dir, tmp_path, "FastestDet.onnx")))
    assert built.table.node_count == 211
    assert len(built.table.layers) <= 100
    patterns = {" ".join(one.operators): one.layers for one in built.table.patterns}
    assert patterns["Conv Relu"] == 47
    assert patterns["Gather Concat Reshape Transpose Reshape Gather Gather"] == 10


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=capability_text)
@pytest.mark.parametrize("name", ["yolox_nano_free_batch.onnx", "FastestDet.onnx"])
def test_engine_of_each_architecture_has_fewer_layers_than_nodes(
    shared_dir: Path, tmp_path: Path, name: str, architecture: tuple[int, int]
) -> None:
    """TensorRT fuses for every architecture, and each engine is its own file."""
    built, file = build_engine(request_for(real_model(shared_dir, tmp_path, name), architecture))
    assert len(built.table.layers) < 0.7 * built.table.node_count
    assert built.table.fused_count > 20
    assert f"-sm{architecture[0]}{architecture[1]}-fp32-" in file.name


def test_engine_in_fp16_casts_only_inputs_and_outputs(shared_dir: Path, tmp_path: Path) -> None:
    """The network computes in half precision; its client sees float32."""
    request = replace(request_for(real_model(shared_dir, tmp_path, "FastestDet.onnx")), precision=Precision.FP16)
    built, file = build_engine(request)
    outputs = [output.split()[0] for layer in built.table.layers for output in layer.outputs]
    assert outputs.count("Half") > 80
    assert [value.type.tensor_type.elem_type for value in onnx.load(file).graph.input] == [TensorProto.FLOAT]
    assert "-sm89-fp16-" in file.name


@pytest.mark.long
def test_engine_for_turing_of_a_float32_gemm_is_refused(shared_dir: Path, tmp_path: Path) -> None:
    """TensorRT-RTX has no float32 matrix products for 7.5; its reason is in the message."""
    request = request_for(real_model(shared_dir, tmp_path, "osnet_x0_25_msmt17.onnx"), (7, 5))
    with pytest.raises(CannotBuild, match=r"for 7.5: .*FP32 GEMM is not supported"):
        build_engine(request)


def test_engine_replaces_that_of_an_older_file(tmp_path: Path) -> None:
    """A changed model has another name of its engine; other architectures' engines and other models' stay."""
    write(tmp_path / "model.onnx", "Relu", [1, 3, 8, 8])
    _, older = build_engine(request_for(tmp_path / "model.onnx"))
    older.with_suffix(".md").touch()
    others = [older.with_name("model-sm86-fp32-0.onnx"), older.with_name("model-sm89-fp16-0.onnx")]
    for other in others:
        other.touch()
    write(tmp_path / "model.onnx", "Sigmoid", [1, 3, 8, 8])
    built, newer = build_engine(request_for(tmp_path / "model.onnx"))
    assert built.table.layers[0].operators == ("Sigmoid",)
    assert {entry.name for entry in newer.parent.iterdir()} == {newer.name, *(other.name for other in others)}


def test_free_sides_are_those_of_the_size(tmp_path: Path) -> None:
    """--input-size gives a picture's free sides, in both layouts; without it, the message asks for it."""
    model = write(tmp_path / "model.onnx", "Relu", ["n", 3, "h", "w"])
    with pytest.raises(CannotBuild, match=r"'x' \[-1, 3, -1, -1\] has free sides: give --input-size WxH"):
        build_engine(request_for(model))
    built, _ = build_engine(replace(request_for(model), size=(8, 16)))
    assert built.shapes == {"x": ((1, 3, 8, 16), (4, 3, 8, 16))}
    write(model, "Relu", [1, "h", "w", 3])
    built, _ = build_engine(replace(request_for(model), size=(8, 16)))
    assert built.shapes == {"x": ((1, 8, 16, 3), (1, 8, 16, 3))}


def garbage(file: Path) -> BuildRequest:
    file.write_bytes(b"\0" * 100)
    return request_for(file)


def missing(file: Path) -> BuildRequest:
    return request_for(file.with_name("missing.onnx"))


def unknown_operator(file: Path) -> BuildRequest:
    return request_for(write(file, "Foo", [1], "acme"))


def unsupported_operator(file: Path) -> BuildRequest:
    return request_for(write(file, "Bernoulli", [1, 4]))


def quantised_for_cpus(file: Path) -> BuildRequest:
    """One QuantizeLinear with a zero point."""
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [0.1]),
        helper.make_tensor("zero", TensorProto.UINT8, [], [128]),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", values, result, constants),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, file)
    return request_for(file)


def too_slow(file: Path) -> BuildRequest:
    return replace(request_for(write(file, "Relu", [1, 4])), limits=BuildLimits(wall_s=0.01))


def too_large(file: Path) -> BuildRequest:
    return replace(request_for(write(file, "Relu", [1, 4])), limits=BuildLimits(engine_bytes=1 << 10))


@pytest.mark.parametrize(
    ("request_of", "sentence"),
    [
        (garbage, "is not an ONNX model"),
        (missing, "No such file"),
        (unknown_operator, "builds no engine for 8.9: it does not have operator Foo (node"),
        (unsupported_operator, "builds no engine for 8.9: it does not have operator Bernoulli (node"),
        (quantised_for_cpus, "has a zero point, as of INT8 for CPUs: build the float model"),
        (too_slow, "no engine for 8.9 was built in 0.01 s; it was stopped"),
        (too_large, "bytes (limit 1024)"),
    ],
)
def test_failed_build_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, request_of: Callable[[Path], BuildRequest], sentence: str
) -> None:
    """The message has the file and the cause, and there is no folder of engines afterwards."""
    request = request_of(tmp_path / "model.onnx")
    with pytest.raises(CannotBuild) as failed:
        build_engine(request)
    assert sentence in str(failed.value)
    assert request.model in str(failed.value)
    assert not (tmp_path / "tensorrt-rtx").exists()


def test_build_over_its_memory_is_one_sentence(shared_dir: Path, tmp_path: Path) -> None:
    """The child process has the limit, not this one."""
    request = request_for(real_model(shared_dir, tmp_path, "FastestDet.onnx"))
    with pytest.raises(CannotBuild, match="memory"):
        build_engine(replace(request, limits=BuildLimits(memory_bytes=160 << 20)))


def test_build_without_the_library_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library is a sentence with the command that installs it."""
    (tmp_path / "tensorrt_rtx_bindings.py").write_text("raise ImportError('no library')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    sentence = r"TensorRT-RTX is not installed here \(no library\): pip install 'penstock\[tensorrt\]'"
    with pytest.raises(CannotBuild, match=sentence):
        build_engine(request_for(write(tmp_path / "model.onnx", "Relu", [1, 4])))
