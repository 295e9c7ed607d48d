"""Whether a stream's pictures are cut off at their left or top, which its sequence parameter set says. Pure.

PyNvVideoCodec takes pictures of the right size from the corner of what was coded: those would be shifted. Encoders cut
off at the right and the bottom, as a rule, where the size is no multiple of their blocks'.
"""

from deepstream_pipeline.decode.field_coding import Bits, skip_to_frames

_PROFILE = 88  # bits of HEVC's profile, before its level
_LEVEL = 8
_MOST_LAYERS = 8


def is_cut_before(unit: bytes, codec: str) -> bool:
    """unit: a sequence parameter set of h264 or hevc, its header first. What cannot be read is said to be whole."""
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
    """To HEVC's conformance_window_flag (ITU-T H.265, 7.3.2.2.1)."""
    bits.skip(16 + 4)  # header, the video parameter set's id
    layers = sum(bits.flag() << place for place in (2, 1, 0))  # below the highest
    bits.skip(1 + _PROFILE + _LEVEL)
    are_told = [(bits.flag(), bits.flag()) for _ in range(layers)]
    bits.skip(2 * (_MOST_LAYERS - layers) if layers else 0)
    for has_profile, has_level in are_told:
        bits.skip(_PROFILE * has_profile + _LEVEL * has_level)
    bits.number()  # its id
    if bits.number() == 3:  # chroma
        bits.skip(1)
    _ = bits.number(), bits.number()  # width, height
