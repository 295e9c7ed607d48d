"""A model file becomes a folder that an engine serves, or nothing changes."""

import hashlib
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.engines.config_pbtxt import read_config
from penstock.models.add import (
    AddOptions,
    NotServable,
    add_model,
    check_name,
    engine_notes,
    name_from,
    remove_model,
    was_added,
)
from penstock.models.added_folder import CannotAdd, config_text, default_slo_ms
from penstock.models.inspect.inspection import Hints, Limits
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype
from penstock.vision.card import card_from_config

CLASSES, ROWS = 80, 84  # a YOLOX of 64 x 64 pixels: 8² + 4² + 2² cells


def write_yolox(path: Path, *, batch: int | str = "b", domain: str = "", mixes: bool = False, greedy: int = 0) -> Path:
    """A network of YOLOX's shapes: every score is a function of the picture. mixes: rows depend on their batch.

    greedy: numbers that it needs in memory for each row but the first.
    """
    width = 5 + CLASSES
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0, 1, 2, 3] if mixes else [1, 2, 3], keepdims=1),
        helper.make_node("Reshape", ["mean", "three"], ["m"]),
        helper.make_node("Mul", ["m", "weights"], ["y"]),
    ]
    if greedy:
        nodes[-1].output[0] = "product"
        nodes += [
            helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
            helper.make_node("Sub", ["rows", "one"], ["more"]),
            helper.make_node("Mul", ["more", "greedy"], ["count"]),
            helper.make_node("ConstantOfShape", ["count"], ["large"]),
            helper.make_node("ReduceSum", ["large"], ["zero"], keepdims=0),
            helper.make_node("Add", ["product", "zero"], ["y"]),
        ]
    if domain:
        nodes.append(helper.make_node("Own", ["y"], ["z"], domain=domain))
    weights = np.random.default_rng(1).random((1, ROWS, width), np.float32) / 300
    weights[..., :2] *= 20  # offsets of some cells, and logarithms of sides below a cell's
    weights[..., 2:4] *= -1
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (batch, 3, 64, 64))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (batch, ROWS, width))],
        [
            numpy_helper.from_array(np.array([-1, 1, 1], np.int64), "three"),
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.array([1], np.int64), "one"),
            numpy_helper.from_array(np.array([greedy], np.int64), "greedy"),
        ],
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


OPTIONS = AddOptions(Hints(layout="yolox", color="bgr"))


@pytest.mark.parametrize(("batch", "is_freed"), [("b", False), (1, True)])
def test_added_model_has_a_card_proven_batches_and_its_origin(
    tmp_path: Path, batch: int | str, *, is_freed: bool
) -> None:
    """Whether the file's batch is free or fixed to 1; MODEL.md has the original file's hash."""
    source = write_yolox(tmp_path / "best v1.onnx", batch=batch)
    added = add_model(source, name_from(source), OPTIONS, home=tmp_path / "home")
    assert (added.name, added.folder) == ("best-v1", tmp_path / "home" / "models" / "best-v1")
    assert (added.batches.max_rows, added.batches.is_freed) == (8, is_freed)
    config = read_config(added.folder / "config.pbtxt")
    card = card_from_config(config)
    assert card is not None
    assert (config.max_batch_size, config.inputs[0].shape, card.layout.name) == (8, (3, 64, 64), "yolox")
    assert (config.parameters["batch_owner"], config.parameters["slo_p99_ms"]) == ("gateway", "2000")
    assert config.parameters["max_batch_size_measured_on"] == "cpu"
    assert hashlib.sha256(source.read_bytes()).hexdigest() in (added.folder / "MODEL.md").read_text()
    assert was_added(added.folder)


@pytest.mark.parametrize(
    ("greedy", "rows", "why"),
    [(500_000_000, 0, "the network does not run with 2 pictures in one call"), (100_000_000, 8, "")],
    ids=["2", "8"],
)
def test_batches_are_tested_in_as_much_memory_as_the_file_is_inspected(
    tmp_path: Path, greedy: int, rows: int, why: str
) -> None:
    """2 GB for each further row, of 1 GiB: no batches. 0.4 GB of 2 GiB: the largest size is not measured."""
    source = write_yolox(tmp_path / "m.onnx", greedy=greedy)
    options = replace(OPTIONS, limits=Limits(memory_bytes=(1 if greedy > 400_000_000 else 2) << 30))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    added = add_model(source, "m", options, home=tmp_path / "home")
    assert added.batches.max_rows == rows, added.batches.why
    assert why in added.batches.why
    assert ("ONNX Runtime" not in added.batches.why, bool(added.batches.error)) == (True, bool(why))
    assert added.batches.rows_per_s[-1][0] < 8
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_batching_options_that_the_user_gives_win(tmp_path: Path) -> None:
    """--parameter slo_p99_ms=50 is not replaced by the default."""
    own = {"slo_p99_ms": "50", "max_batch_size": "3"}
    options = AddOptions(replace(OPTIONS.hints, parameters=own))
    added = add_model(write_yolox(tmp_path / "m.onnx"), "m", options, home=tmp_path)
    parameters = read_config(added.folder / "config.pbtxt").parameters
    assert {name: parameters[name] for name in own} == own
    assert "max_batch_size_measured_on" not in parameters


def test_engines_beside_the_file_are_not_copied_and_the_report_says_so(tmp_path: Path) -> None:
    """An engine fits one file, and `models add` may rewrite it; engines of other files do not count."""
    (tmp_path / "tensorrt-rtx").mkdir()
    (tmp_path / "tensorrt-rtx" / "best-sm89-fp32-0123456789abcdef.engine").touch()
    (note,) = engine_notes(tmp_path / "best.onnx")
    assert f"the engines in {tmp_path / 'tensorrt-rtx'} are not copied: run `penstock models build NAME`" in note
    assert engine_notes(tmp_path / "other.onnx") == ()


def test_default_deadline_gives_slow_models_more_time() -> None:
    """Two seconds, or eight of the largest calls."""
    assert default_slo_ms(((1, 400.0), (8, 500.0)), 8) == 2000
    assert default_slo_ms(((1, 2.5), (2, 3.2)), 8) == 20_000
    assert default_slo_ms(((1, 2.5),), 1) == 3200


def test_model_whose_rows_depend_on_each_other_takes_one_picture_a_call(tmp_path: Path) -> None:
    """No batching without the proof, and the file stays as it is."""
    source = write_yolox(tmp_path / "m.onnx", mixes=True)
    added = add_model(source, "m", OPTIONS, home=tmp_path)
    assert added.batches.max_rows == 0
    assert "its rows are not the batch's" in added.batches.why
    config = read_config(added.folder / "config.pbtxt")
    assert (config.max_batch_size, config.inputs[0].shape) == (0, (1, 3, 64, 64))
    assert "batch_owner" not in config.parameters
    assert config.parameters["slo_p99_ms"] == "2000"
    assert (added.folder / "1" / "model.onnx").read_bytes() == source.read_bytes()


def test_file_that_is_not_recognised_changes_nothing(tmp_path: Path) -> None:
    """The error has what is known of the file."""
    identity = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("b", 7))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("b", 7))],
    )
    onnx.save(helper.make_model(identity, ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(NotServable) as refused:
        add_model(tmp_path / "m.onnx", "m", AddOptions(Hints()), home=tmp_path / "home")
    assert refused.value.inspection.facts.inputs[0].name == "x"
    assert not (tmp_path / "home").exists()


def test_custom_operators_are_refused(tmp_path: Path) -> None:
    """They would run code of the file's author."""
    source = write_yolox(tmp_path / "m.onnx", domain="evil")
    with pytest.raises(CannotAdd, match="custom operator"):
        add_model(source, "m", OPTIONS, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_name_that_is_taken_is_refused_unless_it_was_added(tmp_path: Path) -> None:
    """A model that a person wrote, or another repository has, is never replaced."""
    source = write_yolox(tmp_path / "m.onnx")
    written = tmp_path / "models" / "written"
    (written / "1").mkdir(parents=True)
    (written / "config.pbtxt").write_text('backend: "python"\n')
    replacing = AddOptions(OPTIONS.hints, may_replace=True)
    with pytest.raises(CannotAdd, match="not replaced"):
        add_model(source, "written", replacing, home=tmp_path)
    add_model(source, "m", OPTIONS, home=tmp_path)
    with pytest.raises(CannotAdd, match="--replace replaces it"):
        add_model(source, "m", OPTIONS, home=tmp_path)
    add_model(write_yolox(source, batch=1), "m", replacing, home=tmp_path)
    shipped = tmp_path / "shipped"
    (shipped / "people").mkdir(parents=True)
    with pytest.raises(CannotAdd, match=f"a model in {shipped}"):
        add_model(source, "people", replacing, home=tmp_path, other_repositories=(shipped, tmp_path / "models"))


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", ".a", "a" * 101, "é", "$(x)"])
def test_name_that_an_engine_could_not_have_is_refused(name: str) -> None:
    """Before anything is read."""
    with pytest.raises(CannotAdd, match="cannot be a model's name"):
        check_name(name)


@pytest.mark.parametrize(
    ("file_name", "wanted"),
    [("best.onnx", "best"), ("yolo11n (2).onnx", "yolo11n-2"), ("été.onnx", "t"), ("().onnx", "model")],
)
def test_name_comes_from_the_file(tmp_path: Path, file_name: str, wanted: str) -> None:
    """Characters that a name cannot have become a dash."""
    path = tmp_path / file_name
    path.touch()
    assert name_from(path) == wanted


def test_removed_model_is_gone_whole(tmp_path: Path) -> None:
    """With all of its files; a second removal is refused."""
    add_model(write_yolox(tmp_path / "m.onnx"), "m", OPTIONS, home=tmp_path / "home")
    folder = remove_model("m", home=tmp_path / "home")
    assert list(folder.parent.iterdir()) == []
    with pytest.raises(CannotAdd, match="there is no model 'm'"):
        remove_model("m", home=tmp_path / "home")


@pytest.mark.parametrize("label", ['a "quoted" one', "back\\slash", "é车", "a\nline", "}"])
def test_config_text_reads_the_same_for_any_label(label: str) -> None:
    """Whatever a file's author named a class."""
    spec = (TensorSpec("x", Datatype.FP32, (3, 8, 8)),)
    config = ModelConfig("m", "onnxruntime", 4, spec, (TensorSpec("y", Datatype.FP16, (-1,)),), {"labels": label})
    path_text = config_text(config)
    assert path_text.count("\n") > 3
    assert f'name: "{spec[0].name}"' in path_text


TRITON = """
backend: "onnxruntime"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 64, 64 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 84, 85 ] } ]
dynamic_batching { max_queue_delay_microseconds: 500 }
"""


def triton_folder(tmp_path: Path, config: str = TRITON) -> Path:
    folder = tmp_path / "mine"
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
        write_yolox(folder / version / "model.onnx")
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder


def test_triton_folder_keeps_its_config_and_gets_a_card(tmp_path: Path) -> None:
    """Versions and batching are as they were."""
    added = add_model(triton_folder(tmp_path), "mine", OPTIONS, home=tmp_path / "home")
    text = (added.folder / "config.pbtxt").read_text()
    assert "max_queue_delay_microseconds: 500" in text
    config = read_config(added.folder / "config.pbtxt")
    card = card_from_config(config)
    assert card is not None
    assert (config.max_batch_size, card.layout.name) == (4, "yolox")
    assert sorted(path.name for path in added.folder.iterdir() if path.is_dir()) == ["1", "2"]


def test_triton_folder_with_a_card_keeps_it(tmp_path: Path) -> None:
    """What a person wrote wins over what is recognised."""
    own = TRITON + 'parameters { key: "network-type" value { string_value: "0" } }\n'
    own += 'parameters { key: "layout" value { string_value: "yolov5" } }\n'
    added = add_model(triton_folder(tmp_path, own), "mine", AddOptions(Hints()), home=tmp_path / "home")
    card = card_from_config(read_config(added.folder / "config.pbtxt"))
    assert card is not None
    assert card.layout.name == "yolov5"


def without_output_shape(path: Path) -> None:
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)


def test_triton_folder_is_added_though_its_file_leaves_an_output_open(tmp_path: Path) -> None:
    """Its config says what the file does not; without a config, that is one sentence."""
    own = TRITON + 'parameters { key: "network-type" value { string_value: "0" } }\n'
    own += 'parameters { key: "layout" value { string_value: "yolox" } }\n'
    whole, bare = (
        triton_folder(tmp_path / "whole", own),
        triton_folder(tmp_path / "bare", own.split("output")[0] + own[own.index("parameters") :]),
    )
    for folder in (whole, bare):
        without_output_shape(folder / "2" / "model.onnx")
    added = add_model(whole, "mine", AddOptions(Hints()), home=tmp_path / "home")
    assert read_config(added.folder / "config.pbtxt").outputs[0].shape == (84, 85)
    with pytest.raises(CannotAdd, match="is not a tensor of known rank"):
        add_model(bare, "other", AddOptions(Hints()), home=tmp_path / "home")


def test_folder_of_versions_without_a_config_is_added_by_its_newest_file(tmp_path: Path) -> None:
    """As that file alone would be."""
    added = add_model(triton_folder(tmp_path, ""), "mine", OPTIONS, home=tmp_path / "home")
    assert (added.batches.max_rows, [path.name for path in added.folder.glob("[0-9]")]) == (8, ["1"])


def test_folder_whose_files_could_run_code_is_refused(tmp_path: Path) -> None:
    """A script beside the weights, another backend, a link that leads outside."""
    folder = triton_folder(tmp_path)
    (folder / "1" / "model.py").write_text("print()")
    with pytest.raises(CannotAdd, match=r"model\.py"):
        add_model(folder, "mine", OPTIONS, home=tmp_path / "home")
    (folder / "1" / "model.py").unlink()
    (folder / "labels").symlink_to("/etc/passwd")
    with pytest.raises(CannotAdd, match="is a link"):
        add_model(folder, "mine", OPTIONS, home=tmp_path / "home")
    (folder / "labels").unlink()
    (folder / "config.pbtxt").write_text(TRITON.replace("onnxruntime", "python"))
    with pytest.raises(CannotAdd, match="can run code here"):
        add_model(folder, "mine", OPTIONS, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()
