"""Triton's model configuration and its parameters as records. Pure.

precision        fp16, bf16 or fp32        default fp16 on a GPU, fp32 on a CPU
channels-last    0 or 1                    default 1 where an input of floats has three dimensions beside the batch's
cuda-graphs      0 or 1                    default 1; a GPU only
batch-buckets    1;2;4;8 …                 default powers of two up to max_batch_size, and it
fuse             0 or 1                    default 1: normalisation goes into convolutions, and on a GPU their bias,
                                           ReLU and sums too, by cuDNN, where that is found to answer right at load
event-wait       block or spin             default block: for the GPU; spinning takes a core an instance
check-answers    0 or 1                    default 1: where MPS limits the SMs, answers at load are held to the CPU's
batches-in-flight 1 or 2                   default 1; 2: an instance begins a batch while the one before is computed
image-decoder    gateway or engine         default gateway; engine: the input is TYPE_STRING, encoded pictures
infer-dims       3;224;224                 with image-decoder engine: the network's input
"""

from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from .buckets import default_buckets
from .errors import LoadError
from .pictures_spec import PictureSpec, picture_spec

Config = dict[str, Any]  # the configuration as Triton hands it over: parsed JSON
_DATA_TYPES = frozenset(("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "STRING"))
_FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))
_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}
_KNOWN = (
    "precision",
    "channels-last",
    "cuda-graphs",
    "batch-buckets",
    "fuse",
    "event-wait",
    "check-answers",
    "batches-in-flight",
    "image-decoder",
    "infer-dims",
)
_ALIKE = 0.75  # of two names' letters: a slip, not another word
IMAGE_RANK = 3
MODEL_FILE = "model.pt2"


class Precision(Enum):
    """What the program's floats are while it runs."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the configuration. data_type: "FP32"; dims: without the batch dimension, -1 is free."""

    name: str
    data_type: str
    dims: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        return all(dim > 0 for dim in self.dims)


@dataclass(frozen=True)
class EngineSpec:
    """How one instance serves.

    inputs: what the program takes, in its order; where pictures is not None, one of floats (C, H, W), and the wire
    carries encoded pictures under the same name instead. max_batch_size: 0 without a batch dimension.
    """

    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    precision: Precision
    is_channels_last: bool
    has_cuda_graphs: bool
    buckets: tuple[int, ...]
    is_fused: bool = True
    waits_blocking: bool = False
    batches_in_flight: int = 1
    checks_answers: bool = True
    pictures: PictureSpec | None = None
    file_name: str = MODEL_FILE


def engine_spec(config: Config, *, is_gpu: bool) -> EngineSpec:
    """The record of a configuration.

    Raises LoadError naming parameter, value and what is allowed.
    """
    _refuse_what_this_backend_has_not(config)
    _refuse_slips(config)
    parameters = _Parameters(config)
    pictures = picture_spec(config, parameters.text)
    inputs = tuple(_tensor(entry) for entry in config.get("input", []))
    if pictures is not None:
        inputs = (TensorSpec(inputs[0].name, "FP32", (pictures.channels, pictures.height, pictures.width)),)
    outputs = tuple(_tensor(entry) for entry in config.get("output", []))
    _check_tensors(inputs, outputs)
    max_batch_size = int(config.get("max_batch_size", 0))
    is_image = any(spec.data_type in _FLOATS | {"UINT8"} and len(spec.dims) == IMAGE_RANK for spec in inputs)
    is_fixed = all(spec.is_fixed for spec in inputs)
    return EngineSpec(
        model=str(config.get("name", "")),
        inputs=inputs,
        outputs=outputs,
        max_batch_size=max_batch_size,
        precision=Precision(parameters.one_of("precision", ("fp16", "bf16", "fp32"), "fp16" if is_gpu else "fp32")),
        is_channels_last=parameters.flag("channels-last", default=is_image),
        has_cuda_graphs=parameters.flag("cuda-graphs", default=True) and is_gpu and is_fixed,
        buckets=_buckets(parameters, max_batch_size),
        is_fused=parameters.flag("fuse", default=True),
        waits_blocking=_waits_blocking(parameters),
        checks_answers=parameters.flag("check-answers", default=True),
        batches_in_flight=_batches_in_flight(parameters, pictures),
        pictures=pictures,
        file_name=str(config.get("default_model_filename") or MODEL_FILE),
    )


class _Parameters:
    """A configuration's string parameters."""

    def __init__(self, config: Config) -> None:
        self._values = config.get("parameters") or {}

    def text(self, key: str) -> str:
        """The stripped value; "" where the configuration does not name it."""
        return str((self._values.get(key) or {}).get("string_value", "")).strip()

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        said = self.text(key).lower() or default
        if said not in allowed:
            raise LoadError(f"parameter {key} is '{said}': say one of {', '.join(allowed)}")
        return said

    def flag(self, key: str, *, default: bool) -> bool:
        said = self.text(key).lower()
        if said and said not in _FLAGS:
            raise LoadError(f"parameter {key} is '{said}': say 1 or 0")
        return _FLAGS[said] if said else default


def _buckets(parameters: _Parameters, max_batch_size: int) -> tuple[int, ...]:
    """Ascending, and the last holds the largest batch."""
    said = parameters.text("batch-buckets")
    if not said:
        return default_buckets(max_batch_size)
    words = [word.strip() for word in said.split(";") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise LoadError(f"parameter batch-buckets is '{said}': say whole numbers above 0 with ';' between, as 1;4;16")
    largest = max(max_batch_size, 1)
    numbers = sorted({int(word) for word in words})
    if numbers[-1] > largest:
        raise LoadError(f"parameter batch-buckets is '{said}': {numbers[-1]} is more than max_batch_size {largest}")
    return tuple(numbers) if numbers[-1] == largest else (*numbers, largest)


def _batches_in_flight(parameters: _Parameters, pictures: PictureSpec | None) -> int:
    """Pictures are decoded into the one input that all batches share."""
    said = int(parameters.one_of("batches-in-flight", ("1", "2"), "1"))
    if said > 1 and pictures is not None:
        raise LoadError(f"parameter batches-in-flight is '{said}', and image-decoder is engine: that runs 1 at a time")
    return said


def _waits_blocking(parameters: _Parameters) -> bool:
    """Spinning answers some microseconds sooner, and takes a core an instance while the GPU works: of 16 instances that
    shared 16 cores it left the rest of the machine none."""
    return parameters.one_of("event-wait", ("block", "spin"), "block") == "block"


def instance_count(config: Config) -> int:
    """Of all of the model's instance groups, on all their GPUs."""
    groups = config.get("instance_group") or []
    return max(1, sum(int(group.get("count", 1)) * max(1, len(group.get("gpus") or [])) for group in groups))


def _tensor(entry: Config) -> TensorSpec:
    data_type = str(entry.get("data_type", "")).removeprefix("TYPE_")
    if data_type not in _DATA_TYPES:
        raise LoadError(f"tensor '{entry.get('name')}' is {data_type or 'without a type'}: the torch backend has none")
    reshape = (entry.get("reshape") or {}).get("shape")
    dims = entry.get("dims", []) if reshape is None else reshape
    return TensorSpec(str(entry.get("name", "")), data_type, tuple(int(dim) for dim in dims))


def _check_tensors(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    for kind, specs in (("input", inputs), ("output", outputs)):
        if not specs:
            raise LoadError(f"config.pbtxt names no {kind}, and {MODEL_FILE} does not tell what Triton is to call it")
        for spec in specs:
            if spec.data_type == "STRING":
                raise LoadError(
                    f"{kind} '{spec.name}' is TYPE_STRING: a program takes numbers; "
                    "for encoded pictures say the parameter image-decoder: engine"
                )


def _refuse_what_this_backend_has_not(config: Config) -> None:
    found = [key for key in ("batch_input", "batch_output", "sequence_batching") if config.get(key)]
    found += [f"optional input '{entry['name']}'" for entry in config.get("input", []) if entry.get("optional")]
    if (config.get("model_transaction_policy") or {}).get("decoupled"):
        found.append("the decoupled transaction policy")
    if found:
        raise LoadError(f"the torch backend does not have {' and '.join(found)}: leave it out of config.pbtxt")


def _refuse_slips(config: Config) -> None:
    """Parameters of others' stand there too, so that only what is nearly one of ours is a mistake."""
    for key in config.get("parameters") or {}:
        meant = get_close_matches(key.lower().replace("_", "-"), _KNOWN, 1, _ALIKE)
        if meant and key not in _KNOWN:
            raise LoadError(f"there is no parameter '{key}': did you mean {meant[0]}?")
