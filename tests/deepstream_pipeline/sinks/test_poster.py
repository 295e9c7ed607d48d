"""The poster of a source: which frame it is, and when its file is there."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

from penstock_video.errors import SinkFailed
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.poster import PosterChooser, PosterOptions, PosterSink
from penstock_video.types import ByteArray, FrameResult
from tests.deepstream_pipeline.sinks.results import result

SIZE = (320, 240)


def textured(number: int, *, objects: int, blur_px: int = 0) -> FrameResult:
    """A frame of fine noise, which may be blurred."""
    image: ByteArray = np.random.default_rng(number).integers(0, 255, (*SIZE[::-1], 3), np.uint8)
    if blur_px:
        image = cv2.blur(image, (blur_px, blur_px))
    reported = result(number, size=SIZE, objects=objects, fps=2.0)
    return replace(reported, frame=replace(reported.frame, image=image))


def chosen(frames: list[FrameResult]) -> tuple[int, int]:
    """(frame_num, objects) of the poster."""
    chooser = PosterChooser(Osd().draw)
    for one in frames:
        chooser.offer(one)
    assert chooser.poster is not None
    return chooser.poster.frame_num, chooser.poster.objects


def test_poster_is_the_frame_with_most_objects() -> None:
    """The first of those that are equally sharp."""
    assert chosen([textured(n, objects=count) for n, count in enumerate((1, 2, 5, 3, 5, 1))]) == (2, 5)


def test_poster_is_sharp() -> None:
    """A blurred frame is not chosen for its objects, nor is one with damaged packets."""
    frames = [textured(n, objects=2) for n in range(8)]
    frames[5] = textured(5, objects=9, blur_px=9)
    frames[6] = replace(textured(6, objects=8), frame=replace(textured(6, objects=8).frame, is_corrupt=True))
    frames[7] = textured(7, objects=3)
    assert chosen(frames) == (7, 3)


@pytest.mark.parametrize(("counts", "expected"), [((9, 0), 1), ((9, 1, 0), 1), ((3,), 0)])
def test_poster_is_the_first_frame_only_if_there_is_no_other(counts: tuple[int, ...], expected: int) -> None:
    """The first frame of a camera is often grey."""
    assert chosen([textured(n, objects=count) for n, count in enumerate(counts)])[0] == expected


def test_poster_of_a_long_run_is_drawn_seldom() -> None:
    """Of 400 frames few are drawn and encoded, and one is kept."""
    drawn = []

    def draw(reported: FrameResult) -> ByteArray | None:
        drawn.append(reported.frame.frame_num)
        return reported.frame.image

    chooser = PosterChooser(draw, max_width=100)
    for number in range(400):
        chooser.offer(textured(number, objects=number % 7))
    assert len(drawn) < 20
    assert chooser.poster is not None
    assert simplejpeg.decode_jpeg_header(chooser.poster.picture)[:2] == (75, 100)


def test_poster_files_are_written_at_the_end(tmp_path: Path) -> None:
    """Each source has its own, annotated and as large as its video; frames without pictures give none."""
    sink = PosterSink(PosterOptions(tmp_path), Osd(), is_single=False)
    for number in range(3):
        for source_id in ("a", "b"):
            sink.write(result(number, source_id=source_id, size=SIZE))
        sink.write(result(number, source_id="blind", has_image=False))
    assert not list(tmp_path.rglob("*.jpg"))
    sink.end_source("a")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["a/poster.jpg"]
    sink.close()
    assert sorted(path.parent.name for path in tmp_path.rglob("*.*")) == ["a", "b"]
    assert simplejpeg.decode_jpeg_header((tmp_path / "b" / "poster.jpg").read_bytes())[:2] == SIZE[::-1]


def test_poster_that_cannot_be_written_is_a_failure_with_its_path(tmp_path: Path) -> None:
    """The former file stays."""
    sink = PosterSink(PosterOptions(tmp_path), Osd(), is_single=True)
    sink.write(result(0, size=SIZE))
    (tmp_path / "poster.jpg").mkdir()
    with pytest.raises(SinkFailed, match=r"poster\.jpg: cannot be written"):
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["poster.jpg"]
