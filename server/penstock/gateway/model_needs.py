"""GPU memory and GPUs that the models in the repositories need, estimated from their files."""

from collections.abc import Collection, Iterable
from pathlib import Path

from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import gpu_groups, read_proto
from penstock.gpu.placement import ModelNeed
from penstock.protocol.errors import InvalidRequest

# A CUDA context with PyTorch takes about half a GiB; captured graphs hold activations beside the weights.
CONTEXT_BYTES, WEIGHT_COPIES = 600 << 20, 2
_KIND_CPU = model_config_pb2.ModelInstanceGroup.KIND_CPU


def read_needs(repositories: Iterable[Path], names: Collection[str] | None) -> list[ModelNeed]:
    """GPU memory, estimated from the models' files, and the cards that they name. Reads files. names: None for all."""
    found = {}
    for repository in repositories:
        for path in sorted(repository.glob("*/config.pbtxt")):
            if names is None or path.parent.name in names:
                found[path.parent] = _readable(path)
    together = {step.model_name for proto in found.values() for step in proto.ensemble_scheduling.step}
    return [need_of(folder, proto, has_company=folder.name in together) for folder, proto in found.items()]


def need_of(folder: Path, proto: model_config_pb2.ModelConfig, *, has_company: bool = False) -> ModelNeed:
    """has_company: an ensemble uses it, so that it is loaded wherever the ensemble is."""
    groups = gpu_groups(proto)
    size_bytes = sum(file.stat().st_size for file in folder.glob("*/*") if file.is_file())
    kinds = {group.kind for group in proto.instance_group}
    return ModelNeed(
        folder.name,
        sum(group.count for group in groups) * (CONTEXT_BYTES + WEIGHT_COPIES * size_bytes),
        cards=tuple(sorted({card for group in groups for card in group.cards})),
        is_on_cpu=kinds == {_KIND_CPU} and not has_company,
        is_stateful=proto.HasField("sequence_batching"),
    )


def _readable(path: Path) -> model_config_pb2.ModelConfig:
    """An empty one for a file that cannot be read, which is reported when the model is loaded."""
    try:
        return read_proto(path)
    except InvalidRequest:
        return model_config_pb2.ModelConfig(backend="python")
