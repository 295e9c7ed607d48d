"""Where an ONNX model runs and how: settings of config.pbtxt, choices, and the facts in the log line."""

from typing import Any

import pytest

from penstock.engines.ort_serving.config import Config, OnnxTensorSpec, OrtLoadError, Signature
from penstock.engines.ort_serving.placement import (
    MAX_BUCKETS,
    EngineFacts,
    GpuSettings,
    Precision,
    bucket_for,
    cuda_options,
    default_buckets,
    gpu_settings,
    read_facts,
    unused_accelerators,
    why_no_cuda,
    why_no_graph,
)
from penstock.engines.triton.log_parser import LogAssembler

X, Y = (OnnxTensorSpec(name, "tensor(float)", "TYPE_FP32", (-1, 3)) for name in "xy")
SIGNATURE = Signature((X,), (Y,), ())


def config(*, max_batch_size: int = 8, parameters: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """A configuration of x [N, 3] → y [N, 3]."""
    x, y = ({"name": name, "data_type": "TYPE_FP32", "dims": [3]} for name in "xy")
    values = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    return {"name": "m", "max_batch_size": max_batch_size, "input": [x], "output": [y], "parameters": values} | changes


FACTS = [
    EngineFacts(),
    EngineFacts("cuda", 0, "fp16", (1, 2, 8)),
    EngineFacts("cuda", 1, "fp32", (), ('no CUDA graph: "If" is control flow; see above', "FP16 is not used: 4 % off")),
]


@pytest.mark.parametrize("facts", FACTS)
def test_read_facts_reads_what_the_backend_logs_through_the_log_parser(facts: EngineFacts) -> None:
    """The gateway gets the same facts from Triton's log line."""
    text = f"onnxruntime backend ready instance=m_0_0 version=1 kind=GPU {facts.log_fields()} intra_op_threads=4"
    quoted = '"' + text.replace('"', '\\"') + '"'
    line = f"I1129 11:00:00.000000 123 python_be.cc:2289] {quoted}\n"
    entries = LogAssembler(has_gpu=True).feed(line.encode())
    read = read_facts(entries[-1].message)
    assert read is not None
    assert (read.device, read.precision, read.graph_batch_sizes) == (
        facts.device,
        facts.precision,
        facts.graph_batch_sizes,
    )
    assert len(read.fallbacks) == len(facts.fallbacks)


@pytest.mark.parametrize("line", ["", "torch backend ready instance=m device=cuda:0 precision=fp16", "model loaded"])
def test_read_facts_of_another_line_is_none(line: str) -> None:
    """Other log lines have no facts."""
    assert read_facts(line) is None


def test_gpu_settings_without_parameters_are_fp32_and_graphs_of_powers_of_two() -> None:
    """The default is FP32 with a graph for each power of two and for max_batch_size."""
    assert gpu_settings(config(max_batch_size=6)) == GpuSettings(buckets=(1, 2, 4, 6))
    assert gpu_settings(config(max_batch_size=0)).buckets == (1,)


def test_gpu_settings_read_every_parameter() -> None:
    """Each parameter changes its own setting."""
    parameters = {
        "precision": "FP16",
        "cuda-graphs": "0",
        "batch-buckets": "4; 1",
        "channels-last": "off",
        "check-answers": "0",
    }
    assert gpu_settings(config(parameters=parameters)) == GpuSettings(
        Precision.FP16, has_graphs=False, buckets=(1, 4, 8), is_channels_last=False, checks_answers=False
    )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("precision", "bf16", "parameter precision is 'bf16': set fp32, tf32 or fp16"),
        ("cuda-graphs", "yes", "parameter cuda-graphs is 'yes': set 1 or 0"),
        ("batch-buckets", "9", "parameter batch-buckets is '9': set numbers from 1 to 8"),
        ("batch-buckets", "0;4", "parameter batch-buckets is '0;4'"),
        ("batch-buckets", "9" * 5000, "set numbers from 1 to 8"),
        ("batch-buckets", "four", "parameter batch-buckets is 'four'"),
    ],
)
def test_gpu_settings_reject_other_values(key: str, value: str, sentence: str) -> None:
    """The error names the parameter, its value and the allowed ones."""
    with pytest.raises(OrtLoadError) as raised:
        gpu_settings(config(parameters={key: value}))
    assert sentence in str(raised.value)


def test_gpu_settings_limit_the_number_of_graphs() -> None:
    """More batch sizes than the limit are an error, because each graph uses memory."""
    many = ";".join(map(str, range(1, MAX_BUCKETS + 1)))
    with pytest.raises(OrtLoadError, match=r"has 17 sizes .*limit 16"):
        gpu_settings(config(max_batch_size=100, parameters={"batch-buckets": many}))
    assert len(default_buckets(1 << 20)) == MAX_BUCKETS


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 6), (6, 6), (7, None)])
def test_bucket_for_is_the_smallest_that_fits(rows: int, bucket: int | None) -> None:
    """A batch is padded to the next bucket; above the last there is none."""
    assert bucket_for(rows, (1, 4, 6)) == bucket


@pytest.mark.parametrize(
    ("available", "installed", "sentence"),
    [
        (["CUDAExecutionProvider", "CPUExecutionProvider"], {"onnxruntime-gpu": "1.31.1"}, ""),
        (["CPUExecutionProvider"], {"onnxruntime": "1.31.1"}, "onnxruntime-gpu is not installed"),
        (
            ["CPUExecutionProvider"],
            {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"},
            "the package onnxruntime has overwritten onnxruntime-gpu 1.31.1",
        ),
        (["CPUExecutionProvider"], {"onnxruntime-gpu": "1.31.1"}, "reports no CUDAExecutionProvider"),
    ],
)
def test_why_no_cuda_names_the_package_to_install(
    available: list[str], installed: dict[str, str], sentence: str
) -> None:
    """Each state of the two packages has its own remedy."""
    why = why_no_cuda(available, installed)
    assert why.startswith(sentence) if not sentence else sentence in why
    assert bool(why) == bool(sentence)


def with_accelerator(kind: str, name: str) -> dict[str, Any]:
    """A configuration with one accelerator."""
    return config(optimization={"execution_accelerators": {f"{kind}_execution_accelerator": [{"name": name}]}})


@pytest.mark.parametrize(
    ("kind", "name", "sentences"),
    [
        ("cpu", "openvino", ["the CPU accelerator openvino is not in this onnxruntime: its own CPU kernels are used"]),
        (
            "gpu",
            "tensorrt",
            [
                "the GPU accelerator tensorrt is used by Triton of NGC only: here ONNX Runtime's own kernels run the "
                "model"
            ],
        ),
        ("gpu", "cuda", []),
    ],
)
def test_unused_accelerators_are_stated(kind: str, name: str, sentences: list[str]) -> None:
    """What only NGC's backend has is not silently left out."""
    assert list(unused_accelerators(with_accelerator(kind, name))) == sentences


@pytest.mark.parametrize(
    "option", ["gpu_external_alloc", "user_compute_stream", "has_user_compute_stream", "Device_id"]
)
def test_cuda_option_that_is_an_address_or_unknown_is_rejected(option: str) -> None:
    """On any machine: ONNX Runtime would call a function at that address. Its other options are accepted."""

    def config(name: str) -> Config:
        gpu = [{"name": "cuda", "parameters": {name: "1"}}]
        return {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": gpu}}}

    with pytest.raises(OrtLoadError, match=f"the cuda accelerator has no parameter '{option}': set one of arena_ext"):
        unused_accelerators(config(option))
    assert unused_accelerators(config("gpu_mem_limit")) == ()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_unknown_accelerator_is_rejected(kind: str) -> None:
    """As NGC's backend does."""
    with pytest.raises(OrtLoadError, match=f"unknown {kind.upper()} execution accelerator 'warp'"):
        unused_accelerators(with_accelerator(kind, "warp"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        (
            {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1, -1]}]},
            "input 'x' has variable dimensions [3, -1, -1]",
        ),
        ({"output": [{"name": "y", "data_type": "TYPE_STRING", "dims": [1]}]}, "tensor 'y' is TYPE_STRING"),
        ({"sequence_batching": {"oldest": {}}}, "sequence_batching"),
    ],
)
def test_why_no_graph_names_the_tensor(changes: dict[str, Any], sentence: str) -> None:
    """A graph needs numbers of fixed shape; the reason names what is not."""
    why = why_no_graph(config(**changes), SIGNATURE)
    assert (why == "") if not sentence else sentence in why


def test_cuda_options_keep_fp32_unless_the_precision_is_tf32() -> None:
    """TF32 is off by default, because it changes results."""
    options = cuda_options(GpuSettings(), config(), device_id=1, has_graphs=True, stream=77, memory_limit_bytes=1 << 30)
    assert options["use_tf32"] == "0"
    assert (options["device_id"], options["user_compute_stream"]) == ("1", "77")
    assert (options["enable_cuda_graph"], options["prefer_nhwc"], options["fuse_conv_bias"]) == ("1", "1", "1")
    assert options["gpu_mem_limit"] == str(1 << 30)
    tf32 = cuda_options(GpuSettings(Precision.TF32), config(), device_id=0, has_graphs=False)
    assert (tf32["use_tf32"], tf32["enable_cuda_graph"]) == ("1", "0")
    assert "user_compute_stream" not in tf32


def test_cuda_options_fuse_only_in_nhwc() -> None:
    """Fused convolutions in NCHW gave wrong outputs."""
    settings = (GpuSettings(), GpuSettings(is_channels_last=False), GpuSettings(is_fused=False), GpuSettings().plain)
    options = [cuda_options(one, config(), device_id=0, has_graphs=False) for one in settings]
    assert [(one["prefer_nhwc"], one["fuse_conv_bias"]) for one in options] == [
        ("1", "1"),
        ("0", "0"),
        ("1", "0"),
        ("0", "0"),
    ]


def test_cuda_options_of_the_configuration_override_the_defaults_but_not_the_device() -> None:
    """Triton's `cuda` accelerator sets ONNX Runtime's options, except what the instance decides."""
    accelerator = {"name": "cuda", "parameters": {"cudnn_conv_algo_search": "HEURISTIC", "device_id": "5"}}
    given = config(optimization={"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}})
    options = cuda_options(GpuSettings(), given, device_id=0, has_graphs=True)
    assert options["cudnn_conv_algo_search"] == "HEURISTIC"
    assert options["device_id"] == "0"
