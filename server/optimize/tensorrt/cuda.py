"""The CUDA driver, as far as an engine's inputs and outputs need it: memory, copies, one stream.

By ctypes, since TensorRT's Python module has no memory of its own and everything else that has is no dependency of
ours. docs.nvidia.com/cuda/cuda-driver-api; the primary context is shared with the runtime that TensorRT uses.
"""

import ctypes
from typing import Any

from server.core.tensor import Array
from server.optimize.errors import OptimizeError
from server.optimize.tensorrt.cards import Capability
from server.optimize.tensorrt.errors import NoEngineHereError

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_NAME_BYTES = 256
_PREFERENCE = 0  # CU_STREAM_DEFAULT


def open_cuda(library: Any = None) -> "Cuda":
    """The first card that CUDA sees, its primary context current in this thread. library: libcuda, opened.

    Raises NoEngineHereError where there is no driver or no card.
    """
    try:
        driver = ctypes.CDLL(LIBRARY) if library is None else library
    except OSError as error:
        raise NoEngineHereError(
            "a TensorRT engine is built on the GPU that is to run it, and there is no NVIDIA driver here: see "
            "`penstock doctor`"
        ) from error
    return Cuda(driver)


class Cuda:
    """One card. name: as the driver calls it. stream: its handle, for execute_async_v3. Of one thread."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        device = self._first_device()
        self.name = self._name(device)
        self.capability = self._capability(device)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_PREFERENCE))
        self.stream = int(stream.value or 0)

    def allocate(self, size_bytes: int) -> int:
        """The address of device memory; the process's end frees it at the latest. Raises OptimizeError when full."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, size_bytes)))
        return address.value

    def free(self, address: int) -> None:
        """Memory of allocate."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def copy_in(self, address: int, array: Array) -> None:
        """From a contiguous array of the host; done on return."""
        source = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes))

    def copy_out(self, address: int, array: Array) -> None:
        """Into a contiguous array of the host; done on return."""
        target = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))

    def wait(self) -> None:
        """Until the stream is idle."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def _first_device(self) -> ctypes.c_int:
        device = ctypes.c_int()
        if (error := self._driver.cuInit(0)) or (error := self._driver.cuDeviceGet(ctypes.byref(device), 0)):
            raise NoEngineHereError(
                f"a TensorRT engine is built on the GPU that is to run it, and CUDA sees none here "
                f"({self._reason(error)}): see `penstock doctor`"
            )
        return device

    def _name(self, device: ctypes.c_int) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", text, _NAME_BYTES, device)
        return text.value.decode(errors="replace")

    def _capability(self, device: ctypes.c_int) -> Capability:
        numbers = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            numbers.append(value.value)
        return numbers[0], numbers[1]

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise OptimizeError(f"{name} failed: {self._reason(error)}")

    def _reason(self, error: int) -> str:
        text = ctypes.c_char_p()
        if self._driver.cuGetErrorString(error, ctypes.byref(text)) or not text.value:
            return f"CUDA error {error}"
        return text.value.decode(errors="replace")
