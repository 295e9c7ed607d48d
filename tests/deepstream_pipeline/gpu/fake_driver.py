"""A stand-in for cuda.bindings.driver: the host's memory for a card's, every stream in order and done at once.

`install(monkeypatch)` replaces the package for every Device. Its resources are counted, so
that a test can say that all was given back; `fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")` makes a call fail. A
handle for other processes opens in this process only. Kernels are Python functions: `kernels["name"] = function(grid,
block, arguments)`, arguments as the driver gets them.
"""

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

KernelFunction = Callable[[tuple[int, int, int], tuple[int, int, int], int], None]


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class CUipcMemHandle:
    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class FakeDriver(ModuleType):
    """The functions of the driver that deepstream_pipeline/gpu uses. Wrong addresses are refused."""

    CUresult = CUresult
    CUipcMemHandle = CUipcMemHandle
    CUctx_flags = SimpleNamespace(CU_CTX_SCHED_BLOCKING_SYNC=4)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )

    def __init__(self, devices: int = 1) -> None:
        super().__init__("cuda.bindings.driver")
        self.devices = devices
        self.first_bus = 0x1B  # of the card that is number 0 here
        self.kernels: dict[str, KernelFunction] = {}
        self.calls: list[str] = []
        self.blocks: dict[int, Any] = {}  # allocated here
        self.opened: list[int] = []  # opened from handles
        self.pinned: dict[int, int] = {}
        self.streams: set[int] = set()
        self._failures: dict[str, CUresult] = {}
        self._next = 0x1000

    def fail(self, function: str, error: str | None) -> None:
        """From now on every call of that function fails so; None: it succeeds again."""
        if error is None:
            self._failures.pop(function, None)
        else:
            self._failures[function] = CUresult[error]

    @property
    def is_all_given_back(self) -> bool:
        return not (self.blocks or self.opened or self.pinned or self.streams)

    def _called(self, function: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(function)
        error = self._failures.get(function, CUresult.CUDA_SUCCESS)
        return (error, *(values if error == CUresult.CUDA_SUCCESS else [None] * len(values)))

    def _refused(self, *, is_right: bool, values: int = 0) -> tuple[Any, ...]:
        return (CUresult.CUDA_SUCCESS if is_right else CUresult.CUDA_ERROR_INVALID_VALUE, *[None] * values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._called("cuInit")

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._called("cuDeviceGetCount", self.devices)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._called("cuDeviceGet", index)

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return self._called("cuDeviceGetName", b"A card of the tests".ljust(length, b"\0"))

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return self._called("cuDeviceGetPCIBusId", (b"0000:%02X:00.0" % (self.first_bus + device)).ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self._called("cuDeviceGetAttribute", {75: 9, 76: 0}[attribute])

    def cuDevicePrimaryCtxSetFlags(self, device: int, flags: int) -> tuple[Any, ...]:
        return self._called("cuDevicePrimaryCtxSetFlags")

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self._called("cuDevicePrimaryCtxRetain", 0xC0DE)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        return self._called("cuCtxSetCurrent")

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        self._next += 1
        result = self._called("cuStreamCreate", self._next)
        if result[1] is not None:
            self.streams.add(self._next)
        return result

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        is_right = stream in self.streams
        self.streams.discard(stream)
        return self._refused(is_right=is_right)

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        return self._called("cuStreamQuery")

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._called("cuCtxSynchronize")

    def cuMemAlloc(self, size_bytes: int) -> tuple[Any, ...]:
        result = self._called("cuMemAlloc", 0)
        if result[1] is None:
            return result
        room = np.full(size_bytes + 512, 0xA5, np.uint8)
        address = -(-room.ctypes.data // 512) * 512
        self.blocks[address] = room
        return (result[0], address)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.calls.append("cuMemFree")
        return self._refused(is_right=self.blocks.pop(address, None) is not None)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        if address not in self.blocks:
            return self._refused(is_right=False, values=1)
        handle = CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), address.to_bytes(8, "little"), 8)
        return self._called("cuIpcGetMemHandle", handle)

    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> tuple[Any, ...]:
        address = int.from_bytes(ctypes.string_at(handle.getPtr(), 8), "little")
        if address not in self.blocks:
            return self._refused(is_right=False, values=1)
        result = self._called("cuIpcOpenMemHandle", address)
        if result[1] is not None:
            self.opened.append(address)
        return result

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        is_right = address in self.opened
        if is_right:
            self.opened.remove(address)
        return self._refused(is_right=is_right)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[Any, ...]:
        result = self._called("cuMemHostRegister")
        if result[0] == CUresult.CUDA_SUCCESS:
            self.pinned[address] = size_bytes
        return result

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        return self._refused(is_right=self.pinned.pop(address, None) is not None)

    def cuMemcpyAsync(self, to: int, from_: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        result = self._called("cuMemcpyAsync")
        if result[0] == CUresult.CUDA_SUCCESS:
            ctypes.memmove(to, from_, size_bytes)
        return result

    def cuMemcpyDtoDAsync(self, to: int, from_: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        result = self._called("cuMemcpyDtoDAsync")
        if result[0] != CUresult.CUDA_SUCCESS:
            return result
        if not (self._is_of_the_card(to, size_bytes) and self._is_of_the_card(from_, size_bytes)):
            return self._refused(is_right=False)
        ctypes.memmove(to, from_, size_bytes)
        return result

    def _is_of_the_card(self, address: int, size_bytes: int) -> bool:
        return any(
            begin <= address and address + size_bytes <= begin + room.nbytes - 512
            for begin, room in self.blocks.items()
        )

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        return self._called("cuModuleLoadData", image)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        function = self.kernels.get(name.decode())
        if function is None:
            return (CUresult.CUDA_ERROR_NOT_FOUND, None)
        return self._called("cuModuleGetFunction", function)

    def cuLaunchKernel(self, function: KernelFunction, *rest: int) -> tuple[Any, ...]:
        result = self._called("cuLaunchKernel")
        if result[0] == CUresult.CUDA_SUCCESS:
            function((rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5]), rest[8])
        return result


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None = None) -> FakeDriver:
    """In the place of cuda.bindings.driver for the length of a test."""
    driver = driver or FakeDriver()
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    package.bindings = bindings  # type: ignore[attr-defined]
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    return driver
