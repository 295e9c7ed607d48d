"""The newest annotated picture of each source as JPEG. Encodes only while a viewer is connected."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from penstock_video.sinks.jpeg import JpegEncoder, JpegKind, jpeg_encoder
from penstock_video.sinks.osd import Osd
from penstock_video.types import FrameResult

LINGER_S = 3.0  # a viewer counts as connected for this long after its last request
_MAX_WATCHED = 1_024


@dataclass(frozen=True, slots=True)
class PreviewOptions:
    """max_fps, width: maximum rate per source, and width in pixels. jpeg: the encoder."""

    max_fps: Annotated[float, Field(alias="max-fps", ge=0.1, le=60)] = 5.0
    width: Annotated[int, Field(ge=16, le=7680)] = 640
    jpeg: JpegKind = JpegKind.AUTO


def _ignore(source_id: str, is_watched: bool) -> None:
    return None


class PreviewBoard:
    """A Sink and the Previews of the API. Sources without viewers cost nothing.

    on_watch(source_id, is_watched): called when a source's first viewer comes, and when the last one or the source has
    gone; by any thread, one call at a time; must neither block nor call the board. jpeg: closed with the board; by
    default from the options, for the CPU. Raises SinkFailed if it is unavailable.
    """

    def __init__(
        self,
        options: PreviewOptions,
        osd: Osd,
        *,
        on_watch: Callable[[str, bool], None] = _ignore,
        clock: Callable[[], float] = time.monotonic,
        jpeg: JpegEncoder | None = None,
    ) -> None:
        self._options = options
        self._jpeg = jpeg or jpeg_encoder(options.jpeg, None)
        self._osd = osd
        self._on_watch = on_watch
        self._clock = clock
        self._changed = threading.Condition()
        self._boards: dict[str, _Board] = {}
        self._number = 0
        self._is_closed = False

    def is_watched(self, source_id: str) -> bool:
        """Whether the source has a viewer, or had one recently."""
        with self._changed:
            board = self._boards.get(source_id)
            return board is not None and board.is_watched(self._clock())

    def wait(self, source_id: str, after: int, timeout_s: float) -> tuple[int, bytes] | None:
        """(number, JPEG) of a picture newer than `after`, at once if there is one; None on timeout. Numbers increase
        over all sources. Returns None at once if too many sources are watched, or the board is closed."""
        deadline = self._clock() + timeout_s
        with self._changed:
            board = self._watched_board(source_id)
            if board is None:
                return None
            board.waiting += 1
            try:
                while not self._is_closed and not board.is_over:
                    if board.newest is not None and board.newest[0] > after:
                        return board.newest
                    left_s = deadline - self._clock()
                    if left_s <= 0:
                        return None
                    self._changed.wait(left_s)
                return None
            finally:
                board.waiting -= 1
                board.last_requested_at = self._clock()

    def write(self, result: FrameResult) -> None:
        """Encodes the picture if there is a viewer and the last one is old enough; forgets viewers that left."""
        now = self._clock()
        source_id = result.frame.source_id
        with self._changed:
            self._sweep(now)
            board = self._boards.get(source_id)
            if board is None or now < board.next_at:
                return
        picture = self._osd.draw(result, max_width=self._options.width)
        if picture is None:
            return
        jpeg = self._jpeg.encode(picture)
        with self._changed:
            self._number += 1
            board.newest = (self._number, jpeg)
            pause_s = 1 / self._options.max_fps
            board.next_at = max(board.next_at, now - pause_s) + pause_s
            self._changed.notify_all()

    def end_source(self, source_id: str) -> None:
        """Ends the source's previews."""
        self._osd.drop_pictures(source_id)
        with self._changed:
            board = self._boards.pop(source_id, None)
            if board is not None:
                board.is_over = True
                self._on_watch(source_id, False)
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all previews. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._boards.clear()
            self._changed.notify_all()
        self._jpeg.close()

    def _watched_board(self, source_id: str) -> "_Board | None":
        now = self._clock()
        board = self._boards.get(source_id)
        if board is None:
            self._sweep(now)
            if self._is_closed or len(self._boards) >= _MAX_WATCHED:
                return None
            board = self._boards[source_id] = _Board()
            self._on_watch(source_id, True)
        board.last_requested_at = now
        return board

    def _sweep(self, now: float) -> None:
        gone = [source_id for source_id, board in self._boards.items() if not board.is_watched(now)]
        for source_id in gone:
            del self._boards[source_id]
            self._on_watch(source_id, False)


class _Board:
    """State shared by the viewers of one source."""

    def __init__(self) -> None:
        self.newest: tuple[int, bytes] | None = None
        self.next_at = 0.0
        self.waiting = 0
        self.last_requested_at = 0.0
        self.is_over = False

    def is_watched(self, now: float) -> bool:
        return self.waiting > 0 or now - self.last_requested_at < LINGER_S
