"""annotated.mp4: the annotated stream as H.264."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import av
import structlog
from av.container import OutputContainer
from av.error import FFmpegError
from pydantic import Field

from penstock_video.backoff import Backoff, Outage
from penstock_video.errors import SinkFailed
from penstock_video.sinks.encoder import H264, SQUARE, EncoderRefused, Quality, even, stream_encoder
from penstock_video.sinks.jsonl import Folder, SourceFolders, end_all, made_folder
from penstock_video.sinks.nvenc import EncoderChoice
from penstock_video.sinks.osd import Osd
from penstock_video.types import ByteArray, EncoderKind, FrameResult

RETRY_S = 10.0
FRAMES_A_FILE = 200_000  # the index of an open file takes about 100 bytes of memory per frame
MIN_FREE_BYTES = 64 * 1024 * 1024  # of a disk that was full, before another file is begun
_MOVFLAGS = "hybrid_fragmented+frag_keyframe+default_base_moof"

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class AnnotatedOptions:
    """folder: of the files, or of the sources' folders. crf: of x264, less is better; also NVENC's constant quality."""

    folder: Folder
    crf: Annotated[int, Field(ge=0, le=51)] = 23
    encoder: EncoderKind = EncoderKind.AUTO


class AnnotatedSink:
    """A video file for each source.

    Raises SinkFailed at once if the folder is not writable, or NVENC is asked for and absent. On a full disk, write
    raises SinkFailed once; the file so far is playable, and another is begun when there is room again. If NVENC fails,
    x264 begins another file with the same frame. `lost` counts the pictures in no file. Frames without a picture are
    skipped.
    """

    def __init__(
        self,
        options: AnnotatedOptions,
        osd: Osd,
        *,
        is_single: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._osd = osd
        self._clock = clock
        self._crf = options.crf
        self._encoders = EncoderChoice(options.encoder, "mp4")
        self._folders = SourceFolders(made_folder(options.folder), is_single=is_single)
        self._began_unix_s = time.time() - 0.05  # a file system's clock may be a tick behind
        self._files: dict[str, VideoFile] = {}
        self._outage = Outage(Backoff(RETRY_S, RETRY_S))

    @property
    def lost(self) -> int:
        """Pictures in no file."""
        return self._outage.lost

    def write(self, result: FrameResult) -> None:
        """Adds the frame's picture to its source's file."""
        picture = self._osd.draw(result)
        if picture is None:
            return
        now = self._clock()
        try:
            if not self._may_write(now):
                self._outage.lost += 1
                return
            self._put(result, picture)
        except (OSError, FFmpegError) as error:
            self._failed(result.frame.source_id, error, now)
            return
        lost = self._outage.worked()
        if lost is not None:
            log.warning("annotated video is written again", lost_frames=lost)

    def end_source(self, source_id: str) -> None:
        """Finishes the source's file."""
        self._osd.drop_pictures(source_id)
        self._finish(source_id)

    def close(self) -> None:
        """Finishes every file. A second call does nothing."""
        end_all(self._files, self._finish)

    def _put(self, result: FrameResult, picture: ByteArray) -> None:
        try:
            self._file_for(result).write(picture, result.frame.pts_s)
        except EncoderRefused as refused:
            self._encoders.failed(refused)
            self._finish(result.frame.source_id)
            self._file_for(result).write(picture, result.frame.pts_s)

    def _may_write(self, now: float) -> bool:
        if not self._outage.is_open:
            return True
        return self._outage.may_try(now) and _free_bytes(self._folders.folder) >= MIN_FREE_BYTES

    def _file_for(self, result: FrameResult) -> "VideoFile":
        frame, source_id = result.frame, result.frame.source_id
        size = (frame.width, frame.height)
        file = self._files.get(source_id)
        if file is not None and file.is_for(size, frame.sample_aspect_ratio):
            return file
        self._finish(source_id)
        folder = self._folders.of(source_id)
        folder.mkdir(parents=True, exist_ok=True)
        path = _free_path(folder, self._began_unix_s)
        file = self._encoders.open(lambda codec: VideoFile(path, size, self._crf, frame.sample_aspect_ratio, codec))
        self._files[source_id] = file
        return file

    def _failed(self, source_id: str, error: Exception, now: float) -> None:
        file = self._files.pop(source_id, None)
        path = file.path if file is not None else self._folders.of(source_id)
        if file is not None:
            file.abandon()
        self._outage.lost += 1
        if self._outage.failed(now):
            raise SinkFailed(f"{path}: {_why(error)}; annotated video is off until there is room again") from error

    def _finish(self, source_id: str) -> None:
        file = self._files.pop(source_id, None)
        if file is None:
            return
        try:
            file.close()
        except (OSError, FFmpegError) as error:
            file.abandon()
            raise SinkFailed(f"{file.path}: {_why(error)}; it plays up to its last fragment") from error


class VideoFile:
    """An open MP4. Raises OSError and FFmpegError; then only call `abandon`. EncoderRefused: see Encoder."""

    def __init__(
        self,
        path: Path,
        size: tuple[int, int],
        crf: int,
        sample_aspect_ratio: Fraction = SQUARE,
        codec: H264 = H264.X264,
    ) -> None:
        self.path = path
        self._shape = (size, sample_aspect_ratio)
        self._frames = 0
        self._file = _Output(path)
        try:
            container = av.open(self._file, "w", format="mp4", container_options={"movflags": _MOVFLAGS})
            self._container: OutputContainer = container
            self._encoder = stream_encoder(
                container, even(*size), Quality(crf), codec, sample_aspect_ratio=sample_aspect_ratio
            )
        except (OSError, FFmpegError, EncoderRefused):
            self._file.close()
            raise

    def is_for(self, size: tuple[int, int], sample_aspect_ratio: Fraction = SQUARE) -> bool:
        """Whether pictures of this size and pixel shape fit this file."""
        return (size, sample_aspect_ratio) == self._shape and self._frames < FRAMES_A_FILE

    def write(self, picture: ByteArray, pts_s: float) -> None:
        self._container.mux(self._encoder.encode(picture, pts_s))
        self._frames += 1

    def close(self) -> None:
        """Flushes the encoder, and makes the file a plain MP4."""
        self._container.mux(self._encoder.flush())
        self._container.close()
        self._file.close()

    def abandon(self) -> None:
        """Leaves whole fragments, which are playable, on the disk."""
        try:
            self._container.close()
        except (OSError, FFmpegError) as error:
            log.debug("abandoned file did not close", path=str(self.path), why=_why(error))
        self._file.close()


class _Output:
    """A file for FFmpeg: no short writes, and no writes after a failed one."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, block: bytes) -> int:
        """Writes everything, or raises OSError."""
        view = memoryview(block)
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        return len(block)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, position, whence)

    def tell(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def read(self, count: int) -> bytes:
        return os.read(self._descriptor, count)

    def close(self) -> None:
        """A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _free_path(folder: Path, began_unix_s: float) -> Path:
    """The first free name of annotated.mp4, annotated-2.mp4, … in this run; renames an earlier run's file."""
    number = 1
    while True:
        path = folder / ("annotated.mp4" if number == 1 else f"annotated-{number}.mp4")
        try:
            written_unix_s = path.stat().st_mtime
        except FileNotFoundError:
            return path
        if written_unix_s < began_unix_s:
            path.replace(path.with_suffix(".previous.mp4"))
            return path
        number += 1


def _free_bytes(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else os.strerror(error.errno)
    return str(error)
