"""What a card's video engine takes, over a stand-in of NVIDIA's library."""

import ctypes
from typing import Any

import pytest

from penstock_video.decode.nvcodec import limits_of
from penstock_video.errors import NeedsCpu


class FakeCuvid:
    """cuvidGetDecoderCaps of a card that decodes H.264 and not HEVC; laid out by offset, as the header has it."""

    code = 0

    def cuvidGetDecoderCaps(self, caps: Any) -> int:
        """Fills what it was given."""
        reported = (ctypes.c_ubyte * 88).from_address(ctypes.addressof(caps._obj))
        assert ctypes.sizeof(caps._obj) == len(reported)
        assert (reported[4], reported[8]) == (1, 0)  # 4:2:0, 8 bit
        if reported[0] == 4:
            reported[24], reported[25] = 1, 7
            for offset, number in ((28, 4096), (32, 4080), (36, 65280)):
                ctypes.c_uint.from_address(ctypes.addressof(reported) + offset).value = number
            for offset, number in ((40, 48), (42, 16)):
                ctypes.c_ushort.from_address(ctypes.addressof(reported) + offset).value = number
        return self.code


def test_driver_says_what_a_card_takes() -> None:
    """Its engines, and the least and the largest picture."""
    assert limits_of("h264", FakeCuvid()) == {
        "num_decoder_engines": 7, "width_min": 48, "height_min": 16, "width_max": 4096, "height_max": 4080,
        "mb_num_max": 65280,
    }  # fmt: skip
    assert limits_of("hevc", FakeCuvid())["num_decoder_engines"] == 0


def test_driver_that_does_not_say_leaves_it_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the call fails or the library is not here."""
    cuvid = FakeCuvid()
    cuvid.code = 101
    with pytest.raises(NeedsCpu, match="cuvidGetDecoderCaps answers 101"):
        limits_of("h264", cuvid)
    monkeypatch.setattr("penstock_video.decode.nvcodec._LIBRARY", "libnone-of-that-name.so.1")
    with pytest.raises(NeedsCpu, match="libnone-of-that-name"):
        limits_of("h264")
