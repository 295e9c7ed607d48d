"""Model folders for the bench, all of one exported model: its files are linked, only config.pbtxt is written anew."""

import os
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.gpu.requests import read_config


@dataclass(frozen=True, slots=True)
class Variant:
    """How a copy differs. instances: of the model. max_batch_size: its own, and of its CUDA graphs.

    buckets: sizes of the CUDA graphs; the backend's choice where empty. in_flight: batches of an instance.
    """

    name: str
    instances: int = 1
    max_batch_size: int = 1
    has_dynamic_batching: bool = False
    buckets: tuple[int, ...] = ()
    in_flight: int = 1


def write_variant(source: Path, repository: Path, variant: Variant, *, is_gpu: bool) -> None:
    """The copy's folder. A model without a batch dimension keeps it so. Raises OSError, BadAnswer."""
    config = read_config(source)
    folder = repository / variant.name
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.name not in ("config.pbtxt", "MODEL.md", "golden.json"):
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link(path, copy)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(_changed(config, variant, is_gpu=is_gpu)))


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # another file system
        copy.write_bytes(path.read_bytes())


def _changed(config: model_config_pb2.ModelConfig, variant: Variant, *, is_gpu: bool) -> model_config_pb2.ModelConfig:
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    changed.name = variant.name
    changed.max_batch_size = variant.max_batch_size if config.max_batch_size else 0
    kind = model_config_pb2.ModelInstanceGroup
    del changed.instance_group[:]
    changed.instance_group.add(count=variant.instances, kind=kind.KIND_GPU if is_gpu else kind.KIND_CPU)
    changed.ClearField("dynamic_batching")
    changed.ClearField("model_warmup")
    for name in ("batch_owner", "batch-buckets", "batches-in-flight"):
        changed.parameters.pop(name, None)
    if variant.has_dynamic_batching and changed.max_batch_size:
        changed.dynamic_batching.SetInParent()
    if variant.buckets and changed.max_batch_size:
        changed.parameters["batch-buckets"].string_value = ";".join(map(str, variant.buckets))
    if variant.in_flight > 1 and changed.backend == "torch":
        changed.parameters["batches-in-flight"].string_value = str(variant.in_flight)
    return changed
