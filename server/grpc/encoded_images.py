"""Encoded images in a ModelInferRequest: found, and replaced by their tensor."""

from dataclasses import replace

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from server.backends.triton_messages import with_raw_inputs
from server.core.encoded_images import EncodedCall, ImageInput, images_in, refuse_other_shapes
from server.core.errors import InvalidRequest
from server.core.relay import GrpcCall, InferHead
from server.core.tensor import Tensor


def encoded_call(head: InferHead, call: GrpcCall, place: ImageInput) -> EncodedCall[GrpcCall] | None:
    """The call with the images that it sends in the place of that input; None where it sends none.

    The images stand in bytes_contents, or in raw_input_contents, each behind its length.
    Raises InvalidRequest for an input that says that it is such, and is none.
    """
    if head.bytes_inputs != (place.name,):
        return None
    try:
        request = service_pb2.ModelInferRequest.FromString(call.message)
    except DecodeError as error:
        raise InvalidRequest("the request is not a ModelInferRequest") from error
    if len(request.inputs) != 1 or len(request.raw_input_contents) > 1:
        return None  # the engine has words for these
    images = _images(request)
    return EncodedCall(head, images, lambda tensor: replace(call, message=_with_tensor(request, tensor)))


def _images(request: service_pb2.ModelInferRequest) -> tuple[bytes, ...]:
    entry = request.inputs[0]
    shape = tuple(entry.shape)
    if "shared_memory_region" in entry.parameters:
        raise InvalidRequest(
            f"input {entry.name!r}: encoded images cannot stand in shared memory; send them in the request itself"
        )
    if request.raw_input_contents:
        return images_in(entry.name, shape, memoryview(request.raw_input_contents[0]))
    refuse_other_shapes(entry.name, shape)
    images = tuple(entry.contents.bytes_contents)
    if len(images) != shape[0]:
        raise InvalidRequest(f"input {entry.name!r} has shape {list(shape)}, but its data holds {len(images)} elements")
    return images


def _with_tensor(request: service_pb2.ModelInferRequest, tensor: Tensor) -> bytes:
    """All fields as they came, but for what is said of the tensor itself."""
    entry = request.inputs[0]
    entry.datatype = tensor.datatype.value
    entry.shape[:] = tensor.shape
    entry.ClearField("contents")
    request.ClearField("raw_input_contents")
    return with_raw_inputs(request, (tensor,))
