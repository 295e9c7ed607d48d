"""GRPCInferenceService for clients: encodes requests, decodes responses, metadata and parameters."""

from collections.abc import Container, Mapping, MutableMapping, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from penstock.protocol.engine import ModelMetadata, ModelState, TensorSpec
from penstock.protocol.errors import EngineFailed, InvalidRequest, reason_line
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Parameter, SlabAddress, Tensor, Timings

M = TypeVar("M", bound=Message)

_RAW_INPUT_TAG = b"\x3a"  # field 7, length-delimited: ModelInferRequest.raw_input_contents
_DATATYPE_BY_NAME = {str(datatype): datatype for datatype in Datatype}
_INT64_MAX, _UINT64_MAX = 2**63 - 1, 2**64 - 1


def encode_request(request: InferRequest, regions: Container[str] = ()) -> bytes:
    """The serialised ModelInferRequest. regions: tensors there are sent by address. Raises InvalidRequest."""
    message = service_pb2.ModelInferRequest(
        model_name=request.model_name, model_version=request.model_version, id=request.id
    )
    if request.parameters:
        set_parameters(message.parameters, request.parameters)
    sent: list[Tensor] = []
    for tensor in request.inputs:
        slot = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if tensor.place is None or tensor.place.region not in regions:
            sent.append(tensor)
        else:
            _set_region(slot, tensor.place, tensor.data.nbytes or tensor.declared_bytes)
    for name in request.outputs:
        message.outputs.add(name=name)
    return with_raw_inputs(message, sent)


def with_raw_inputs(message: service_pb2.ModelInferRequest, tensors: Sequence[Tensor]) -> bytes:
    """The message serialised with the tensors as raw_input_contents, of which it has none. Copies once."""
    parts: list[bytes | memoryview] = [message.SerializeToString()]
    for tensor in tensors:
        parts += (_RAW_INPUT_TAG, varint(tensor.data.nbytes), tensor.data)
    return b"".join(parts)


def _set_region(slot: "service_pb2.ModelInferRequest.InferInputTensor", place: SlabAddress, size_bytes: int) -> None:
    slot.parameters["shared_memory_region"].string_param = place.region
    slot.parameters["shared_memory_byte_size"].int64_param = size_bytes
    if place.offset:
        slot.parameters["shared_memory_offset"].int64_param = place.offset


def decode_response(message: bytes, request: InferRequest, infer_s: float) -> InferResponse:
    """The response, with tensors as views of the message.

    Raises EngineFailed for missing bytes: a Python backend with the wrong numpy sends well-formed responses without
    any.
    """
    who = f"model {request.model_name!r}"
    answer = parsed(service_pb2.ModelInferResponse, message, who)
    if len(answer.raw_output_contents) != len(answer.outputs):
        raise EngineFailed(
            f"{who} announced {len(answer.outputs)} outputs and sent {len(answer.raw_output_contents)} raw contents"
        )
    contents = answer.raw_output_contents
    outputs = tuple(
        [_response_output(who, one, content) for one, content in zip(answer.outputs, contents, strict=True)]
    )
    if request.outputs and (missing := set(request.outputs) - {tensor.name for tensor in outputs}):
        raise EngineFailed(f"{who} left out the requested outputs {sorted(missing)}")
    return InferResponse(
        model_name=answer.model_name,
        model_version=answer.model_version,
        outputs=outputs,
        id=answer.id,
        parameters=parameters_of(answer.parameters),
        timings=Timings(infer=infer_s),
    )


def decode_metadata(message: bytes) -> ModelMetadata:
    """Raises EngineFailed for a datatype that is not in KServe v2."""
    answer = parsed(service_pb2.ModelMetadataResponse, message)
    return ModelMetadata(
        name=answer.name,
        versions=tuple(answer.versions),
        platform=answer.platform,
        inputs=_specs(answer.name, answer.inputs),
        outputs=_specs(answer.name, answer.outputs),
    )


def decode_index(message: bytes) -> list[ModelState]:
    """The repository's rows, each reason on one line."""
    answer = parsed(service_pb2.RepositoryIndexResponse, message)
    return [ModelState(row.name, row.version, row.state, reason_line(row.reason)) for row in answer.models]


def parsed(kind: type[M], message: bytes, who: str = "the engine") -> M:
    """The parsed message. Raises EngineFailed for invalid bytes."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise EngineFailed(f"{who} answered bytes that are no {kind.DESCRIPTOR.name}") from error


def _response_output(who: str, output: "service_pb2.ModelInferResponse.InferOutputTensor", content: bytes) -> Tensor:
    datatype = _response_datatype(f"{who}: output {output.name!r}", output.datatype)
    tensor = Tensor(output.name, datatype, tuple(output.shape), memoryview(content))
    _check_size(who, tensor)
    return tensor


def _check_size(who: str, tensor: Tensor) -> None:
    if min(tensor.shape, default=0) < 0:
        raise EngineFailed(f"{who}: output {tensor.name!r} has shape {list(tensor.shape)}")
    size_bytes, elements = tensor.datatype.size_bytes, tensor.element_count
    found_bytes = tensor.data.nbytes
    if found_bytes < 4 * elements if size_bytes is None else found_bytes != size_bytes * elements:
        raise EngineFailed(
            f"{who}: output {tensor.name!r} is {tensor.datatype} of shape {list(tensor.shape)} "
            f"but came with {found_bytes} bytes"
        )


def _specs(
    model_name: str, tensors: "Sequence[service_pb2.ModelMetadataResponse.TensorMetadata]"
) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            tensor.name,
            _response_datatype(f"model {model_name!r}: {tensor.name!r}", tensor.datatype),
            tuple(tensor.shape),
        )
        for tensor in tensors
    )


def _response_datatype(what: str, word: str) -> Datatype:
    datatype = _DATATYPE_BY_NAME.get(word)
    if datatype is None:
        raise EngineFailed(f"{what} has the unknown datatype {word!r}")
    return datatype


def set_parameters(slots: MutableMapping[str, service_pb2.InferParameter], parameters: Mapping[str, Parameter]) -> None:
    """Sets protobuf parameters. Raises InvalidRequest for a value that protobuf cannot represent."""
    for key, value in parameters.items():
        _set_parameter(slots[key], key, value)


def _set_parameter(slot: service_pb2.InferParameter, key: str, value: Parameter) -> None:
    if isinstance(value, bool):
        slot.bool_param = value
    elif isinstance(value, str):
        slot.string_param = value
    elif isinstance(value, float):
        slot.double_param = value
    elif -_INT64_MAX - 1 <= value <= _INT64_MAX:
        slot.int64_param = value
    elif 0 <= value <= _UINT64_MAX:
        slot.uint64_param = value
    else:
        raise InvalidRequest(f"parameter {key!r} is {value}, which fits no 64-bit integer")


def _parameter(slot: service_pb2.InferParameter) -> Parameter:
    kind = slot.WhichOneof("parameter_choice")
    value: Parameter = getattr(slot, kind) if kind else ""
    return value


def parameters_of(slots: Mapping[str, service_pb2.InferParameter]) -> dict[str, Parameter]:
    """Protobuf's parameters as plain values; an empty one is ""."""
    return {key: _parameter(slot) for key, slot in slots.items()}


def varint(number: int) -> bytes:
    """The number as a protobuf varint: seven bits per byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
