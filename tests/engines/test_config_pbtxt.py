"""config.pbtxt is read as Triton reads it, and refused with its place named."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto, read_config
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype

DETECTOR = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "input.1" data_type: TYPE_FP32 dims: [ 3, 352, 352 ] } ]
output [
  { name: "758" data_type: TYPE_FP32 dims: [ 85, 22, 22 ] },
  { name: "names" data_type: TYPE_STRING dims: [ -1 ] }
]
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 500 }
parameters { key: "network-type" value { string_value: "0" } }
parameters { key: "net-scale-factor" value { string_value: "0.0039215686" } }
"""


def write_config(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.pbtxt"
    path.write_text(text, encoding="utf-8")
    return path


def config_of(text: str) -> ModelConfig:
    return config_from_proto(text_format.Parse(text, model_config_pb2.ModelConfig()))


def test_read_config_whole_file_gives_what_the_gateway_decides_by(tmp_path: Path) -> None:
    """Names, types, dims, batching, instances and parameters all arrive."""
    config = read_config(write_config(tmp_path / "fastestdet", DETECTOR))

    assert config == ModelConfig(
        name="fastestdet",
        backend="onnxruntime",
        max_batch_size=8,
        inputs=(TensorSpec("input.1", Datatype.FP32, (3, 352, 352)),),
        outputs=(TensorSpec("758", Datatype.FP32, (85, 22, 22)), TensorSpec("names", Datatype.BYTES, (-1,))),
        parameters={"network-type": "0", "net-scale-factor": "0.0039215686"},
        instance_count=2,
        is_decoupled=False,
        has_dynamic_batching=True,
        has_sequence_batching=False,
    )


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('name: "m"\nbackend: "python"\nfoo: 3\n', ":3: ", 'no field named "foo"'),
        ('name: "m"\nmax_batch_size: "x"\n', ":2: ", "parse integer"),
        ('name: "m"\ninput [ { name: "a" data_type: TYPE_F32 } ]\n', ":2: ", "TYPE_F32"),
        ("input [\n", ":", ""),
    ],
)
def test_read_config_bad_text_names_path_and_line(tmp_path: Path, text: str, place: str, words: str) -> None:
    """The message begins with path:line and says what stands there."""
    path = write_config(tmp_path / "m", text)

    with pytest.raises(InvalidRequest) as refused:
        read_config(path)

    assert refused.value.message.startswith(f"{path}{place}")
    assert words in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name: "other"\n', "the folder is 'm'"),
        ("max_batch_size: -1\n", "max_batch_size is -1"),
        ('input [ { name: "a" dims: [ 1 ] } ]\n', "input 'a' has no data_type"),
        ('output [ { name: "b" data_type: TYPE_INT8 dims: [ 0 ] } ]\n', "output 'b' has dims [0]"),
    ],
)
def test_read_config_contradiction_names_path_and_value(tmp_path: Path, text: str, words: str) -> None:
    """What parses but no Triton would serve is refused with the path and the value."""
    path = write_config(tmp_path / "m", text)

    with pytest.raises(InvalidRequest) as refused:
        read_config(path)

    assert refused.value.message.startswith(f"{path}: ")
    assert words in refused.value.message


def test_read_config_missing_file_says_so(tmp_path: Path) -> None:
    """An absent file is a sentence with its path, not a traceback."""
    with pytest.raises(InvalidRequest, match=r"config\.pbtxt: cannot be read: No such file"):
        read_config(tmp_path / "config.pbtxt")


def test_read_config_binary_file_says_so(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are refused with the place of the first."""
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'name: "a\xff"')

    with pytest.raises(InvalidRequest, match=r"not UTF-8 text: .* at byte 8"):
        read_config(path)


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ("", 1),
        ("instance_group [ { kind: KIND_CPU } ]", 1),
        ("instance_group [ { count: 3 kind: KIND_CPU }, { count: 2 kind: KIND_CPU } ]", 5),
        ("instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1, 2 ] } ]", 6),
        ("instance_group [ { count: 2 kind: KIND_GPU } ]", 2),
        ("instance_group [ { count: 2 kind: KIND_CPU }, { count: 4 passive: true } ]", 2),
    ],
)
def test_config_instance_groups_are_summed(groups: str, count: int) -> None:
    """A group counts once a GPU it names; passive groups serve nothing; none at all is one."""
    assert config_of(groups).instance_count == count


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ('backend: "python"', "python"),
        ('platform: "onnxruntime_onnx"', "onnxruntime"),
        ('platform: "tensorrt_plan"', "tensorrt"),
        ('platform: "ensemble"', "ensemble"),
        ("", ""),
    ],
)
def test_config_backend_comes_from_backend_or_platform(text: str, backend: str) -> None:
    """Older configs name a platform; it stands for its backend."""
    assert config_of(text).backend == backend


def test_config_batching_and_decoupling_are_distinguished() -> None:
    """An empty block counts as given, an absent one does not."""
    sequence = config_of("sequence_batching { } model_transaction_policy { decoupled: true }")
    dynamic = config_of("dynamic_batching { }")

    assert (sequence.has_sequence_batching, sequence.has_dynamic_batching, sequence.is_decoupled) == (True, False, True)
    assert (dynamic.has_sequence_batching, dynamic.has_dynamic_batching, dynamic.is_decoupled) == (False, True, False)
    assert [config.is_ensemble for config in (sequence, config_of("ensemble_scheduling { }"))] == [False, True]


def test_config_every_datatype_has_its_name() -> None:
    """All of Triton's types map to one of KServe's, none is lost."""
    seen = {
        config_of(f'input [ {{ name: "a" data_type: {word} dims: [ 1 ] }} ]').inputs[0].datatype
        for word, number in model_config_pb2.DataType.items()
        if number
    }

    assert seen == set(Datatype)
