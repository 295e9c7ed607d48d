"""A decoded picture in GPU memory, as NVDEC leaves it, and its orientation."""

from typing import NamedTuple


class Orientation(NamedTuple):
    """Makes a stored picture upright: first swap rows and columns, then mirror left to right, then top to bottom.

    The eight combinations are those of EXIF and of a video's display matrix.
    """

    is_transposed: bool = False
    is_mirrored_x: bool = False
    is_mirrored_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the upright picture."""
        return (height, width) if self.is_transposed else (width, height)


UPRIGHT = Orientation()


class DevicePicture(NamedTuple):
    """8 bit, 4:2:0, NV12: luma (height, width) and interleaved chroma ((height + 1) // 2, (width + 1) // 2, 2).

    Borrowed until its decoder is given the next packet. luma, chroma: addresses; pitch: bytes from line to line, of
    both. width, height: as stored, before turning. stream: the handle of the CUDA stream in whose order it is complete.
    orientation: makes it upright. matrix: colorspace as FFmpeg numbers it (AVCOL_SPC: 1 BT.709, 5 and 6 BT.601, 2 where
    it says nothing). is_full_range: luma from 0 to 255, else 16 to 235.
    """

    luma: int
    chroma: int
    pitch: int
    width: int
    height: int
    stream: int
    orientation: Orientation = UPRIGHT
    matrix: int = 2
    is_full_range: bool = False

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) of the upright picture."""
        return self.orientation.size(self.width, self.height)
