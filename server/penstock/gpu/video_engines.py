"""Video codecs that a GPU decodes. Runs in a child process, because a call into a broken driver may hang.

Uses ctypes (cuvidGetDecoderCaps of libnvcuvid), so it needs no package.
"""

import ctypes
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from penstock.gpu.nvml import ChildProcessFailed, run_json_child

READ_TIMEOUT_S = 10.0  # the first context after boot takes seconds
_PROGRAM = (sys.executable, "-P", "-m", "penstock.gpu.video_engines")
_CUDA, _CUVID = "libcuda.so.1", "libnvcuvid.so.1"
_CODECS = {"H.264": 4, "HEVC": 8}  # cudaVideoCodec; the codecs that the video program decodes on the GPU
_CHROMA_420 = 1


class EngineOutcome(StrEnum):
    """Result of the query."""

    ANSWERED = "answered"
    NO_CUDA = f"{_CUDA} is not here"
    NO_LIBRARY = f"{_CUVID} is not here"
    TIMED_OUT = "no answer in time"
    FAILED = "failed"


class Codec(msgspec.Struct, frozen=True):
    """A codec with 8 bits and 4:2:0. engines: number of decoders, 0 for none. width, height: maximum in pixels."""

    name: str
    engines: int
    width: int = 0
    height: int = 0


class VideoEngines(msgspec.Struct, frozen=True):
    """Video engines of the first CUDA device."""

    outcome: EngineOutcome
    detail: str = ""
    codecs: tuple[Codec, ...] = ()
    has_nvjpeg: bool = False  # encodes JPEGs on the GPU
    has_nvrtc: bool = False  # compiles the GPU kernels


def read_engines(environ: Mapping[str, str] | None = None) -> VideoEngines:
    """Reads the engines of the first card that CUDA sees. Blocks for at most READ_TIMEOUT_S + 1 s. Failures are in the
    outcome. environ: on top of this process's."""
    try:
        return run_json_child(_PROGRAM, VideoEngines, READ_TIMEOUT_S, environ)
    except ChildProcessFailed as error:
        return VideoEngines(EngineOutcome.TIMED_OUT if error.is_late else EngineOutcome.FAILED, str(error))


class _Caps(ctypes.Structure):
    """CUVIDDECODECAPS of cuviddec.h."""

    _fields_ = (
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bit_depth_minus_8", ctypes.c_uint),
        ("reserved_1", ctypes.c_uint * 3),
        ("is_supported", ctypes.c_ubyte),
        ("engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("most_width", ctypes.c_uint),
        ("most_height", ctypes.c_uint),
        ("most_macroblocks", ctypes.c_uint),
        ("least_width", ctypes.c_ushort),
        ("least_height", ctypes.c_ushort),
        ("has_histogram", ctypes.c_ubyte),
        ("counter_bits", ctypes.c_ubyte),
        ("most_bins", ctypes.c_ushort),
        ("reserved_3", ctypes.c_uint * 10),
    )


class _CallFailed(Exception):
    """A driver call failed. The text has the function and CUDA's error code."""


def query_engines() -> VideoEngines:
    """Queries in this process; may hang."""
    return msgspec.structs.replace(
        query_driver(), has_nvjpeg=_has_library("libnvjpeg"), has_nvrtc=_has_library("libnvrtc")
    )


def query_driver(cuda: Any = None, cuvid: Any = None) -> VideoEngines:
    """Queries in this process; may hang. cuda, cuvid: loaded libraries, for tests."""
    try:
        cuda = ctypes.CDLL(_CUDA) if cuda is None else cuda
    except OSError:
        return VideoEngines(EngineOutcome.NO_CUDA)
    try:
        cuvid = ctypes.CDLL(_CUVID) if cuvid is None else cuvid
    except OSError:
        return VideoEngines(EngineOutcome.NO_LIBRARY)
    try:
        _make_current(cuda)
        codecs = tuple(_codec(cuvid, name, number) for name, number in _CODECS.items())
    except _CallFailed as error:
        return VideoEngines(EngineOutcome.FAILED, str(error))
    return VideoEngines(EngineOutcome.ANSWERED, codecs=codecs)


def _make_current(cuda: Any) -> None:
    """Makes the first card's primary context current in this thread. It ends with the process."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
        ("cuCtxSetCurrent", (context,)),
    ):
        _call(cuda, name, *arguments)


def _codec(cuvid: Any, name: str, number: int) -> Codec:
    caps = _Caps(codec=number, chroma=_CHROMA_420)
    _call(cuvid, "cuvidGetDecoderCaps", ctypes.byref(caps))
    if not caps.is_supported:
        return Codec(name, 0)
    return Codec(name, caps.engines, caps.most_width, caps.most_height)


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        raise _CallFailed(f"{name} answers {code}")


def _has_library(library: str) -> bool:
    return any(map(_is_loaded, _candidates(library)))


def _candidates(library: str) -> Iterator[str]:
    """Paths of the linker, of pip's packages and of CUDA's toolkits."""
    package = find_spec("nvidia")
    roots = [Path(root) for root in (package.submodule_search_locations or () if package else ())]
    for version in (13, 12):
        name = f"{library}.so.{version}"
        yield name
        for root in roots:
            yield from map(str, root.glob(f"*/lib/{name}"))
        for place in ("lib64", "targets/*/lib"):
            yield from map(str, Path("/usr/local").glob(f"cuda*/{place}/{name}"))


def _is_loaded(path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(query_engines()))
