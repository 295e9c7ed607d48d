"""Holds a GPU's memory for Triton's CUDA shared memory: `python -m loadtest.bench.gpu.cuda_region BYTES COUNT NOISE`.

One line of JSON: {"handles": [base64 of a cudaIpcMemHandle, …]}, or {"why": …}; then it waits for its stdin to close.
The driver's own library is enough: no toolkit, no package.
"""

import base64
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

IPC_HANDLE_BYTES = 64


class CudaError(Exception):
    """The driver refused; the text says what."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


def open_driver() -> Any:
    """libcuda with the first card's primary context current. Raises CudaError."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(str(error)) from None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return cuda


def check(result: int, what: str) -> None:
    """Raises CudaError for any result but 0."""
    if result:
        raise CudaError(f"{what} failed with CUDA error {result}")


def allocate(cuda: Any, size_bytes: int, noise: bytes) -> str:
    """New memory that begins with the noise, as its IPC handle in base64. Raises CudaError."""
    address, handle = ctypes.c_uint64(), _IpcHandle()
    check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)), "cuMemAlloc")
    check(cuda.cuMemcpyHtoD_v2(address, noise, ctypes.c_size_t(len(noise))), "cuMemcpyHtoD")
    check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), address), "cuIpcGetMemHandle")
    return base64.b64encode(ctypes.string_at(ctypes.byref(handle), IPC_HANDLE_BYTES)).decode()


def main() -> None:
    """Until stdin closes."""
    size_bytes, count, noise = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).read_bytes()
    try:
        cuda = open_driver()
        said: dict[str, object] = {"handles": [allocate(cuda, size_bytes, noise) for _ in range(count)]}
    except CudaError as error:
        said = {"why": str(error)}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
