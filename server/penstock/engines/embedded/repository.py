"""Model repositories on disk: folders, versions and config.pbtxt, completed and checked as in Triton."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto, read_proto
from penstock.engines.load_policy import check_model, parse_config
from penstock.engines.ort_serving.config import Config, Signature, complete
from penstock.engines.ort_serving.placement import has_nvidia_driver
from penstock.logs import get_logger
from penstock.protocol.errors import EngineUnavailable, InvalidRequest
from penstock.protocol.request_checks import is_version

CONFIG_FILE = "config.pbtxt"
Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder. versions: ascending. twin: a folder of the same name in another repository."""

    name: str
    path: Path
    versions: tuple[int, ...]
    twin: Path | None = None

    @property
    def is_empty(self) -> bool:
        """Without versions and config: Triton ignores it."""
        return not self.versions and not (self.path / CONFIG_FILE).is_file()

    @property
    def conflict(self) -> str:
        """Why the name is ambiguous; empty if it is not."""
        if self.twin is None:
            return ""
        return f"it is in {self.path} and in {self.twin}; one name may stand in one repository"


def scan(repositories: Iterable[Path]) -> dict[str, ModelFolder]:
    """The models on disk by name, sorted. Skips hidden folders (downloads), and repositories that cannot be read."""
    found: dict[str, ModelFolder] = {}
    for repository in repositories:
        for path in _folders(repository):
            first = found.get(path.name)
            twin = path if first is not None else None
            where = first.path if first is not None else path
            found[path.name] = ModelFolder(path.name, where, _versions(where), twin)
    return dict(sorted(found.items()))


def read_config(folder: ModelFolder) -> model_config_pb2.ModelConfig:
    """The parsed config.pbtxt, empty if there is none. Raises InvalidRequest as "path:line: problem"."""
    path = folder.path / CONFIG_FILE
    try:
        path.stat()
    except FileNotFoundError:
        return model_config_pb2.ModelConfig()
    except OSError:
        pass  # read_proto raises the reason
    return read_proto(path)


def chosen_versions(folder: ModelFolder, config: model_config_pb2.ModelConfig) -> tuple[int, ...]:
    """The versions that version_policy serves; by default the highest one."""
    policy = config.version_policy
    if policy.HasField("all"):
        return folder.versions
    if policy.HasField("specific"):
        return tuple(version for version in folder.versions if version in set(policy.specific.versions))
    return folder.versions[-(policy.latest.num_versions or 1) :]


def fingerprint(folder: ModelFolder) -> Fingerprint:
    """Path, time, size and inode of the model's files, to detect changes. A version may be a link."""
    files = set()
    for top in (folder.path, *(folder.path / str(version) for version in folder.versions)):
        for parent, _, names in os.walk(top):
            for name in names:
                path = Path(parent, name)
                try:
                    seen = path.stat()
                except OSError:  # removed meanwhile, or a dangling link
                    continue
                files.add((str(path), seen.st_mtime_ns, seen.st_size, seen.st_ino))
    return tuple(sorted(files))


def _folders(repository: Path) -> list[Path]:
    try:
        return [path for path in repository.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _versions(path: Path) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(entry.name) for entry in path.iterdir() if is_version(entry.name) and entry.is_dir()))
    except OSError:
        return ()


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
    """The folder's config, or the given one, with name and backend completed. Raises InvalidRequest."""
    if config_json is None:
        return with_name_and_backend(folder, read_config(folder))
    config = parse_config(config_json)
    check_model(config, {}, allows_code=True)  # load requests were checked for code when they arrived
    return with_name_and_backend(folder, config)


def with_name_and_backend(folder: ModelFolder, config: model_config_pb2.ModelConfig) -> model_config_pb2.ModelConfig:
    """The config completed with name, backend, platform, file and instances (KIND_AUTO: CPU). Raises InvalidRequest."""
    if config.name and config.name != folder.name:
        raise InvalidRequest(f"name is {config.name!r} but the folder is {folder.name!r}; Triton wants them equal")
    config.name = folder.name
    config.backend = _backend(folder, config)
    if config.backend == BACKEND:
        config.platform = config.platform or PLATFORM
        config.default_model_filename = config.default_model_filename or FILE_NAME
    _set_instances(config)
    return config


def why_not_servable(config: model_config_pb2.ModelConfig) -> str:
    """Why this engine cannot serve the model, with advice; empty if it can. config: of config_of."""
    limit = f"the embedded engine runs ONNX models only; model {config.name!r}"
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        return f"{limit} is an ensemble: {ELSEWHERE}"
    if config.backend != BACKEND:
        needs = f"needs backend {config.backend!r}" if config.backend else "names no backend and has no model.onnx"
        return f"{limit} {needs}: {ELSEWHERE}" if config.backend else f"{limit} {needs}: add one of them"
    missing = [name for name, is_wanted in _unsupported_features(config).items() if is_wanted]
    if missing:
        return f"the embedded engine has no {' and no '.join(missing)}, which model {config.name!r} wants: {ELSEWHERE}"
    return ""


def completed_config(config: model_config_pb2.ModelConfig, signature: Signature) -> model_config_pb2.ModelConfig:
    """A copy with missing parts from the ONNX file, and Triton's defaults. Raises OrtLoadError, InvalidRequest."""
    as_dict = json_of(config)
    complete(as_dict, signature)
    full = json_format.ParseDict(as_dict, model_config_pb2.ModelConfig())
    _set_defaults(full)
    config_from_proto(full)  # rejects what no Triton would serve
    return full


def json_of(config: model_config_pb2.ModelConfig) -> Config:
    """The config as Triton's JSON, with integers as numbers."""
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


def _unsupported_features(config: model_config_pb2.ModelConfig) -> dict[str, bool]:
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
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.count < 1:  # two also where the kind is not set: one converts tensors while the GPU works
            group.count = 1 if group.kind == _KINDS.KIND_GPU else CPU_INSTANCES
        if group.kind == _KINDS.KIND_AUTO:
            group.kind = _KINDS.KIND_GPU if has_nvidia_driver() else _KINDS.KIND_CPU


class ConfigChecks:
    """Why models on disk cannot be served. Caches unchanged configs. Use on one thread."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, str]] = {}

    def of(self, folder: ModelFolder) -> str:
        """One sentence, or empty if no problem is known."""
        try:
            stat = (folder.path / CONFIG_FILE).stat()
            seen: object = (stat.st_mtime_ns, stat.st_size, stat.st_ino, folder)
        except OSError:
            seen = folder
        known = self._known.get(folder.path)
        if known is None or known[0] != seen:
            known = self._known[folder.path] = (seen, _why_not_servable(folder))
        return known[1]


def _why_not_servable(folder: ModelFolder) -> str:
    if folder.is_empty or folder.conflict:
        return folder.conflict
    try:
        return why_not_servable(config_of(folder))
    except InvalidRequest as error:
        return error.message


log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class RepositorySnapshot:
    """The models' folders by name, and the problems of those that cannot be served."""

    folders: Mapping[str, ModelFolder]
    problems: Mapping[str, str]


class RepositoryReader:
    """Reads repositories from one event loop. max_wait_s: for one read; no other starts while one is late."""

    def __init__(self, repositories: tuple[Path, ...], *, max_wait_s: float) -> None:
        self._repositories = repositories
        self._max_wait_s = max_wait_s
        self._problems = ConfigChecks()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="repository")
        self._stuck: asyncio.Future[RepositorySnapshot] | None = None
        self._last: RepositorySnapshot | None = None

    async def read(self) -> RepositorySnapshot:
        """The current state. Raises EngineUnavailable if the disk does not answer, or the reader is closed."""
        if self._stuck is not None and not self._stuck.done():
            raise self._silent()
        look = asyncio.get_running_loop().run_in_executor(self._thread, self._look)
        done, _ = await asyncio.wait((look,), timeout=self._max_wait_s)
        if not done:
            self._stuck = look
            raise self._silent()
        if look.cancelled():
            raise EngineUnavailable("the embedded engine is closed")
        self._last = look.result()
        return self._last

    async def read_or_remember(self) -> RepositorySnapshot:
        """The current state, or the last known one if the disk does not answer. Raises as `read` without one."""
        was_stuck = self._stuck is not None and not self._stuck.done()
        try:
            return await self.read()
        except EngineUnavailable as error:
            if self._last is None:
                raise
            if not was_stuck:
                log.error("the disk is silent; what is loaded is served on", reason=str(error))
            return self._last

    def close(self) -> None:
        """Cancels pending reads; does not wait for a hanging one."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> RepositorySnapshot:
        folders = scan(self._repositories)
        problems = {name: self._problems.of(folder) for name, folder in folders.items()}
        return RepositorySnapshot(folders, {name: reason for name, reason in problems.items() if reason})

    def _silent(self) -> EngineUnavailable:
        return EngineUnavailable(f"the model repository could not be read within {self._max_wait_s:g} s")
