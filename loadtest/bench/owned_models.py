"""The same model three times in one repository: its batches formed by the gateway, by Triton, by nobody."""

import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from server.core.batching import Owner

OWNER_PARAMETER = "batch_owner"
OWNERS = (Owner.GATEWAY, Owner.TRITON, Owner.OFF)


class NoModel(Exception):
    """A folder cannot be copied three times; the message is a sentence."""


def owned_name(model: str, owner: Owner) -> str:
    """The copy's name."""
    return f"{model}-{owner}"


def write_owned(source: Path, repository: Path, *, max_batch_size: int | None = None) -> None:
    """Three folders in the repository, alike but for the owner. max_batch_size: instead of the model's own.

    Raises NoModel for a folder that is no model, or one without a batch dimension.
    """
    config = _config(source)
    if config.max_batch_size == 0:
        raise NoModel(f"model {config.name!r} has max_batch_size 0, so nobody can form batches for it")
    for owner in OWNERS:
        folder = repository / owned_name(source.name, owner)
        shutil.copytree(source, folder)
        (folder / "config.pbtxt").write_text(text_format.MessageToString(_owned(config, owner, max_batch_size)))


def _config(source: Path) -> model_config_pb2.ModelConfig:
    try:
        config = text_format.Parse((source / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise NoModel(f"{source} is no model folder: {error}") from error
    config.name = config.name or source.name
    return config


def _owned(
    config: model_config_pb2.ModelConfig, owner: Owner, max_batch_size: int | None
) -> model_config_pb2.ModelConfig:
    owned = model_config_pb2.ModelConfig()
    owned.CopyFrom(config)
    owned.name = owned_name(config.name, owner)
    owned.max_batch_size = max_batch_size or config.max_batch_size
    owned.ClearField("dynamic_batching")
    if owner is Owner.TRITON:
        owned.dynamic_batching.SetInParent()
    owned.parameters[OWNER_PARAMETER].string_value = owner
    return owned
