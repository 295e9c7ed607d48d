"""Pictures that the engine decodes: looked at by their headers, and laid down as they came, each a row of BYTES.

They lie in the slab where there is one, whatever their size: that is how the batcher knows what may be merged there.
Whoever else writes into the slab could change the length before a picture while Triton reads it. Triton checks lengths
against the tensor's end, and a backend in Python reads them from a copy of its own: what comes of it is a picture that
cannot be decoded.
"""

import asyncio
import struct
import time
from dataclasses import replace

import numpy as np

from server.core.errors import DeadlineExceeded
from server.core.slab import Lease, Slab
from server.core.tensor import Array, Datatype, Tensor, tensor_from_numpy
from server.vision.decoder import Prepared
from server.vision.header import header_within
from server.vision.preprocess import geometry_of
from server.vision.spec import PrepareSpec

AT_ONCE_BYTES = 1 << 20  # a PNG's checksums, a progressive JPEG's scans: a millisecond of the event loop, ten at worst
_LENGTH = struct.Struct("<I")


def is_short(size_bytes: int) -> bool:
    """Whether the headers of a request's pictures, of this total size, are read on the event loop."""
    return size_bytes <= AT_ONCE_BYTES


async def relayed(
    data: bytes, spec: PrepareSpec, max_pixels: int, slab: Slab | None, size_bytes: int, deadline: float | None
) -> Prepared:
    """The picture as `relay` returns it. Raises what `relay` raises, and DeadlineExceeded.

    size_bytes: of all pictures of the request. Headers of large requests are read in a thread; a picture that is still
    waiting for the thread at its deadline is not read.
    """
    if is_short(size_bytes):
        return relay(data, spec, max_pixels, slab)
    prepared = await asyncio.to_thread(_relay_in_time, data, spec, max_pixels, deadline)
    return replace(prepared, lease=_laid_down(data, slab))


def _relay_in_time(data: bytes, spec: PrepareSpec, max_pixels: int, deadline: float | None) -> Prepared:
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceeded("the deadline passed before the image's header was read; allow more time")
    return relay(data, spec, max_pixels, None)


def relay(data: bytes, spec: PrepareSpec, max_pixels: int, slab: Slab | None) -> Prepared:
    """The picture, not decoded: an array of one element, its bytes, and where it will lie in the network's input.

    spec: what the engine makes of it. The lease, where there is room in the slab, holds it behind its length.
    Raises UnsupportedMedia, TooLarge and UndecodableImage for what its header tells.
    """
    started = time.perf_counter()
    width, height = header_within(data, max_pixels).upright_size
    array: Array = np.empty(1, np.object_)
    array[0] = data
    lease = _laid_down(data, slab)
    return Prepared(array, geometry_of(width, height, spec), time.perf_counter() - started, 0.0, lease)


def input_tensor(name: str, array: Array, lease: Lease | None) -> Tensor:
    """The array as the model's input, where it lies. lease: of the one image that it holds then."""
    if lease is None:
        return tensor_from_numpy(name, array)
    if array.dtype == np.object_:
        return Tensor(name, Datatype.BYTES, array.shape, lease.view, lease.place)
    return replace(tensor_from_numpy(name, array), place=lease.place)


def _laid_down(data: bytes, slab: Slab | None) -> Lease | None:
    lease = slab.lease(_LENGTH.size + len(data)) if slab is not None else None
    if lease is not None:
        view = lease.view
        _LENGTH.pack_into(view, 0, len(data))
        view[_LENGTH.size :] = data
    return lease
