"""What an Annex B packet of H.264 or HEVC says in its headers: its parameter sets, and whether it holds a picture.

Headers stand before the first slice, so nothing behind it is read: of most pictures a few dozen bytes. Pure.
"""

from collections.abc import Iterator
from typing import NamedTuple

_MOST_UNITS = 64  # before the first slice; a packet with more of them is none
_START = b"\x00\x00\x01"
_H264_SPS, _H264_PPS = 7, 8
_HEVC_SPS, _HEVC_SETS = 33, (32, 33, 34)
_HEVC_KEYS = range(16, 22)
_HEVC_SKIPPED = (8, 9)
_HEVC_SLICES = (*range(10), *_HEVC_KEYS)


class Headers(NamedTuple):
    """sequence: its sequence parameter sets, which tell the size, one behind another; empty without. sets: all of its
    parameter sets as a packet would hold them, with start codes. has_picture: a slice of a picture follows; may_be_key:
    one at which a stream can begin; is_skipped: HEVC's RASL, which is none in a stream that began with the keyframe
    before it."""

    sequence: bytes = b""
    sets: bytes = b""
    has_picture: bool = False
    may_be_key: bool = False
    is_skipped: bool = False


def is_annex_b(extradata: bytes | None) -> bool:
    """Whether packets of a stream with that extradata have start codes; else they tell their units' lengths."""
    return not extradata or extradata[0] != 1


def headers_of(packet: bytes, codec: str) -> Headers:
    """Of a packet of that codec, h264 or hevc. Bytes of anything else have no picture, mostly."""
    is_hevc = codec == "hevc"
    sequence, sets = b"", b""
    for begin, end, kind in _units(packet, is_hevc):
        if _is_slice(kind, is_hevc):
            may_be_key = not is_hevc or kind in _HEVC_KEYS
            return Headers(sequence, sets, True, may_be_key, is_hevc and kind in _HEVC_SKIPPED)
        if kind in _HEVC_SETS if is_hevc else kind in (_H264_SPS, _H264_PPS):
            unit = packet[begin:end].rstrip(b"\x00")
            sets += b"\x00" + _START + unit
            if kind == (_HEVC_SPS if is_hevc else _H264_SPS):
                sequence += unit
    return Headers(sequence, sets)


def _units(packet: bytes, is_hevc: bool) -> Iterator[tuple[int, int, int]]:
    """(begin, end, type) of each until a slice, which is taken to last until the end; nothing of what is broken."""
    begin = packet.find(_START) + len(_START)
    for _ in range(_MOST_UNITS):
        if begin < len(_START) or begin >= len(packet) or packet[begin] & 0x80:  # the bit that is forbidden
            return
        kind = _hevc_kind(packet[begin : begin + 2]) if is_hevc else packet[begin] & 0x1F
        if _is_slice(kind, is_hevc):
            yield begin, len(packet), kind
            return
        end = packet.find(_START, begin)
        yield begin, end if end >= 0 else len(packet), kind
        if end < 0:
            return
        begin = end + len(_START)


def _hevc_kind(header: bytes) -> int:
    """-1 of another layer, or of no header."""
    is_base = len(header) == 2 and not header[0] & 1 and 1 <= header[1] <= 7
    return header[0] >> 1 if is_base else -1


def _is_slice(kind: int, is_hevc: bool) -> bool:
    return kind in _HEVC_SLICES if is_hevc else kind in (1, 5)
