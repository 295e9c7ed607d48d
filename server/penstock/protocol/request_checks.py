"""Checks that HTTP and gRPC share. They reject requests that crash Triton 2.51."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic
from urllib.parse import unquote

from penstock.protocol.call import A, Call, InferHead
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.inference import Datatype, Tensor

# Without shared memory: rejected with 501 / UNIMPLEMENTED, and not advertised.
BLOCKED_EXTENSIONS = frozenset(("system_shared_memory", "cuda_shared_memory"))
# Triton 2.51 multiplies a shape without an overflow check; FP32 [1, 2^62] without bytes crashes the model's process.
MAX_ELEMENTS = 1 << 40
# of inputs, and of outputs, in one request
MAX_TENSORS = 1000
# Number and size of cached heads: clients repeat them.
CACHED_HEADS, MAX_CACHED_HEAD_BYTES = 512, 1 << 10
MAX_MODEL_NAME = 100  # characters, of models that are added
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_SETTINGS = {"trace_file": "trace", "log_file": "log"}


def refuse_file_setting(name: str) -> None:
    """Raises NotSupported for a setting of the engine's output file, which Triton before 2.51 lets clients change."""
    if name in _FILE_SETTINGS:
        raise NotSupported(f"{_FILE_SETTINGS[name]} file location can not be updated through network protocol")


def check_counts(input_count: int, outputs: Sequence[str]) -> None:
    """Raises InvalidRequest for too many inputs or outputs, and for a duplicate output."""
    if input_count < 2 and len(outputs) < 2:
        return
    for count, kind in ((input_count, "inputs"), (len(outputs), "outputs")):
        if count > MAX_TENSORS:
            raise InvalidRequest(f"{count} {kind} (limit {MAX_TENSORS}); send fewer")
    if len(set(outputs)) < len(outputs):
        twice = next(name for name in outputs if outputs.count(name) > 1)
        raise InvalidRequest(f"output {twice[:80]!r} is given twice")


def checked_name(name: str) -> str:
    """The model's name. Raises InvalidRequest for one that no model has."""
    if not name.isprintable():
        raise InvalidRequest(f"the model's name {name[:80]!r} holds control characters")
    return name


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raises InvalidRequest for an impossible shape. A dimension of 0 does not make the others valid."""
    elements = 1
    for size in shape:
        if size < 0:
            raise InvalidRequest(f"input {name!r} has shape {_shape_text(shape)}; no dimension may be negative")
        elements *= size or 1
        if elements > MAX_ELEMENTS:
            raise InvalidRequest(
                f"input {name!r} has shape {_shape_text(shape)}; more than 2^40 elements fit no request"
            )


def _shape_text(shape: Sequence[int]) -> str:
    return str(list(shape)) if len(shape) <= 8 else f"{list(shape[:8])} and {len(shape) - 8} more dimensions"


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The image input of a model. row_bytes: of one image, 0 if sizes differ. is_encoded: the engine decodes."""

    name: str
    row_bytes: int
    is_encoded: bool = False


@dataclass(frozen=True, slots=True)
class EncodedCall(Generic[A]):
    """An inference with encoded images. with_tensors: the call with the first tensor instead, and the others as further
    inputs. row_bytes: 0 if unknown.
    """

    head: InferHead
    images: tuple[bytes, ...]
    with_tensors: Callable[[Sequence[Tensor]], Call[A]]
    row_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes in flight: the images and their tensor."""
        return sum([len(image) for image in self.images]) + len(self.images) * self.row_bytes


def images_in(name: str, shape: tuple[int, ...], data: memoryview) -> tuple[bytes, ...]:
    """The images in a BYTES tensor, each after its length; a single one may have no length. Raises InvalidRequest."""
    check_image_shape(name, shape)
    if shape[0] == 1 and int.from_bytes(data[:4], "little") > max(data.nbytes, 1 << 30):
        return (bytes(data),)
    return tuple(Tensor(name, Datatype.BYTES, shape, data).to_numpy().ravel().tolist())


def check_images(name: str, shape: tuple[int, ...], images: int) -> None:
    """Raises InvalidRequest unless the shape matches the number of encoded images."""
    check_image_shape(name, shape)
    if images != shape[0]:
        raise InvalidRequest(f"input {name!r} has shape {list(shape)}, but its data holds {images} elements")


def refuse_shared_images(name: str) -> None:
    """Raises InvalidRequest."""
    raise InvalidRequest(
        f"input {name!r}: encoded images cannot stand in shared memory; send them in the request itself"
    )


def check_image_shape(name: str, shape: tuple[int, ...]) -> None:
    """Raises InvalidRequest for anything but [N] and [N, 1], N at least 1."""
    if len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ((), (1,)):
        raise InvalidRequest(f"input {name!r} has shape {list(shape)[:8]}; encoded images come as [N] or [N, 1]")


MAX_NAME_BYTES = 255  # of a path component; a longer one in a model load crashes Triton 2.51
MAX_QUOTED = 80
MAX_VERSION = (1 << 63) - 1  # Triton's version numbers are 64-bit integers; a larger one crashes Triton 2.51


def check_inside_folder(what: str, name: str) -> None:
    """Raises InvalidRequest for a path that leaves its base folder, also percent-encoded. what: for the message."""
    if any(not _is_inside(form) for form in (name, unquote(name))):
        raise InvalidRequest(f"{what} is {quoted(name)}; it must name a file inside the model's folder")
    if any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in name.split("/")):
        raise InvalidRequest(f"{what} is {quoted(name)}; a name may have at most {MAX_NAME_BYTES} bytes")


def is_version(folder_name: str) -> bool:
    """Whether a model's folder is a version: its name is a decimal integer without leading zeros."""
    is_number = folder_name.isascii() and folder_name.isdecimal()
    return is_number and (folder_name == "0" or folder_name[0] != "0") and int(folder_name) <= MAX_VERSION


def check_new_model_name(name: str) -> None:
    """Raises InvalidRequest for a model name that cannot be a folder's name or a part of a URL."""
    if len(name) > MAX_MODEL_NAME or not _MODEL_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:120]!r} cannot be a model's name: use up to {MAX_MODEL_NAME} letters, digits, '.', '_' and '-'; "
            "the first one is a letter or digit"
        )


def quoted(name: str) -> str:
    """A client's text, quoted and shortened for a message."""
    return repr(name if len(name) <= MAX_QUOTED else name[:MAX_QUOTED] + "…")


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and not set(parts) & {"", ".", "..", "~", "*"} and "\\" not in name
