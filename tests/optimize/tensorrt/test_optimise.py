"""The whole way by the stand-ins: the folder, the cache, both precisions, both kinds of TensorRT."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2

from server.backends.config_pbtxt import read_config
from server.optimize.errors import OptimizeError
from server.optimize.progress import Progress
from server.optimize.report import RANDOM_WEIGHTS
from server.optimize.source import SourceModel, read_source
from server.optimize.tensorrt import timing
from server.optimize.tensorrt.cards import Precision
from server.optimize.tensorrt.optimise import Pictures, open_workshop, optimise
from server.optimize.tensorrt.report import EngineReport, as_json
from tests.optimize.conftest import RANDOM, write_model
from tests.optimize.tensorrt.conftest import Install
from tests.optimize.tensorrt.fake_cuda import FakeCuda


@pytest.fixture(autouse=True)
def one_quick_round(quick_rounds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured of a stand-in means nothing."""
    monkeypatch.setattr(timing.time_engine, "__kwdefaults__", {**timing.time_engine.__kwdefaults__, "rounds": 2})


class Making:
    """One optimisation, as often as wanted."""

    def __init__(self, tmp_path: Path, pictures: list[Path]) -> None:
        self._tmp_path, self._pictures, self.count = tmp_path, pictures, 0
        self.staged = tmp_path

    def __call__(self, source: SourceModel, precision: Precision = Precision.FP16) -> EngineReport:
        self.count += 1
        self.staged = self._tmp_path / f"staged{self.count}"
        self.staged.mkdir()
        workshop = open_workshop(precision, self._tmp_path / "plans")
        silent = Progress(step=lambda what, count: None, advance=lambda: None)
        return optimise(source, workshop, Pictures(self._pictures, {}), self.staged, silent)


@pytest.fixture
def make(tmp_path: Path, pictures: list[Path]) -> Making:
    """make(source, precision) → the report; make.staged is the folder."""
    return Making(tmp_path, pictures)


def network_in(staged: Path) -> onnx.ModelProto:
    """What the stand-in's plan holds."""
    return onnx.ModelProto.FromString((staged / "1" / "model.plan").read_bytes().partition(b"\n")[2])


def test_optimise_writes_a_folder_for_tritons_tensorrt_backend(
    source: SourceModel, make: Making, install: Install
) -> None:
    """The card stays, ONNX Runtime's words go; the page says for what it is and that it was never run by us."""
    module = install()
    report = make(source)
    folder = shutil.copytree(make.staged, make.staged.parent / report.name)
    config = read_config(folder / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("small-tensorrt-fp16", "tensorrt", 16)
    assert config.parameters.items() >= {("network-type", "1"), ("precision", "fp16"), ("optimized-from", "small")}
    assert "intra_op_thread_count" not in config.parameters
    text = (folder / "config.pbtxt").read_text()
    assert 'platform: "tensorrt_plan"' in text
    assert 'default_model_filename: "model.plan"' in text
    assert "kind: KIND_GPU" in text
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
        "MODEL.md", "config.pbtxt", "labels.txt", "model.plan",
    ]  # fmt: skip
    page = (folder / "MODEL.md").read_text()
    for words in ("was never run by the project itself", "NVIDIA Fake (compute capability 9.0)", "TensorRT 10.4.0.26",
                  "driver then: 580.95.05", "Apache-2.0", report.plan_sha256, report.source_sha256):  # fmt: skip
        assert words in page
    (built,) = module.built
    assert built["profile"] == [[((1, 3, 32, 32), (16, 3, 32, 32), (16, 3, 32, 32))]]
    assert (built["flags"], built["creation"]) == (["FP16"], 1)


@pytest.mark.parametrize(
    ("declared", "made"),
    [
        ("{ count: 2 kind: KIND_CPU }", [(1, [])]),
        ("{ count: 2 }, { count: 4 kind: KIND_CPU }", [(2, [])]),
        ("{ count: 3 kind: KIND_GPU gpus: [ 0, 1 ] }, { count: 1 }", [(3, [0, 1]), (1, [])]),
    ],
)
def test_optimise_puts_every_instance_on_the_gpu(
    tmp_path: Path, make: Making, install: Install, declared: str, made: list[tuple[int, list[int]]]
) -> None:
    """Triton's TensorRT backend takes no other; what was meant for the CPU was counted by its cores."""
    install()
    folder = write_model(tmp_path / "models", "small")
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace("{ count: 1 }", declared))
    make(read_source(folder))
    config = text_format.Parse((make.staged / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert [(group.count, list(group.gpus)) for group in config.instance_group] == made
    assert {group.kind for group in config.instance_group} == {model_config_pb2.ModelInstanceGroup.KIND_GPU}


def test_optimise_judges_the_engine_on_every_picture_of_fp16(
    source: SourceModel, make: Making, install: Install
) -> None:
    """The stand-in computes float32, so the engine agrees to the last box; nothing calibrates."""
    install()
    report = make(source)
    assert (report.calibrating, report.held_out, report.quantised) == (0, 20, None)
    assert report.judgement is not None
    assert (report.judgement.agreement.pictures, report.judgement.agreement.share) == (20, 1.0)
    assert [(item.output, round(item.cosine, 6), item.not_numbers) for item in report.closeness] == [("logits", 1.0, 0)]
    assert [item.batch_size for item in report.timings] == [1, 8, 16]
    assert report.warnings == ()
    assert report.noted == ("a warning of the builder",)
    told = json.loads(msgspec.json.encode(as_json(report)))
    assert told["key"]["capability"] == "9.0"
    assert told["judgement"]["agreement"]["kind"] == "classes"
    assert told["timings"][0]["pictures_a_second"] > 0


def test_optimise_says_what_was_fused(source: SourceModel, make: Making, install: Install) -> None:
    """Nodes of the file by layer, copies apart, the first convolution as example."""
    install()
    layers = make(source).layers
    assert (layers.network_nodes, layers.copies) == (10, 1)
    assert layers.fused == 1
    assert layers.precisions == {"FP16": layers.total - 1}
    assert layers.example is not None
    assert layers.example.nodes == ("stem", "stem.norm", "stem.norm.relu")


def test_optimise_again_takes_the_plan_that_was_built(source: SourceModel, make: Making, install: Install) -> None:
    """The same bytes, without a build; another driver, card, precision or network builds anew."""
    module = install()
    first, second = make(source), make(source)
    assert [first.is_cached, second.is_cached] == [False, True]
    assert second.plan_sha256 == first.plan_sha256
    assert len(module.built) == 1
    other = install(card=FakeCuda((8, 9)))
    assert not make(source).is_cached
    assert len(other.built) == 1


def test_optimise_of_a_damaged_plan_builds_anew(
    source: SourceModel, make: Making, install: Install, plans: Path
) -> None:
    """A half-written file of a killed process is no plan."""
    install()
    make(source)
    (kept,) = plans.glob("*.plan")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert not make(source).is_cached


def test_optimise_int8_builds_from_the_quantised_network(source: SourceModel, make: Making, install: Install) -> None:
    """Pairs in the file, the flags that a weakly typed TensorRT wants, half of the pictures to calibrate."""
    module = install()
    report = make(source, Precision.INT8)
    assert report.name == "small-tensorrt-int8"
    assert module.built[0]["flags"] == ["FP16", "INT8"]
    assert (report.calibrating, report.held_out) == (10, 10)
    assert "QuantizeLinear" in {node.op_type for node in network_in(make.staged).graph.node}
    assert report.quantised is not None
    assert "10 pictures to calibrate, ranges: " in (make.staged / "MODEL.md").read_text()
    assert make(source, Precision.INT8).is_cached  # quantising the same pictures gives the same network


def test_optimise_int8_on_a_card_of_slow_half_allows_no_half(
    source: SourceModel, make: Making, install: Install
) -> None:
    """A P4 computes FP16 at a crawl: what is not quantised stays float32."""
    module = install(card=FakeCuda((6, 1)), version="8.6.1")
    make(source, Precision.INT8)
    assert module.built[0]["flags"] == ["INT8"]


@pytest.mark.parametrize("precision", list(Precision))
def test_optimise_for_a_strongly_typed_tensorrt_writes_the_types_into_the_file(
    source: SourceModel, make: Making, install: Install, precision: Precision
) -> None:
    """TensorRT 11 has no flag for FP16: weights and scales are FP16, input and output stay float32, answers agree."""
    module = install(version="11.4.0", weak=False)
    report = make(source, precision)
    assert (module.built[0]["flags"], module.built[0]["creation"]) == ([], 2)
    graph = network_in(make.staged).graph
    kinds = {item.data_type for item in graph.initializer}
    assert TensorProto.FLOAT16 in kinds
    assert TensorProto.FLOAT not in kinds
    values = [*graph.input, *graph.output]
    assert {value.type.tensor_type.elem_type for value in values} == {TensorProto.FLOAT}
    assert report.judgement is not None
    assert report.judgement.agreement.share == 1.0
    assert 0.999 < report.closeness[0].cosine < 1.0


def test_optimise_of_random_weights_compares_numbers_alone(tmp_path: Path, make: Making, install: Install) -> None:
    """No accuracy; that the engine computes the same network is seen by its outputs."""
    install()
    report = make(read_source(write_model(tmp_path / "models", "noise", more=RANDOM)))
    assert report.judgement is None
    assert report.closeness[0].cosine == pytest.approx(1.0)
    page = (make.staged / "MODEL.md").read_text()
    assert "RANDOM WEIGHTS" in page.splitlines()[0]
    assert RANDOM_WEIGHTS in page


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("builder", "TensorRT 10.4.0.26 cannot start on this GPU: no luck"),
        ("parse", "TensorRT 10.4.0.26 does not read the network: no luck (0) (and 1 more)"),
        ("build", "TensorRT 10.4.0.26 built no engine: no luck"),
        ("deserialize", "TensorRT 10.4.0.26 does not read the plan: no luck"),
        ("run", "the engine does not run: no luck"),
        (
            "int32",
            "TensorRT 10.4.0.26 makes int32 of logits, which is FP32 in config.pbtxt, and Triton loads no such plan: "
            "export the model with that type, or take a TensorRT that knows it (INT64: 10.0 on)",
        ),
        (
            "nms",
            "the shape of output logits depends on what is in the picture ([1, -1]): leave what drops boxes out of "
            "the network, the gateway's parser does it",
        ),
    ],
)
def test_optimise_where_tensorrt_fails_says_its_reason(
    source: SourceModel, make: Making, install: Install, fault: str, sentence: str
) -> None:
    """In one sentence with TensorRT's own words, and the folder stays empty."""
    faults: dict[str, Any] = {fault: "no luck"}
    install(**faults)
    with pytest.raises(OptimizeError) as failed:
        make(source)
    assert str(failed.value) == sentence
    assert list(make.staged.iterdir()) == []


def test_optimise_on_a_full_card_says_so(source: SourceModel, make: Making, install: Install) -> None:
    """In the driver's words."""
    install(card=FakeCuda(memory_bytes=100))
    with pytest.raises(OptimizeError, match="cuMemAlloc_v2 failed: out of memory"):
        make(source)


def test_optimise_of_a_network_of_one_batch_size_says_how_to_export_it(
    source: SourceModel, make: Making, install: Install
) -> None:
    """config.pbtxt promises batches that the file does not take."""
    model = onnx.load(source.path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    del model.graph.value_info[:]
    onnx.save(model, source.path)
    install()
    with pytest.raises(OptimizeError, match=r"takes \[1, 3, 32, 32\] only, .* free first axis"):
        make(source)
