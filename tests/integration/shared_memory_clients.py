"""Segments of this machine, and clients that share them with a stack."""

import contextlib
import multiprocessing
import os
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from tests.support.stack import RunningStack

Floats = npt.NDArray[np.float32]
FOUR = np.array([[1, 2, 3, 4]], np.float32)
SIZE_BYTES = 8192


@contextlib.contextmanager
def segment(size_bytes: int = SIZE_BYTES) -> Iterator[SharedMemory]:
    """A segment of a name of its own, gone afterwards."""
    shared = SharedMemory(f"test_{os.getpid()}_{uuid.uuid4().hex[:8]}", create=True, size=size_bytes)
    try:
        yield shared
    finally:
        shared.close()
        shared.unlink()


def put(shared: SharedMemory, array: Floats, offset: int = 0) -> None:
    """The array's bytes into the segment."""
    shared.buf[offset : offset + array.nbytes] = array.tobytes()


def get(shared: SharedMemory, count: int, offset: int = 0) -> list[float]:
    """So many numbers out of it."""
    return np.frombuffer(bytes(shared.buf[offset : offset + 4 * count]), np.float32).tolist()


@contextlib.contextmanager
def over_http(stack: RunningStack) -> Iterator[http_client.InferenceServerClient]:
    """A client of its own."""
    client = http_client.InferenceServerClient(stack.http_url.removeprefix("http://"))
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def over_grpc(stack: RunningStack) -> Iterator[grpc_client.InferenceServerClient]:
    """A client with a connection of its own: without an argument of its own, gRPC shares one among all."""
    options = [("grpc.use_local_subchannel_pool", 1), ("penstock.test", uuid.uuid4().hex)]
    client = grpc_client.InferenceServerClient(stack.grpc_address, channel_args=options)
    try:
        yield client
    finally:
        client.close()


def infer_shared(
    client: object, module: object, *, region: str = "r", model: str = "identity_fp32", offset: int = 0
) -> list[int]:
    """Four numbers from the region's offset, answered at 64 behind it; the shape that the answer tells."""
    taken = module.InferInput("x", [1, 4], "FP32")  # type: ignore[attr-defined]
    taken.set_shared_memory(region, 16, offset)
    given = module.InferRequestedOutput("y")  # type: ignore[attr-defined]
    given.set_shared_memory(region, 16, offset + 64)
    result = client.infer(model, [taken], outputs=[given])  # type: ignore[attr-defined]
    output = result.get_output("y")
    shape = output["shape"] if isinstance(output, dict) else output.shape
    return list(shape)


def register_and_die(grpc_address: str, name: str, key: str, how: str) -> int:
    """A process that registers the segment over gRPC and is killed, or leaves without a word; its exit code."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_register, args=(grpc_address, name, key, how))
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def _register(grpc_address: str, name: str, key: str, how: str) -> None:
    client = grpc_client.InferenceServerClient(grpc_address)
    client.register_system_shared_memory(name, key, 64)
    if how == "killed":
        os.kill(os.getpid(), 9)
    os._exit(0)
