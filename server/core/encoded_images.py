"""Encoded images in the place of a model's image input: a BYTES tensor whose elements are JPEG, PNG or WebP files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.core.errors import InvalidRequest
from server.core.relay import GrpcCall, HttpCall, InferHead
from server.core.tensor import Datatype, Tensor

C = TypeVar("C", HttpCall, GrpcCall)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The one input of a model that describes how it sees images.

    row_bytes: of one image as a tensor, 0 where images keep their own size. is_encoded: it takes nothing else, since
    the engine decodes.
    """

    name: str
    row_bytes: int
    is_encoded: bool = False


@dataclass(frozen=True, slots=True)
class EncodedCall(Generic[C]):
    """An inference call whose image input holds encoded images.

    with_tensor: the same call with the prepared tensor in their place, and nothing else changed.
    """

    head: InferHead
    images: tuple[bytes, ...]
    with_tensor: Callable[[Tensor], C]


def images_in(name: str, shape: tuple[int, ...], data: memoryview) -> tuple[bytes, ...]:
    """The elements of a BYTES tensor of images, each behind its length; one image may also stand there bare.

    A bare image cannot be mistaken: its first four bytes, read as a length, would be a gigabyte or more.
    Raises InvalidRequest where lengths, shape and bytes do not fit each other.
    """
    refuse_other_shapes(name, shape)
    if shape[0] == 1 and int.from_bytes(data[:4], "little") > max(data.nbytes, 1 << 30):
        return (bytes(data),)
    return tuple(Tensor(name, Datatype.BYTES, shape, data).to_numpy().ravel().tolist())


def refuse_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    """Raises InvalidRequest for anything but [N] and [N, 1], N at least 1."""
    if len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ((), (1,)):
        raise InvalidRequest(f"input {name!r} has shape {list(shape)[:8]}; encoded images come as [N] or [N, 1]")
