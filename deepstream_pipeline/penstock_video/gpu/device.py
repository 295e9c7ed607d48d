"""One GPU by NVIDIA's driver API: memory, streams, copies and kernels."""

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock_video.errors import GpuFailed, GpuFull, GpuUnavailable

IPC_HANDLE_BYTES = 64
# What is handed to other processes is mapped by such pieces: a block that shared one with another would show it, too.
_GRANULE_BYTES = 2 << 20
_PAGE_BYTES = 4096
_BUS_ID_BYTES = 64
_NOT_IN_NAMES = re.compile(r"[^0-9a-z.]")  # of files
# A card has some 2,000 channels, of which each decoder takes as many as it has video engines. A context takes up to 32
# for its streams, which a program whose kernels last microseconds does not miss: of an H200, 16 processes got 279
# decoders with one each, and 24 processes 239 with CUDA's own choice.
_CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS")
_NO_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_FIRST_LOOK_S, _NEXT_LOOK_S = 0.00005, 0.00025  # a row takes 0.1 to 0.3 ms on a busy card
_LATE_SHARE, _LONGEST_S = 0.5, 0.05  # of what was waited already, by which a look may come late; a card that is stuck
_CPU = "use the CPU (decoder: cpu)"


class Kernel(Protocol):
    """A function on the card, from `Device.load`, for `Device.launch`."""

    @property
    def name(self) -> str: ...

    @property
    def handle(self) -> Any: ...


class _Loaded:
    """A loaded module; it stays loaded while the process lives."""

    def __init__(self, name: str, module: Any, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self._module = module


class CudaStream:
    """A CUDA stream. handle: CUDA's number."""

    def __init__(self, device: "Device", handle: int) -> None:
        self.handle = handle
        self._device = device
        self._is_open = True

    def __repr__(self) -> str:
        return f"<Stream {self.handle:#x}>"

    def synchronize(self) -> None:
        """Waits for all its work."""
        self._device.wait(self.handle)

    def close(self) -> None:
        """Destroys the stream; its work is finished first. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._device.call("close a stream", "cuStreamDestroy", self.handle)


class DeviceBlock:
    """Memory of the card, not cleared. address: in this process."""

    def __init__(self, device: "Device", address: int, size_bytes: int, *, is_own: bool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._device = device
        self._is_own = is_own
        self._is_open = True

    def __repr__(self) -> str:
        return f"<DeviceBlock {self.address:#x}, {self.size_bytes} B>"

    def ipc_handle(self) -> bytes:
        """64 bytes with which another process of this machine opens it. Only for memory allocated here."""
        handle = self._device.call("share memory of the GPU", "cuIpcGetMemHandle", self.address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def close(self) -> None:
        """Frees it, or closes another process's. Waits for the card. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            way = "cuMemFree" if self._is_own else "cuIpcCloseMemHandle"
            self._device.call("give memory of the GPU back", way, self.address)


class Pinned:
    """Pinned host memory. The array must outlive it."""

    def __init__(self, device: "Device", array: npt.NDArray[Any]) -> None:
        self.address: int = array.ctypes.data
        self.size_bytes: int = array.nbytes
        self._array = array
        self._device = device
        self._is_open = True

    def close(self) -> None:
        """Unpins it. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._device.call("let go of pinned memory", "cuMemHostUnregister", self.address)


class Device:
    """A GPU; one per process. name: of the card. context: handle of its primary context. capability: (9, 0).

    bus_id: identifies the card on this host regardless of CUDA_VISIBLE_DEVICES, as "0000-1b-00.0", usable in a file
    name.
    """

    def __init__(self, driver: Any, handle: Any, index: int) -> None:
        """Use `Device.open`."""
        self._driver = driver
        self._ok, self._not_ready = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY
        self.index = index
        self._kernels: dict[str, Kernel] = {}
        self._kernels_lock = threading.Lock()
        self.name: str = _text(self.call("ask the GPU's name", "cuDeviceGetName", 128, handle))
        bus_id = self.call("ask the GPU's place on the bus", "cuDeviceGetPCIBusId", _BUS_ID_BYTES, handle)
        self.bus_id: str = _NOT_IN_NAMES.sub("-", _text(bus_id).lower())
        attributes = driver.CUdevice_attribute
        major, minor = (
            int(self.call("ask the GPU's compute capability", "cuDeviceGetAttribute", wanted, handle))
            for wanted in (
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.capability: tuple[int, int] = (major, minor)
        # Refused where another library of this process made the context: then it waits as that one chose.
        driver.cuDevicePrimaryCtxSetFlags(handle, int(driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC))
        self._context = self.call("make a context on the GPU", "cuDevicePrimaryCtxRetain", handle)
        self.context = int(self._context)
        self.bind()

    @classmethod
    def open(cls, index: int = 0) -> "Device":
        """Opens the index-th card of CUDA_VISIBLE_DEVICES; its context is current in this thread. Uses one channel for
        kernels and one for copies, unless the environment says otherwise.

        Raises GpuUnavailable, with what is missing.
        """
        with _few_channels():
            return cls._opened(_driver(), index)

    @classmethod
    def _opened(cls, driver: Any, index: int) -> "Device":
        count = _count(driver)
        if not 0 <= index < count:
            cards = f"{count} GPU{'s' if count != 1 else ''}"
            raise GpuUnavailable(
                f"there is no GPU {index}: CUDA shows {cards} here, from 0; set gpu: device, or {_CPU}"
            )
        error, handle = driver.cuDeviceGet(index)
        if error == driver.CUresult.CUDA_SUCCESS:
            try:
                return cls(driver, handle, index)
            except GpuFailed as failed:
                raise GpuUnavailable(f"GPU {index} cannot be used: {failed.message}") from failed
        raise GpuUnavailable(f"GPU {index} cannot be used: {_name_of(error)}; see nvidia-smi, or {_CPU}")

    def __repr__(self) -> str:
        return f"<Device {self.index}: {self.name}>"

    def bind(self) -> None:
        """Makes its context current in this thread, in microseconds. Call it once per thread, and after a library
        changed it."""
        (error,) = self._driver.cuCtxSetCurrent(self._context)
        if error != self._ok:
            raise _failed("bind a thread to the GPU", error)

    def new_stream(self) -> CudaStream:
        """A stream that waits for no other stream, including the default one."""
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return CudaStream(self, int(self.call("make a stream", "cuStreamCreate", flags)))

    def allocate(self, size_bytes: int) -> DeviceBlock:
        """Allocates memory, at least 2 MiB: use one block per purpose, not per row."""
        taken = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        address = self.call(f"allocate {size_bytes} B on the GPU", "cuMemAlloc", taken)
        return DeviceBlock(self, int(address), size_bytes, is_own=True)

    def open_block(self, ipc_handle: bytes, size_bytes: int) -> DeviceBlock:
        """Opens memory of another process on the same card, by its `ipc_handle`."""
        handle = self._driver.CUipcMemHandle()
        if len(ipc_handle) != IPC_HANDLE_BYTES:
            raise GpuFailed(f"a handle of GPU memory has {IPC_HANDLE_BYTES} bytes, not {len(ipc_handle)}")
        ctypes.memmove(handle.getPtr(), ipc_handle, IPC_HANDLE_BYTES)
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        address = self.call("open another process's memory of the GPU", "cuIpcOpenMemHandle", handle, flags)
        return DeviceBlock(self, int(address), size_bytes, is_own=False)

    def pin(self, array: npt.NDArray[Any]) -> Pinned:
        """Pins the array's pages for copies without the CPU. C order, not empty."""
        pinned = Pinned(self, array)
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE
        self.call(f"pin {pinned.size_bytes} B of memory", "cuMemHostRegister", pinned.address, pinned.size_bytes, flags)
        return pinned

    def copy(self, to: int, from_: int, size_bytes: int, stream: int) -> None:
        """Copies in stream order, between card and host or within one; pin host memory."""
        (error,) = self._driver.cuMemcpyAsync(to, from_, size_bytes, stream)
        if error != self._ok:
            raise _failed(f"copy {size_bytes} B", error)

    def copy_within(self, to: int, from_: int, size_bytes: int, stream: int) -> None:
        """Copies within the card: an address outside it is refused and not read."""
        (error,) = self._driver.cuMemcpyDtoDAsync(to, from_, size_bytes, stream)
        if error != self._ok:
            raise _failed(f"copy {size_bytes} B within the GPU", error)

    def wait(self, stream: int) -> None:
        """Waits for the stream; raises errors of its earlier work."""
        pause_s, waited_s = _FIRST_LOOK_S, 0.0
        while True:
            time.sleep(pause_s)
            waited_s += pause_s
            (error,) = self._driver.cuStreamQuery(stream)
            if error != self._not_ready:
                break
            pause_s = min(max(_NEXT_LOOK_S, _LATE_SHARE * waited_s), _LONGEST_S)
        if error != self._ok:
            raise _failed("wait for the GPU", error)

    def is_lost(self) -> bool:
        """Whether the context is broken. Call it after a failure, which may concern only that call. Waits for the
        card."""
        try:
            self.bind()
            self.call("go on after a failure", "cuCtxSynchronize")
        except GpuFailed:
            return True
        return False

    def load(self, image: bytes, name: str) -> Kernel:
        """The function `name` of a compiled module (a cubin for this card's capability)."""
        module = self.call(f"load the kernel {name}", "cuModuleLoadData", image)
        return _Loaded(name, module, self.call(f"find the kernel {name}", "cuModuleGetFunction", module, name.encode()))

    def kernel(self, name: str, compiled: Callable[[tuple[int, int]], bytes]) -> Kernel:
        """The kernel of compiled(capability), loaded once."""
        with self._kernels_lock:
            if name not in self._kernels:
                self._kernels[name] = self.load(compiled(self.capability), name)
            return self._kernels[name]

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: int, stream: int
    ) -> None:
        """Launches in stream order. arguments: address of an array of parameter addresses; read at once."""
        (error,) = self._driver.cuLaunchKernel(kernel.handle, *grid, *block, 0, stream, arguments, 0)
        if error != self._ok:
            raise _failed(f"launch {kernel.name}", error)

    def call(self, doing: str, function: str, *arguments: Any) -> Any:
        """Calls a driver function. Raises GpuFailed with CUDA's error name and the action."""
        error, *values = getattr(self._driver, function)(*arguments)
        if error != self._ok:
            raise _failed(doing, error)
        return values[0] if values else None


def zeros_pinned(device: Device, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], Pinned]:
    """(an array of its own pages, its pinning)."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = np.zeros(count + 2 * _PAGE_BYTES, np.uint8)
    begin = -pages.ctypes.data % _PAGE_BYTES
    own = pages[begin : begin + -(-count // _PAGE_BYTES) * _PAGE_BYTES]
    return own[:count].view(dtype).reshape(shape), device.pin(own)


@contextmanager
def _few_channels() -> Iterator[None]:
    """Limits channels of the context that is created meanwhile, not of child processes."""
    unsaid = [name for name in _CONNECTIONS if name not in os.environ]
    os.environ.update(dict.fromkeys(unsaid, "1"))
    try:
        yield
    finally:
        for name in unsaid:
            os.environ.pop(name, None)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise GpuUnavailable(
            "the package cuda-bindings is not installed: run make gpu in a checkout, "
            f"else pip install 'penstock[gpu]', or {_CPU}"
        ) from None
    return driver


def _count(driver: Any) -> int:
    try:
        (error,) = driver.cuInit(0)
    except (RuntimeError, OSError):  # cuda-bindings finds no libcuda.so.1
        raise GpuUnavailable(
            f"NVIDIA's driver library libcuda.so.1 is not here: install the driver (in a container: run it with "
            f"--gpus all), or {_CPU}"
        ) from None
    no_device = driver.CUresult.CUDA_ERROR_NO_DEVICE
    if error == no_device:
        raise GpuUnavailable(f"CUDA shows no GPU here: see nvidia-smi and CUDA_VISIBLE_DEVICES, or {_CPU}")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise GpuUnavailable(f"CUDA does not start: {_name_of(error)}; see nvidia-smi, or {_CPU}")
    error, count = driver.cuDeviceGetCount()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise GpuUnavailable(f"CUDA does not count its GPUs: {_name_of(error)}; see nvidia-smi, or {_CPU}")
    return int(count)


def _failed(doing: str, error: Any) -> GpuFailed:
    name = _name_of(error)
    return (GpuFull if name == _NO_MEMORY else GpuFailed)(f"{name}: could not {doing}")


def _name_of(error: Any) -> str:
    return str(getattr(error, "name", error))


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode(errors="replace")
