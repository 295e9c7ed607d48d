"""Which models a client may send: config fields, file names, and operators of ONNX files."""

import json
import re
from collections.abc import Iterator

import onnx
import pytest
from google.protobuf.descriptor import Descriptor
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

from penstock.engines.load_policy import MAX_FIELDS, check_model, parse_config, read_header
from penstock.engines.ort_serving.tensorrt_rtx import FOLDER, RUNTIME_CACHE
from penstock.protocol.errors import InvalidRequest
from tests.engines import onnx_models

GOOD = {"backend": "onnxruntime", "max_batch_size": 2}
OUTSIDE = ["/etc/passwd", "../x", "a/../../x", "a\\..\\x", "x\0y", "%2e%2e/x", "..%2fx", "./x", "a//x", "x\n", "*/x"]
FILE_FIELDS = {
    "default_model_filename": lambda name: {"default_model_filename": name},
    "cc_model_filenames": lambda name: {"cc_model_filenames": {"8.6": name}},
    "label_filename": lambda name: {"output": [{"name": "y", "label_filename": name}, {"name": "y"}]},
    "input_data_file": lambda name: {"model_warmup": [{"name": "w", "inputs": {"x": {"input_data_file": name}}}]},
    "data_file": lambda name: {"sequence_batching": {"state": [{"initial_state": [{"data_file": name}]}]}},
}


def accelerator(name: str, option: str) -> dict[str, object]:
    """A config with an option of one of ONNX Runtime's providers."""
    gpu = [{"name": name, "parameters": {option: "/tmp"}}]
    return {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": gpu}}}


PROVIDER_OPTIONS = [
    *(("tensorrt", "trt_engine_cache_path"), ("tensorrt", "int8_calibration_table_name"), ("openvino", "load_config")),
    *(("cuda", "gpu_external_alloc"), ("cuda", "GPU_EXTERNAL_FREE"), ("cuda", "user_compute_stream")),
]
CODE_FIELDS: dict[str, dict[str, object]] = {
    **{f"backend {name!r}": {"backend": name} for name in ("python", "Python", " onnxruntime", "pytorch", "../x")},
    "platform 'pytorch_libtorch'": {"platform": "pytorch_libtorch"},
    "platform 'ensemble'": {"platform": "ensemble"},
    "runtime 'libevil.so'": {"runtime": "libevil.so"},
    "ensemble_scheduling of 'people'": {"ensemble_scheduling": {"step": [{"model_name": "people"}]}},
    "op_library_filename 'libown.so'": {"model_operations": {"op_library_filename": ["libown.so"]}},
    "model_repository_agents 'checksum'": {"model_repository_agents": {"agents": [{"name": "checksum"}]}},
    "default_model_filename 'model.py'": {"default_model_filename": "model.py"},
    "default_model_filename 'model.plan'": {"cc_model_filenames": {"8.6": "model.plan"}},
    "'EXECUTION_ENV_PATH'": {"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/x.tar.gz"}}},
    "'TRITON_BATCH_STRATEGY_PATH'": {"parameters": {"TRITON_BATCH_STRATEGY_PATH": {"string_value": "/x.so"}}},
    "'session.collect_node_memory_stats_to_file'": {
        "parameters": {"session.collect_node_memory_stats_to_file": {"string_value": "/tmp/x"}}
    },
    **{f"'{option}'": accelerator(name, option) for name, option in PROVIDER_OPTIONS},
}
CODE_FILES = [
    *(
        "1/model.py",
        "1/model.pt",
        "1/model.pt2",
        "1/weights.pkl",
        "1/model.plan",
        "model.engine",
        "1/model.savedmodel/x",
    ),
    *("1/tensorrt-rtx/runtime-cache/x", "tensorrt/x.profile"),
    *("libtriton_onnxruntime.so", "1/libtriton_onnxruntime.so", "1/libx.so.1", "config.pbtxt", "env.tar.gz", "readme"),
]


def check(config: dict[str, object], files: dict[str, bytes] | None = None, *, allows_code: bool = False) -> None:
    check_model(parse_config(json.dumps(GOOD | config)), files or {}, allows_code=allows_code)


def with_external(location: str, model: onnx.ModelProto | None = None) -> bytes:
    """A model whose first weights are in a file of that name."""
    model = model or onnx_models.plus(1)
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="0")
    return bytes(model.SerializeToString())


def with_node(node: onnx.NodeProto) -> onnx.ModelProto:
    model = onnx_models.plus(1)
    model.graph.node.append(node)
    return model


@pytest.mark.parametrize("allows_code", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("field", FILE_FIELDS)
def test_config_with_a_file_outside_the_model_is_refused_by_its_field(field: str, name: str, allows_code: bool) -> None:
    """Absolute, parent, encoded and NUL paths are refused in each field with a file name, with and without the flag."""
    with pytest.raises(InvalidRequest, match=f"{field}.* must name a file inside the model's folder"):
        check(FILE_FIELDS[field](name), allows_code=allows_code)


@pytest.mark.parametrize("words", CODE_FIELDS)
def test_config_that_can_run_code_is_refused_unless_code_is_allowed(words: str) -> None:
    """The message names the field, its value and the flag; with the flag it is accepted."""
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        check(CODE_FIELDS[words])
    assert "--allow-model-code" in refused.value.message
    check(CODE_FIELDS[words], allows_code=True)


@pytest.mark.parametrize("name", CODE_FILES)
def test_file_that_can_hold_code_is_refused_unless_code_is_allowed(name: str) -> None:
    """TorchScript, pickles, engines, libraries, scripts: all that is not an ONNX model, even if a config names it."""
    for config in ({}, {"output": [{"name": "y", "label_filename": name}]}):
        if name == "readme" and config:
            continue  # a file of labels may have this name
        with pytest.raises(InvalidRequest, match=re.escape(repr(name)) + ".*--allow-model-code"):
            check(config, {name: b"x"})
    check({}, {name: b"x"}, allows_code=True)


def test_engine_for_a_gpu_beside_a_model_is_refused_unless_code_is_allowed() -> None:
    """Also as external data, and if it is a plain ONNX file: its cache of kernels would be read with it."""
    plain, cache = bytes(onnx_models.plus(1).SerializeToString()), f"{FOLDER}/{RUNTIME_CACHE}/kernels"
    for files in (
        {"1/model.onnx": plain, f"1/{FOLDER}/model-sm89-fp32-0.onnx": plain},
        {"1/model.onnx": with_external(cache), f"1/{cache}": b"x"},
    ):
        with pytest.raises(InvalidRequest, match=r"is in a folder for compiled engines.*--allow-model-code"):
            check({}, files)
        check({}, files, allows_code=True)


@pytest.mark.parametrize("name", OUTSIDE)
def test_file_outside_the_model_is_refused(name: str) -> None:
    """It is refused with and without the flag."""
    for allows_code in (False, True):
        with pytest.raises(InvalidRequest, match="must name a file inside the model's folder"):
            check({}, {name: b"x"}, allows_code=allows_code)


def test_file_name_of_256_bytes_is_refused() -> None:
    """A name of more than 255 bytes crashes Triton 2.51, so the flag does not allow it."""
    check({}, {"a" * 255: b"x"}, allows_code=True)
    with pytest.raises(InvalidRequest, match="a name may have at most 255 bytes"):
        check({}, {"a" * 256: b"x"}, allows_code=True)


def test_onnx_model_with_its_weights_labels_and_warm_up_passes() -> None:
    """A client may send these files without the flag."""
    config = {
        "output": [{"name": "y", "label_filename": "labels.txt"}],
        "model_warmup": [{"name": "w", "inputs": {"x": {"input_data_file": "row"}}}],
        "parameters": {"network-type": {"string_value": "classifier"}, "intra_op_thread_count": {"string_value": "1"}},
    }
    files = {"1/model.onnx": with_external("w/model.onnx_data"), "1/w/model.onnx_data": b"", "labels.txt": b"a"}
    check(config, files | {"warmup/row": b""})


@pytest.mark.parametrize("name", OUTSIDE)
def test_external_data_outside_the_model_is_refused(name: str) -> None:
    """It is found in the graph, in an attribute, in a graph of an If and in a function."""
    inner = onnx.ModelProto.FromString(with_external(name)).graph
    constant = helper.make_node("Constant", [], ["c"])
    constant.attribute.append(helper.make_attribute("value", inner.initializer[-1]))
    in_function = onnx_models.plus(1)
    in_function.functions.append(helper.make_function("own", "f", [], ["c"], [constant], []))
    models = [
        with_external(name),
        with_node(constant).SerializeToString(),
        with_node(helper.make_node("If", ["c"], ["z"], then_branch=inner)).SerializeToString(),
        in_function.SerializeToString(),
    ]
    for model in models:
        for allows_code in (False, True):
            with pytest.raises(InvalidRequest, match=r"external data of '1/model.onnx'.* inside the model's folder"):
                check({}, {"1/model.onnx": model}, allows_code=allows_code)


@pytest.mark.parametrize(
    ("domain", "operator"), [("evil", "Run"), ("com.microsoft", "EPContext"), ("ai.onnx.contrib", "PyOp")]
)
def test_custom_operator_is_refused_unless_the_file_defines_it(domain: str, operator: str) -> None:
    """It is found inside a branch of an If; functions that the file defines are allowed."""
    node = helper.make_node(operator, ["x"], ["z"], domain=domain)
    branch = helper.make_graph([node], "b", [], [])
    for model in (with_node(node), with_node(helper.make_node("If", ["c"], ["z"], then_branch=branch))):
        with pytest.raises(InvalidRequest, match=re.escape(f"custom operator '{domain}:{operator}'")):
            check({}, {"1/model.onnx": model.SerializeToString()})
    if domain == "evil":
        own = with_node(node)
        own.functions.append(helper.make_function(domain, operator, ["x"], ["z"], [], []))
        check({}, {"1/model.onnx": own.SerializeToString()})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an ONNX model"),
        (b"PK\3\4 TorchScript", "protobuf"),
        (b"\x80\x04\x95 pickle", "protobuf"),
        (b"\x08\x08\x3a\x04\x0a\x00\x0a\x7f", "protobuf"),
        (b"\x08\x08" + b"\x3a\x00" * (MAX_FIELDS + 1), "fields"),
    ],
    ids=["empty", "TorchScript", "pickle", "truncated", "many fields"],
)
def test_file_that_is_no_onnx_model_is_refused(content: bytes, words: str) -> None:
    """Other formats with that name are refused, and a protobuf that would take gigabytes to parse."""
    with pytest.raises(InvalidRequest, match=f"'1/model.onnx'.*{words}"):
        check({}, {"1/model.onnx": content})


def test_graphs_nested_without_end_are_refused() -> None:
    """A client cannot make the reader recurse without limit."""
    graph = b""
    for _ in range(200):
        attribute = b"\x32" + _sized(graph)
        graph = b"\x0a" + _sized(b"\x2a" + _sized(attribute))
    with pytest.raises(InvalidRequest, match="deep"):
        read_header(b"\x08\x08\x3a" + _sized(graph))


def _sized(content: bytes) -> bytes:
    size, digits = len(content), b""
    while size >= 0x80:
        digits, size = digits + bytes([size & 0x7F | 0x80]), size >> 7
    return digits + bytes([size]) + content


def test_every_field_of_the_config_that_names_a_file_is_known() -> None:
    """If a Triton release adds such a field, this fails until the checker covers it."""
    known = {*FILE_FIELDS, "op_library_filename"}
    words = re.compile(r"file(?!$)|filenames?$|_file$|path|library|folder|directory")
    found = {name for name in _text_fields(model_config_pb2.ModelConfig.DESCRIPTOR, set()) if words.search(name)}
    assert found == known


def _text_fields(message: Descriptor, seen: set[str]) -> Iterator[str]:
    seen.add(message.full_name)
    for field in message.fields:
        if field.message_type is None:
            yield field.name
        else:
            inner = field.message_type
            if inner.GetOptions().map_entry:
                yield field.name
            if inner.full_name not in seen:
                yield from _text_fields(inner, seen)
