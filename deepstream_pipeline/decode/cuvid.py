"""What a card's video engine decodes, as its driver (libnvcuvid) says: in the context that the thread has.

PyNvVideoCodec tells it, too, but makes a CUDA context for each asking: a fifth of a second, and under MPS one client of
the few that a card may have.
"""

import ctypes
from typing import Any

from deepstream_pipeline.errors import NeedsCpu

_LIBRARY = "libnvcuvid.so.1"
_CODECS = {"h264": 4, "hevc": 8}  # cudaVideoCodec
_CHROMA_420 = 1  # cudaVideoChromaFormat_420


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
        ("width_max", ctypes.c_uint),
        ("height_max", ctypes.c_uint),
        ("blocks_max", ctypes.c_uint),
        ("width_min", ctypes.c_ushort),
        ("height_min", ctypes.c_ushort),
        ("histogram", ctypes.c_ubyte * 2),
        ("bins", ctypes.c_ushort),
        ("reserved_3", ctypes.c_uint * 10),
    )


def limits_of(codec: str, library: Any = None) -> dict[str, int]:
    """num_decoder_engines, width_min, height_min, width_max, height_max and mb_num_max (macroblocks), of h264 or hevc
    in 8 bit, 4:2:0. library: libnvcuvid, looked for by default. Raises NeedsCpu where the driver does not say."""
    try:
        library = ctypes.CDLL(_LIBRARY) if library is None else library
    except OSError as error:
        raise NeedsCpu(f"NVIDIA's {_LIBRARY} is not here ({error})") from None
    caps = _Caps(codec=_CODECS[codec], chroma=_CHROMA_420)
    code = library.cuvidGetDecoderCaps(ctypes.byref(caps))
    if code:
        raise NeedsCpu(f"the card does not say what NVDEC takes (cuvidGetDecoderCaps answers {code})")
    return {
        "num_decoder_engines": caps.engines if caps.is_supported else 0,
        "width_min": caps.width_min,
        "height_min": caps.height_min,
        "width_max": caps.width_max,
        "height_max": caps.height_max,
        "mb_num_max": caps.blocks_max,
    }
