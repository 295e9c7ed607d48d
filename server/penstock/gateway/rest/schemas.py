"""JSON bodies of the HTTP API for the OpenAPI document; pydantic models, except what the gateway itself encodes.

Requests and the engine's answers are relayed as they are: none of them is validated by these models.
"""

from enum import Enum
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, Field

from penstock.protocol.identity import Role
from penstock.protocol.inference import Datatype, Parameter

ABSENT: Any = Field(default_factory=lambda: None)  # of a member that may be left out, but must not be null


class ServerMetadata(msgspec.Struct):
    """GET /v2, in Triton's order."""

    name: str
    version: str
    extensions: list[str]


class Error(BaseModel):
    """The body of every error."""

    error: Annotated[str, Field(description="What failed, with which value, and what to do.")]


class ClientIdentity(BaseModel):
    """The client of the request. client: null without a key."""

    client: str | None
    roles: list[Role]


class Live(BaseModel):
    """The process is alive."""

    live: bool


class Ready(BaseModel):
    """Whether the server accepts requests. details: what it lacks though it does, such as one of several GPUs."""

    ready: bool
    details: list[str] = []


class TensorMetadata(BaseModel):
    """shape: -1 for variable dimensions."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(BaseModel):
    """KServe v2's."""

    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    versions: list[str] = ABSENT


class ModelTensor(BaseModel):
    """data_type: such as TYPE_FP32. dims: without the batch dimension, -1 for variable ones."""

    name: str
    data_type: str
    dims: list[int]


class ModelConfig(BaseModel):
    """Triton's ModelConfig as JSON. It has more members than these."""

    name: str
    max_batch_size: int
    input: list[ModelTensor]
    output: list[ModelTensor]
    platform: str = ABSENT
    backend: str = ABSENT


class Duration(BaseModel):
    """Number of requests, and their total time."""

    count: int
    ns: int


class InferStatistics(BaseModel):
    """Time by stage of a version's requests."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStatistics(BaseModel):
    """Since the version was loaded. last_inference: milliseconds since 1970, 0 for none."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics


class ModelStatistics(BaseModel):
    """One entry per version."""

    model_stats: list[VersionStatistics]


class ModelState(Enum):
    """Of a version in the repository."""

    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNKNOWN = "UNKNOWN"


class IndexEntry(BaseModel):
    """A model of the repository. A model that was never loaded has only a name."""

    name: str
    version: str = ABSENT
    state: ModelState = ABSENT
    reason: str = ABSENT


class IndexRequest(BaseModel):
    """ready: list only ready models."""

    ready: bool = ABSENT


class LoadParameters(BaseModel):
    """Members such as `file:1/model.onnx` are files of the model in base64; they need a `config`."""

    config: Annotated[str, Field(description="A ModelConfig as JSON, instead of the repository's.")] = ABSENT


class LoadRequest(BaseModel):
    """An empty body loads the model from the repository."""

    parameters: LoadParameters = ABSENT


class UnloadParameters(BaseModel):
    """unload_dependents: whether the models of an ensemble are unloaded, too.

    A boolean. Over REST, Triton ignores other values; over gRPC, it rejects them.
    """

    unload_dependents: bool | int | float | str = ABSENT


class UnloadRequest(BaseModel):
    """May be empty."""

    parameters: UnloadParameters = ABSENT


Bytes = Annotated[int, Field(ge=0)]


class SystemRegion(BaseModel):
    """A registered region. key: of the POSIX shared memory object, offset and byte_size within it."""

    name: str
    key: str
    offset: Bytes
    byte_size: Bytes


class SystemRegister(BaseModel):
    """key: of a POSIX shared memory object of this host, as shm_open takes it."""

    key: str
    byte_size: Bytes
    offset: Bytes = ABSENT


class CudaHandle(BaseModel):
    """b64: a cudaIpcMemHandle_t in base64."""

    b64: str


class CudaRegion(BaseModel):
    """A registered region of a GPU's memory."""

    name: str
    device_id: int
    byte_size: Bytes


class CudaRegister(BaseModel):
    """A region of a GPU's memory, by its handle."""

    raw_handle: CudaHandle
    device_id: Annotated[int, Field(ge=0)]
    byte_size: Bytes


class TraceSetting(BaseModel):
    """Triton's, numbers as strings."""

    trace_level: list[str] = ABSENT
    trace_rate: str = ABSENT
    trace_count: str = ABSENT
    log_frequency: str = ABSENT
    trace_file: str = ABSENT
    trace_mode: str = ABSENT


class TraceChange(BaseModel):
    """Settings to change. null resets a setting: of a model to the global one, a global one to its initial value."""

    trace_level: list[str] | None = ABSENT
    trace_rate: str | None = ABSENT
    trace_count: str | None = ABSENT
    log_frequency: str | None = ABSENT


class LogSettings(BaseModel):
    """Triton's."""

    log_file: str = ABSENT
    log_info: bool = ABSENT
    log_warning: bool = ABSENT
    log_error: bool = ABSENT
    log_verbose_level: Annotated[int, Field(ge=0)] = ABSENT
    log_format: str = ABSENT


class LogChange(BaseModel):
    """Settings to change. null keeps a setting."""

    log_info: bool | None = ABSENT
    log_warning: bool | None = ABSENT
    log_error: bool | None = ABSENT
    log_verbose_level: Annotated[int, Field(ge=0)] | None = ABSENT
    log_format: str | None = ABSENT


Name = Annotated[str, Field(description="A tensor's name in the model's metadata.")]
Data = Annotated[
    list[Any], Field(description="The elements in row-major order, flat or nested like the shape. BYTES: strings.")
]
Shape = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=64, description="Its product is 2^40 at most.")
]


class InputParameters(BaseModel):
    """Location of an input's elements if they are not in `data`. Other parameters are relayed."""

    binary_data_size: Annotated[
        int, Field(ge=0, description="Bytes of this tensor after the JSON, in the inputs' order.")
    ] = ABSENT
    shared_memory_region: str = ABSENT
    shared_memory_byte_size: Bytes = ABSENT
    shared_memory_offset: Bytes = ABSENT


class OutputParameters(BaseModel):
    """Form of an output. Other parameters are relayed."""

    binary_data: Annotated[bool, Field(description="After the JSON instead of inside it.")] = ABSENT
    classification: Annotated[
        int, Field(ge=0, description="Number of likeliest classes to return as BYTES; 0: the tensor.")
    ] = ABSENT
    shared_memory_region: str = ABSENT
    shared_memory_byte_size: Bytes = ABSENT
    shared_memory_offset: Bytes = ABSENT


class RequestInput(BaseModel):
    """One input: its elements in `data`, after the JSON (`binary_data_size`) or in shared memory."""

    name: Name
    shape: Shape
    datatype: Datatype
    parameters: InputParameters = ABSENT
    data: Data = ABSENT


class RequestOutput(BaseModel):
    """One requested output."""

    name: Name
    parameters: OutputParameters = ABSENT


class InferenceParameters(BaseModel):
    """Parameters of the request. Others are relayed to the model."""

    timeout: Annotated[int, Field(ge=0, description="Microseconds from the last byte of the body; 0 for none.")] = (
        ABSENT
    )
    priority: Annotated[int, Field(ge=0)] = ABSENT
    sequence_id: int | str = ABSENT
    sequence_start: bool = ABSENT
    sequence_end: bool = ABSENT
    binary_data_output: Annotated[bool, Field(description="All outputs after the JSON.")] = ABSENT


class InferenceRequest(BaseModel):
    """KServe v2's. Names in an object must be unique. Depth, objects and names are limited."""

    inputs: Annotated[list[RequestInput], Field(max_length=1000)]
    id: str = ABSENT
    parameters: InferenceParameters = ABSENT
    outputs: Annotated[list[RequestOutput], Field(max_length=1000)] = ABSENT


class ResponseOutput(BaseModel):
    """One output: its elements in `data`, after the JSON, or in shared memory."""

    name: Name
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, Parameter] = ABSENT
    data: Data = ABSENT


class InferenceResponse(BaseModel):
    """KServe v2's."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str = ABSENT
    parameters: dict[str, Parameter] = ABSENT


class GenerateResponse(BaseModel):
    """The outputs are further members by name: an element, or an array of elements."""

    model_name: str
    model_version: str
