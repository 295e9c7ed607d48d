"""Trial whether an engine accepts rows in GPU memory: both memories must give the same result."""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from penstock.network import is_loopback
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import InferResponse, Tensor
from penstock.vision.preprocess import geometry_of
from penstock.vision.spec import InputOrder
from penstock_video.errors import InferFailed
from penstock_video.infer.calls import Call, EngineClient, calls_of, gathered, load
from penstock_video.infer.gpu_client import GpuMemoryClient
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress
from penstock_video.types import DeviceRow, RowArray

FIRST_S = 10.0  # for the response through host memory: an engine's first may include a warm-up
TRIAL_S = 2.0  # for everything else
TOLERANCE = 0.01  # of an output's maximum: batches may differ by other clients' rows
ROOM_CALLS = 16  # of the largest: few run at once, but abandoned ones use their room for a while
LEAST_BYTES, MOST_BYTES = 64 << 20, 1 << 30  # of the shared memory
_ROW_SIDE = 256  # of an image for a network that takes any size


def why_not(place: EngineAddress, network: Network) -> str:
    """Why rows cannot be on the GPU, without a trial; empty if a trial is useful."""
    host = place.grpc_address.rpartition(":")[0]
    if place.run_dir is None and not is_loopback(host):
        return (
            f"the gateway at {place.grpc_address} is on another host, and GPU memory can be shared within one host only"
        )
    if network.is_batched_by_gateway:
        return (
            f"the gateway forms the batches of {network.name!r} (batch_owner gateway), and it cannot "
            "read rows in GPU memory; give the model dynamic_batching, or batch_owner off"
        )
    return ""


def memory_for(network: Network) -> int:
    """Bytes of GPU memory to share for its rows."""
    call_bytes = network.row_bytes * max(network.max_batch_size, 1)
    return min(max(ROOM_CALLS * call_bytes, LEAST_BYTES), MOST_BYTES)


async def try_gpu(host: EngineClient, card: GpuMemoryClient, network: Network) -> str:
    """Why rows on the GPU do not work; empty if they do. Bounded by FIRST_S and TRIAL_S."""
    row = row_of_noise(network)
    width, height = network.prepare_spec.width or _ROW_SIDE, network.prepare_spec.height or _ROW_SIDE
    geometry = geometry_of(width, height, network.prepare_spec)
    (call,) = calls_of(network, [row], row.nbytes, geometries=[geometry])
    try:
        async with asyncio.timeout(FIRST_S):
            through_host = await _infer_on_host(host, network, row, call)
    except (InferenceError, TimeoutError) as error:
        return f"model {network.name!r} did not answer the trial: {_why(error, FIRST_S)}"
    try:
        async with asyncio.timeout(TRIAL_S):
            await card.until_up()
            through_card = await _infer_on_gpu(card, network, row, call)
    except (InferenceError, InferFailed, TimeoutError) as error:
        return _why(error, TRIAL_S)
    return difference(through_host.outputs, through_card.outputs)


def row_of_noise(network: Network) -> RowArray:
    """A constant row of noise."""
    spec, noise = network.prepare_spec, np.random.default_rng(20261123)
    side = min(_ROW_SIDE, spec.max_side or _ROW_SIDE)
    height, width = spec.height or side, spec.width or side
    channels = spec.color.channels
    shape = (channels, height, width) if spec.layout is InputOrder.NCHW else (height, width, channels)
    if network.row_dtype == np.uint8:
        return noise.integers(0, 256, shape, np.uint8)
    row: RowArray = noise.random(shape, np.float32).astype(network.row_dtype)
    return row


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> str:
    """How the answers differ; empty if they are within TOLERANCE of an output's maximum."""
    by_name = {tensor.name: tensor for tensor in other}
    if {tensor.name for tensor in one} != set(by_name):
        return "the engine has other outputs for rows in GPU memory than for rows in host memory"
    for tensor in one:
        if not _are_alike(tensor, by_name[tensor.name]):
            return f"output {tensor.name!r} differs between rows in GPU memory and rows in host memory"
    return ""


def _are_alike(one: Tensor, other: Tensor) -> bool:
    if (one.datatype, one.shape) != (other.datatype, other.shape):
        return False
    first, second = one.to_numpy(), other.to_numpy()
    if first.dtype.kind != "f":
        return bool(np.array_equal(first, second))
    first, second = first.astype(np.float64), second.astype(np.float64)
    finite = np.abs(first[np.isfinite(first)])
    largest = float(finite.max()) if finite.size else 0.0
    return bool(np.allclose(first, second, rtol=0, atol=TOLERANCE * largest, equal_nan=True))


async def _infer_on_host(host: EngineClient, network: Network, row: RowArray, call: Call) -> InferResponse:
    loaded = load(network, [row], call, host, time.monotonic() + FIRST_S)
    is_answered = False
    try:
        response = await host.infer(loaded.request)
        is_answered = True
        return response
    finally:
        if loaded.lease is not None:
            (loaded.lease.release if is_answered else loaded.lease.release_later)()


async def _infer_on_gpu(card: GpuMemoryClient, network: Network, row: RowArray, call: Call) -> InferResponse:
    """Infers as in operation: gathered rows, at a nonzero offset of the memory."""
    source, kept = await card.put(row)
    try:
        lease = await card.gather([DeviceRow(source.address, row.shape, row.dtype)])
    finally:
        kept.release()
    is_answered = False
    try:
        place = card.place_of(lease)
        response = await card.infer(gathered(network, call, card, place, lease, time.monotonic() + TRIAL_S).request)
        is_answered = True
        return response
    finally:
        (lease.release if is_answered else lease.release_later)()


def _why(error: Exception, within_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"the trial was not answered within {within_s:g} s"
    return error.message if isinstance(error, InferenceError | InferFailed) else str(error)
