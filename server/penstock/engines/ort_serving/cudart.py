"""NVIDIA's CUDA runtime library for one GPU: memory, copies and a stream. The same library that ONNX Runtime loads."""

import contextlib
import ctypes
import importlib.util
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

_NON_BLOCKING = 1  # a stream that does not wait for the default stream
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses say whether they are host or device memory
_PORTABLE = 1  # page-locked for all GPUs
_ALREADY_LOCKED = 712
_PAUSE_S = 1.0  # between two looks at this process's mappings, which take milliseconds
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_EXIT_DELAY_S = 0.5  # lets the answers of the failed requests leave the process
_BROKEN_CONTEXT_EXIT = 70


class CudaUnavailable(Exception):
    """CUDA cannot be used; the text is the reason."""


class CudaError(Exception):
    """A call of the CUDA runtime failed."""


class Regions(Protocol):
    """Page-locks shared memory at its first use, as torch_serving.staging.PinnedRegions."""

    def pin(self, address: int) -> bool:
        """Whether the address is in page-locked memory now."""


class NewRegions(Protocol):
    """Makes Regions. lock, unlock: get address and size. pause_s: see PinnedRegions."""

    def __call__(
        self, lock: Callable[[int, int], bool], unlock: Callable[[int, int], None], *, pause_s: float
    ) -> Regions: ...


class Cuda(Protocol):
    """One GPU, as a session uses it. Use it in the thread that created it. Methods raise CudaError."""

    device_id: int
    stream: int  # its handle; runs and copies are in order on it

    def allocate(self, size: int) -> int:
        """Address of device memory, filled with zeros."""

    def allocate_host(self, size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Page-locked host memory, which is never freed."""

    def is_page_locked(self, address: int) -> bool:
        """Whether the GPU can read host memory at that address directly."""

    def free_memory(self) -> None:
        """Frees all that was allocated here. Call it after the session is gone, whose graphs use it."""

    def close(self) -> None:
        """Frees all memory and the stream."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Starts a copy on the stream, between host and device memory in any direction."""

    def synchronize(self) -> None:
        """Waits for everything on the stream."""

    def wait_for(self, stream: int) -> None:
        """Waits for everything on another stream, such as a producer's."""

    def free_bytes(self) -> int:
        """Free memory of the GPU."""

    def is_lost(self) -> bool:
        """Whether the CUDA context is lost: then every call fails until the process ends."""


def load_cuda_libraries() -> None:
    """Loads CUDA and cuDNN for ONNX Runtime from NVIDIA's packages, or from the system's folders."""
    folders = _package_folders()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what is missing; opening a session says it, too
        for folder in folders:
            has_cudnn = folder.parent.name == "cudnn"
            ort.preload_dlls(cuda=not has_cudnn, cudnn=has_cudnn, directory=str(folder))
        ort.preload_dlls()


def _package_folders() -> list[Path]:
    """Folders of NVIDIA's Python packages, wherever on the path they are."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec is not None else []
    major = str(ort.cuda_version).partition(".")[0]
    return [
        folder for root in roots for folder in (root / f"cu{major}" / "lib", root / "cudnn" / "lib") if folder.is_dir()
    ]


class CudaRuntime:
    """One GPU by the CUDA runtime's C interface. See Cuda."""

    def __init__(self, device_id: int, regions: NewRegions | None = None) -> None:
        """Creates the CUDA context and a stream. regions: of shared memory to page-lock. Raises CudaUnavailable."""
        load_cuda_libraries()
        name = f"libcudart.so.{str(ort.cuda_version).partition('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise CudaUnavailable(f"ONNX Runtime's CUDA library cannot be loaded: {error}") from error
        self.device_id = device_id
        self._device_memory: list[int] = []
        self._regions = None if regions is None else regions(self._lock_region, self._unlock_region, pause_s=_PAUSE_S)
        try:
            self._open()
        except CudaError as error:
            raise CudaUnavailable(f"GPU {device_id} cannot be used: {error}") from error

    def _open(self) -> None:
        self._call("cudaSetDevice", ctypes.c_int(self.device_id))
        mode = ctypes.c_int(_THREAD_LOCAL)  # another model's capture must not forbid this thread's allocations
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        self.stream = int(stream.value or 0)

    def allocate(self, size: int) -> int:
        """See Cuda."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        self._device_memory.append(int(address.value or 0))
        self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(size))
        return self._device_memory[-1]

    def allocate_host(self, size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """See Cuda."""
        address = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address.value or 0)))

    def is_page_locked(self, address: int) -> bool:
        """See Cuda."""
        return self._regions is not None and self._regions.pin(address)

    def _lock_region(self, address: int, size: int) -> bool:
        code = int(
            self._library.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
        )
        self._library.cudaGetLastError()
        return code in (0, _ALREADY_LOCKED)  # by another model of this process

    def _unlock_region(self, address: int, _: int) -> None:
        self._library.cudaHostUnregister(ctypes.c_void_p(address))
        self._library.cudaGetLastError()

    def free_memory(self) -> None:
        """See Cuda."""
        while self._device_memory:
            self._library.cudaFree(ctypes.c_void_p(self._device_memory.pop()))

    def close(self) -> None:
        """See Cuda."""
        self.free_memory()
        self._library.cudaStreamDestroy(ctypes.c_void_p(self.stream))

    def copy(self, target: int, source: int, size: int) -> None:
        """See Cuda."""
        stream = ctypes.c_void_p(self.stream)
        addresses = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self._call("cudaMemcpyAsync", *addresses, ctypes.c_size_t(size), ctypes.c_int(_ANY_DIRECTION), stream)

    def synchronize(self) -> None:
        """See Cuda."""
        self.wait_for(self.stream)

    def wait_for(self, stream: int) -> None:
        """See Cuda."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def free_bytes(self) -> int:
        """See Cuda."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def is_lost(self) -> bool:
        """See Cuda."""
        return int(self._library.cudaDeviceSynchronize()) != 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code != 0:
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            text = (self._library.cudaGetErrorString(code) or b"").decode("ascii", "replace")
            self._library.cudaGetLastError()  # clears it, so that ONNX Runtime does not report it
            raise CudaError(f"{name}: {text} (CUDA error {code})")


def exit_after(seconds: float = _EXIT_DELAY_S) -> None:
    """Ends the process, whose CUDA context is lost. Without unwinding, because the driver may not answer."""
    threading.Timer(seconds, os._exit, (_BROKEN_CONTEXT_EXIT,)).start()
