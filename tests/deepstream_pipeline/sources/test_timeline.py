"""The counting of frames over several processes."""

from dataclasses import dataclass

import msgspec
import pytest

from penstock_video.sources.feed import FrameNumbers
from penstock_video.sources.protocol import FrameReady

READY = FrameReady(
    slot=0, frame_num=0, pts_s=0.0, captured_at=100.0, captured_unix_s=0.0, width=4, height=4, row_shape=(),
    has_image=False, segment=0, is_corrupt=False, digest=0,
)  # fmt: skip


def ready(frame_num: int, pts_s: float, captured_at: float = 100.0, segment: int = 0) -> FrameReady:
    """A frame."""
    return msgspec.structs.replace(READY, frame_num=frame_num, pts_s=pts_s, captured_at=captured_at, segment=segment)


def test_timeline_of_one_process_believes_its_pts() -> None:
    """The first process begins at 0, and what it says of its frames is taken."""
    timeline = FrameNumbers()
    assert timeline.begin(0.0, is_live=True) == (0, 0.0, 0)
    assert [timeline.place(ready(n, n * 0.04), is_live=True) for n in (0, 1, 5)] == pytest.approx([0.0, 0.04, 0.2])
    assert timeline.frame_num == 6


def test_timeline_of_a_live_source_goes_on_by_the_clock() -> None:
    """After a reconnection the pts has gone on by as much as the clock, opening included, in another segment."""
    timeline = FrameNumbers()
    timeline.begin(99.0, is_live=True)
    timeline.place(ready(9, 4.0, 100.0), is_live=True)
    frame_num, pts_s, segment = timeline.begin(103.0, is_live=True)
    assert (frame_num, pts_s, segment) == (10, pytest.approx(7.0), 1)
    assert timeline.place(ready(10, pts_s, 105.0, 1), is_live=True) == pytest.approx(9.0)
    assert timeline.place(ready(11, pts_s + 0.04, 105.04, 1), is_live=True) == pytest.approx(9.04)


def test_timeline_of_a_file_does_not_go_on_by_the_clock() -> None:
    """A file that is begun anew goes on behind its last frame, however long that took."""
    timeline = FrameNumbers()
    timeline.begin(99.0, is_live=False)
    timeline.place(ready(9, 4.0, 100.0), is_live=False)
    frame_num, pts_s, segment = timeline.begin(200.0, is_live=False)
    assert (frame_num, segment) == (10, 1)
    assert timeline.place(ready(10, pts_s, 201.0, 1), is_live=False) == pytest.approx(4.001)


@dataclass(frozen=True)
class Lie:
    """A frame after number 5 of segment 2 at 1.0 s."""

    frame_num: int = 6
    pts_s: float = 1.1
    captured_at: float = 100.0
    segment: int = 2


@pytest.mark.parametrize(
    "lie",
    [
        Lie(frame_num=5),
        Lie(frame_num=-1),
        Lie(pts_s=1.0),
        Lie(pts_s=float("nan")),
        Lie(pts_s=float("inf")),
        Lie(captured_at=float("nan")),
        Lie(segment=1),
    ],
    ids=repr,
)
def test_timeline_of_one_that_counts_backwards_refuses(lie: Lie) -> None:
    """Numbers, times and segments that do not rise are refused, and leave the counting where it was."""
    timeline = FrameNumbers()
    timeline.begin(0.0, is_live=False)
    timeline.place(ready(5, 1.0, segment=2), is_live=False)
    with pytest.raises(ValueError, match=r"."):
        timeline.place(ready(lie.frame_num, lie.pts_s, lie.captured_at, lie.segment), is_live=False)
    assert timeline.place(ready(6, 1.1, segment=2), is_live=False) == 1.1
