"""Encoded images in the body of POST …/infer: found, and replaced by their tensor."""

import base64
import binascii

import msgspec

from server.core.encoded_images import EncodedCall, ImageInput, images_in, refuse_other_shapes
from server.core.errors import InvalidRequest
from server.core.relay import HttpCall, HttpHeaders, InferHead
from server.core.tensor import Tensor
from server.rest.json_members import Members, decode
from server.vision.header import sniff

_REPLACED_HEADERS = (b"content-encoding", b"inference-header-content-length")
_SIZE, _REGION = "binary_data_size", "shared_memory_region"


class _Base64(msgspec.Struct):
    b64: str


_Element = str | _Base64
_DATA = msgspec.json.Decoder(list[_Element | list[_Element]])
_OBJECT = msgspec.json.Decoder(Members)
_OBJECTS = msgspec.json.Decoder(list[Members])
_SHAPE = msgspec.json.Decoder(tuple[int, ...])


def encoded_call(
    head: InferHead, call: HttpCall, plain: bytes, header_length: int | None, place: ImageInput
) -> EncodedCall[HttpCall] | None:
    """The call with the images that it sends in the place of that input; None where it sends none.

    plain: the body, decompressed and scanned. header_length: of its JSON, None for all of it. The images stand in the
    binary data, or in `data` as base64 (a string, or {"b64": "…"}); a raw binary request is one image.
    Raises InvalidRequest for an input that says that it is such, and is none.
    """
    if not plain or header_length == 0:
        return _raw_call(head, call, plain, place)
    if head.bytes_inputs != (place.name,):
        return None
    length = len(plain) if header_length is None else header_length
    top = decode(_OBJECT, plain[:length], "")
    entries = decode(_OBJECTS, top["inputs"], "inputs")
    if len(entries) != 1:
        return None  # the engine has words for inputs that the model has not
    images = _images(entries[0], place.name, memoryview(plain)[length:])
    return EncodedCall(head, images, lambda tensor: _with_tensor(call, top, entries[0], tensor))


def is_raw_image(plain: bytes, place: ImageInput) -> bool:
    """Whether a raw binary body is an encoded image, and not, by its size, the tensor itself."""
    return place.is_encoded or (len(plain) != place.row_bytes and sniff(plain) is not None)


def _raw_call(head: InferHead, call: HttpCall, plain: bytes, place: ImageInput) -> EncodedCall[HttpCall] | None:
    if not is_raw_image(plain, place):
        return None
    # A raw binary request is answered in binary.
    top: Members = {"parameters": msgspec.Raw(b'{"binary_data_output":true}'), "inputs": msgspec.Raw(b"[]")}
    entry: Members = {"name": msgspec.Raw(msgspec.json.encode(place.name))}
    return EncodedCall(head, (plain,), lambda tensor: _with_tensor(call, top, entry, tensor))


def _images(entry: Members, name: str, binary: memoryview) -> tuple[bytes, ...]:
    parameters = _parameters(entry)
    if _REGION in parameters:
        raise InvalidRequest(
            f"input {name!r}: encoded images cannot stand in shared memory; send them in the request itself"
        )
    shape = decode(_SHAPE, entry["shape"], f"input {name!r}: shape")
    if _SIZE in parameters:
        return images_in(name, shape, binary)
    refuse_other_shapes(name, shape)
    return _from_base64(name, shape, decode(_DATA, entry["data"], f"input {name!r}: data"))


def _from_base64(name: str, shape: tuple[int, ...], data: list[_Element | list[_Element]]) -> tuple[bytes, ...]:
    elements = [element for item in data for element in (item if isinstance(item, list) else [item])]
    if len(elements) != shape[0]:
        raise InvalidRequest(f"input {name!r} has shape {list(shape)}, but its data holds {len(elements)} elements")
    texts = (element.b64 if isinstance(element, _Base64) else element for element in elements)
    return tuple(_decoded(text, f"input {name!r}: element {number}") for number, text in enumerate(texts, start=1))


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f'{where} is no base64 ({error}); give an image\'s bytes as base64 or {{"b64": "…"}}, or as binary data'
        ) from error


def _with_tensor(call: HttpCall, top: Members, entry: Members, tensor: Tensor) -> HttpCall:
    """The members in their order, as they came, but for what is said of the tensor itself."""
    parameters = _parameters(entry) | {_SIZE: _raw(tensor.data.nbytes)}
    described = entry | {
        "shape": _raw(tensor.shape),
        "datatype": _raw(tensor.datatype.value),
        "parameters": _raw(parameters),
    }
    described.pop("data", None)
    header = msgspec.json.encode(top | {"inputs": _raw([described])})
    headers: HttpHeaders = tuple(pair for pair in call.headers if pair[0] not in _REPLACED_HEADERS)
    headers += ((b"inference-header-content-length", b"%d" % len(header)),)
    return HttpCall(call.method, call.target, headers, b"".join((header, tensor.data)))


def _parameters(entry: Members) -> Members:
    return decode(_OBJECT, entry["parameters"], "parameters") if "parameters" in entry else {}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
