"""The work of a decode process over a real socket and a real ring: every frame counted, every wish obeyed."""

import os
import resource
import socket
import subprocess
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_video.mux import MAX_PENDING
from penstock_video.sources.protocol import (
    UP,
    Beat,
    Cut,
    Ended,
    EndReason,
    FrameReady,
    Hold,
    Lost,
    Opened,
    Recorded,
    Release,
    Want,
)
from tests.deepstream_pipeline.clips import joined, number_of, write_clip
from tests.deepstream_pipeline.decode.test_recording import numbers_of
from tests.deepstream_pipeline.sources.child_parent import DEADLINE_S, FRAMES, SPEC, Parent, child, ended


def test_file_under_the_block_policy_loses_nothing(tmp_path: Path) -> None:
    """Every frame of a clip in order, its row and number exact, though its parent is slow; then the end, and exit 0."""
    with child(write_clip(tmp_path / "a.mp4", frames=FRAMES)) as parent:
        opened = parent.until(lambda record: isinstance(record, Opened))
        assert opened == Opened(
            width=160, height=96, fps=25.0, codec="h264", is_live=False, frames_total=FRAMES, duration_s=1.6
        )
        numbers = []
        while not isinstance(record := parent.hear(), Ended | None):
            if isinstance(record, FrameReady):
                assert parent.row_number(record) == record.frame_num
                numbers.append(record.frame_num)
                time.sleep(0.005)
                parent.release(record)
        assert parent.process.wait(DEADLINE_S) == 0
    assert numbers == list(range(FRAMES))
    assert ended(parent).reason is EndReason.EOF
    assert not parent.of(Lost)
    assert parent.of(Beat)[-1].decoded == FRAMES
    frames = parent.of(FrameReady)
    assert [frame.pts_s for frame in frames] == pytest.approx([n / 25 for n in range(FRAMES)])
    assert {frame.row_shape for frame in frames} == {(3, 48, 64)}
    assert {(frame.width, frame.height, frame.segment, frame.is_corrupt) for frame in frames} == {(160, 96, 0, False)}
    assert all(abs(frame.captured_at - time.monotonic()) < 120 for frame in frames)
    assert len({frame.digest for frame in frames}) > FRAMES // 2


def test_process_waits_for_a_slot_and_beats_meanwhile(tmp_path: Path) -> None:
    """A parent that releases nothing gets as many frames as the ring has, and hears each second that it lives."""
    with child(write_clip(tmp_path / "a.mp4", frames=FRAMES), frames=3) as parent:
        held = [parent.frame() for _ in range(3)]
        assert len({frame.slot for frame in held}) == 3
        for _ in range(2):
            assert isinstance(parent.until(lambda record: not isinstance(record, Opened)), Beat)
        parent.say(Release((held[1].slot,)))
        assert parent.frame().slot == held[1].slot
        parent.say(Release((held[0].slot, held[2].slot)))
        assert parent.frame().frame_num == 4


@pytest.mark.parametrize("policy", ["drop-newest", "drop-oldest"])
def test_live_policy_counts_what_finds_no_slot(tmp_path: Path, policy: str) -> None:
    """Frames that find the ring full are lost and counted; sent and lost are all that were decoded."""
    with child(write_clip(tmp_path / "a.mp4", frames=200), frames=2, policy=policy) as parent:
        frames = [parent.frame()]
        parent.say(Release((frames[0].slot,)))
        frames += parent.rest(pause_s=0.01)
    numbers = [frame.frame_num for frame in [*frames]]
    assert numbers == sorted(set(numbers))
    lost = Counter[str]()
    for record in parent.of(Lost):
        lost[record.reason] += record.count
    assert set(lost) == {"ring_full"}
    assert lost["ring_full"] > 0
    assert len(frames) + lost["ring_full"] == 200 == parent.of(Beat)[-1].decoded
    for frame in frames:
        assert frame.frame_num < 200


def test_camera_makes_no_more_rows_ready_than_may_wait(tmp_path: Path) -> None:
    """What came beyond them would be dropped where they wait: it is lost before anything is made of it."""
    with child(write_clip(tmp_path / "a.mp4", frames=200), frames=6, policy="drop-oldest", is_realtime=True) as parent:
        held = [parent.frame() for _ in range(MAX_PENDING)]
        assert isinstance(parent.until(lambda record: isinstance(record, FrameReady | Lost)), Lost)
        parent.release(held[0])
        assert parent.frame().frame_num > held[-1].frame_num + 1


@pytest.mark.parametrize("how", [{"interval": 20}, {"wants_images": True}], ids=["between", "pictures"])
def test_camera_sends_what_is_no_row_alone_as_far_as_the_ring_has_slots(tmp_path: Path, how: dict[str, Any]) -> None:
    """A frame between two that are inferred waits for the first of them; a picture is the sinks' for a while."""
    with child(write_clip(tmp_path / "a.mp4", frames=40), frames=6, policy="drop-oldest", **how) as parent:
        assert [parent.frame().frame_num for _ in range(6)] == list(range(6))


def test_interval_infers_every_nth_frame(tmp_path: Path) -> None:
    """The frames between carry no row, and are reported all the same."""
    with child(write_clip(tmp_path / "a.mp4", frames=12), interval=2) as parent:
        frames = parent.rest()
    assert [frame.frame_num for frame in frames if frame.row_shape] == [0, 3, 6, 9]
    assert len(frames) == 12


def test_full_pictures_travel_from_when_they_are_wanted(tmp_path: Path) -> None:
    """Without a row, too; to the pixel what the network's row was made of; and no longer than they are wanted."""
    with child(write_clip(tmp_path / "a.mp4", frames=FRAMES), interval=1, frames=2) as parent:
        first = parent.frame()
        parent.say(Want(True), Release((first.slot,)))
        seen = []
        for _ in range(12):
            frame = parent.frame()
            seen.append(frame)
            if frame.has_image:
                assert number_of(parent.image(frame)) == frame.frame_num
            if frame.row_shape:
                assert parent.row_number(frame) == frame.frame_num
            parent.say(Release((frame.slot,)))
        assert first.has_image is False
        assert [frame.has_image for frame in seen[4:]] == [True] * 8
        assert {bool(frame.row_shape) for frame in seen if frame.has_image} == {True, False}
        parent.say(Want(False))
        assert [frame.has_image for frame in parent.rest()][-5:] == [False] * 5


def test_pictures_travel_no_more_often_than_they_are_wanted(tmp_path: Path) -> None:
    """A wall of cameras shows few pictures a second: the frames between them cost no conversion and no copy."""
    clip = write_clip(tmp_path / "a.mp4", frames=20, fps=20)
    with child(clip, is_realtime=True, wants_images=True, image_interval_s=0.25) as parent:
        frames = parent.rest()
    shown = [frame.captured_at for frame in frames if frame.has_image]
    assert len(frames) == 20
    assert frames[0].has_image
    assert len(shown) == 4
    assert all(later - earlier >= 0.25 for earlier, later in pairwise(shown))


def test_source_without_a_network_has_pictures_only(tmp_path: Path) -> None:
    """No row is made where no network is named."""
    with child(write_clip(tmp_path / "a.mp4", frames=3), spec=None, wants_images=True) as parent:
        for number in range(3):
            frame = parent.frame()
            assert (frame.row_shape, frame.has_image) == ((), True)
            assert number_of(parent.image(frame)) == number


def test_bytes_of_the_ring_bound_its_use(tmp_path: Path) -> None:
    """However many slots it has: no more are in use than the bytes allow, and never fewer than two."""
    clip = write_clip(tmp_path / "a.mp4", frames=FRAMES)
    for ring_bytes, expected in ((3 * SPEC.row_bytes, 3), (1, 2)):
        with child(clip, frames=8, ring_bytes=ring_bytes) as parent:
            parent.until(lambda record: isinstance(record, Beat))
            assert len(parent.of(FrameReady)) == expected


def test_picture_that_is_larger_than_a_slot_ends_the_source(tmp_path: Path) -> None:
    """In words, with the numbers, whether it is so from the begin or becomes so."""
    small = write_clip(tmp_path / "small.ts", frames=FRAMES)
    large = write_clip(tmp_path / "large.ts", frames=FRAMES, size=(640, 480))
    with child(joined(tmp_path / "both.ts", small, large), wants_images=True) as parent:
        assert len(parent.rest()) == FRAMES
        assert ended(parent).reason is EndReason.DECODE
        assert "640x480 needs" in ended(parent).text


def test_resolution_that_changes_begins_a_segment(tmp_path: Path) -> None:
    """It is opened anew in words, before the first frame that is so; no frame has another's size."""
    small = write_clip(tmp_path / "small.ts", frames=FRAMES)
    large = write_clip(tmp_path / "large.ts", frames=FRAMES, size=(320, 192))
    with child(joined(tmp_path / "both.ts", small, large)) as parent:
        frames = parent.rest()
    assert [frame.frame_num for frame in frames] == list(range(2 * FRAMES))
    assert [(frame.width, frame.segment) for frame in frames] == [(160, 0)] * FRAMES + [(320, 1)] * FRAMES
    assert [(opened.width, opened.height) for opened in parent.of(Opened)] == [(160, 96), (320, 192)]
    kinds = [type(record) for record in parent.event_log if not isinstance(record, Beat)]
    assert kinds.index(Opened, 1) == 1 + FRAMES


def test_cut_of_a_file_begins_a_segment(tmp_path: Path) -> None:
    """Another scene in the same clip; not where cuts are switched off."""

    def scenes(number: int, width: int, height: int) -> np.ndarray:
        picture = np.full((height, width, 3), 30 if number < 10 else 200, np.uint8)
        picture[: height // 3, : number * 2] += 20
        return picture

    clip = write_clip(tmp_path / "a.mp4", frames=20, picture=scenes)
    for cut, expected in ((0.5, [0] * 10 + [1] * 10), (0.0, [0] * 20)):
        with child(clip, cut=cut) as parent:
            assert [frame.segment for frame in parent.rest()] == expected


@pytest.mark.parametrize("suffix", [".mp4", ".ts"])
def test_file_that_loops_goes_on(tmp_path: Path, suffix: str) -> None:
    """Numbers and times go on, each loop is a segment of its own, and every frame comes each time."""
    clip = write_clip(tmp_path / f"a{suffix}", frames=15)
    with child(clip, is_loop=True, first_frame_num=100, first_pts_s=50.0, first_segment=7) as parent:
        frames = []
        while len(frames) < 40:
            frames.append(parent.frame())
            assert parent.row_number(frames[-1]) == (len(frames) - 1) % 15
            parent.say(Release((frames[-1].slot,)))
    assert [frame.frame_num for frame in frames] == list(range(100, 140))
    assert [frame.segment for frame in frames] == [7] * 15 + [8] * 15 + [9] * 10
    assert [frame.pts_s for frame in frames] == pytest.approx([50 + n / 25 for n in range(40)], abs=0.05)


def test_file_that_is_played_at_its_own_speed_takes_its_time(tmp_path: Path) -> None:
    """As a camera: a frame is not captured before its time has come, however fast it could be decoded."""
    clip = write_clip(tmp_path / "a.mp4", frames=12, fps=10)
    with child(clip, is_realtime=True) as parent:
        frames = parent.rest()
    first = frames[0]
    assert [frame.frame_num for frame in frames] == list(range(12))
    for frame in frames:
        assert frame.captured_at - first.captured_at >= frame.pts_s - first.pts_s - 0.001


def test_file_that_is_held_stands_still(tmp_path: Path) -> None:
    """Nothing comes while it is held but its beats; then it goes on where it was."""
    with child(write_clip(tmp_path / "a.mp4", frames=200)) as parent:
        first = parent.frame()
        parent.say(Hold(True), Release((first.slot,)))
        parent.until(lambda record: isinstance(record, Beat))
        before = parent.of(FrameReady)
        parent.say(Release(tuple(frame.slot for frame in before[1:])))
        for _ in range(2):
            parent.until(lambda record: isinstance(record, Beat))
        during = parent.of(FrameReady)[len(before) :]
        assert len(during) <= 1  # one was on its way
        parent.say(Hold(False), Release(tuple(frame.slot for frame in during)))
        parent.rest()
    assert [frame.frame_num for frame in parent.of(FrameReady)] == list(range(200))


def test_recording_is_made_beside_decoding(tmp_path: Path) -> None:
    """From before it was asked for until after; whole when it is reported, and no frame is missed for it."""
    path = tmp_path / "cut.mp4"
    with child(write_clip(tmp_path / "a.mp4", frames=120), record_cache_s=2.0, frames=2) as parent:
        for _ in range(50):
            parent.say(Release((parent.frame().slot,)))
        parent.say(Cut(str(path), 0.4, 0.8, frame_num=49))
        recorded = parent.until(lambda record: _released(parent, record) and isinstance(record, Recorded))
        assert isinstance(recorded, Recorded)
        assert (recorded.path, recorded.error) == (str(path), "")
        numbers = numbers_of(path)
        parent.rest()
    assert numbers == list(range(36, 36 + len(numbers)))
    assert len(numbers) >= 14 + 16
    assert [frame.frame_num for frame in parent.of(FrameReady)] == list(range(120))


def test_recording_without_a_cache_counts_its_seconds_from_its_frame(tmp_path: Path) -> None:
    """Also the first one of a source: it ends so long after the event, however late it was requested."""
    path = tmp_path / "cut.mp4"
    with child(write_clip(tmp_path / "a.mp4", frames=200, gop=4), frames=2) as parent:
        for _ in range(50):
            parent.release(parent.frame())
        parent.say(Cut(str(path), 0.0, 2.4, frame_num=10))
        parent.rest()
    [recorded] = parent.of(Recorded)
    assert recorded.after_s == pytest.approx(2.4, abs=0.1)
    numbers = numbers_of(path)
    assert numbers[-1] == pytest.approx(10 + 60, abs=2)
    assert -recorded.before_s == pytest.approx((numbers[0] - 10) / 25, abs=0.1)


def test_recording_that_fails_costs_nothing_else(tmp_path: Path) -> None:
    """A disk that is full: reported, and every frame comes all the same."""
    clip = write_clip(tmp_path / "a.avi", frames=120, codec="mjpeg", size=(320, 192))
    with child(clip, record_cache_s=2.0, is_process=True) as parent:
        assert isinstance(parent.process, subprocess.Popen)
        parent.say(Cut(str(tmp_path / "cut.mp4"), 1.0, 60.0))
        resource.prlimit(parent.process.pid, resource.RLIMIT_FSIZE, (30_000, 30_000))
        assert len(parent.rest()) == 120
    [recorded] = parent.of(Recorded)
    assert recorded.error
    assert ended(parent).reason is EndReason.EOF
    assert os.listdir(tmp_path) == ["a.avi"]


def test_recording_of_a_source_that_is_taken_out_is_whole(tmp_path: Path) -> None:
    """The parent says goodbye in the middle: what is recorded so far is finished first."""
    path = tmp_path / "cut.mp4"
    with child(write_clip(tmp_path / "a.mp4", frames=400), record_cache_s=2.0, is_loop=True, frames=2) as parent:
        for _ in range(30):
            parent.say(Release((parent.frame().slot,)))
        parent.say(Cut(str(path), 0.5, 60.0))
        for _ in range(30):
            parent.say(Release((parent.frame().slot,)))
        parent.socket.shutdown(socket.SHUT_WR)
        assert parent.process.wait(DEADLINE_S) == 0
        parent.rest()
    [recorded] = parent.of(Recorded)
    assert recorded.error.endswith("after its moment, not 60: the source was stopped")
    assert recorded.before_s + recorded.after_s == pytest.approx(len(numbers_of(path)) / 25, abs=0.1)
    assert len(numbers_of(path)) > 20


def _released(parent: Parent, record: UP) -> bool:
    if isinstance(record, FrameReady):
        parent.say(Release((record.slot,)))
    return True
