"""Compiles a CUDA kernel by torch's NVRTC and launches it by the driver."""

import ctypes
from collections.abc import Sequence
from typing import Any

from .parameters import TorchLoadError


class CudaFunction:
    """A kernel on the device that was current when it was loaded. Launches are asynchronous."""

    def __init__(self, cubin: bytes, name: str) -> None:
        """Raises RuntimeError with CUDA's code."""
        self._name = name
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(self._module), cubin))
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any], *, stream: int
    ) -> None:
        """arguments: ctypes values in the kernel's order. stream: a CUDA stream's handle. Raises RuntimeError."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        launch = self._cuda.cuLaunchKernel
        self._check(launch(self._function, *grid, *block, 0, ctypes.c_void_p(stream), pointers, None))

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} ({code}) of the kernel {self._name}")


def load_kernel(source: str, name: str, device: Any, *, options: Sequence[str] = ()) -> CudaFunction:
    """The kernel, compiled for the device, which becomes current. Raises TorchLoadError, RuntimeError."""
    import torch

    torch.zeros(1, device=device)  # makes the device's primary context current in this thread
    major, minor = torch.cuda.get_device_capability(device)
    return CudaFunction(compile_cubin(source, name, f"sm_{major}{minor}", options), name)


def compile_cubin(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Compiles by NVRTC, without a GPU. architecture: "sm_90". Raises TorchLoadError with the compiler's output."""
    nvrtc = _nvrtc()
    words = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None):
        raise TorchLoadError(f"NVRTC gives no program for the kernel {name}")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words)):
            said = _bytes_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            log = said.rstrip(b"\0").decode(errors="replace").strip()
            raise TorchLoadError(f"NVRTC refuses the kernel {name}, for {architecture}: {log}")
        return _bytes_of(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(size_of: Any, copy: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    copy(program, room)
    return room.raw


def _nvrtc() -> Any:
    """torch's NVRTC, found by the dynamic linker or in torch's packages."""
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    for folder in ("", *_package_folders(major)):
        try:
            return ctypes.CDLL(f"{folder}{name}")
        except OSError:
            continue
    raise TorchLoadError(f"{name} was not found: install the torch that was built for CUDA, with its nvidia packages")


def _package_folders(major: str) -> tuple[str, ...]:
    from importlib.util import find_spec

    found = find_spec("nvidia")
    roots = list(found.submodule_search_locations or ()) if found else []
    return tuple(f"{root}/{name}/lib/" for root in roots for name in (f"cu{major}", "cuda_nvrtc"))
