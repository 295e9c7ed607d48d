"""A decoded picture in the memory of a GPU, as NVDEC leaves it."""

from typing import NamedTuple


class DevicePicture(NamedTuple):
    """8 bit, 4:2:0, NV12: luma (height, width) and interleaved chroma ((height + 1) // 2, (width + 1) // 2, 2).

    Borrowed until its decoder is given the next packet. luma, chroma: addresses; pitch: bytes from line to line, of
    both. width, height: as stored, before turning. stream: the handle of the CUDA stream in whose order it is complete.
    rotation: degrees counter-clockwise that make it upright, a multiple of 90. matrix: colorspace as FFmpeg numbers it
    (AVCOL_SPC: 1 BT.709, 5 and 6 BT.601, 2 where it says nothing). is_full_range: luma from 0 to 255, else 16 to 235.
    """

    luma: int
    chroma: int
    pitch: int
    width: int
    height: int
    stream: int
    rotation: int = 0
    matrix: int = 2
    is_full_range: bool = False

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) when it is turned."""
        return (self.height, self.width) if self.rotation % 180 else (self.width, self.height)
