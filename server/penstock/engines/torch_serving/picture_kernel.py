"""A CUDA kernel that resizes and normalises pictures of any size into a network's input; and its parameters.

Resizes as cv2.INTER_LINEAR, and applies EXIF orientation, crop, padding, colour order and normalisation, as
penstock.vision; tests compare them. Compiled by torch's NVRTC, and as C++ for tests without a GPU.
"""

import ctypes
import math
import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .cuda_kernel import load_kernel
from .picture_spec import PictureFit, PictureSpec

ROW = struct.Struct("<Qqqq6i2d")  # struct Picture of the kernel
NO_PICTURE = ROW.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)  # all black
_ADDRESS = struct.Struct("<Q")
_MAX_SIDES = 8  # before a crop, only the middle of a picture longer than this is resized
# By EXIF's orientation: (swap rows and columns, reverse stored rows, reverse stored columns).
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True)
class ResizeGeometry:
    """The part of an upright picture that is resized, and its position in the network's image."""

    left: int  # left, top, width, height: in source pixels
    top: int
    width: int
    height: int
    resized_width: int
    resized_height: int
    pad_x: int = 0  # negative if cropped, like pad_y
    pad_y: int = 0


class PixelLayout(NamedTuple):
    """Layout of decoded uint8 pixels, before the orientation is applied."""

    width: int
    height: int
    orientation: int
    is_planar: bool  # (channels, height, width), as nvJPEG; else (height, width, channels), as OpenCV; contiguous
    channels: int  # 1 or 3
    color: str  # RGB, BGR or GRAY


@dataclass(frozen=True)
class KernelRow:
    """One picture's kernel parameters, without its address."""

    offset: int
    rest: bytes

    def row(self, address: int) -> bytes:
        """ROW.size bytes. address: of the first stored byte."""
        return _ADDRESS.pack(address + self.offset) + self.rest


def kernel_row(stored: PixelLayout, spec: PictureSpec) -> KernelRow:
    """The kernel's parameters to read the picture upright, in the network's colour order, at its position."""
    swaps, rows_backwards, columns_backwards = _TURNS[stored.orientation]
    column_step = 1 if stored.is_planar else stored.channels
    row_step = stored.width * column_step
    channel_step = stored.width * stored.height if stored.is_planar else 1
    offset = 0
    if rows_backwards:
        offset, row_step = offset + (stored.height - 1) * row_step, -row_step
    if columns_backwards:
        offset, column_step = offset + (stored.width - 1) * column_step, -column_step
    if stored.channels > 1 and stored.color != spec.color:
        offset, channel_step = offset + (stored.channels - 1) * channel_step, -channel_step
    if swaps:
        row_step, column_step = column_step, row_step
    width, height = (stored.height, stored.width) if swaps else (stored.width, stored.height)
    part = resize_geometry(width, height, spec)
    packed = ROW.pack(
        0,
        channel_step,
        row_step,
        column_step,
        part.width,
        part.height,
        part.resized_width,
        part.resized_height,
        part.pad_x,
        part.pad_y,
        1.0 / (part.resized_width / part.width),  # as OpenCV computes it
        1.0 / (part.resized_height / part.height),
    )
    return KernelRow(offset + part.top * row_step + part.left * column_step, packed[_ADDRESS.size :])


def resize_geometry(width: int, height: int, spec: PictureSpec) -> ResizeGeometry:
    """Geometry of an upright picture of that size."""
    if spec.fit is PictureFit.STRETCH:
        return ResizeGeometry(0, 0, width, height, spec.width, spec.height)
    if spec.fit is PictureFit.CROP:
        scale = spec.shorter_side / min(width, height)
        resized_width, resized_height = _scaled(width, scale), _scaled(height, scale)
        pad_x, pad_y = -((resized_width - spec.width) // 2), -((resized_height - spec.height) // 2)
        return _middle(ResizeGeometry(0, 0, width, height, resized_width, resized_height, pad_x, pad_y), spec)
    scale = min(spec.height / height, spec.width / width)
    if spec.fit is PictureFit.PAD_RIGHT_BOTTOM:  # truncates, as nvinfer and YOLOX do
        return ResizeGeometry(0, 0, width, height, max(int(width * scale), 1), max(int(height * scale), 1))
    resized_width, resized_height = _scaled(width, scale), _scaled(height, scale)
    pad_x, pad_y = (spec.width - resized_width) // 2, (spec.height - resized_height) // 2
    return ResizeGeometry(0, 0, width, height, resized_width, resized_height, pad_x, pad_y)


def _scaled(side: int, scale: float) -> int:
    return max(round(side * scale), 1)


def _middle(whole: ResizeGeometry, spec: PictureSpec) -> ResizeGeometry:
    """The middle of a very long picture, more than a crop can show; otherwise the whole picture."""
    if whole.resized_width > _MAX_SIDES * spec.width:
        count = _middle_count(whole.width, whole.resized_width, spec.width)
        size, left = round(count * whole.resized_width / whole.width), (whole.width - count) // 2
        return replace(whole, left=left, width=count, resized_width=size, pad_x=-((size - spec.width) // 2))
    if whole.resized_height > _MAX_SIDES * spec.height:
        count = _middle_count(whole.height, whole.resized_height, spec.height)
        size, top = round(count * whole.resized_height / whole.height), (whole.height - count) // 2
        return replace(whole, top=top, height=count, resized_height=size, pad_y=-((size - spec.height) // 2))
    return whole


def _middle_count(length: int, resized: int, network: int) -> int:
    """Pixels of `length` that become _MAX_SIDES network sides; has length's parity, so that the centre stays."""
    count = math.ceil(length * _MAX_SIDES * network / resized)
    return count + (length - count) % 2


SOURCE = r"""
struct Picture {
  unsigned long long first;                                   // address of the upright part's first byte, channel 0
  long long channel_step, row_step, column_step;              // in bytes, may be negative
  int width, height, resized_width, resized_height, pad_x, pad_y;
  double scale_x, scale_y;                                    // source pixels in a resized one
};

struct Taps { long long first, second; int first_weight, second_weight; };

// Where OpenCV's resize takes a resized pixel from: two source pixels and their weights, in 2048ths.
static __device__ Taps taps(int at, double scale, int length, long long step) {
  float source = (float)((at + 0.5) * scale - 0.5);
  int first = (int)floorf(source);
  float fraction = source - first;
  if (first < 0) { first = 0; fraction = 0.0f; }
  if (first >= length - 1) { first = length - 1; fraction = 0.0f; }
  int second = first + 1 < length ? first + 1 : first;
  Taps found = {first * step, second * step, (int)rintf((1.0f - fraction) * 2048.0f), (int)rintf(fraction * 2048.0f)};
  return found;
}

// table (channels, 256): what a pixel's value becomes. out (pictures, channels, height, width), steps in elements.
extern "C" __global__ void prepare_pictures(
    const Picture* pictures, const WORD* table, WORD* out, int channels, int width, int height,
    long long picture_step, long long channel_step, long long row_step, long long column_step) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  const Picture picture = pictures[blockIdx.z];
  WORD* to = out + blockIdx.z * picture_step + y * row_step + x * column_step;
  int at_x = x - picture.pad_x, at_y = y - picture.pad_y;
  if (at_x < 0 || at_y < 0 || at_x >= picture.resized_width || at_y >= picture.resized_height) {
    for (int channel = 0; channel < channels; channel++) to[channel * channel_step] = table[channel * 256];
    return;
  }
  Taps across = taps(at_x, picture.scale_x, picture.width, picture.column_step);
  Taps down = taps(at_y, picture.scale_y, picture.height, picture.row_step);
  const unsigned char* upper = (const unsigned char*)picture.first + down.first;
  const unsigned char* lower = (const unsigned char*)picture.first + down.second;
  for (int channel = 0; channel < channels; channel++) {
    int above = upper[across.first] * across.first_weight + upper[across.second] * across.second_weight;
    int below = lower[across.first] * across.first_weight + lower[across.second] * across.second_weight;
    int value = ((down.first_weight * (above >> 4)) >> 16) + ((down.second_weight * (below >> 4)) >> 16);
    to[channel * channel_step] = table[channel * 256 + ((value + 2) >> 2)];
    upper += picture.channel_step;
    lower += picture.channel_step;
  }
}
"""
_NAME = "prepare_pictures"
_BLOCK = (32, 8, 1)
_ELEMENT_TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}
# With fused multiply-add, source positions would be rounded differently than on the CPU.
_OPTIONS = ("--fmad=false",)


class PictureKernel:
    """The kernel for one element size, loaded on the current device. Launches are asynchronous."""

    def __init__(self, device: Any, element_bytes: int) -> None:
        """Raises TorchLoadError if NVRTC is missing or fails."""
        source = f"#define WORD {_ELEMENT_TYPES[element_bytes]}\n{SOURCE}"
        self._function = load_kernel(source, _NAME, device, options=_OPTIONS)

    def __call__(self, rows: Any, table: Any, out: Any, *, stream: int) -> None:
        """rows (n * ROW.size,) uint8, table (channels, 256), out (n, channels, height, width) of any strides.

        All on the device. stream: a CUDA stream's handle. Raises RuntimeError with CUDA's code.
        """
        count, channels, height, width = out.shape
        arguments = (
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, table, out)),
            *(ctypes.c_int(number) for number in (channels, width, height)),
            *(ctypes.c_longlong(step) for step in out.stride()),
        )
        grid = (-(-width // _BLOCK[0]), -(-height // _BLOCK[1]), count)
        self._function(grid, _BLOCK, arguments, stream=stream)
