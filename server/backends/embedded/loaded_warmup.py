"""model_warmup of a config: requests that a version answers before it is called ready."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from tritonclient.grpc import model_config_pb2

from server.backends.ort_serving.errors import LoadError
from server.backends.wire.validation import rules_of
from server.core.errors import InvalidRequest
from server.core.infer import InferRequest
from server.core.tensor import Array, Datatype, Tensor

Run = Callable[[Mapping[str, Array]], object]
MAX_RUNS = 1000  # of one sample: while it runs, it holds one of the few threads that load
MAX_SAMPLE_BYTES = 1 << 30
_SEED = 0
_DATATYPES = {
    model_config_pb2.DataType.Value(f"TYPE_{'STRING' if datatype is Datatype.BYTES else datatype}"): datatype
    for datatype in Datatype
}


def warm_up(config: model_config_pb2.ModelConfig, folder: Path, run: Run) -> None:
    """Run each of the config's samples as often as it says. folder: where the input files lie.

    Raises LoadError for a sample that is no request to this model, and whatever `run` raises.
    """
    rules = rules_of(config)
    for sample in config.model_warmup:
        if sample.count > MAX_RUNS:
            raise LoadError(f"its warm-up sample {sample.name!r} wants {sample.count} runs (limit {MAX_RUNS})")
        rows = max(1, sample.batch_size) if config.max_batch_size else None
        try:
            inputs = tuple(_tensor(name, entry, folder, rows) for name, entry in sorted(sample.inputs.items()))
            request = InferRequest(config.name, inputs)
            rules.check(request)
            arrays = rules.arrays_of(request)
        except InvalidRequest as error:
            raise LoadError(f"its warm-up sample {sample.name!r} is no request to it: {error}") from error
        for _ in range(max(1, sample.count)):
            run(arrays)


def _tensor(name: str, entry: "model_config_pb2.ModelWarmup.Input", folder: Path, rows: int | None) -> Tensor:
    """A sample's data is that of one row: it is repeated for each."""
    datatype = _DATATYPES.get(entry.data_type)
    if datatype is None or any(dim < 0 for dim in entry.dims):
        raise InvalidRequest(f"input {name!r} has no data_type, or dims that vary: say both")
    dims = tuple(entry.dims)
    shape = dims if rows is None else (rows, *dims)
    size_bytes = math.prod(shape) * (datatype.size_bytes or 4)
    if size_bytes > MAX_SAMPLE_BYTES:
        raise InvalidRequest(f"input {name!r} has {size_bytes} bytes (limit {MAX_SAMPLE_BYTES})")
    one_row = _data(name, entry, datatype, folder)
    return Tensor(name, datatype, shape, memoryview(one_row * (rows or 1)))


def _data(name: str, entry: "model_config_pb2.ModelWarmup.Input", datatype: Datatype, folder: Path) -> bytes:
    count = int(np.prod(entry.dims, dtype=object)) if entry.dims else 1
    if entry.input_data_file:
        path = folder / str(entry.input_data_file)
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"input {name!r}: {path}: {error.strerror}") from error
    if datatype is Datatype.BYTES:
        return bytes(4 * count)  # as many empty strings
    size = count * (datatype.size_bytes or 0)
    if entry.random_data and datatype in (Datatype.FP16, Datatype.FP32, Datatype.FP64):
        kinds = {Datatype.FP16: np.float16, Datatype.FP32: np.float32, Datatype.FP64: np.float64}
        return np.random.default_rng(_SEED).random(count).astype(kinds[datatype]).tobytes()
    if entry.random_data and datatype is not Datatype.BOOL:
        return np.random.default_rng(_SEED).bytes(size)
    return bytes(size)
