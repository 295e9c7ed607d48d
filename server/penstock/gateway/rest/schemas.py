"""JSON bodies of the HTTP API as msgspec structs, for the OpenAPI document. Tensors are never decoded into these."""

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.gateway.batching.explanation import RequestExplanation
from penstock.gateway.rest.image import ClassesResult, DetectionsResult
from penstock.protocol.inference import Datatype, Parameter


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


Bytes = Annotated[int, Meta(ge=0)]


class SystemRegion(msgspec.Struct):
    """A registered region. key: of the POSIX shared memory object, offset and byte_size within it."""

    name: str
    key: str
    offset: Bytes
    byte_size: Bytes


class SystemRegister(msgspec.Struct):
    """key: of a POSIX shared memory object of this host, as shm_open takes it."""

    key: str
    byte_size: Bytes
    offset: Bytes | UnsetType = UNSET


class CudaHandle(msgspec.Struct):
    """b64: a cudaIpcMemHandle_t in base64."""

    b64: str


class CudaRegion(msgspec.Struct):
    """A registered region of a GPU's memory."""

    name: str
    device_id: int
    byte_size: Bytes


class CudaRegister(msgspec.Struct):
    """A region of a GPU's memory, by its handle."""

    raw_handle: CudaHandle
    device_id: Annotated[int, Meta(ge=0)]
    byte_size: Bytes


class TraceSetting(msgspec.Struct):
    """Triton's, numbers as strings."""

    trace_level: list[str] | UnsetType = UNSET
    trace_rate: str | UnsetType = UNSET
    trace_count: str | UnsetType = UNSET
    log_frequency: str | UnsetType = UNSET
    trace_file: str | UnsetType = UNSET
    trace_mode: str | UnsetType = UNSET


class TraceChange(msgspec.Struct):
    """What is to change; null goes back to what stands above: the model's to the global one, that to the start's."""

    trace_level: list[str] | UnsetType | None = UNSET
    trace_rate: str | UnsetType | None = UNSET
    trace_count: str | UnsetType | None = UNSET
    log_frequency: str | UnsetType | None = UNSET


class LogSettings(msgspec.Struct):
    """Triton's."""

    log_file: str | UnsetType = UNSET
    log_info: bool | UnsetType = UNSET
    log_warning: bool | UnsetType = UNSET
    log_error: bool | UnsetType = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    log_format: str | UnsetType = UNSET


class LogChange(msgspec.Struct):
    """What is to change; null leaves a setting as it is."""

    log_info: bool | UnsetType | None = UNSET
    log_warning: bool | UnsetType | None = UNSET
    log_error: bool | UnsetType | None = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    log_format: str | UnsetType | None = UNSET


Name = Annotated[str, Meta(description="A tensor's name, as the model's metadata has it.")]
Data = Annotated[
    list[msgspec.Raw],
    Meta(description="The elements in row-major order, flat or nested as the shape is. BYTES: strings."),
]
Shape = Annotated[
    list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=64, description="Its product is 2^40 at most.")
]


class InputParameters(msgspec.Struct):
    """Where an input's elements are, when they are not in `data`; others are passed on."""

    binary_data_size: (
        Annotated[int, Meta(ge=0, description="Bytes of this tensor after the JSON, in the inputs' order.")] | UnsetType
    ) = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_byte_size: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    shared_memory_offset: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


class OutputParameters(msgspec.Struct):
    """How an output shall come; others are passed on."""

    binary_data: Annotated[bool, Meta(description="After the JSON instead of in it.")] | UnsetType = UNSET
    classification: (
        Annotated[int, Meta(ge=0, description="So many of the likeliest classes, as BYTES; 0: the tensor.")] | UnsetType
    ) = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_byte_size: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    shared_memory_offset: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


class RequestInput(msgspec.Struct):
    """One input: its elements in `data`, after the JSON (`binary_data_size`) or in shared memory."""

    name: Name
    shape: Shape
    datatype: Datatype
    parameters: InputParameters | UnsetType = UNSET
    data: Data | UnsetType = UNSET


class RequestOutput(msgspec.Struct):
    """One output that is wanted."""

    name: Name
    parameters: OutputParameters | UnsetType = UNSET


class InferenceParameters(msgspec.Struct):
    """Of a whole request; others are passed on to the model."""

    timeout: (
        Annotated[int, Meta(ge=0, description="Microseconds from the body's last byte on; 0 for none.")] | UnsetType
    ) = UNSET
    priority: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    sequence_id: int | str | UnsetType = UNSET
    sequence_start: bool | UnsetType = UNSET
    sequence_end: bool | UnsetType = UNSET
    binary_data_output: Annotated[bool, Meta(description="All outputs after the JSON.")] | UnsetType = UNSET


class InferenceRequest(msgspec.Struct):
    """KServe v2's. A name stands once in each object; depth, objects and names are limited."""

    inputs: Annotated[list[RequestInput], Meta(max_length=1000)]
    id: str | UnsetType = UNSET
    parameters: InferenceParameters | UnsetType = UNSET
    outputs: Annotated[list[RequestOutput], Meta(max_length=1000)] | UnsetType = UNSET


class ResponseOutput(msgspec.Struct):
    """One output: its elements in `data`, after the JSON, or in shared memory."""

    name: Name
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, Parameter] | UnsetType = UNSET
    data: Data | UnsetType = UNSET


class InferenceResponse(msgspec.Struct):
    """KServe v2's."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str | UnsetType = UNSET
    parameters: dict[str, Parameter] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct):
    """The outputs as members beside these, each by its name: an element, or an array of them."""

    model_name: str
    model_version: str


RESULTS = (ClassesResult, DetectionsResult)
_ONE_OF_RESULTS = {"oneOf": [{"$ref": f"#/components/schemas/{result.__name__}"} for result in RESULTS]}


class ImageAnswer(msgspec.Struct):
    """One result for each image, in their order; corners in the pixels of the image that was sent."""

    model_name: str
    model_version: str
    results: list[Annotated[msgspec.Raw, Meta(extra_json_schema=_ONE_OF_RESULTS)]]
    timings_ms: Annotated[
        dict[str, float],
        Meta(description="Milliseconds by stage: decode, preprocess, queue, infer, postprocess, total."),
    ]
    batch_size: Annotated[int, Meta(ge=1, description="Rows of the engine's call that this request was part of.")]
    id: Annotated[str, Meta(description="The request's x-request-id.")] | UnsetType = UNSET
    explain: (
        Annotated[
            list[RequestExplanation],
            Meta(
                description="Of the batch of each image, or of the call with all of them; with x-penstock-explain: 1."
            ),
        ]
        | UnsetType
    ) = UNSET
