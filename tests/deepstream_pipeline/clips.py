"""Clips made on the spot, whose pictures tell their number: who reads them back knows which frame it got."""

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]

COLUMNS, ROWS = 8, 2  # of cells in the upper half, each one bit of the number
NUMBERS = 1 << (COLUMNS * ROWS)
_ENCODED: dict[tuple[object, ...], bytes] = {}
_PIXEL_FORMATS = {"mjpeg": "yuvj420p", "ffv1": "yuv420p"}


def numbered_picture(number: int, width: int, height: int) -> Picture:
    """(height, width, 3) RGB that tells its number (modulo NUMBERS) to `number_of`, after a lossy codec, too.

    The upper half has a bit of the number in each of 8 x 2 cells, black or white; the lower half red, green, blue and
    grey quarters, and a bright square that moves with the number. Sides of 32 and more.
    """
    picture = np.empty((height, width, 3), np.uint8)
    for cell, (rows, columns) in enumerate(_cells(width, height)):
        picture[rows, columns] = 235 if number >> cell & 1 else 20
    for quarter, colour in enumerate(((200, 40, 40), (40, 200, 40), (40, 40, 200), (128, 128, 128))):
        picture[height // 2 :, quarter * width // 4 : (quarter + 1) * width // 4] = colour
    side = max(min(width, height) // 8, 4)
    left = number * 3 % max(width - side, 1)
    picture[height - side - 2 : height - 2, left : left + side] = 250
    return picture


def number_of(picture: Picture) -> int:
    """The number of a picture that numbered_picture made (RGB, or any order of the channels)."""
    height, width = picture.shape[:2]
    bits = (
        int(_middle(picture[rows, columns]).mean() > 127) << i
        for i, (rows, columns) in enumerate(_cells(width, height))
    )
    return sum(bits)


def write_clip(
    path: Path,
    *,
    frames: int = 30,
    fps: float = 25,
    size: tuple[int, int] = (160, 96),
    codec: str = "libx264",
    gop: int = 12,
    first: int = 0,
    picture: Callable[[int, int, int], Picture] = numbered_picture,
    b_frames: int = 0,
    options: dict[str, str] | None = None,
    pixel_format: str = "",
    sample_aspect_ratio: Fraction = Fraction(1),
) -> Path:
    """The path, to which a clip was written; its suffix (.mp4, .avi, .mkv, .ts, .flv, .h264 …) says in which format.

    Its pictures are picture(number, width, height) for number = first, first + 1, …; size is (width, height). The same
    clip is encoded once in a process.
    """
    how = (path.suffix, frames, fps, size, codec, gop, first, picture, b_frames, str(options), pixel_format)
    key = (*how, sample_aspect_ratio)
    if key in _ENCODED:
        path.write_bytes(_ENCODED[key])
        return path
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(str(path), "w", format={".ts": "mpegts"}.get(path.suffix)) as container:
        stream = container.add_stream(codec, rate=rate, options=_encoding(codec, gop, b_frames) | (options or {}))
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format or _PIXEL_FORMATS.get(codec, "yuv420p")
        stream.codec_context.gop_size = gop
        stream.codec_context.sample_aspect_ratio = sample_aspect_ratio
        stream.codec_context.thread_count = 1
        for number in range(first, first + frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            frame.pts, frame.time_base = number - first, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    _ENCODED[key] = path.read_bytes()
    return path


def timed_clip(path: Path, times_s: Sequence[float]) -> Path:
    """Writes a clip with B-frames at these times (rounded to milliseconds) to the path, and returns it."""
    base = Fraction(1, 1000)
    with av.open(str(path), "w", format={".ts": "mpegts"}.get(path.suffix)) as container:
        stream = container.add_stream("libx264", rate=25, options={"bf": "3", "b-adapt": "0", "refs": "4"})
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        stream.codec_context.time_base = base
        for number, time_s in enumerate(times_s):
            frame = av.VideoFrame.from_ndarray(numbered_picture(number, 160, 96), format="rgb24")
            frame.pts, frame.time_base = round(time_s * 1000), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


DisplayMatrix = tuple[float, ...]  # a, b, c, d: x' = a x + c y, y' = b x + d y

# The eight orientations, in the order of EXIF's 1 to 8.
DISPLAY_MATRICES: tuple[DisplayMatrix, ...] = (
    *((1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1)),
    *((0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0), (0, -1, 1, 0)),
)


def with_display_matrix(path: Path, source: Path, matrix: DisplayMatrix) -> Path:
    """Writes a copy of an MP4 with this matrix in its track header to the path, and returns it."""
    content = bytearray(source.read_bytes())
    header = content.index(b"tkhd") + 4
    at = header + (52 if content[header] == 1 else 40)
    a, b, c, d = (round(factor * (1 << 16)) for factor in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


def displayed(picture: Picture, matrix: DisplayMatrix) -> Picture:
    """A stored picture after its display matrix (quarter turns and mirroring), pixel by pixel."""
    a, b, c, d = (round(factor) for factor in matrix)
    rows, columns = np.indices(picture.shape[:2])
    x, y = a * columns + c * rows, b * columns + d * rows
    x, y = x - x.min(), y - y.min()
    shown = np.empty((y.max() + 1, x.max() + 1, *picture.shape[2:]), picture.dtype)
    shown[y, x] = picture
    return shown


def joined(path: Path, *parts: Path) -> Path:
    """The path, at which the parts' bytes follow each other: of MPEG-TS a stream that changes in the middle."""
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


def damaged(path: Path, source: Path, *, flips: int = 20, seed: int = 1, spare: float = 0.1) -> Path:
    """The path, at which the source's bytes lie with so many of them changed, none in its first `spare`."""
    content = bytearray(source.read_bytes())
    dice = np.random.default_rng(seed)
    for place in dice.integers(int(len(content) * spare), len(content), flips):
        content[place] ^= int(dice.integers(1, 256))
    path.write_bytes(content)
    return path


def truncated(path: Path, source: Path, share: float = 0.5) -> Path:
    """The path, at which the source's first share of bytes lies."""
    content = source.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def _encoding(codec: str, gop: int, b_frames: int) -> dict[str, str]:
    if codec == "libx264":
        fixed = f"scenecut=0:keyint={gop}:min-keyint={gop}"
        return {"preset": "veryfast", "bf": str(b_frames), "x264-params": fixed, "crf": "20"}
    if codec == "libx265":
        return {"preset": "ultrafast", "x265-params": f"log-level=none:keyint={gop}:bframes={b_frames}:pools=1"}
    return {"b": "4000000"} if codec in {"mpeg4", "mpeg2video", "flv"} else {}


def _cells(width: int, height: int) -> list[tuple[slice, slice]]:
    """(rows, columns) of each bit's cell, the lowest bit first."""
    lines = [height // 2 * i // ROWS for i in range(ROWS + 1)]
    sides = [width * i // COLUMNS for i in range(COLUMNS + 1)]
    return [
        (slice(lines[row], lines[row + 1]), slice(sides[column], sides[column + 1]))
        for row in range(ROWS)
        for column in range(COLUMNS)
    ]


def _middle(cell: Picture) -> Picture:
    height, width = cell.shape[:2]
    return cell[height // 4 : height - height // 4, width // 4 : width - width // 4]
