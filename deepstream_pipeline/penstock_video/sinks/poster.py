"""poster.jpg: the annotated frame of a source with the most objects."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import simplejpeg

from penstock_video.errors import SinkFailed
from penstock_video.sinks.jsonl import Folder, SourceFolders, end_all, made_folder
from penstock_video.sinks.osd import Osd
from penstock_video.types import ByteArray, FrameResult

POSTER_FILE = "poster.jpg"
_QUALITY = 90
_SMALL_PX = 320  # width at which sharpness is measured
_SHARP_SHARE = 0.7  # of the usual sharpness
_SAMPLE_S = 1.0  # between frames that tell the usual sharpness
_SHARPER = 1.1  # times: another frame with as many objects


@dataclass(frozen=True, slots=True)
class Poster:
    """A chosen frame. objects: tracked ones. picture: annotated, plain: as decoded, or empty; both JPEG."""

    frame_num: int
    pts_s: float
    objects: int
    picture: bytes
    plain: bytes


class PosterChooser:
    """Chooses from a source's frames the sharp one with most tracked objects, never the first if there are others.

    Keeps JPEGs of one frame only.
    """

    def __init__(
        self, draw: Callable[[FrameResult], ByteArray | None], *, max_width: int = 0, has_plain: bool = False
    ) -> None:
        """draw: the annotated picture of a frame, or None. max_width: of pictures in pixels, 0 for the source's.
        has_plain: also keeps the picture as decoded."""
        self._draw, self._max_width, self._has_plain = draw, max_width, has_plain
        self._frames, self._sample_at_s = 0, float("-inf")
        self._usual = 0.0  # sharpness: a running mean
        self._rank = (False, -1, 0.0)  # is sharp, objects, sharpness
        self.poster: Poster | None = None

    def offer(self, result: FrameResult) -> None:
        """Stores the frame if it is better than the best so far."""
        frame, objects = result.frame, len(result.tracks)
        if frame.image is None or frame.is_corrupt:
            return
        self._frames += 1
        is_sample = not 0 <= frame.pts_s - self._sample_at_s < _SAMPLE_S
        if not is_sample and self._frames > 2 and objects < self._rank[1]:
            return
        sharpness = _sharpness(frame.image)
        if is_sample:
            self._sample_at_s = frame.pts_s
            self._usual = sharpness if not self._usual else 0.9 * self._usual + 0.1 * sharpness
        rank = (sharpness >= _SHARP_SHARE * self._usual, objects, sharpness)
        if self.poster is None or self._frames == 2 or _is_better(rank, self._rank):
            self._take(result, rank)

    def _take(self, result: FrameResult, rank: tuple[bool, int, float]) -> None:
        image, picture = result.frame.image, self._draw(result)
        if image is None or picture is None:
            return
        self._rank = rank
        frame = result.frame
        plain = self._jpeg(image) if self._has_plain else b""
        self.poster = Poster(frame.frame_num, frame.pts_s, rank[1], self._jpeg(picture), plain)

    def _jpeg(self, picture: ByteArray) -> bytes:
        height, width = picture.shape[:2]
        if 0 < self._max_width < width:
            size = self._max_width, max(1, round(height * self._max_width / width))
            picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
        return bytes(simplejpeg.encode_jpeg(picture, quality=_QUALITY, colorspace="RGB"))


def _is_better(rank: tuple[bool, int, float], best: tuple[bool, int, float]) -> bool:
    return rank[:2] > best[:2] or (rank[:2] == best[:2] and rank[2] > _SHARPER * best[2])


def _sharpness(picture: ByteArray) -> float:
    """Variance of the Laplacian of sampled green pixels: low for blurred, dark or uniform frames."""
    step = max(1, picture.shape[1] // _SMALL_PX)
    deviation = cv2.meanStdDev(cv2.Laplacian(picture[::step, ::step, 1].copy(), cv2.CV_32F))[1]
    return float(deviation[0][0]) ** 2


@dataclass(frozen=True, slots=True)
class PosterOptions:
    """folder: of the file, or of the sources' folders."""

    folder: Folder


class PosterSink:
    """Writes poster.jpg of each source at its end. Raises SinkFailed at once if the folder is not writable, and at the
    end of a source whose file cannot be written."""

    def __init__(self, options: PosterOptions, osd: Osd, *, is_single: bool = False) -> None:
        self._osd = osd
        self._folders = SourceFolders(made_folder(options.folder), is_single=is_single)
        self._choosers: dict[str, PosterChooser] = {}

    def write(self, result: FrameResult) -> None:
        """Offers the frame to its source's chooser."""
        source_id = result.frame.source_id
        if source_id not in self._choosers:
            self._folders.of(source_id)  # the first source's place is decided by its first frame, as in other sinks
            self._choosers[source_id] = PosterChooser(self._osd.draw)
        self._choosers[source_id].offer(result)

    def end_source(self, source_id: str) -> None:
        """Writes the source's file, unless no frame was chosen."""
        self._osd.drop_pictures(source_id)
        chooser = self._choosers.pop(source_id, None)
        if chooser is None or chooser.poster is None:
            return
        path = self._folders.of(source_id) / POSTER_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, chooser.poster.picture)
        except OSError as error:
            raise SinkFailed(f"{path}: cannot be written ({error.strerror or error})") from error

    def close(self) -> None:
        """Writes the files of all sources. A second call does nothing."""
        end_all(self._choosers, self.end_source)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the file only after it was written completely. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
