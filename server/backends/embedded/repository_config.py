"""A model's config as the engine serves it: completed, given its defaults as Triton does, and judged."""

from pathlib import Path
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from server.backends.config_pbtxt import config_from_proto
from server.backends.embedded.repository import CONFIG_FILE, ModelFolder, read_config
from server.backends.model_code import check_model, parse_config
from server.backends.ort_serving.config import Config, complete
from server.backends.ort_serving.signature import Signature
from server.core.errors import InvalidRequest

BACKEND, PLATFORM, FILE_NAME = "onnxruntime", "onnxruntime_onnx", "model.onnx"
ELSEWHERE = "start with --engine triton"
CPU_INSTANCES = 2  # Triton's default for ONNX models on the CPU
_KINDS = model_config_pb2.ModelInstanceGroup
_BACKEND_OF_FILE = {
    FILE_NAME: BACKEND,
    "model.py": "python",
    "model.plan": "tensorrt",
    "model.pt": "pytorch",
    "model.graphdef": "tensorflow",
    "model.savedmodel": "tensorflow",
    "model.xml": "openvino",
    "model.dali": "dali",
}


def config_of(folder: ModelFolder, config_json: str | None = None) -> model_config_pb2.ModelConfig:
    """The folder's config, or the one given, as `named` fills it in. Raises InvalidRequest where it is broken."""
    if config_json is None:
        return named(folder, read_config(folder))
    config = parse_config(config_json)
    check_model(config, {}, allows_code=True)  # load requests were checked for code when they arrived
    return named(folder, config)


def named(folder: ModelFolder, config: model_config_pb2.ModelConfig) -> model_config_pb2.ModelConfig:
    """The config with its name, backend, platform, file and instances, as far as it and the files tell them.

    An instance of KIND_AUTO is on the CPU here. Raises InvalidRequest for a name that is not the folder's.
    """
    if config.name and config.name != folder.name:
        raise InvalidRequest(f"name is {config.name!r} but the folder is {folder.name!r}; Triton wants them equal")
    config.name = folder.name
    config.backend = _backend(folder, config)
    if config.backend == BACKEND:
        config.platform = config.platform or PLATFORM
        config.default_model_filename = config.default_model_filename or FILE_NAME
    _set_instances(config)
    return config


def obstacle(config: model_config_pb2.ModelConfig) -> str:
    """Why this engine cannot serve the model, with the way out; empty where it can. config: of config_of."""
    limit = f"the embedded engine runs ONNX models only; model {config.name!r}"
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        return f"{limit} is an ensemble: {ELSEWHERE}"
    if config.backend != BACKEND:
        needs = f"needs backend {config.backend!r}" if config.backend else "names no backend and has no model.onnx"
        return f"{limit} {needs}: {ELSEWHERE}" if config.backend else f"{limit} {needs}: add one of them"
    missing = [name for name, is_wanted in _not_here(config).items() if is_wanted]
    if missing:
        return f"the embedded engine has no {' and no '.join(missing)}, which model {config.name!r} wants: {ELSEWHERE}"
    return ""


def completed(config: model_config_pb2.ModelConfig, signature: Signature) -> model_config_pb2.ModelConfig:
    """A copy with tensors and batching from the ONNX file where the config names none, and Triton's defaults.

    Raises LoadError of ort_serving, InvalidRequest.
    """
    as_dict = json_of(config)
    complete(as_dict, signature)
    full = json_format.ParseDict(as_dict, model_config_pb2.ModelConfig())
    _set_defaults(full)
    config_from_proto(full)  # refuses what no Triton would serve
    return full


def json_of(config: model_config_pb2.ModelConfig) -> Config:
    """The config as ort_serving reads it: Triton's JSON, whole numbers as numbers."""
    as_dict: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for entry in (*as_dict.get("input", []), *as_dict.get("output", [])):
        entry["dims"] = [int(dim) for dim in entry.get("dims", [])]
        if "reshape" in entry:
            entry["reshape"]["shape"] = [int(dim) for dim in entry["reshape"].get("shape", [])]
    return as_dict


def _backend(folder: ModelFolder, config: model_config_pb2.ModelConfig) -> str:
    if config.backend or config.platform:
        return config_from_proto(model_config_pb2.ModelConfig(backend=config.backend, platform=config.platform)).backend
    names = {path.name for version in folder.versions for path in (folder.path / str(version)).glob("*")}
    names.add(config.default_model_filename)
    return next((backend for name, backend in _BACKEND_OF_FILE.items() if name in names), "")


def _not_here(config: model_config_pb2.ModelConfig) -> dict[str, bool]:
    return {
        "sequence batching": config.HasField("sequence_batching"),
        "decoupled answers": config.model_transaction_policy.decoupled,
    }


def _set_defaults(config: model_config_pb2.ModelConfig) -> None:
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.extend([config.max_batch_size] if config.max_batch_size else [])
    for side in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(side):
            getattr(config.optimization, side).enable = True


def _set_instances(config: model_config_pb2.ModelConfig) -> None:
    if not config.instance_group:
        config.instance_group.add(name=config.name, kind=_KINDS.KIND_CPU)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == _KINDS.KIND_AUTO:
            group.kind = _KINDS.KIND_CPU
        if group.count < 1:
            group.count = CPU_INSTANCES if group.kind == _KINDS.KIND_CPU else 1


class ConfigProblems:
    """Why models on disk cannot be served by this engine. Of one thread; a config that did not change is not read."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, str]] = {}

    def of(self, folder: ModelFolder) -> str:
        """One sentence; empty where nothing is known against the model."""
        try:
            stat = (folder.path / CONFIG_FILE).stat()
            seen: object = (stat.st_mtime_ns, stat.st_size, stat.st_ino, folder)
        except OSError:
            seen = folder
        known = self._known.get(folder.path)
        if known is None or known[0] != seen:
            known = self._known[folder.path] = (seen, _problem(folder))
        return known[1]


def _problem(folder: ModelFolder) -> str:
    if folder.is_empty or folder.conflict:
        return folder.conflict
    try:
        return obstacle(config_of(folder))
    except InvalidRequest as error:
        return error.message
