"""GRPCInferenceService for servers: decodes requests, encodes responses, metadata and the repository index."""

import struct
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from penstock.protocol.decoded_request import RESERVED_PREFIX, DecodedRequest, RequestedOutput, grpc_region
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.protocol.grpc_messages import parameters_of, set_parameters, varint
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Parameter, Tensor

M = TypeVar("M", bound=Message)

_RAW_OUTPUT_TAG = b"\x32"  # field 6, length-delimited: ModelInferResponse.raw_output_contents
_NO_BYTES = memoryview(b"")
_REQUEST_DATATYPES = {datatype.value: datatype for datatype in Datatype}
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_CONTENTS = {
    "bool_contents": (Datatype.BOOL,),
    "int_contents": (Datatype.INT32, Datatype.INT16, Datatype.INT8),
    "int64_contents": (Datatype.INT64,),
    "uint_contents": (Datatype.UINT32, Datatype.UINT16, Datatype.UINT8),
    "uint64_contents": (Datatype.UINT64,),
    "fp32_contents": (Datatype.FP32,),
    "fp64_contents": (Datatype.FP64,),
    "bytes_contents": (Datatype.BYTES,),
}  # the first of each is Triton's name of the field
_FIELD_DTYPES: dict[str, type[np.generic]] = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}
_NARROW_DTYPES: dict[Datatype, type[np.generic]] = {
    Datatype.INT8: np.int8,
    Datatype.INT16: np.int16,
    Datatype.UINT8: np.uint8,
    Datatype.UINT16: np.uint16,
}  # sent in a wider field, and truncated to their width
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "int64_param or string_param"),
    "sequence_start": ((bool,), "bool_param"),
    "sequence_end": ((bool,), "bool_param"),
    "priority": ((int,), "int64_param or uint64_param"),
    "timeout": ((int,), "int64_param"),
}


def parsed_request(kind: type[M], message: bytes) -> M:
    """The parsed message. Raises EngineFailed, Triton's INTERNAL, for invalid bytes."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise EngineFailed("Unable to parse request") from error


def decode_request(message: bytes, deadline: float | None = None) -> InferRequest:
    """The request in a serialised ModelInferRequest. Raises what `decode_infer_message` raises, and EngineFailed."""
    request = parsed_request(service_pb2.ModelInferRequest, message)
    ask = decode_infer_message(request)
    return InferRequest(
        model_name=request.model_name,
        inputs=ask.inputs,
        model_version=request.model_version,
        id=request.id,
        outputs=tuple(output.name for output in ask.outputs),
        parameters=parameters_of(request.parameters),
        deadline=deadline,
    )


def decode_infer_message(request: service_pb2.ModelInferRequest) -> DecodedRequest:
    """The decoded request. Extra raw contents are dropped. Raises InvalidRequest, RegionNotFound, as Triton."""
    parameters = _checked_parameters(request) if request.parameters else {}
    contents = request.raw_input_contents
    raw, is_raw = iter(contents), len(contents) > 0
    inputs = []
    shared = {}
    for tensor in request.inputs:
        region = grpc_region(tensor.name, parameters_of(tensor.parameters)) if tensor.parameters else None
        if region is not None:
            shared[tensor.name] = region
            datatype = _request_datatype(request.model_name, tensor)
            inputs.append(Tensor(tensor.name, datatype, tuple(tensor.shape), _NO_BYTES))
            continue
        inputs.append(_tensor(request.model_name, tensor, next(raw, None), is_raw=is_raw))
    outputs = {output.name: _requested_output(output) for output in request.outputs}
    return DecodedRequest(request.id, tuple(inputs), tuple(outputs.values()), shared=shared, parameters=parameters)


def encode_response(response: InferResponse) -> bytes:
    """The serialised ModelInferResponse with raw tensors, whose bytes are copied once."""
    message = service_pb2.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    if response.parameters:
        set_parameters(message.parameters, response.parameters)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    parts: list[bytes | memoryview] = [serialised(message)]
    for tensor in response.outputs:
        parts += (_RAW_OUTPUT_TAG, varint(tensor.data.nbytes), tensor.data)
    return b"".join(parts)


def metadata_message(metadata: ModelMetadata) -> service_pb2.ModelMetadataResponse:
    """The model's metadata."""
    message = service_pb2.ModelMetadataResponse(
        name=metadata.name, versions=metadata.versions, platform=metadata.platform
    )
    for spec in metadata.inputs:
        message.inputs.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    for spec in metadata.outputs:
        message.outputs.add(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    return message


def index_message(rows: list[ModelState]) -> service_pb2.RepositoryIndexResponse:
    """The repository's rows."""
    kind = service_pb2.RepositoryIndexResponse
    return kind(
        models=[kind.ModelIndex(name=row.name, version=row.version, state=row.state, reason=row.reason) for row in rows]
    )


def serialised(message: Message) -> bytes:
    """The message's bytes."""
    text: bytes = message.SerializeToString()
    return text


def _tensor(
    model_name: str, tensor: service_pb2.ModelInferRequest.InferInputTensor, raw: bytes | None, *, is_raw: bool
) -> Tensor:
    """is_raw: whether the request has raw contents; then no tensor may be typed."""
    filled = [field.name for field, _ in tensor.contents.ListFields()] if tensor.HasField("contents") else []
    if is_raw and filled:
        raise InvalidRequest(
            "contents field must not be specified when using raw_input_contents for "
            f"'{tensor.name}' for model '{model_name}'"
        )
    datatype = _request_datatype(model_name, tensor)
    shape = tuple(tensor.shape)
    if raw is not None:
        return Tensor(tensor.name, datatype, shape, memoryview(raw))
    if not filled:
        raise InvalidRequest(
            f"unable to find data for input tensor '{tensor.name}' for model '{model_name}' in request."
        )
    for field in filled:
        if datatype not in _CONTENTS.get(field, ()):
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model_name}' of type "
                f"'{_CONTENTS[field][0]}', expected datatype '{datatype}'"
            )
    values = getattr(tensor.contents, filled[0])
    if datatype is Datatype.BYTES:
        packed = b"".join(struct.pack("<I", len(item)) + item for item in values)
        return Tensor(tensor.name, datatype, shape, memoryview(packed))
    held = _FIELD_DTYPES[filled[0]]
    array = np.array(values, held).astype(_NARROW_DTYPES.get(datatype, held))
    return Tensor(tensor.name, datatype, shape, array.view(np.uint8).data)


def _request_datatype(model_name: str, tensor: service_pb2.ModelInferRequest.InferInputTensor) -> Datatype:
    found = _REQUEST_DATATYPES.get(tensor.datatype)
    if found is None:
        raise InvalidRequest(
            f"inference input '{tensor.name}' of model '{model_name}' has the unknown data-type '{tensor.datatype}'"
        )
    return found


def _requested_output(output: service_pb2.ModelInferRequest.InferRequestedOutputTensor) -> RequestedOutput:
    parameters = parameters_of(output.parameters)
    region = grpc_region(output.name, parameters)
    if "classification" not in parameters:
        return RequestedOutput(output.name, region=region)
    if region is not None:
        raise InvalidRequest("output can't set both 'shared_memory_region' and 'classification'")
    classes = parameters["classification"]
    if isinstance(classes, bool) or not isinstance(classes, int):
        raise InvalidRequest("invalid value type for 'classification' parameter, expected int64_param")
    if classes <= 0:
        raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
    return RequestedOutput(output.name, classes)


def _checked_parameters(request: service_pb2.ModelInferRequest) -> dict[str, Parameter]:
    for name, slot in request.parameters.items():
        choice = slot.WhichOneof("parameter_choice")
        is_known = name == "priority" or name.startswith(RESERVED_PREFIX)
        if choice is None or (choice == "uint64_param" and not is_known):
            words = _KINDS[name][1] if choice and name in _KINDS else "int64_param, bool_param, or string_param"
            raise InvalidRequest(f"invalid value type for '{name}' parameter, expected {words}.")
    parameters = parameters_of(request.parameters)
    _check_parameters(parameters)
    return parameters


def _check_parameters(parameters: Mapping[str, Parameter]) -> None:
    """Checks names and types. No parameter changes the results of this engine's models."""
    for name, value in parameters.items():
        if name in _KINDS:
            _check_kind(name, value)
        elif name.startswith(RESERVED_PREFIX) and name != EMPTY_FINAL_RESPONSE:
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"
            )


def _check_kind(name: str, value: Parameter) -> None:
    kinds, words = _KINDS[name]
    if type(value) not in kinds:
        raise InvalidRequest(f"invalid value type for '{name}' parameter, expected {words}.")
    if name == "priority" and isinstance(value, int) and value < 0:
        raise InvalidRequest("invalid value for 'priority', expected value >= 0.")
