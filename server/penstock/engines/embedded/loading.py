"""Opens a model's versions from disk and warms them up. Blocks: call it in a loader thread."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.embedded.arena import shared_arena
from penstock.engines.embedded.model_version import OpenedVersion
from penstock.engines.embedded.repository import (
    Fingerprint,
    ModelFolder,
    chosen_versions,
    completed_config,
    config_of,
    fingerprint,
    json_of,
    why_not_servable,
)
from penstock.engines.model_io import rules_of
from penstock.engines.ort_serving.config import Config, OrtLoadError, OrtRequestError, Signature, validate
from penstock.engines.ort_serving.cudart import CudaRuntime
from penstock.engines.ort_serving.memory import MemoryLimit
from penstock.engines.ort_serving.opening import Placement, open_model
from penstock.engines.ort_serving.session import OrtModel, describe, model_path, session_options
from penstock.engines.ort_serving.threads import thread_budget
from penstock.engines.torch_serving.staging import PinnedRegions
from penstock.logs import get_logger
from penstock.protocol.errors import InvalidRequest, ModelNotReady
from penstock.protocol.inference import Array, Datatype, InferRequest, Tensor

Run = Callable[[Mapping[str, Array]], object]
MAX_RUNS = 1000  # of one sample, because it occupies one of the few loader threads
MAX_SAMPLE_BYTES = 1 << 30
_SEED = 0
_DATATYPES = {
    model_config_pb2.DataType.Value(f"TYPE_{'STRING' if datatype is Datatype.BYTES else datatype}"): datatype
    for datatype in Datatype
}


def warm_up(config: model_config_pb2.ModelConfig, folder: Path, run: Run) -> None:
    """Runs the config's warm-up samples. folder: of input files. Raises OrtLoadError, and errors of `run`."""
    rules = rules_of(config)
    for sample in config.model_warmup:
        if sample.count > MAX_RUNS:
            raise OrtLoadError(f"its warm-up sample {sample.name!r} wants {sample.count} runs (limit {MAX_RUNS})")
        rows = max(1, sample.batch_size) if config.max_batch_size else None
        try:
            inputs = tuple(_sample_tensor(name, entry, folder, rows) for name, entry in sorted(sample.inputs.items()))
            request = InferRequest(config.name, inputs)
            rules.check(request)
            arrays = rules.arrays_of(request)
        except InvalidRequest as error:
            raise OrtLoadError(f"its warm-up sample {sample.name!r} is no request to it: {error}") from error
        for _ in range(max(1, sample.count)):
            run(arrays)


def _sample_tensor(name: str, entry: "model_config_pb2.ModelWarmup.Input", folder: Path, rows: int | None) -> Tensor:
    """A sample contains one row, which is repeated for the batch."""
    datatype = _DATATYPES.get(entry.data_type)
    if datatype is None or any(dim < 0 for dim in entry.dims):
        raise InvalidRequest(f"input {name!r} has no data_type, or dims that vary: say both")
    dims = tuple(entry.dims)
    shape = dims if rows is None else (rows, *dims)
    size_bytes = math.prod(shape) * (datatype.size_bytes or 4)
    if size_bytes > MAX_SAMPLE_BYTES:
        raise InvalidRequest(f"input {name!r} has {size_bytes} bytes (limit {MAX_SAMPLE_BYTES})")
    one_row = _sample_data(name, entry, datatype, folder)
    return Tensor(name, datatype, shape, memoryview(one_row * (rows or 1)))


def _sample_data(name: str, entry: "model_config_pb2.ModelWarmup.Input", datatype: Datatype, folder: Path) -> bytes:
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


log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The opened versions of version_policy, and the failures. state_on_disk: None if this state was already open."""

    state_on_disk: "StateOnDisk | None"
    opened: Mapping[int, OpenedVersion]
    failures: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class StateOnDisk:
    """Source of a load: the files, and the config in the load request."""

    files: Fingerprint
    config_json: str | None


def open_folder(
    folder: ModelFolder, config_json: str | None, *, loaded: StateOnDisk | None, memory: MemoryLimit | None = None
) -> OpenedModel:
    """Opens all configured versions, unless `loaded` is the same state. memory: of the process.

    Raises ModelNotReady.
    """
    if folder.conflict:
        raise _not_ready(folder, folder.conflict)
    state = StateOnDisk(fingerprint(folder), config_json)
    if state == loaded:
        return OpenedModel(None, {}, {})
    try:
        config = config_of(folder, config_json)
    except InvalidRequest as error:
        raise _not_ready(folder, error.message) from error
    reason = why_not_servable(config)
    if reason:
        raise ModelNotReady(reason)
    versions = chosen_versions(folder, config)
    if not versions:
        raise _not_ready(folder, "at least one version must be available under its version policy")
    opened: dict[int, OpenedVersion] = {}
    failures: dict[int, str] = {}
    for version in versions:
        try:
            opened[version] = _open_version(folder, version, config, memory)
        except (OrtLoadError, InvalidRequest) as error:
            failures[version] = str(error)
        except Exception as error:  # loader thread's root: fails only this version
            log.exception("a model cannot be opened", model=folder.name, version=version)
            failures[version] = f"{type(error).__name__} in the engine, see the gateway's log"
    return OpenedModel(state, opened, failures)


def _not_ready(folder: ModelFolder, reason: str) -> ModelNotReady:
    return ModelNotReady(f"model {folder.name!r} cannot be loaded: {reason}")


def _open_version(
    folder: ModelFolder, version: int, config: model_config_pb2.ModelConfig, memory: MemoryLimit | None
) -> OpenedVersion:
    given = json_of(config)
    path = model_path(folder.path / str(version), given)
    group = config.instance_group[0]
    kind = model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")
    budget = thread_budget(given, is_one_session=True)

    def new_options() -> ort.SessionOptions:
        options = session_options(given, budget)
        if memory is not None and kind == "CPU":
            _limit_memory(memory, options)
        return options

    def complete(signature: Signature) -> Config:
        as_dict = json_of(completed_config(config, signature))
        validate(as_dict, signature)
        return as_dict

    placement = Placement(kind, group.gpus[0] if group.gpus else 0)
    open_cuda = partial(CudaRuntime, regions=PinnedRegions)
    opened = open_model(path, placement, new_options, complete, open_cuda=open_cuda)
    full = completed_config(config, opened.signature)
    ort_model, rules = OrtModel(opened.session, opened.signature, opened.config, memory), rules_of(full)
    try:
        warm_up(full, folder.path / "warmup", lambda arrays: ort_model.run(tuple(rules.outputs), arrays))
    except OrtRequestError as error:
        raise OrtLoadError(f"its warm-up failed: {error}") from error
    for reason in opened.facts.fallbacks:
        log.warning("model is served otherwise than configured", model=folder.name, reason=reason)
    described = f"{opened.facts.log_fields()} {describe(opened.config, session_options(given, budget), budget)}"
    log.debug("model opened", model=folder.name, version=version, session=described)
    instances, labels = config_from_proto(full).instance_count, _labels(full, folder.path)
    return OpenedVersion(folder.name, version, full, rules, ort_model, instances, labels, opened.facts)


def _limit_memory(memory: MemoryLimit, options: ort.SessionOptions) -> None:
    memory.check()
    if options.enable_cpu_mem_arena and (arena := shared_arena()) is not None:
        arena.use(options)
        memory.add(arena)


def _labels(config: model_config_pb2.ModelConfig, folder: Path) -> dict[str, tuple[str, ...]]:
    """Labels by output. Raises OrtLoadError if a label file cannot be read, as Triton does."""
    labels = {}
    for output in config.output:
        if output.label_filename:
            path = folder / output.label_filename
            try:
                labels[output.name] = tuple(path.read_text(encoding="utf-8-sig").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise OrtLoadError(f"the label file {path} cannot be read: {error}") from error
    return labels
