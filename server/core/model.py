"""What is known of a model: its tensors and its config.pbtxt."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.core.tensor import Datatype

UNMERGED = "unmerged"  # parameter in the config that the gateway returns: see ModelConfig.unmerged


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared tensor. shape: -1 where it varies; ModelMetadata has the batch dimension, ModelConfig not."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What KServe v2 tells of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What config.pbtxt says, as far as the gateway decides by it.

    max_batch_size: 0 where the model has no batch dimension. parameters: key → string_value. is_on_gpu: an instance
    group says KIND_GPU, as Triton's own answer does wherever it is so.
    has_priorities: its dynamic batcher has priority levels.
    unmerged: the result of the gateway's trial: why an execution may not have rows of several requests, pictures or
    frames; empty if it may, None before the trial.
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    instance_count: int = 1
    is_decoupled: bool = False
    has_dynamic_batching: bool = False
    has_sequence_batching: bool = False
    is_ensemble: bool = False
    is_on_gpu: bool = False
    unmerged: str | None = None
    has_priorities: bool = False

    @property
    def merged_rows(self) -> int:
        """Maximum number of pictures or frames in one execution; 0 if the model has no batch dimension."""
        return self.max_batch_size if self.unmerged == "" else min(self.max_batch_size, 1)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A row of the repository index. state: READY, LOADING, UNLOADING, UNAVAILABLE, or empty for never loaded."""

    name: str
    version: str
    state: str
    reason: str
