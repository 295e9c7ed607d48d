"""Models and their repository: what they are, how they fare, how they are loaded."""

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.core.tensor import Datatype


class Error(msgspec.Struct):
    """The form of every error."""

    error: Annotated[str, Meta(description="What was wrong, with which value, and what to do.")]


class Live(msgspec.Struct):
    """This process lives."""

    live: bool


class Ready(msgspec.Struct):
    """Requests may be sent here."""

    ready: bool


class TensorMetadata(msgspec.Struct):
    """shape: -1 where it varies."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """KServe v2's."""

    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    versions: list[str] | UnsetType = UNSET


class ModelTensor(msgspec.Struct):
    """data_type: TYPE_FP32 and its like. dims: without the batch's, -1 where one varies."""

    name: str
    data_type: str
    dims: list[int]


class ModelConfig(msgspec.Struct):
    """Triton's ModelConfig as JSON; it has more members than these."""

    name: str
    max_batch_size: int
    input: list[ModelTensor]
    output: list[ModelTensor]
    platform: str | UnsetType = UNSET
    backend: str | UnsetType = UNSET


class Duration(msgspec.Struct):
    """How often, and how long in all."""

    count: int
    ns: int


class InferStatistics(msgspec.Struct):
    """Where the time of a version's requests went."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStatistics(msgspec.Struct):
    """Since the version was loaded. last_inference: milliseconds since 1970, 0 for none."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics


class ModelStatistics(msgspec.Struct):
    """One entry a version."""

    model_stats: list[VersionStatistics]


class ModelState(Enum):
    """Of a version in the repository."""

    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNKNOWN = "UNKNOWN"


class IndexEntry(msgspec.Struct):
    """A model of the repository; one that was never loaded has a name only."""

    name: str
    version: str | UnsetType = UNSET
    state: ModelState | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class IndexRequest(msgspec.Struct):
    """ready: only models that are."""

    ready: bool | UnsetType = UNSET


class LoadParameters(msgspec.Struct):
    """Members `file:1/model.onnx` and their like hold files of the model in base64; they need a `config`."""

    config: Annotated[str, Meta(description="A ModelConfig as JSON, instead of the repository's.")] | UnsetType = UNSET


class LoadRequest(msgspec.Struct):
    """An empty body loads the model as the repository has it."""

    parameters: LoadParameters | UnsetType = UNSET


class UnloadParameters(msgspec.Struct):
    """unload_dependents: whether, of an ensemble, the models it is made of go too.

    A boolean; Triton takes other values over REST and unloads without a word, over gRPC it refuses them.
    """

    unload_dependents: bool | int | float | str | UnsetType = UNSET


class UnloadRequest(msgspec.Struct):
    """May be empty."""

    parameters: UnloadParameters | UnsetType = UNSET
