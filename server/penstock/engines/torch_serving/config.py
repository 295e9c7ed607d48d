"""How an instance serves, by its model configuration. Does not import torch.

precision        fp16, bf16 or fp32        default fp16 on a GPU, fp32 on a CPU
channels-last    0 or 1                    default 1 if a float input has three dimensions besides the batch
cuda-graphs      0 or 1                    default 1; GPU only
batch-buckets    1;2;4;8 …                 default powers of two and the sizes halfway, up to max_batch_size
fuse             0 or 1                    default 1: folds normalisation into convolutions; on a GPU also fuses bias,
                                           activation, sums and concatenations, if that answers correctly at load
compiler         none or aot-inductor      default none; aot-inductor: compiles the program at its first load, on a GPU
event-wait       block or spin             default block, spin if shared; spin uses a core while it waits for the GPU
check-answers    0 or 1                    default 1: where MPS limits the SMs, compares answers at load with the CPU's
active-thread-percentage 1 to 100          default: all, or what `penstock up` chose; of the GPU, per instance; MPS only
batches-in-flight 1 to 4                   default 1; more: begins batches while the one before is computed
program-process  own or shared             default own; shared: one process runs the batches of all instances
image-decoder    gateway or engine         default gateway; engine: the input is TYPE_STRING, encoded pictures
infer-dims       3;224;224                 the network's input, with image-decoder engine
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from .parameters import Config, Parameters, TorchLoadError, whole_number
from .picture_spec import PictureSpec, picture_spec

_DATA_TYPES = frozenset(("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "STRING"))
_FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))
_KNOWN = (
    *("precision", "channels-last", "cuda-graphs", "batch-buckets", "fuse", "compiler", "event-wait", "check-answers"),
    *("active-thread-percentage", "batches-in-flight", "program-process", "image-decoder", "infer-dims"),
)
_MIN_SIMILARITY = 0.75  # of two names' letters, for a typing error
_MOST_ROWS = 1 << 31
IMAGE_RANK = 3
MODEL_FILE = "model.pt2"


def default_buckets(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 … below max_batch_size, and max_batch_size; (1,) without a batch dimension."""
    largest = max(max_batch_size, 1)
    powers = [1 << power for power in range(largest.bit_length())]
    between = [power + power // 2 for power in powers[1:]]
    return (*sorted(size for size in (*powers, *between) if size < largest), largest)


def bucket_for(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket for that many rows. buckets: ascending. Raises ValueError above the last."""
    if rows > buckets[-1]:
        raise ValueError(f"{rows} rows are more than the largest bucket, {buckets[-1]}")
    return buckets[bisect.bisect_left(buckets, rows)]


class Precision(Enum):
    """Type of the program's floats while it runs."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


@dataclass(frozen=True)
class TorchTensorSpec:
    """An input or output of the configuration. data_type: "FP32"; dims: without batch dimension, -1 variable."""

    name: str
    data_type: str
    dims: tuple[int, ...]

    @property
    def is_fixed(self) -> bool:
        return all(dim > 0 for dim in self.dims)


@dataclass(frozen=True)
class EngineSpec:
    """How one instance serves."""

    model: str
    inputs: tuple[TorchTensorSpec, ...]  # in the program's order; with pictures, one float input (C, H, W)
    outputs: tuple[TorchTensorSpec, ...]
    max_batch_size: int  # 0 without a batch dimension
    precision: Precision
    is_channels_last: bool
    has_cuda_graphs: bool
    buckets: tuple[int, ...]
    is_fused: bool = True
    is_compiled: bool = False
    waits_blocking: bool = False
    batches_in_flight: int = 1
    is_shared: bool = False  # one process runs the program for all instances
    checks_answers: bool = True
    thread_percentage: int | None = None  # of the GPU's threads under MPS, per instance; None: not set
    pictures: PictureSpec | None = None  # requests have encoded pictures
    file_name: str = MODEL_FILE


def engine_spec(config: Config, *, is_gpu: bool) -> EngineSpec:
    """The spec of a configuration. Raises TorchLoadError."""
    _reject_unsupported_features(config)
    _reject_misspelt_parameters(config)
    parameters = Parameters(config)
    pictures = picture_spec(config)
    inputs = tuple(_tensor(entry) for entry in config.get("input", []))
    if pictures is not None:
        inputs = (TorchTensorSpec(inputs[0].name, "FP32", (pictures.channels, pictures.height, pictures.width)),)
    outputs = tuple(_tensor(entry) for entry in config.get("output", []))
    _check_tensors(inputs, outputs)
    max_batch_size = int(config.get("max_batch_size", 0))
    is_image = any(spec.data_type in _FLOATS | {"UINT8"} and len(spec.dims) == IMAGE_RANK for spec in inputs)
    is_fixed = all(spec.is_fixed for spec in inputs)
    is_shared = _is_shared(parameters, max_batch_size, (*inputs, *outputs), pictures)
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
        is_compiled=_is_compiled(parameters, is_fixed=is_fixed),
        waits_blocking=_waits_blocking(parameters, is_shared=is_shared),
        checks_answers=parameters.flag("check-answers", default=True),
        thread_percentage=_thread_percentage(parameters),
        batches_in_flight=_batches_in_flight(parameters, pictures),
        is_shared=is_shared,
        pictures=pictures,
        file_name=str(config.get("default_model_filename") or MODEL_FILE),
    )


def _buckets(parameters: Parameters, max_batch_size: int) -> tuple[int, ...]:
    """Ascending; the last one has the largest batch."""
    if not (value := parameters.text("batch-buckets")):
        return default_buckets(max_batch_size)
    words = [word.strip() for word in value.split(";") if word.strip()]
    if not words or not all(whole_number(word, _MOST_ROWS) for word in words):
        raise TorchLoadError(
            f"parameter batch-buckets is '{value}': say whole numbers above 0 with ';' between, as 1;4;16"
        )
    largest = max(max_batch_size, 1)
    numbers = sorted({int(word) for word in words})
    if numbers[-1] > largest:
        raise TorchLoadError(
            f"parameter batch-buckets is '{value}': {numbers[-1]} is more than max_batch_size {largest}"
        )
    return tuple(numbers) if numbers[-1] == largest else (*numbers, largest)


def _is_compiled(parameters: Parameters, *, is_fixed: bool) -> bool:
    if parameters.one_of("compiler", ("none", "aot-inductor"), "none") == "none":
        return False
    if not parameters.flag("fuse", default=True):
        raise TorchLoadError("parameter compiler is 'aot-inductor', and fuse is 0: a compiler fuses; leave one out")
    if not is_fixed:
        raise TorchLoadError("parameter compiler is 'aot-inductor', and an input has free dims: say numbers there")
    return True


def _batches_in_flight(parameters: Parameters, pictures: PictureSpec | None) -> int:
    """At most 1 with pictures, which are decoded into the one input of all batches."""
    value = int(parameters.one_of("batches-in-flight", ("1", "2", "3", "4"), "1"))
    if value > 1 and pictures is not None:
        raise TorchLoadError(
            f"parameter batches-in-flight is '{value}', and image-decoder is engine: that runs 1 at a time"
        )
    return value


def _thread_percentage(parameters: Parameters) -> int | None:
    value = parameters.text("active-thread-percentage")
    percentage = whole_number(value, 100)
    if value and not percentage:
        raise TorchLoadError(f"parameter active-thread-percentage is '{value}': say a whole number from 1 to 100")
    return percentage or None


def _waits_blocking(parameters: Parameters, *, is_shared: bool) -> bool:
    """Spinning saves microseconds, but each process uses one core while the GPU works."""
    return parameters.one_of("event-wait", ("block", "spin"), "spin" if is_shared else "block") == "block"


def _is_shared(
    parameters: Parameters, rows: int, tensors: Sequence[TorchTensorSpec], pictures: PictureSpec | None
) -> bool:
    if parameters.one_of("program-process", ("own", "shared"), "own") == "own":
        return False
    unfit = [f"'{one.name}' is {one.data_type}" for one in tensors if one.data_type in ("BF16", "STRING")]
    unfit += [f"'{one.name}' has variable dims" for one in tensors if not one.is_fixed]
    unfit += ["max_batch_size is 0"] * (rows < 1) + ["image-decoder is engine"] * (pictures is not None)
    unfit += ["batches-in-flight is more than 1"] * (parameters.text("batches-in-flight") not in ("", "1"))
    if unfit:
        raise TorchLoadError(f"parameter program-process is 'shared', which is not possible if {unfit[0]}")
    return True


THREADS_VARIABLE = "PENSTOCK_MPS_THREADS"  # "MODEL=PERCENT MODEL=PERCENT", set by `penstock up`


def thread_percentage(spec: EngineSpec, environ: Mapping[str, str]) -> int | None:
    """Percentage of the GPU's threads for an instance: the model's own setting, else what `penstock up` chose."""
    if spec.thread_percentage is not None:
        return spec.thread_percentage
    chosen = dict(pair.rpartition("=")[::2] for pair in environ.get(THREADS_VARIABLE, "").split())
    percentage = chosen.get(spec.model, "")
    return int(percentage) if percentage.isdigit() else None


def _tensor(entry: Config) -> TorchTensorSpec:
    data_type = str(entry.get("data_type", "")).removeprefix("TYPE_")
    if data_type not in _DATA_TYPES:
        found = data_type or "without a type"
        raise TorchLoadError(f"tensor '{entry.get('name')}' is {found}: the torch backend has none")
    reshape = (entry.get("reshape") or {}).get("shape")
    dims = entry.get("dims", []) if reshape is None else reshape
    return TorchTensorSpec(str(entry.get("name", "")), data_type, tuple(int(dim) for dim in dims))


def _check_tensors(inputs: tuple[TorchTensorSpec, ...], outputs: tuple[TorchTensorSpec, ...]) -> None:
    for kind, specs in (("input", inputs), ("output", outputs)):
        if not specs:
            raise TorchLoadError(f"config.pbtxt names no {kind}, and {MODEL_FILE} does not name it either")
        for spec in specs:
            if spec.data_type == "STRING":
                raise TorchLoadError(
                    f"{kind} '{spec.name}' is TYPE_STRING: a program takes numbers; "
                    "for encoded pictures say the parameter image-decoder: engine"
                )


def _reject_unsupported_features(config: Config) -> None:
    found = [key for key in ("batch_input", "batch_output", "sequence_batching") if config.get(key)]
    found += [f"optional input '{entry['name']}'" for entry in config.get("input", []) if entry.get("optional")]
    if (config.get("model_transaction_policy") or {}).get("decoupled"):
        found.append("the decoupled transaction policy")
    if found:
        raise TorchLoadError(f"the torch backend does not have {' and '.join(found)}: leave it out of config.pbtxt")


def _reject_misspelt_parameters(config: Config) -> None:
    """Other programs' parameters are allowed, so only names similar to ours are errors."""
    for key in config.get("parameters") or {}:
        meant = get_close_matches(key.lower().replace("_", "-"), _KNOWN, 1, _MIN_SIMILARITY)
        if meant and key not in _KNOWN:
            raise TorchLoadError(f"there is no parameter '{key}': did you mean {meant[0]}?")
