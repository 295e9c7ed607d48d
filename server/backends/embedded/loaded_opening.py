"""A model's versions opened from disk. Blocking: to be called in a thread that loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from tritonclient.grpc import model_config_pb2

from server.backends.config_pbtxt import config_from_proto
from server.backends.embedded.loaded import OpenedVersion
from server.backends.embedded.loaded_warmup import warm_up
from server.backends.embedded.repository import Fingerprint, ModelFolder, chosen_versions, fingerprint
from server.backends.embedded.repository_config import completed, config_of, json_of, obstacle
from server.backends.ort_serving.config import validate
from server.backends.ort_serving.errors import LoadError, RequestError
from server.backends.ort_serving.session import OrtModel, describe, model_path, open_session, place, session_options
from server.backends.ort_serving.signature import read_signature
from server.backends.ort_serving.threads import thread_budget
from server.backends.wire.validation import rules_of
from server.core.errors import InvalidRequest, ModelNotReady
from server.logs import get_logger

log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """What became of the versions that version_policy wants: opened, or why not.

    state_on_disk: None where the same state was open already, and nothing was done.
    """

    state_on_disk: "StateOnDisk | None"
    opened: Mapping[int, OpenedVersion]
    failures: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class StateOnDisk:
    """What a load was made from: the files, and the config that came with it."""

    files: Fingerprint
    config_json: str | None


def open_model(folder: ModelFolder, config_json: str | None, *, loaded: StateOnDisk | None) -> OpenedModel:
    """Every version that the config wants. loaded: the state that serves now, which is not opened again.

    Raises ModelNotReady with the reason where nothing can be tried.
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
    reason = obstacle(config)
    if reason:
        raise ModelNotReady(reason)
    versions = chosen_versions(folder, config)
    if not versions:
        raise _not_ready(folder, "at least one version must be available under its version policy")
    opened: dict[int, OpenedVersion] = {}
    failures: dict[int, str] = {}
    for version in versions:
        try:
            opened[version] = _open_version(folder, version, config)
        except (LoadError, InvalidRequest) as error:
            failures[version] = str(error)
        except Exception as error:  # the root of the loader's thread: one version's failure is its own
            log.exception("a model cannot be opened", model=folder.name, version=version)
            failures[version] = f"{type(error).__name__} in the engine, see the gateway's log"
    return OpenedModel(state, opened, failures)


def _not_ready(folder: ModelFolder, reason: str) -> ModelNotReady:
    return ModelNotReady(f"model {folder.name!r} cannot be loaded: {reason}")


def _open_version(folder: ModelFolder, version: int, config: model_config_pb2.ModelConfig) -> OpenedVersion:
    given = json_of(config)
    path = model_path(folder.path / str(version), given)
    group = config.instance_group[0]
    kind = model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")
    device_id = group.gpus[0] if group.gpus else 0
    placement = place(given, kind=kind, device_id=device_id, available=ort.get_available_providers())
    budget = thread_budget(given, is_one_session=True)
    options = session_options(given, budget)
    session = open_session(path, options, placement.providers)
    signature = read_signature(session)
    full = completed(config, signature)
    as_dict = json_of(full)
    validate(as_dict, signature)
    ort_model, rules = OrtModel(session, signature, as_dict), rules_of(full)
    try:
        warm_up(full, folder.path / "warmup", lambda arrays: ort_model.run(tuple(rules.outputs), arrays))
    except RequestError as error:
        raise LoadError(f"its warm-up failed: {error}") from error
    for warning in placement.warnings:
        log.warning("model is served otherwise than configured", model=folder.name, reason=warning)
    log.debug("model opened", model=folder.name, version=version, session=describe(as_dict, options, budget))
    instances = config_from_proto(full).instance_count
    return OpenedVersion(folder.name, version, full, rules, ort_model, instances, _labels(full, folder.path))


def _labels(config: model_config_pb2.ModelConfig, folder: Path) -> dict[str, tuple[str, ...]]:
    """By output; LoadError where a label file cannot be read, as in Triton."""
    labels = {}
    for output in config.output:
        if output.label_filename:
            path = folder / output.label_filename
            try:
                labels[output.name] = tuple(path.read_text(encoding="utf-8-sig").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise LoadError(f"the label file {path} cannot be read: {error}") from error
    return labels
