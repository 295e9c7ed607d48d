"""CUDA kernels for model input rows, RGB pictures and thumbnails, and their compilation by NVRTC with a cache on
disk.
"""

import ctypes
import hashlib
import os
import stat
import struct
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock_video.errors import GpuFailed, GpuUnavailable
from penstock_video.types import Orientation

SOURCE = r"""
struct Picture {                                              // NV12
  unsigned long long luma, chroma;
  int pitch, at_x, x_by_x, x_by_y, at_y, y_by_x, y_by_y;      // where an upright pixel is stored
  int dark, y_factor, v_to_red, v_to_green, u_to_green, u_to_blue;
  int unused;
};

struct Row {                                                  // steps in elements
  unsigned long long values, out;
  long long channel_step, row_step, column_step;
  double scale_x, scale_y;                                    // source pixels in a resized one
  int width, height, left, top, part_width, part_height, resized_width, resized_height, pad_x, pad_y;
  int is_nearest, is_bgr, is_gray, pad_level;                 // pad_level: the padding's pixel value
};

struct Whole { unsigned long long out; int width, height; };

struct Thumbnail { unsigned long long out; int width, lines, line_step, unused; };

struct Colour { int red, green, blue; };

struct Taps { int first, second, first_weight, second_weight; };

static __device__ int product(int first, int second) { return (first * second) >> 16; }

static __device__ int level(int value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

static __device__ Colour colour_at(const Picture& picture, int x, int y) {
  int column = picture.at_x + x * picture.x_by_x + y * picture.x_by_y;
  int line = picture.at_y + x * picture.y_by_x + y * picture.y_by_y;
  const unsigned char* luma = (const unsigned char*)picture.luma + (long long)line * picture.pitch;
  const unsigned char* chroma = (const unsigned char*)picture.chroma + (long long)(line >> 1) * picture.pitch;
  int bright = product(luma[column] * 8 - picture.dark, picture.y_factor);
  int u = chroma[column & ~1] * 8 - 1024, v = chroma[column | 1] * 8 - 1024;
  Colour colour = {
      level(bright + product(v, picture.v_to_red)),
      level(bright + product(u, picture.u_to_green) + product(v, picture.v_to_green)),
      level(bright + product(u, picture.u_to_blue))};
  return colour;
}

// cv2.cvtColor's, so that it is made before the picture is resized, as on the CPU.
static __device__ int gray_of(Colour colour) {
  return (colour.red * 9798 + colour.green * 19235 + colour.blue * 3735 + 16384) >> 15;
}

// Where OpenCV's resize takes a resized pixel from: two source pixels and their weights, in 2048ths.
static __device__ Taps taps(int at, double scale, int length, int is_nearest) {
  if (is_nearest) {
    int only = (int)floor(at * scale);
    only = only < length - 1 ? only : length - 1;
    Taps found = {only, only, 2048, 0};
    return found;
  }
  float source = (float)((at + 0.5) * scale - 0.5);
  int first = (int)floorf(source);
  float fraction = source - first;
  if (first < 0) { first = 0; fraction = 0.0f; }
  if (first >= length - 1) { first = length - 1; fraction = 0.0f; }
  int second = first + 1 < length ? first + 1 : first;
  Taps found = {first, second, (int)rintf((1.0f - fraction) * 2048.0f), (int)rintf(fraction * 2048.0f)};
  return found;
}

static __device__ int mixed(Taps across, Taps down, int a, int b, int c, int d) {
  int above = a * across.first_weight + b * across.second_weight;
  int below = c * across.first_weight + d * across.second_weight;
  int value = product(down.first_weight, above >> 4) + product(down.second_weight, below >> 4);
  return (value + 2) >> 2;
}

// values (channels, 256): what a pixel's value becomes. One thread makes one pixel of the network's.
template <typename Word>
static __device__ void make_row(const Picture& picture, const Row& row) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= row.width || y >= row.height) return;
  const Word* values = (const Word*)row.values;
  Word* out = (Word*)row.out + y * row.row_step + x * row.column_step;
  int at_x = x - row.pad_x, at_y = y - row.pad_y;
  if (at_x < 0 || at_y < 0 || at_x >= row.resized_width || at_y >= row.resized_height) {
    for (int channel = 0; channel < (row.is_gray ? 1 : 3); channel++)
      out[channel * row.channel_step] = values[channel * 256 + row.pad_level];
    return;
  }
  Taps across = taps(at_x, row.scale_x, row.part_width, row.is_nearest);
  Taps down = taps(at_y, row.scale_y, row.part_height, row.is_nearest);
  Colour a = colour_at(picture, row.left + across.first, row.top + down.first);
  Colour b = colour_at(picture, row.left + across.second, row.top + down.first);
  Colour c = colour_at(picture, row.left + across.first, row.top + down.second);
  Colour d = colour_at(picture, row.left + across.second, row.top + down.second);
  if (row.is_gray) {
    out[0] = values[mixed(across, down, gray_of(a), gray_of(b), gray_of(c), gray_of(d))];
    return;
  }
  int red = mixed(across, down, a.red, b.red, c.red, d.red);
  int green = mixed(across, down, a.green, b.green, c.green, d.green);
  int blue = mixed(across, down, a.blue, b.blue, c.blue, d.blue);
  out[0] = values[row.is_bgr ? blue : red];
  out[row.channel_step] = values[256 + green];
  out[2 * row.channel_step] = values[512 + (row.is_bgr ? red : blue)];
}

// out (height, width, 3) RGB, upright. One thread makes one pixel.
extern "C" __global__ void paint(Picture picture, Whole whole) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= whole.width || y >= whole.height) return;
  Colour colour = colour_at(picture, x, y);
  unsigned char* out = (unsigned char*)whole.out + ((long long)y * whole.width + x) * 3;
  out[0] = (unsigned char)colour.red;
  out[1] = (unsigned char)colour.green;
  out[2] = (unsigned char)colour.blue;
}

// The share of pixel `at` that lies between begin and end.
static __device__ float share(int at, float begin, float end) {
  float from = begin > at ? begin : (float)at, to = end < at + 1 ? end : (float)(at + 1);
  return to > from ? to - from : 0.0f;
}

// out (18, 64): means of the luma as it is stored, of every line_step-th line. One thread makes one mean.
static __device__ void make_thumbnail(const Picture& picture, const Thumbnail& small) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= 64 || y >= 18) return;
  float width = small.width / 64.0f, height = small.lines / 18.0f;
  float left = x * width, right = left + width, top = y * height, bottom = top + height;
  float sum = 0.0f;
  for (int line = (int)top; line < small.lines && line < bottom; line++) {
    const unsigned char* luma = (const unsigned char*)picture.luma + (long long)line * small.line_step * picture.pitch;
    float of_line = 0.0f;
    for (int column = (int)left; column < small.width && column < right; column++)
      of_line += luma[column] * share(column, left, right);
    sum += of_line * share(line, top, bottom);
  }
  ((unsigned char*)small.out)[y * 64 + x] = (unsigned char)level((int)rintf(sum / (width * height)));
}

extern "C" __global__ void thumbnail(Picture picture, Thumbnail small) { make_thumbnail(picture, small); }

// In one launch, side by side: the row by the blocks of z 0, the thumbnail by those of z 1.
template <typename Word>
static __device__ void make_both(const Picture& picture, const Row& row, const Thumbnail& small) {
  if (blockIdx.z) make_thumbnail(picture, small);
  else make_row<Word>(picture, row);
}

extern "C" __global__ void row_of_1(Picture picture, Row row, Thumbnail small) {
  make_both<unsigned char>(picture, row, small);
}
extern "C" __global__ void row_of_2(Picture picture, Row row, Thumbnail small) {
  make_both<unsigned short>(picture, row, small);
}
extern "C" __global__ void row_of_4(Picture picture, Row row, Thumbnail small) {
  make_both<unsigned int>(picture, row, small);
}
"""

PICTURE = struct.Struct("<2Q14i")
ROW = struct.Struct("<2Q3q2d14i")
WHOLE = struct.Struct("<Q2i")
THUMBNAIL = struct.Struct("<Q4i")
ADDRESS, ADDRESSES = struct.Struct("<Q"), struct.Struct("<2Q")  # of an output; of a picture's luma and chroma
ROW_VALUES_AT, ROW_OUT_AT = 0, 8  # in a ROW
ROW_KERNELS = {1: "row_of_1", 2: "row_of_2", 4: "row_of_4"}  # by the bytes of an element
PAINT_KERNEL, THUMBNAIL_KERNEL = "paint", "thumbnail"
THUMBNAIL_SIZE = (64, 18)  # decode/likeness.py's
_THUMBNAIL_LINES = 36

# swscale's, by AVCOL_SPC, of limited range, in 65,536ths: V to red, U to blue, U and V to green. Others are BT.601.
_BT_601 = (104597, 132201, -25675, -53279)
_MATRICES = {
    1: (117489, 138438, -13975, -34925),  # BT.709
    4: (104448, 132798, -24759, -53109),  # FCC
    7: (117579, 136230, -16907, -35559),  # SMPTE 240M
    9: (110013, 140363, -12277, -42626),  # BT.2020
}


def picture_arguments(pitch: int, stored_size: tuple[int, int], orientation: Orientation) -> tuple[int, ...]:
    """PICTURE's words from pitch to y_by_y, for a stored picture (width, height) with an orientation."""
    is_transposed, is_mirrored_x, is_mirrored_y = orientation
    width, height = orientation.size(*stored_size)
    x = (width - 1, -1) if is_mirrored_x else (0, 1)  # start of upright x along its stored axis, and its step
    y = (height - 1, -1) if is_mirrored_y else (0, 1)
    if is_transposed:  # upright y runs along stored columns, upright x along stored rows
        return (pitch, y[0], 0, y[1], x[0], x[1], 0)
    return (pitch, x[0], x[1], 0, y[0], 0, y[1])


def colour_arguments(matrix: int, *, is_full_range: bool) -> tuple[int, ...]:
    """PICTURE's words from dark to u_to_blue: swscale's 16-bit factors, in 8,192ths.

    matrix: AVCOL_SPC.
    """
    factors: tuple[int, ...] = _MATRICES.get(matrix, _BT_601)
    y_factor, dark = 255 * 65536 // 219, 16 * 8
    if is_full_range:
        y_factor, dark = 65536, 0
        factors = tuple(abs(factor) * 224 // 255 * (1 if factor > 0 else -1) for factor in factors)
    y, red, blue, green_of_u, green_of_v = ((factor * 8192 + 32768) >> 16 for factor in (y_factor, *factors))
    return (dark, y, red, green_of_v, green_of_u, blue)


def thumbnail_arguments(width: int, height: int) -> tuple[int, int, int]:
    """THUMBNAIL's words from width to line_step, of a stored picture."""
    step = max(height // _THUMBNAIL_LINES, 1)
    return (width, -(-height // step), step)


_INSTALL = "run make gpu in a checkout, else pip install 'penstock[gpu]'"
_CACHED_SOURCES = 16  # compiled sources: other versions of the program, other cards of the machine
_MOST_BYTES = 4 << 20
_DIGEST_BYTES = 32
_COMPILERS = ("cuda_nvrtc/lib", "cu13/lib")  # in the packages nvidia: of nvidia-cuda-nvrtc-cu12, and of CUDA 13's
# Without --fmad=false the places would be rounded otherwise than on the CPU.
_OPTIONS = (b"--fmad=false", b"--std=c++14")


def cubin_for(capability: tuple[int, int], folder: Path | None = None) -> bytes:
    """Of all kernels. folder: where compiled ones are kept, None for the user's own.

    Raises GpuUnavailable where NVRTC is missing or knows no such card, GpuFailed where it refuses the source.
    """
    nvrtc = _nvrtc()
    version = _version(nvrtc)
    architecture = f"sm_{capability[0]}{capability[1]}"
    inputs = "\0".join((SOURCE, architecture, version, repr(_OPTIONS)))
    name = f"{architecture}-{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.cubin"
    folder = folder or cache_folder()
    if folder is None:
        return compile_cubin(nvrtc, architecture)
    kept = _read(folder, name)
    if kept is not None:
        return kept
    made = compile_cubin(nvrtc, architecture)
    with suppress(OSError):
        _keep(folder, name, made)
    return made


def cache_folder() -> Path | None:
    """The user's own; None for one who has no home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "penstock" / "kernels" if os.path.isabs(root) else None


def compile_cubin(nvrtc: Any, architecture: str) -> bytes:
    """By NVRTC, which needs no card. architecture: sm_90."""
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"penstock.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *_OPTIONS]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            said = " ".join(log.rstrip(b"\0").decode(errors="replace").split())
            if error == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION or not said.strip():
                raise GpuUnavailable(
                    f"NVRTC {_version(nvrtc)} cannot compile for {architecture}: {said or error.name}; "
                    "install another nvidia-cuda-nvrtc, or use the CPU (decoder: cpu)"
                )
            raise GpuFailed(f"NVRTC {_version(nvrtc)} refuses the kernels for {architecture}: {said}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(folder: Path, name: str) -> bytes | None:
    """What is kept under that name, if it is ours and whole."""
    try:
        if not _is_ours(os.lstat(folder)):
            return None
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            known = os.fstat(file.fileno())
            if not (stat.S_ISREG(known.st_mode) and _is_ours(known) and known.st_size <= _MOST_BYTES):
                return None
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _keep(folder: Path, name: str, cubin: bytes) -> None:
    """Whole or not at all; the oldest go beyond a handful."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(os.lstat(folder)):
        return
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, folder / name)
    except OSError:
        os.unlink(temporary)
        raise
    kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[_CACHED_SOURCES:]:
        path.unlink(missing_ok=True)


def _is_ours(known: os.stat_result) -> bool:
    """Whether it is this user's, and not writable by others."""
    is_link = stat.S_ISLNK(known.st_mode)
    return known.st_uid == os.geteuid() and not known.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_link


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise GpuUnavailable(f"the package cuda-bindings is not installed: {_INSTALL}") from None
    _load_compiler()
    return nvrtc


def _load_compiler() -> None:
    """NVRTC as pip installs it, wherever this Python has its packages: cuda-bindings looks for it in the interpreter's
    own folder and where the linker looks, and takes what is loaded. NVRTC 13 does not look beside itself for its
    builtins. Where there is none, it is left to cuda-bindings to find one."""
    package = find_spec("nvidia")
    for root in list(package.submodule_search_locations or ()) if package else []:
        for folder in _COMPILERS:
            compilers = sorted(Path(root, folder).glob("libnvrtc.so.*"))
            if compilers:
                with suppress(OSError):
                    for builtins in Path(root, folder).glob("libnvrtc-builtins.so.*"):
                        ctypes.CDLL(str(builtins))
                    ctypes.CDLL(str(compilers[-1]))
                    return


def _version(nvrtc: Any) -> str:
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as missing:  # cuda-bindings finds no libnvrtc
        raise GpuUnavailable(
            f"NVIDIA's run-time compiler (libnvrtc) is not here: {_INSTALL}, or use the CPU (decoder: cpu)"
        ) from missing
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise GpuFailed(f"{error.name}: could not ask NVRTC's version")
    return f"{major}.{minor}"


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise GpuFailed(f"{error.name}: could not compile the kernels")
    return values[0] if values else None
