"""The CUDA kernel that prepares pictures, compiled as C++ and run on the CPU: its own source, without a GPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.engines.torch_serving.picture_kernel import NO_PICTURE, SOURCE, PixelLayout, kernel_row
from penstock.engines.torch_serving.picture_spec import PictureSpec

_CUDA_WORDS = """
#include <math.h>
#define __device__
#define __global__
#define WORD unsigned int
struct Place { int x, y, z; };
static Place blockIdx, blockDim = {1, 1, 1}, threadIdx;
"""
_ALL_THREADS = """
extern "C" void run(const void* pictures, const WORD* table, WORD* out, int count, int channels, int width, int height,
                    long long picture_step, long long channel_step, long long row_step, long long column_step) {
  for (blockIdx.z = 0; blockIdx.z < count; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < height; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < width; blockIdx.x++)
        prepare_pictures((const Picture*)pictures, table, out, channels, width, height,
                         picture_step, channel_step, row_step, column_step);
}
"""


def compile_kernel(folder: Path) -> ctypes.CDLL:
    """Skips where no C++ compiler is installed."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the kernel's source is not tried on the CPU")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(_CUDA_WORDS + SOURCE + _ALL_THREADS)
    flags = ("-O1", "-shared", "-fPIC", "-ffp-contract=off")
    subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=60)
    return ctypes.CDLL(str(library))


def run_kernel(
    kernel: ctypes.CDLL,
    pictures: list[tuple[npt.NDArray[np.uint8], PixelLayout] | None],
    table: npt.NDArray[np.float32],
    spec: PictureSpec,
    *,
    is_channels_last: bool = False,
) -> npt.NDArray[np.float32]:
    """(pictures, channels, height, width) of the pictures as decoders left them in memory; None for a refused one."""
    shape = (len(pictures), spec.channels, spec.height, spec.width)
    if is_channels_last:
        out = np.full((shape[0], shape[2], shape[3], shape[1]), np.nan, np.float32).transpose(0, 3, 1, 2)
    else:
        out = np.full(shape, np.nan, np.float32)
    rows = b"".join(NO_PICTURE if one is None else kernel_row(one[1], spec).row(one[0].ctypes.data) for one in pictures)
    launch(kernel, rows, table, out)
    return out


def launch(kernel: ctypes.CDLL, rows: bytes, table: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
    """As PictureKernel is called, with arrays of the CPU's. out: (pictures, channels, height, width), any strides."""
    count, channels, height, width = out.shape
    kernel.run(
        ctypes.c_char_p(rows),
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        *(ctypes.c_int(number) for number in (count, channels, width, height)),
        *(ctypes.c_longlong(step // 4) for step in out.strides),
    )
