"""Colours: as other programs see them, whatever the range, the matrix and the way a camera was held."""

from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace

from penstock_video.decode.codec import Painter, orientation_of, upright_size
from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder
from penstock_video.types import UPRIGHT
from tests.deepstream_pipeline.clips import numbered_picture, with_display_matrix, write_clip

RGB = (200, 60, 30)
# Of that colour, by the standards' own matrices: (Y, Cb, Cr) of 8 bits.
_BT601 = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
_BT709 = np.array([[0.2126, 0.7152, 0.0722], [-0.114572, -0.385428, 0.5], [0.5, -0.454153, -0.045847]])


def frame_of(matrix: np.ndarray, *, is_full: bool, format: str = "yuv420p") -> av.VideoFrame:
    """64 x 48 of RGB, as a decoder would give it."""
    y, cb, cr = matrix @ np.array(RGB)
    values = (y, cb + 128, cr + 128) if is_full else (16 + y * 219 / 255, 128 + cb * 224 / 255, 128 + cr * 224 / 255)
    frame = av.VideoFrame(64, 48, format)
    for plane, value in zip(frame.planes, values, strict=True):
        plane.update(bytes([round(value)]) * plane.buffer_size)
    frame.color_range = ColorRange.JPEG if is_full else ColorRange.MPEG
    return frame


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("matrix", "colorspace"), [(_BT601, 5), (_BT601, 6), (_BT601, 2), (_BT709, 1)])
def test_colours_follow_the_frames_own_range_and_matrix(matrix: np.ndarray, colorspace: int, is_full: bool) -> None:
    """BT.709 and BT.601, limited and full range, give back the colour that was meant; what says nothing is BT.601."""
    frame = frame_of(matrix, is_full=is_full)
    frame.colorspace = colorspace
    for _ in range(2):
        pixels = Painter().rgb(frame)
        assert pixels.shape == (48, 64, 3)
        assert np.abs(pixels.astype(int) - RGB).max() <= 3
    assert np.abs(Painter().bgr(frame)[..., ::-1].astype(int) - RGB).max() <= 3


def test_matrix_that_is_mistaken_would_be_seen() -> None:
    """The tolerance above is no blindness: the other matrix is far off."""
    frame = frame_of(_BT709, is_full=False)
    frame.colorspace = Colorspace.ITU601
    assert np.abs(Painter().rgb(frame).astype(int) - RGB).max() > 8


@pytest.mark.parametrize("size", [(64, 48), (322, 182), (161, 97), (33, 47)])
def test_colours_are_those_of_other_programs_to_the_bit(tmp_path: Path, size: tuple[int, int]) -> None:
    """A plain program that decodes with PyAV sees the same numbers, whatever the lines' padding, and so does one with
    OpenCV where no side is odd: it mixes the colours of neighbours there."""
    path = write_clip(tmp_path / "a.mkv", frames=5, size=size, codec="ffv1")
    decoder, painter = Decoder(str(path), DecodeOptions()), Painter()
    ours = [painter.rgb(one.frame).copy() for packet in decoder.packets() for one in decoder.decode(packet)]
    decoder.close()
    with av.open(str(path)) as container:
        pyav = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.array_equal(ours, pyav)
    if not any(side % 2 for side in size):
        capture = cv2.VideoCapture(str(path))
        assert np.array_equal(ours[0], capture.read()[1][..., ::-1])
        capture.release()


@pytest.mark.parametrize("format", ["yuv420p", "yuvj420p", "nv12", "gray", "yuv422p10le", "rgb24", "yuyv422"])
def test_brightness_of_any_format_is_seen(format: str) -> None:
    """Of what has no plane of 8 bits for it, it is computed."""
    picture = numbered_picture(5, 64, 48)
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=format)
    luma = Painter().luma(frame)
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    assert luma.shape == (48, 64)
    assert np.corrcoef(luma.ravel(), grey.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("matrix", [(0.7, 0.7, -0.7, 0.7), (0, 0, 0, 0), (1, 1, 1, 1)])
def test_picture_with_an_oblique_matrix_is_left_as_stored(tmp_path: Path, matrix: tuple[float, ...]) -> None:
    """Only quarter turns and mirroring are applied: other rotations would need a larger picture."""
    plain = write_clip(tmp_path / "plain.mp4", frames=1)
    path = with_display_matrix(tmp_path / "oblique.mp4", plain, matrix)
    with av.open(str(path)) as container:
        (frame,) = container.decode(video=0)
        assert orientation_of(frame) == UPRIGHT
        assert upright_size(frame) == (160, 96)


def test_picture_with_a_nearly_straight_matrix_is_turned(tmp_path: Path) -> None:
    """A matrix within a degree of a quarter turn counts as one, as in FFmpeg's players."""
    plain = write_clip(tmp_path / "plain.mp4", frames=1)
    path = with_display_matrix(tmp_path / "nearly.mp4", plain, (0.01, 1, -1, 0.01))
    with av.open(str(path)) as container:
        assert upright_size(next(container.decode(video=0))) == (96, 160)
