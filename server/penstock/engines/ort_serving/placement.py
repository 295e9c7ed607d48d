"""Where an ONNX model runs and how: settings, choices and their reasons. Imports neither ONNX Runtime nor CUDA.

These parameters of config.pbtxt apply to an instance on a GPU; their names are those of the torch backend:

precision        fp32, tf32 or fp16        default fp32; inputs and outputs keep their types. int8: that of the file
cuda-graphs      0 or 1                    default 1: one CUDA graph per batch size, if the model allows it
batch-buckets    1;2;4;8 …                 default powers of two up to max_batch_size, and max_batch_size
channels-last    0 or 1                    default 1: ONNX Runtime's prefer_nhwc
fuse             0 or 1                    default 1: ONNX Runtime's fuse_conv_bias, with channels-last
check-answers    0 or 1                    default 1: compares the outputs at load with those of FP32 on the CPU
"""

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from .config import Config, OrtLoadError, Signature

CPU, CUDA, TENSORRT_RTX = "cpu", "cuda", "tensorrt_rtx"
_DRIVER_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of Linux and of WSL
MAX_BUCKETS = 16  # each captured graph uses memory of the GPU
_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


class Precision(Enum):
    """Type of the network's floats while it runs. TF32: FP32 tensors, products with 10 bits of mantissa.

    INT8: a file that `models optimize` has quantized; nothing is converted.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    INT8 = "int8"


@dataclass(frozen=True)
class EngineFacts:
    """How one instance runs. fallbacks: one sentence with the reason for each setting that is not used."""

    provider: str = CPU  # or CUDA, TENSORRT_RTX
    device_id: int | None = None  # of the GPU
    precision: str = Precision.FP32.value
    graph_batch_sizes: tuple[int, ...] = ()  # batch sizes with a CUDA graph; others run without one
    fallbacks: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """`cpu` or `cuda:0`."""
        return self.provider if self.device_id is None else f"{self.provider}:{self.device_id}"

    def log_fields(self) -> str:
        """Part of the log line `onnxruntime backend ready …`; read_facts reads it back."""
        graphs = ";".join(map(str, self.graph_batch_sizes)) or "none"
        why = "; ".join(each.replace('"', "'").replace(";", ",") for each in self.fallbacks)
        return f"device={self.device} precision={self.precision} graphs={graphs}" + (
            f' fallback="{why}"' if why else ""
        )


_LINE = re.compile(
    r'onnxruntime backend ready .*?device=(\w+)(?::(\d+))? precision=(\w+) graphs=([\d;]+|none)(?: fallback="([^"]*)")?'
)


def read_facts(line: str) -> EngineFacts | None:
    """The facts in a log line of Triton's onnxruntime backend; None if it is another line."""
    found = _LINE.search(line)
    if found is None:
        return None
    provider, device_id, precision, graphs, why = found.groups()
    sizes = () if graphs == "none" else tuple(int(size) for size in graphs.split(";") if size)
    fallbacks = tuple(why.split("; ")) if why else ()
    return EngineFacts(provider, int(device_id) if device_id else None, precision, sizes, fallbacks)


@dataclass(frozen=True)
class GpuSettings:
    """Parameters of an instance on a GPU. buckets: batch sizes, ascending; the last is max_batch_size or 1."""

    precision: Precision = Precision.FP32
    has_graphs: bool = True
    buckets: tuple[int, ...] = (1,)
    is_channels_last: bool = True
    is_fused: bool = True
    checks_answers: bool = True

    @property
    def plain(self) -> "GpuSettings":
        """With the provider's default kernels, for a GPU on which the faster ones fail."""
        return replace(self, is_channels_last=False, is_fused=False)


def gpu_settings(config: Config) -> GpuSettings:
    """The settings of a configuration. Raises OrtLoadError."""
    return GpuSettings(
        precision=_precision(config),
        has_graphs=_flag(config, "cuda-graphs"),
        buckets=_buckets(config),
        is_channels_last=_flag(config, "channels-last"),
        is_fused=_flag(config, "fuse"),
        checks_answers=_flag(config, "check-answers"),
    )


def _text(config: Config, key: str) -> str:
    return str((config.get("parameters", {}).get(key) or {}).get("string_value", "")).strip()


def _precision(config: Config) -> Precision:
    value = _text(config, "precision").lower() or Precision.FP32.value
    if value not in {one.value for one in Precision}:
        raise OrtLoadError(f"parameter precision is '{value}': set fp32, tf32 or fp16")
    return Precision(value)


def _flag(config: Config, key: str) -> bool:
    value = _text(config, key).lower() or "1"
    if value not in _FLAGS:
        raise OrtLoadError(f"parameter {key} is '{value}': set 1 or 0")
    return _FLAGS[value]


def _buckets(config: Config) -> tuple[int, ...]:
    largest = max(int(config.get("max_batch_size", 0)), 1)
    value = _text(config, "batch-buckets")
    if not value:
        return default_buckets(largest)
    words = [word.strip() for word in value.split(";") if word.strip()]
    digits = len(str(largest))  # int() refuses thousands of them
    are_short = all(word.isascii() and word.isdigit() and len(word) <= digits for word in words)
    if not words or not are_short or not all(0 < int(word) <= largest for word in words):
        raise OrtLoadError(f"parameter batch-buckets is '{value}': set numbers from 1 to {largest}, such as 1;4;16")
    buckets = tuple(sorted({*map(int, words), largest}))
    if len(buckets) > MAX_BUCKETS:
        raise OrtLoadError(
            f"parameter batch-buckets has {len(buckets)} sizes with max_batch_size (limit {MAX_BUCKETS})"
        )
    return buckets


def default_buckets(largest: int) -> tuple[int, ...]:
    """Powers of two below the largest batch size, and that size. At most MAX_BUCKETS, the largest ones."""
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return (*powers, largest)[-MAX_BUCKETS:]


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket for that many rows; None above the last. buckets: ascending."""
    place = bisect.bisect_left(buckets, rows)
    return buckets[place] if place < len(buckets) else None


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver, and thus probably a GPU."""
    return any(Path(name).exists() for name in _DRIVER_DEVICES)


def why_no_cuda(available: Sequence[str], installed: Mapping[str, str]) -> str:
    """Why ONNX Runtime has no CUDA provider; empty if it has. installed: version by package name."""
    if "CUDAExecutionProvider" in available:
        return ""
    version = installed.get("onnxruntime-gpu")
    if version is None:
        return "onnxruntime-gpu is not installed here (make gpu, or penstock setup triton --gpu)"
    if "onnxruntime" in installed:
        return (
            f"the package onnxruntime has overwritten onnxruntime-gpu {version}: pip uninstall onnxruntime, then "
            f"pip install --force-reinstall --no-deps onnxruntime-gpu=={version}"
        )
    return f"onnxruntime-gpu {version} reports no CUDAExecutionProvider"


def why_no_graph(config: Config, signature: Signature) -> str:
    """Why no run of the model can be captured as a CUDA graph; empty if its tensors allow it."""
    entries = [*config.get("input", []), *config.get("output", [])]
    texts = [entry["name"] for entry in entries if entry.get("data_type") == "TYPE_STRING"]
    if texts:
        return f"no CUDA graph: tensor '{texts[0]}' is TYPE_STRING"
    for entry in config.get("input", []):
        dims = (entry.get("reshape") or {}).get("shape", entry.get("dims", []))
        if any(int(dim) < 0 for dim in dims):
            return f"no CUDA graph: input '{entry['name']}' has variable dimensions {list(map(int, dims))}"
    if signature.overridable and any(entry.get("optional") for entry in config.get("input", [])):
        return "no CUDA graph: the model has optional inputs"
    if config.get("sequence_batching"):
        return "no CUDA graph: the model has sequence_batching"
    return ""


def cuda_options(
    settings: GpuSettings,
    config: Config,
    *,
    device_id: int,
    has_graphs: bool,
    stream: int | None = None,  # handle of the CUDA stream for all runs
    memory_limit_bytes: int | None = None,  # of the session's arena
) -> dict[str, str]:
    """Options of CUDAExecutionProvider. The configuration's `cuda` accelerator overrides all but device and graph."""
    options = {
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "1" if settings.precision is Precision.TF32 else "0",
        "prefer_nhwc": "1" if settings.is_channels_last else "0",
        # ONNX Runtime 1.31's fused convolutions in NCHW gave wrong outputs on an H200.
        "fuse_conv_bias": "1" if settings.is_fused and settings.is_channels_last else "0",
    }
    if memory_limit_bytes is not None:
        options["gpu_mem_limit"] = str(memory_limit_bytes)
    options |= _accelerator_parameters(config)
    options |= {"device_id": str(device_id), "enable_cuda_graph": "1" if has_graphs else "0"}
    return options if stream is None else options | {"user_compute_stream": str(stream)}


# Of CUDAExecutionProvider. Others, such as gpu_external_alloc and user_compute_stream, are addresses in the process.
_CUDA_OPTIONS = frozenset(
    (
        *("device_id", "enable_cuda_graph", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream"),
        *("cudnn_conv_algo_search", "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d", "fuse_conv_bias"),
        *("use_tf32", "prefer_nhwc", "use_ep_level_unified_stream", "enable_skip_layer_norm_strict_mode"),
        *("sdpa_kernel", "tunable_op_enable", "tunable_op_tuning_enable", "tunable_op_max_tuning_duration_ms"),
    )
)
_KNOWN_ACCELERATORS = {"cpu": ("openvino",), "gpu": ("cuda", "tensorrt")}
_UNUSED_ACCELERATORS = {
    "openvino": "the CPU accelerator openvino is not in this onnxruntime: its own CPU kernels are used",
    "tensorrt": "the GPU accelerator tensorrt is used by Triton of NGC only: here ONNX Runtime's own kernels run the "
    "model",
}


def unused_accelerators(config: Config) -> tuple[str, ...]:
    """A sentence for each accelerator that only NGC's backend has. Raises OrtLoadError for an unknown one or option."""
    accelerators = config.get("optimization", {}).get("execution_accelerators") or {}
    found = []
    for kind, known in _KNOWN_ACCELERATORS.items():
        for accelerator in accelerators.get(f"{kind}_execution_accelerator", []):
            name = accelerator["name"]
            if name not in known:
                raise OrtLoadError(f"unknown {kind.upper()} execution accelerator '{name}': set {' or '.join(known)}")
            if unknown := sorted(set(accelerator.get("parameters", {}) if name == "cuda" else ()) - _CUDA_OPTIONS):
                known_text = ", ".join(sorted(_CUDA_OPTIONS))
                raise OrtLoadError(f"the cuda accelerator has no parameter '{unknown[0]}': set one of {known_text}")
            found.append(_UNUSED_ACCELERATORS.get(name, ""))
    return tuple(filter(None, found))


def _accelerator_parameters(config: Config) -> dict[str, str]:
    accelerators = config.get("optimization", {}).get("execution_accelerators") or {}
    options: dict[str, str] = {}
    for accelerator in accelerators.get("gpu_execution_accelerator", []):
        if accelerator["name"] == "cuda":
            options |= accelerator.get("parameters", {})
    return options
