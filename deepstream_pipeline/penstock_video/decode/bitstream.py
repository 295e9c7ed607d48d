"""Headers of H.264 and HEVC streams: parameter sets, field coding and cropping. No I/O."""

from collections.abc import Iterator
from typing import NamedTuple

_HAS_CHROMA = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # profiles
_MOST_BYTES = 512
_MOST_ZEROS = 32  # leading zeros of a number; the standard allows no more
_MOST_OFFSETS = 255


class Bits:
    """Reads a NAL unit without emulation prevention bytes. Raises IndexError beyond its end."""

    def __init__(self, unit: bytes) -> None:
        content = unit[:_MOST_BYTES].replace(b"\x00\x00\x03", b"\x00\x00")
        self._bits = "".join(f"{byte:08b}" for byte in content)
        self._place = 0

    def flag(self) -> bool:
        self._place += 1
        return self._bits[self._place - 1] == "1"

    def skip(self, count: int) -> None:
        self._place += count

    def number(self) -> int:
        """ue(v)."""
        zeros = 0
        while not self.flag():
            zeros += 1
            if zeros > _MOST_ZEROS:
                raise IndexError
        begin = self._place
        self.skip(zeros)
        return int("1" + self._bits[begin : self._place], 2) - 1

    def signed(self) -> int:
        """se(v)."""
        number = self.number()
        return (number + 1) // 2 if number % 2 else -(number // 2)


def may_hold_fields(unit: bytes) -> bool:
    """Whether an H.264 sequence parameter set (with header byte) allows fields; False if it cannot be parsed."""
    try:
        return _may_hold_fields(Bits(unit), unit[1])
    except IndexError:
        return False


def _may_hold_fields(bits: Bits, profile: int) -> bool:
    skip_to_frames(bits, profile)
    return not bits.flag()  # frame_mbs_only


def skip_to_frames(bits: Bits, profile: int) -> None:
    """Skips to frame_mbs_only_flag. Raises IndexError."""
    bits.skip(32)  # header, profile, constraints, level
    bits.number()  # its id
    if profile in _HAS_CHROMA:
        _skip_chroma(bits)
    bits.number()  # log2_max_frame_num
    order = bits.number()
    if order == 0:
        bits.number()
    elif order == 1:
        bits.skip(1)
        _ = bits.number(), bits.number()
        for _ in range(min(bits.number(), _MOST_OFFSETS)):
            bits.number()
    bits.number()  # max_num_ref_frames
    bits.skip(1)
    _ = bits.number(), bits.number()  # width, height


def _skip_chroma(bits: Bits) -> None:
    chroma = bits.number()
    if chroma == 3:
        bits.skip(1)
    _ = bits.number(), bits.number()  # depths
    bits.skip(1)
    if not bits.flag():
        return
    for place in range(12 if chroma == 3 else 8):
        if bits.flag():
            _skip_scaling(bits, 16 if place < 6 else 64)


def _skip_scaling(bits: Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.signed()) % 256
        last = following or last


_PROFILE = 88  # bits of HEVC's profile, before its level
_LEVEL = 8
_MOST_LAYERS = 8


def is_cut_before(unit: bytes, codec: str) -> bool:
    """Whether an h264 or hevc sequence parameter set (with header) crops left or top; False if it cannot be parsed."""
    try:
        bits = Bits(unit)
        if codec == "hevc":
            _skip_to_window(bits)
        else:
            skip_to_frames(bits, unit[1])
            bits.skip(0 if bits.flag() else 1)
            bits.skip(1)
        if not bits.flag():
            return False
        left, _, top, _ = bits.number(), bits.number(), bits.number(), bits.number()
    except IndexError:
        return False
    return bool(left or top)


def _skip_to_window(bits: Bits) -> None:
    """Skips to HEVC's conformance_window_flag (ITU-T H.265, 7.3.2.2.1)."""
    bits.skip(16 + 4)  # header, the video parameter set's id
    layers = sum(bits.flag() << place for place in (2, 1, 0))  # below the highest
    bits.skip(1 + _PROFILE + _LEVEL)
    layer_flags = [(bits.flag(), bits.flag()) for _ in range(layers)]
    bits.skip(2 * (_MOST_LAYERS - layers) if layers else 0)
    for has_profile, has_level in layer_flags:
        bits.skip(_PROFILE * has_profile + _LEVEL * has_level)
    bits.number()  # its id
    if bits.number() == 3:  # chroma
        bits.skip(1)
    _ = bits.number(), bits.number()  # width, height


_MOST_UNITS = 64  # before the first slice; a packet with more is invalid
_START = b"\x00\x00\x01"
_H264_SPS, _H264_PPS = 7, 8
_HEVC_SPS, _HEVC_SETS = 33, (32, 33, 34)
_HEVC_KEYS = range(16, 22)
_HEVC_SKIPPED = (8, 9)
_HEVC_SLICES = (*range(10), *_HEVC_KEYS)


class Headers(NamedTuple):
    """sequence: sequence parameter sets, concatenated. sets: all parameter sets, with start codes. has_picture: a slice
    follows. may_be_key: a stream can begin at it. is_skipped: an HEVC RASL picture, undecodable in a stream that began
    with the keyframe before it."""

    sequence: bytes = b""
    sets: bytes = b""
    has_picture: bool = False
    may_be_key: bool = False
    is_skipped: bool = False


def is_annex_b(extradata: bytes | None) -> bool:
    """Whether packets of a stream with this extradata have start codes, rather than lengths."""
    return not extradata or extradata[0] != 1


def headers_of(packet: bytes, codec: str) -> Headers:
    """Headers of an h264 or hevc packet. Other data mostly yields no picture."""
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
    """(begin, end, type) of each NAL unit, up to and with the first slice; ends at invalid data."""
    begin = packet.find(_START) + len(_START)
    for _ in range(_MOST_UNITS):
        if begin < len(_START) or begin >= len(packet) or packet[begin] & 0x80:  # forbidden_zero_bit
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
    """NAL unit type; -1 for another layer, or without a header."""
    is_base = len(header) == 2 and not header[0] & 1 and 1 <= header[1] <= 7
    return header[0] >> 1 if is_base else -1


def _is_slice(kind: int, is_hevc: bool) -> bool:
    return kind in _HEVC_SLICES if is_hevc else kind in (1, 5)
