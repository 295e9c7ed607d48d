"""One CUDA kernel that turns a batch of pictures of unlike sizes into a network's input, and what launches it.

For each of the network's pixels: where it lies in its picture, cv2.INTER_LINEAR's four neighbours and fixed-point
weights (so that the uint8 that comes out is OpenCV's, to the last bit where OpenCV itself uses that arithmetic: when it
makes a picture smaller), then a look-up of what that value becomes (so that the float is server/vision/preprocess.py's,
to the last bit). Padding is black. Turning by EXIF, cropping and the colours' order cost nothing: they are in the steps
by which a picture's bytes are walked (placement.py).

The source compiles as C++, too: that is how it is tested where there is no GPU. On a GPU NVRTC, which torch brings,
compiles it in a fraction of a second; no compiler has to be installed.
"""

import ctypes
from typing import Any

from .errors import LoadError

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
_NAME = b"prepare_pictures"
_BLOCK = (32, 8, 1)
_WORDS = {1: b"unsigned char", 2: b"unsigned short", 4: b"unsigned int"}


class PictureKernel:
    """The kernel for outputs of one element size, loaded into the current device. Launches are asynchronous."""

    def __init__(self, device: Any, element_bytes: int) -> None:
        """Raises LoadError where NVRTC is absent or refuses the device."""
        import torch

        torch.zeros(1, device=device)  # so that the device's primary context is this thread's
        major, minor = torch.cuda.get_device_capability(device)
        image = compile_cubin(major, minor, element_bytes)
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(self._module), image))
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, _NAME))

    def __call__(self, rows: Any, table: Any, out: Any, *, stream: int) -> None:
        """rows (n * ROW.size,) uint8, table (channels, 256) and out (n, channels, height, width), all on the device.

        out may have any strides. stream: a CUDA stream's handle. Raises RuntimeError with CUDA's code.
        """
        count, channels, height, width = out.shape
        arguments = (
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, table, out)),
            *(ctypes.c_int(number) for number in (channels, width, height)),
            *(ctypes.c_longlong(step) for step in out.stride()),
        )
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        grid = (-(-width // _BLOCK[0]), -(-height // _BLOCK[1]), count)
        launch = self._cuda.cuLaunchKernel
        self._check(launch(self._function, *grid, *_BLOCK, 0, ctypes.c_void_p(stream), pointers, None))

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'unknown').decode()} ({code}) of the pictures' kernel")


def compile_cubin(major: int, minor: int, element_bytes: int) -> bytes:
    """The kernel for that compute capability, by NVRTC; needs no GPU. Raises LoadError with the compiler's words."""
    nvrtc = _nvrtc()
    source = b"#define WORD " + _WORDS[element_bytes] + b"\n" + SOURCE.encode()
    # Without --fmad=false the places would be rounded otherwise than on the CPU.
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture=sm_{major}{minor}".encode(), b"--fmad=false")
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, _NAME + b".cu", 0, None, None):
        raise LoadError("NVRTC gives no program for the kernel that prepares pictures")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            said = _nvrtc_bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            log = said.rstrip(b"\0").decode(errors="replace").strip()
            raise LoadError(f"NVRTC refuses the kernel that prepares pictures, for sm_{major}{minor}: {log}")
        return _nvrtc_bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_bytes(size_of: Any, copy: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    copy(program, room)
    return room.raw


def _nvrtc() -> Any:
    """The library that came with torch, where the dynamic linker or torch's own packages have it."""
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    for folder in ("", *_package_folders(major)):
        try:
            return ctypes.CDLL(f"{folder}{name}")
        except OSError:
            continue
    raise LoadError(f"{name} was not found: install the torch that was built for CUDA, with its nvidia packages")


def _package_folders(major: str) -> tuple[str, ...]:
    """Where pip puts NVIDIA's libraries; the name of the folder changed with CUDA 13."""
    from importlib.util import find_spec

    found = find_spec("nvidia")
    roots = list(found.submodule_search_locations or ()) if found else []
    return tuple(f"{root}/{name}/lib/" for root in roots for name in (f"cu{major}", "cuda_nvrtc"))
