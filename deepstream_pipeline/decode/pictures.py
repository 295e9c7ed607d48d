"""A decoded frame's pixels: its brightness, and its colours as RGB or BGR.

The conversion is swscale's, with the frame's own colour range and matrix (BT.709, BT.601, full or limited; BT.601 where
it says nothing), the same that cv2.VideoCapture and PyAV's to_ndarray give, to the bit. It takes 0.3 ms for 1280 x 720,
no longer than cv2.cvtColor, which knows one matrix and is off by one level on average.
"""

import struct

import av
import cv2
import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.reformatter import VideoReformatter

from deepstream_pipeline.gpu.picture import UPRIGHT, Orientation

Pixels = npt.NDArray[np.uint8]

_MATRIX = struct.Struct("=9i")  # a b u c d v x y w of libavutil/display.h: x' = a x + c y, y' = b x + d y
_OFF_AXIS = 0.02  # relative to the larger factor: about a degree, which FFmpeg's players also ignore
_LUMA_FIRST = ("yuv4", "yuvj4", "nv12", "nv21", "nv16", "gray")


class Painter:
    """Converts the frames of one source. Used by one thread; its arrays are borrowed until the frame is let go of."""

    def __init__(self) -> None:
        self._colours = VideoReformatter()
        self._greys = VideoReformatter()

    def rgb(self, frame: av.VideoFrame) -> Pixels:
        """(H, W, 3), upright."""
        return self._painted(frame, "rgb24")

    def bgr(self, frame: av.VideoFrame) -> Pixels:
        """(H, W, 3), upright."""
        return self._painted(frame, "bgr24")

    def luma(self, frame: av.VideoFrame) -> Pixels:
        """(H, W), as it is stored: not turned, and of whatever range; to compare pictures of one source."""
        layout = frame.format
        is_plain = layout.name.startswith(_LUMA_FIRST) and layout.components[0].bits == 8
        if is_plain and frame.planes[0].line_size > 0:  # negative where a picture is stored upside down
            return _plane(frame, 1)[:, :, 0]
        return _plane(self._greys.reformat(frame, format="gray", threads=1), 1)[:, :, 0]

    def _painted(self, frame: av.VideoFrame, pixel_format: str) -> Pixels:
        pixels = _plane(self._colours.reformat(frame, format=pixel_format, threads=1), 3)
        return upright(pixels, orientation_of(frame))


def upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """(width, height) of the upright picture."""
    return orientation_of(frame).size(frame.width, frame.height)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """The orientation by the frame's display matrix: rotations by quarter turns, and mirroring.

    Frames with another matrix, or without one, stay as stored.
    """
    matrix = _display_matrix(frame)
    if matrix is None:
        return UPRIGHT
    a, b, _, c, d, *_ = _MATRIX.unpack(matrix)
    straight, crossed = sorted((abs(a), abs(d))), sorted((abs(b), abs(c)))
    if crossed[1] <= _OFF_AXIS * straight[0]:
        return Orientation(False, a < 0, d < 0)
    if straight[1] <= _OFF_AXIS * crossed[0]:
        return Orientation(True, c < 0, b < 0)
    return UPRIGHT


def _display_matrix(frame: av.VideoFrame) -> bytes | None:
    """The display matrix in the frame's side data.

    frame.side_data would store the container in the frame: a reference cycle, so the frame's memory would not be freed
    until the garbage collector runs.
    """
    try:
        found = SideDataContainer(frame)  # type: ignore[call-arg]  # its stub lacks the constructor
    except ValueError:  # PyAV fails for side data types that are newer than its FFmpeg
        return None
    return next((bytes(one) for one in found if one.type is SideDataType.DISPLAYMATRIX), None)


def upright(pixels: Pixels, orientation: Orientation) -> Pixels:
    """The picture (H, W, channels), rotated and mirrored."""
    if orientation.is_transposed:
        pixels = cv2.transpose(pixels)
    if orientation.is_mirrored_x and orientation.is_mirrored_y:
        pixels = cv2.flip(pixels, -1)
    elif orientation.is_mirrored_x or orientation.is_mirrored_y:
        pixels = cv2.flip(pixels, 1 if orientation.is_mirrored_x else 0)
    return pixels


def _plane(frame: av.VideoFrame, channels: int) -> Pixels:
    """A view of the frame's first plane, (H, W, channels); its lines may lie apart."""
    plane = frame.planes[0]
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
    pixels: Pixels = lines[: frame.height, : frame.width * channels].reshape(frame.height, frame.width, channels)
    return pixels
