"""The video program's CUDA kernels, compiled as C++ and run on the CPU: their own source, without a GPU.

`card(folder, monkeypatch)` is a Device of the stand-in of the driver that launches them, in the host's memory.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_video.gpu.device import Device
from penstock_video.preprocess import device_rows
from penstock_video.preprocess.kernels import PAINT_KERNEL, ROW_KERNELS, SOURCE, THUMBNAIL_KERNEL
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, KernelFunction, install

_CUDA_WORDS = """
#include <math.h>
#define __device__
#define __global__
struct Place { int x, y, z; };
static Place blockIdx, blockDim, threadIdx;
"""
_ALL_THREADS = """
extern "C" void run_%(name)s(int grid_x, int grid_y, int grid_z, int block_x, int block_y, void** arguments) {
  blockDim.x = block_x; blockDim.y = block_y;
  for (blockIdx.z = 0; blockIdx.z < grid_z; blockIdx.z++)
  for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++)
      for (threadIdx.y = 0; threadIdx.y < block_y; threadIdx.y++)
        for (threadIdx.x = 0; threadIdx.x < block_x; threadIdx.x++)
          %(name)s(%(arguments)s);
}
"""
_PARAMETERS = {
    **dict.fromkeys(ROW_KERNELS.values(), ("Picture", "Row", "Thumbnail")),
    PAINT_KERNEL: ("Picture", "Whole"),
    THUMBNAIL_KERNEL: ("Picture", "Thumbnail"),
}


def compile_kernels(folder: Path) -> ctypes.CDLL:
    """Skips where no C++ compiler is installed."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the kernels' source is not tried on the CPU")
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    launched = "".join(_launches(name, kinds) for name, kinds in _PARAMETERS.items())
    source.write_text(_CUDA_WORDS + SOURCE + launched)
    flags = ("-O2", "-shared", "-fPIC", "-ffp-contract=off", "-std=c++14")
    subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=60)
    return ctypes.CDLL(str(library))


def card(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> tuple[Device, FakeDriver]:
    """In the place of cuda-bindings and of NVRTC for the length of a test."""
    driver = install(monkeypatch)
    driver.kernels.update({name: _launcher(library, name) for name in _PARAMETERS})
    monkeypatch.setattr(device_rows, "cubin_for", lambda capability: b"no cubin")
    return Device.open(), driver


def _launches(name: str, kinds: tuple[str, ...]) -> str:
    arguments = ", ".join(f"*(const {kind}*)arguments[{index}]" for index, kind in enumerate(kinds))
    return _ALL_THREADS % {"name": name, "arguments": arguments}


def _launcher(library: ctypes.CDLL, name: str) -> KernelFunction:
    run = library[f"run_{name}"]

    def launch(grid: tuple[int, int, int], block: tuple[int, int, int], arguments: int) -> None:
        run(*grid, block[0], block[1], ctypes.c_void_p(arguments))

    return launch
