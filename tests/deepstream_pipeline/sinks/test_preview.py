"""Previews: encoded while someone looks, and only then."""

import threading
from collections.abc import Callable

import pytest
import simplejpeg

from penstock_video.interfaces import View
from penstock_video.sinks import jpeg
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.preview import LINGER_S, PreviewBoard, PreviewOptions
from tests.deepstream_pipeline.sinks.results import Clock, result


class Watches:
    """Who was watched, and who no more."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, float]] = []

    def __call__(self, source_id: str, fps: float) -> None:
        """Remember it."""
        self.reported.append((source_id, fps))


def board_with(clock: Clock, watches: Watches | None = None, **options: float) -> PreviewBoard:
    """A board with a manual clock."""
    chosen = PreviewOptions(max_fps=options.get("max_fps", 5.0), width=int(options.get("width", 640)))
    return PreviewBoard(chosen, Osd(), on_watch=watches or Watches(), clock=clock)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of the pictures that were encoded."""
    widths: list[int] = []
    encode: Callable[..., bytes] = simplejpeg.encode_jpeg

    def count(picture: object, **options: object) -> bytes:
        widths.append(picture.shape[1])  # type: ignore[attr-defined]
        return encode(picture, **options)

    monkeypatch.setattr(jpeg.simplejpeg, "encode_jpeg", count)  # type: ignore[attr-defined]
    return widths


def test_preview_that_no_one_looks_at_is_not_encoded(encoded: list[int]) -> None:
    """Without viewers no JPEG is made, and no one is asked for pictures."""
    watches = Watches()
    board = board_with(Clock(), watches)
    for number in range(10):
        board.write(result(number))
    assert (encoded, watches.reported, board.is_watched("cam")) == ([], [], False)


def test_preview_of_a_watched_source_is_a_jpeg_of_limited_width(encoded: list[int]) -> None:
    """Who looks gets the newest annotated picture, not wider than was asked for."""
    clock = Clock()
    board = board_with(clock, width=200)
    assert board.wait("cam", 0, 0.0) is None
    board.write(result(1, size=(800, 600)))
    got = board.wait("cam", 0, 0.0)
    assert got is not None
    assert simplejpeg.decode_jpeg(got[1]).shape == (150, 200, 3)
    assert board.wait("cam", got[0], 0.0) is None
    assert encoded == [200]


def test_preview_is_encoded_no_faster_than_was_asked_for(encoded: list[int]) -> None:
    """A camera of 30 frames a second costs 5 JPEGs a second."""
    clock = Clock()
    board = board_with(clock, max_fps=5.0)
    for number in range(90):
        if number % 10 == 0:
            board.wait("cam", 10**9, 0.0)
        board.write(result(number))
        clock.now += 1 / 30
    assert 14 <= len(encoded) <= 16


def test_preview_tells_who_is_watched_and_when_that_ends(encoded: list[int]) -> None:
    """The first viewer of a source is reported once, so is the last one's end; then nothing is encoded any more."""
    clock, watches = Clock(), Watches()
    board = board_with(clock, watches)
    for _ in range(3):
        board.wait("cam", 0, 0.0)
    assert watches.reported == [("cam", 5.0)]
    clock.now += LINGER_S - 0.1
    board.write(result(0))
    assert board.is_watched("cam")
    clock.now += 0.2
    board.write(result(1, source_id="other"))
    assert watches.reported == [("cam", 5.0), ("cam", 0.0)]
    board.write(result(2))
    assert len(encoded) == 1
    assert board.wait("cam", 0, 0.0) is None  # not the stale one


def test_preview_wakes_a_waiting_viewer_with_the_picture() -> None:
    """Who waits is given the picture as soon as it is there; while it waits it counts as looking."""
    board = PreviewBoard(PreviewOptions(), Osd())
    got: list[tuple[int, bytes] | None] = []
    viewer = threading.Thread(target=lambda: got.append(board.wait("cam", 0, 30.0)))
    viewer.start()
    while not board.is_watched("cam"):
        pass
    board.write(result(0))
    viewer.join(20)
    assert got[0] is not None


@pytest.mark.parametrize("ending", ["end_source", "close"])
def test_preview_of_a_source_that_ends_lets_viewers_go(ending: str) -> None:
    """A viewer does not wait for a source that is over."""
    board = PreviewBoard(PreviewOptions(), Osd())
    got: list[tuple[int, bytes] | None] = []
    viewer = threading.Thread(target=lambda: got.append(board.wait("cam", 0, 60.0)))
    viewer.start()
    while not board.is_watched("cam"):
        pass
    board.end_source("cam") if ending == "end_source" else board.close()
    viewer.join(20)
    assert got == [None]
    assert not board.is_watched("cam")


def test_preview_of_a_source_that_ends_is_watched_no_more() -> None:
    """The maker of its pictures is informed, or would make them for ever when its id comes again."""
    watches = Watches()
    board = board_with(Clock(), watches)
    board.wait("cam", 0, 0.0)
    board.end_source("cam")
    board.end_source("cam")
    assert watches.reported == [("cam", 5.0), ("cam", 0.0)]


def test_preview_remembers_no_source_for_ever() -> None:
    """Viewers that ask for names leave nothing behind, and only so many at a time."""
    clock = Clock()
    board = board_with(clock)
    for number in range(3000):
        board.wait(f"unknown{number}", 0, 0.0)
    assert len(board._boards) == 1024
    clock.now += LINGER_S + 1
    board.write(result(0))
    assert board._boards == {}


def test_tiles_of_a_wall_are_small_and_one_a_second(encoded: list[int]) -> None:
    """However many clients ask for a tile, a camera of 30 frames a second costs one small JPEG a second.

    Its frames need pictures only so often.
    """
    clock, watches = Clock(), Watches()
    board = board_with(clock, watches)
    for number in range(90):
        if number % 10 == 0:
            for _ in range(20):
                board.wait("cam", 10**9, 0.0, View(300))
        board.write(result(number, size=(800, 600)))
        clock.now += 1 / 30
    assert encoded == [320] * 4  # at 0, 0.8, 1.8 and 2.8 s
    assert watches.reported == [("cam", 1.0)]


def test_each_view_is_encoded_once_and_the_fastest_sets_the_rate(encoded: list[int]) -> None:
    """A tile, the picture of the detail page and the bare picture for drawing share the frames."""
    clock, watches = Clock(), Watches()
    board = board_with(clock, watches)
    for view in (View(320), View(960), View(960, is_drawn=False)):
        board.wait("cam", 10**9, 0.0, view)
    board.write(result(0, size=(800, 600)))
    assert (sorted(encoded), watches.reported) == ([320, 800, 800], [("cam", 1.0), ("cam", 5.0)])
    clock.now += LINGER_S
    board.wait("cam", 10**9, 0.0, View(320))
    board.write(result(1, size=(800, 600)))
    assert watches.reported[2:] == [("cam", 1.0)]


def test_bare_picture_has_no_boxes() -> None:
    """Without drawing, the JPEG shows the camera's picture as it is."""
    board = board_with(Clock())
    shown = result(0, size=(640, 480))
    pictures = []
    for view in (View(640), View(640, is_drawn=False)):
        board.wait("cam", 10**9, 0.0, view)
        board.write(shown)
        found = board.wait("cam", 0, 0.0, view)
        assert found is not None
        pictures.append(simplejpeg.decode_jpeg(found[1]).astype(int))
    image = shown.frame.image
    assert image is not None
    drawn, bare = (abs(picture - image).mean() for picture in pictures)
    assert bare < 2 < drawn


@pytest.mark.parametrize(("asked", "width"), [(0, 500), (1, 160), (320, 320), (321, 480), (7680, 1280)])
def test_widths_are_few_so_that_clients_share_pictures(asked: int, width: int) -> None:
    """A request gets the next larger width, or the largest; 0 is the width of the options."""
    assert PreviewOptions(width=500).view(View(asked)) == View(width)
