"""Payloads from a seed: pictures and tensors for a model's inputs; what a server says about its models."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import msgspec
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

MEDIA_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
JPEG_QUALITY = 90
# Of a folder: each process of the generator holds them all in memory.
MOST_PICTURES = 1024
MAX_PAYLOAD_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded image and its media type."""

    content: bytes
    media_type: str


def read_pictures(folder: Path) -> list[Picture]:
    """The folder's first pictures by name: 1024 at most, and 128 MiB. Raises ValueError where there is none."""
    paths = _that_fit(_picture_paths(folder))
    if not paths:
        raise ValueError(f"no picture ({', '.join(MEDIA_TYPES)}) in {folder}")
    return [Picture(path.read_bytes(), MEDIA_TYPES[path.suffix.lower()]) for path in paths]


def make_pictures(count: int, *, seed: int, size: tuple[int, int] = (640, 480)) -> list[Picture]:
    """JPEGs of coarse noise with fine grain: about as hard to decode as photos of that (width, height)."""
    return [Picture(_jpeg(np.random.default_rng([seed, index]), size), "image/jpeg") for index in range(count)]


def make_raw_tensor(shape: Sequence[int], dtype: type[np.generic], *, seed: int) -> bytes:
    """A tensor of that shape as little-endian bytes: floats in [0, 1), whole numbers in [0, 127)."""
    generator = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        return generator.random(shape).astype(dtype).tobytes()
    return generator.integers(0, 127, shape).astype(dtype).tobytes()


def _picture_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in MEDIA_TYPES)


def _that_fit(paths: list[Path]) -> list[Path]:
    """The first ones, one at least."""
    sizes = itertools.accumulate(path.stat().st_size for path in paths[:MOST_PICTURES])
    return paths[: max(1, sum(1 for size_bytes in sizes if size_bytes <= MAX_PAYLOAD_BYTES))]


def _jpeg(generator: np.random.Generator, size: tuple[int, int]) -> bytes:
    coarse = generator.integers(0, 256, (12, 16, 3), np.uint8)
    scene = cv2.resize(coarse, size, interpolation=cv2.INTER_CUBIC).astype(np.int16)
    grain = generator.integers(-12, 13, scene.shape, np.int16)
    is_encoded, jpeg = cv2.imencode(
        ".jpg", np.clip(scene + grain, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    assert is_encoded, "OpenCV has no JPEG encoder"
    return jpeg.tobytes()


FREE_DIMENSION = 256
MAX_TENSOR_BYTES = 256 << 20
BYTES_PICTURE_PX = (64, 48)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input as the model's metadata has it; a dimension of -1 is free, and a free first one is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input with its content as the v2 protocol's raw bytes: little-endian, BYTES with a length before each."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: bytes


def make_tensors(
    specs: Iterable[InputSpec], *, batch: int = 1, sizes: Sequence[int] = (), seed: int
) -> list[InputTensor]:
    """One tensor an input. sizes: of the free dimensions after the batch, the last repeats; none: 256.

    A BYTES element is a small JPEG. Raises ValueError for a batch above 1 where an input has no batch dimension, for a
    tensor above 256 MiB, and for an unknown datatype.
    """
    return [_make_tensor(spec, concrete_shape(spec, batch=batch, sizes=sizes), seed) for spec in specs]


def grpc_request_of(model: str, tensors: Iterable[InputTensor]) -> service_pb2.ModelInferRequest:
    """The tensors as a request, contents raw."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.content)
    return request


def concrete_shape(spec: InputSpec, *, batch: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The spec's shape with every free dimension filled. Raises ValueError for a batch where there is no dimension."""
    has_batch = bool(spec.shape) and spec.shape[0] < 0
    if batch > 1 and not has_batch:
        raise ValueError(f"input {spec.name} has shape {list(spec.shape)}, so a batch of {batch} has no place: ask 1")
    wanted = iter(sizes)
    size = FREE_DIMENSION
    shape = []
    for axis, fixed in enumerate(spec.shape):
        if fixed < 0 and axis > 0:
            size = next(wanted, size)
        shape.append(fixed if fixed >= 0 else batch if axis == 0 else size)
    return tuple(shape)


def _make_tensor(spec: InputSpec, shape: tuple[int, ...], seed: int) -> InputTensor:
    if spec.datatype == "BYTES":
        element = _element(make_pictures(1, seed=seed, size=BYTES_PICTURE_PX)[0].content)
        _refuse_huge(spec, shape, len(element))
        return InputTensor(spec.name, spec.datatype, shape, element * math.prod(shape))
    dtype = triton_to_np_dtype(spec.datatype)
    if dtype is None:
        raise ValueError(f"input {spec.name} is of type {spec.datatype}, which nothing here can fill")
    _refuse_huge(spec, shape, np.dtype(dtype).itemsize)
    return InputTensor(spec.name, spec.datatype, shape, make_raw_tensor(shape, np.dtype(dtype).type, seed=seed))


def _refuse_huge(spec: InputSpec, shape: tuple[int, ...], element_bytes: int) -> None:
    if (size_bytes := math.prod(shape) * element_bytes) > MAX_TENSOR_BYTES:
        size = f"input {spec.name} of shape {list(shape)} is {size_bytes >> 20} MiB (limit {MAX_TENSOR_BYTES >> 20})"
        raise ValueError(f"{size}; ask a smaller batch or smaller sizes")


def _element(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


_MOST_NAMES = 12


class ServerIdentity(NamedTuple):
    """By the server's own word; all empty where it has none."""

    name: str = ""
    version: str = ""
    extensions: tuple[str, ...] = ()


class ModelSignature(NamedTuple):
    """A model from outside. outputs: their names. is_decoupled: it answers a request any number of times."""

    inputs: tuple[InputSpec, ...]
    outputs: frozenset[str]
    is_decoupled: bool = False


class IndexedModel(msgspec.Struct):
    """A model of a repository index; a server that writes no state has only such as are ready."""

    name: str
    state: str = "READY"


def ready_names(index: Iterable[IndexedModel]) -> tuple[str, ...]:
    """By name, each once."""
    return tuple(sorted({model.name for model in index if model.state in ("READY", "")}))


def no_model(where: str, model: str, served: tuple[str, ...], reply: str) -> str:
    """The sentence for a model that cannot be requested. reply: of the server."""
    if model in served:
        return f"{where} serves {model}, but does not describe it ({reply})"
    if not served:
        return f"{where} does not serve {model} ({reply})"
    more = f" and {len(served) - _MOST_NAMES} more" if len(served) > _MOST_NAMES else ""
    return f"{where} does not serve {model}; it serves {', '.join(served[:_MOST_NAMES])}{more}"


def nothing_answers(where: str, why: str) -> str:
    """The sentence for an address at which no server listens."""
    return f"nothing answers at {where} ({why}); start the server, or give the address of one that runs"


def https_question(where: str) -> str:
    """The end of a sentence on a broken connection: a server with TLS resets plain ones. Empty for other addresses."""
    return "; does it take https?" if where.startswith("http://") else ""
