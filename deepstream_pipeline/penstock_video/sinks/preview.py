"""The newest frame of each source as JPEG. Encodes only while a viewer is connected."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from penstock_video.interfaces import FULL_VIEW, View
from penstock_video.sinks.jpeg import JpegEncoder, JpegKind, jpeg_encoder
from penstock_video.sinks.osd import Osd, scaled_copy
from penstock_video.types import ByteArray, FrameResult

LINGER_S = 3.0  # a viewer counts as connected for this long after its last request
WIDTHS = (160, 320, 480, 640, 960, 1280)  # pixels; a request for another one gets the next larger, or the largest
TILE_WIDTH, TILE_FPS = 320, 1.0  # pictures up to this width are of a wall of many cameras: rate of each
_EARLY = 0.2  # of the time between two pictures: so much sooner one may come
_MAX_WATCHED = 1_024


@dataclass(frozen=True, slots=True)
class PreviewOptions:
    """max_fps, width: maximum rate per source, and width in pixels. jpeg: the encoder."""

    max_fps: Annotated[float, Field(alias="max-fps", ge=0.1, le=60)] = 5.0
    width: Annotated[int, Field(ge=16, le=7680)] = 640
    jpeg: JpegKind = JpegKind.AUTO

    def view(self, wanted: View) -> View:
        """The view that is encoded for this one: there are few widths, so that clients share pictures."""
        if not wanted.width:
            return View(self.width, wanted.is_drawn)
        return View(next((width for width in WIDTHS if wanted.width <= width), WIDTHS[-1]), wanted.is_drawn)

    def fps(self, view: View) -> float:
        """Pictures per second of this view."""
        is_tile = view.width <= min(TILE_WIDTH, self.width - 1)
        return min(self.max_fps, TILE_FPS) if is_tile else self.max_fps


def _ignore(source_id: str, fps: float) -> None:
    return None


class PreviewBoard:
    """A Sink and the Previews of the API. Sources without viewers cost nothing.

    on_watch(source_id, fps): called when the rate changes that a source's viewers see, 0 for no viewer; by any thread,
    one call at a time; must neither block nor call the board. jpeg: closed with the board; by default from the options,
    for the CPU. Raises SinkFailed if it is unavailable.
    """

    def __init__(
        self,
        options: PreviewOptions,
        osd: Osd,
        *,
        on_watch: Callable[[str, float], None] = _ignore,
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
            return board is not None and any(shown.is_watched(self._clock()) for shown in board.views.values())

    def wait(self, source_id: str, after: int, timeout_s: float, view: View = FULL_VIEW) -> tuple[int, bytes] | None:
        """(number, JPEG) of a picture newer than `after`, at once if there is one; None on timeout. Numbers increase
        over all sources. Returns None at once if too many sources are watched, or the board is closed."""
        deadline = self._clock() + timeout_s
        with self._changed:
            board = self._watched_board(source_id)
            if board is None:
                return None
            shown = self._shown(source_id, board, self._options.view(view))
            shown.waiting += 1
            try:
                while not self._is_closed and not board.is_over:
                    if shown.newest is not None and shown.newest[0] > after:
                        return shown.newest
                    left_s = deadline - self._clock()
                    if left_s <= 0:
                        return None
                    self._changed.wait(left_s)
                return None
            finally:
                shown.waiting -= 1
                shown.last_requested_at = self._clock()

    def write(self, result: FrameResult) -> None:
        """Encodes each view that has a viewer and whose last picture is old enough; forgets viewers that left."""
        now = self._clock()
        source_id = result.frame.source_id
        with self._changed:
            self._sweep(now)
            board = self._boards.get(source_id)
            due = [] if board is None else [item for item in board.views.items() if self._is_due(*item, now)]
        for view, shown in due:
            picture = self._picture(result, view)
            if picture is None:
                return
            jpeg = self._jpeg.encode(picture)
            with self._changed:
                self._number += 1
                shown.newest = (self._number, jpeg)
                pause_s = 1 / self._options.fps(view)
                shown.next_at = max(shown.next_at, now) + pause_s
                self._changed.notify_all()

    def _is_due(self, view: View, shown: "_Shown", now: float) -> bool:
        return now >= shown.next_at - _EARLY / self._options.fps(view)

    def _picture(self, result: FrameResult, view: View) -> ByteArray | None:
        if view.is_drawn:
            return self._osd.draw(result, max_width=view.width)
        image = result.frame.image
        return None if image is None else scaled_copy(image, min(view.width, result.frame.width))

    def end_source(self, source_id: str) -> None:
        """Ends the source's previews."""
        self._osd.drop_pictures(source_id)
        with self._changed:
            board = self._boards.pop(source_id, None)
            if board is not None:
                board.is_over = True
                self._on_watch(source_id, 0.0)
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all previews. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._boards.clear()
            self._changed.notify_all()
        self._jpeg.close()

    def _watched_board(self, source_id: str) -> "_Board | None":
        board = self._boards.get(source_id)
        if board is None:
            self._sweep(self._clock())
            if self._is_closed or len(self._boards) >= _MAX_WATCHED:
                return None
            board = self._boards[source_id] = _Board()
        return board

    def _shown(self, source_id: str, board: "_Board", view: View) -> "_Shown":
        shown = board.views.get(view)
        if shown is None:
            shown = board.views[view] = _Shown()
            self._report(source_id, board)
        shown.last_requested_at = self._clock()
        return shown

    def _report(self, source_id: str, board: "_Board") -> None:
        """Reports the rate of the source's pictures if it changed."""
        fps = max(map(self._options.fps, board.views), default=0.0)
        if fps != board.fps:
            board.fps = fps
            self._on_watch(source_id, fps)

    def _sweep(self, now: float) -> None:
        for source_id, board in list(self._boards.items()):
            gone = [view for view, shown in board.views.items() if not shown.is_watched(now)]
            if not gone:
                continue
            for view in gone:
                del board.views[view]
            if not board.views:
                del self._boards[source_id]
            self._report(source_id, board)


class _Board:
    """The views of one source that have viewers. fps: as last reported."""

    def __init__(self) -> None:
        self.views: dict[View, _Shown] = {}
        self.fps = 0.0
        self.is_over = False


class _Shown:
    """State shared by the viewers of one view."""

    def __init__(self) -> None:
        self.newest: tuple[int, bytes] | None = None
        self.next_at = 0.0
        self.waiting = 0
        self.last_requested_at = 0.0

    def is_watched(self, now: float) -> bool:
        return self.waiting > 0 or now - self.last_requested_at < LINGER_S
