"""A stand-in for libcuda.so.1: the driver's functions that Penstock calls, with the host's memory as the card's.

Names and order of arguments as in docs.nvidia.com/cuda/cuda-driver-api; tests/gpu/test_cuda_driver.py asks a real one.
"""

import ctypes
from typing import Any

from tests.optimize.tensorrt.fake_tensorrt import STREAM

NO_DEVICE, OUT_OF_MEMORY, INVALID_VALUE = 100, 2, 1
_TEXTS = {NO_DEVICE: b"no CUDA-capable device is detected", OUT_OF_MEMORY: b"out of memory"}


class FakeCuda:
    """One card. capability: (major, minor). init: what cuInit answers. memory_bytes: of the card."""

    def __init__(self, capability: tuple[int, int] = (9, 0), *, init: int = 0, memory_bytes: int = 1 << 30) -> None:
        self._capability, self._init, self._left = capability, init, memory_bytes
        self.live: dict[int, Any] = {}

    def cuInit(self, flags: int) -> int:
        """Flags must be 0."""
        return self._init if flags == 0 else INVALID_VALUE

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        """Card 0."""
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:
        """Fills the caller's buffer."""
        assert ctypes.sizeof(name) == length
        assert isinstance(device, ctypes.c_int)
        name.value = b"NVIDIA Fake"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        """75 and 76 are the compute capability."""
        value._obj.value = self._capability[{75: 0, 76: 1}[attribute]]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        """Shared with the runtime."""
        context._obj.value = 1234
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        """Of the calling thread."""
        return 0 if context.value == 1234 else INVALID_VALUE

    def cuStreamCreate(self, stream: Any, flags: ctypes.c_uint) -> int:
        """One is enough."""
        stream._obj.value = STREAM
        return 0

    def cuStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        """Of that one."""
        return 0 if stream.value == STREAM else INVALID_VALUE

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        """0 bytes are an error, as with the real one."""
        if not size.value:
            return INVALID_VALUE
        if size.value > self._left:
            return OUT_OF_MEMORY
        memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(memory)
        self.live[address._obj.value] = memory
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        """Once."""
        return 0 if self.live.pop(address.value, None) is not None else INVALID_VALUE

    def cuMemcpyHtoD_v2(self, target: ctypes.c_uint64, source: ctypes.c_void_p, size: ctypes.c_size_t) -> int:
        """Within what was allocated."""
        if target.value not in self.live or size.value > ctypes.sizeof(self.live[target.value]):
            return INVALID_VALUE
        ctypes.memmove(target.value, source.value or 0, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, target: ctypes.c_void_p, source: ctypes.c_uint64, size: ctypes.c_size_t) -> int:
        """Within what was allocated."""
        if source.value not in self.live or size.value > ctypes.sizeof(self.live[source.value]):
            return INVALID_VALUE
        ctypes.memmove(target.value or 0, source.value, size.value)
        return 0

    def cuGetErrorString(self, error: int, text: Any) -> int:
        """1 for a number that it does not know."""
        if error not in _TEXTS:
            return INVALID_VALUE
        text._obj.value = _TEXTS[error]
        return 0
