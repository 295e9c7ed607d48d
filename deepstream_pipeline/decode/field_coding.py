"""Whether an H.264 stream may hold fields, which its sequence parameter set says (ITU-T H.264, 7.3.2.1.1). Pure.

NVDEC deinterlaces such a stream, whole pictures in it, too: they are not FFmpeg's then. HEVC has no fields in pictures.
"""

_HAS_CHROMA = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # profiles
_MOST_BYTES = 512
_MOST_ZEROS = 32  # of a number's length; the standard has no longer one
_MOST_OFFSETS = 255


class Bits:
    """Of a unit without its emulation prevention. Raises IndexError behind its end."""

    def __init__(self, unit: bytes) -> None:
        content = unit[:_MOST_BYTES].replace(b"\x00\x00\x03", b"\x00\x00")
        self._bits = "".join(f"{byte:08b}" for byte in content)
        self._place = 0

    def flag(self) -> bool:
        """One bit."""
        self._place += 1
        return self._bits[self._place - 1] == "1"

    def skip(self, count: int) -> None:
        """So many bits."""
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
    """unit: an H.264 sequence parameter set, its header byte first. What cannot be read is said to hold none."""
    try:
        return _may_hold_fields(Bits(unit), unit[1])
    except IndexError:
        return False


def _may_hold_fields(bits: Bits, profile: int) -> bool:
    skip_to_frames(bits, profile)
    return not bits.flag()  # frame_mbs_only


def skip_to_frames(bits: Bits, profile: int) -> None:
    """To frame_mbs_only_flag. Raises IndexError."""
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
