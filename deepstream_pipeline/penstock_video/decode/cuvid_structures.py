"""Structures of NVIDIA's libnvcuvid for ctypes, as in the Video Codec SDK 13 (nvcuvid.h, cuviddec.h).

Every driver since 570 has them. Only the fields that are used have names.
"""

import ctypes
from ctypes import c_int, c_longlong, c_short, c_ubyte, c_uint, c_ulong, c_ushort, c_void_p


class Caps(ctypes.Structure):
    """CUVIDDECODECAPS."""

    _fields_ = (
        ("codec", c_int),
        ("chroma", c_int),
        ("bit_depth_minus_8", c_uint),
        ("reserved_1", c_uint * 3),
        ("is_supported", c_ubyte),
        ("engines", c_ubyte),
        ("output_formats", c_ushort),
        ("width_max", c_uint),
        ("height_max", c_uint),
        ("blocks_max", c_uint),
        ("width_min", c_ushort),
        ("height_min", c_ushort),
        ("histogram", c_ubyte * 2),
        ("bins", c_ushort),
        ("reserved_3", c_uint * 10),
    )


class VideoFormat(ctypes.Structure):
    """CUVIDEOFORMAT."""

    _fields_ = (
        ("codec", c_int),
        ("frame_rate", c_uint * 2),
        ("is_progressive", c_ubyte),
        ("luma_bits_minus_8", c_ubyte),
        ("chroma_bits_minus_8", c_ubyte),
        ("surfaces", c_ubyte),
        ("coded_width", c_uint),
        ("coded_height", c_uint),
        ("display_area", c_int * 4),
        ("chroma", c_int),
        ("bit_rate", c_uint),
        ("aspect", c_int * 2),
        ("signal", c_ubyte * 4),
        ("header_bytes", c_uint),
    )


class CreateInfo(ctypes.Structure):
    """CUVIDDECODECREATEINFO."""

    _fields_ = (
        ("width", c_ulong),
        ("height", c_ulong),
        ("surfaces", c_ulong),
        ("codec", c_int),
        ("chroma", c_int),
        ("flags", c_ulong),
        ("bit_depth_minus_8", c_ulong),
        ("is_intra_only", c_ulong),
        ("width_max", c_ulong),
        ("height_max", c_ulong),
        ("reserved_1", c_ulong),
        ("display_area", c_short * 4),
        ("output_format", c_int),  # 0: NV12
        ("deinterlacing", c_int),
        ("target_width", c_ulong),
        ("target_height", c_ulong),
        ("output_surfaces", c_ulong),
        ("lock", c_void_p),
        ("target_area", c_short * 4),
        ("has_histogram", c_ulong),
        ("reserved_2", c_ulong * 4),
    )


class ParserParams(ctypes.Structure):
    """CUVIDPARSERPARAMS."""

    _fields_ = (
        ("codec", c_int),
        ("surfaces", c_uint),
        ("clock_hz", c_uint),
        ("error_threshold", c_uint),
        ("display_delay", c_uint),
        ("flags", c_uint),
        ("reserved_1", c_uint * 4),
        ("user_data", c_void_p),
        ("on_format", c_void_p),
        ("on_picture", c_void_p),
        ("on_display", c_void_p),
        ("on_operating_point", c_void_p),
        ("on_sei", c_void_p),
        ("reserved_2", c_void_p * 5),
        ("extended", c_void_p),
    )


class SourcePacket(ctypes.Structure):
    """CUVIDSOURCEDATAPACKET."""

    _fields_ = (("flags", c_ulong), ("size", c_ulong), ("content", c_void_p), ("timestamp", c_longlong))


class DisplayInfo(ctypes.Structure):
    """CUVIDPARSERDISPINFO."""

    _fields_ = (
        ("index", c_int),
        ("is_progressive", c_int),
        ("is_top_first", c_int),
        ("repeat", c_int),
        ("timestamp", c_longlong),
    )


class ProcessParams(ctypes.Structure):
    """CUVIDPROCPARAMS."""

    _fields_ = (
        ("is_progressive", c_int),
        ("is_second_field", c_int),
        ("is_top_first", c_int),
        ("is_unpaired", c_int),
        ("raw", c_uint * 10),
        ("stream", c_void_p),
        ("reserved_2", c_uint * 46),
        ("histogram", c_void_p),
        ("reserved_3", c_void_p),
    )


class DecodeStatus(ctypes.Structure):
    """CUVIDGETDECODESTATUS."""

    _fields_ = (("status", c_int), ("reserved_1", c_uint * 31), ("reserved_2", c_void_p * 8))
