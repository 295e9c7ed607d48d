"""When a frame was captured: when its packet came, so that its latency holds its decoding and every lateness."""

import itertools
import socket
import threading
import time
from pathlib import Path

import pytest

from penstock_video.decode.codec import Decoded, SoftwareCodec, VideoPacket
from penstock_video.sources.child_link import ParentLink, SlotWriter
from penstock_video.sources.child_work import Tools, Work
from penstock_video.sources.protocol import MESSAGE_BYTES, Ended, FrameReady, Release, Start, decode_up, encode
from penstock_video.sources.ring import Ring, RingSize, new_ring
from tests.deepstream_pipeline.clips import write_clip

FRAMES, FPS = 12, 10
SIZE = RingSize(FRAMES + 1, 4096)


class SlowCodec(SoftwareCodec):
    """A decoder that takes its time."""

    pause_s = 0.03

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        time.sleep(self.pause_s)
        return super().decode(packet)


class StuckOnceCodec(SlowCodec):
    """One whose machine had no time for two seconds and a half."""

    pause_s = 0.0
    packets = 0

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        self.packets += 1
        if self.packets == FRAMES // 2:
            time.sleep(2.5)
        return super().decode(packet)


def frames_of(
    path: Path, codec: type[SlowCodec], *, is_realtime: bool, begin_after_s: float = 0.0
) -> list[tuple[FrameReady, float]]:
    """Of one run of the clip; each with the moment at which it was reported."""
    start = Start(
        uri=str(path),
        spec=b"",
        ring_frames=SIZE.frames,
        slot_bytes=SIZE.slot_bytes,
        ring_bytes=SIZE.size_bytes,
        policy="drop-oldest",
        is_realtime=is_realtime,
        begin_after_s=begin_after_s,
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    event_log: list[tuple[FrameReady, float]] = []
    with ours, theirs:
        ring = Ring(new_ring(SIZE, "arrival"), SIZE)
        work = Work(ParentLink(theirs, start), ring, start, Tools(codec, SlotWriter, time.thread_time))
        thread = threading.Thread(target=work.run)
        thread.start()
        while not isinstance(record := decode_up(ours.recv(MESSAGE_BYTES)), Ended):
            if isinstance(record, FrameReady):
                event_log.append((record, time.monotonic()))
                ours.send(encode(Release((record.slot,))))
        ours.shutdown(socket.SHUT_WR)
        thread.join(10)
        ring.close()
    return event_log


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_clip(tmp_path / "a.mp4", frames=FRAMES, fps=FPS)


def test_frame_is_captured_before_it_is_decoded(clip: Path) -> None:
    """Of a file and of what is played as a camera: what the decoder takes is part of the frame's latency."""
    for is_realtime in (False, True):
        event_log = frames_of(clip, SlowCodec, is_realtime=is_realtime)
        assert len(event_log) == FRAMES
        assert all(at - frame.captured_at >= SlowCodec.pause_s for frame, at in event_log)


def test_frame_that_is_due_was_captured_then_however_late_it_is(clip: Path) -> None:
    """Played as a camera its frames are captured as evenly as they were filmed, whatever the decoder takes."""
    event_log = frames_of(clip, SlowCodec, is_realtime=True)
    first = event_log[0][0]
    for frame, _ in event_log:
        assert frame.captured_at - first.captured_at == pytest.approx(frame.pts_s - first.pts_s, abs=1e-6)


def test_file_that_begins_later_is_late_by_nothing(clip: Path) -> None:
    """The pause that spreads many files in time is not part of a frame's latency."""
    began_s = time.monotonic()
    (first, reported_at), *_ = frames_of(clip, SlowCodec, is_realtime=True, begin_after_s=0.3)
    assert first.captured_at >= began_s + 0.3
    assert reported_at - first.captured_at < 0.3


def test_more_than_a_second_is_not_made_up_for(clip: Path) -> None:
    """What came in the meantime is gone, as of a camera: the rest is played from then on, at its own speed."""
    event_log = frames_of(clip, StuckOnceCodec, is_realtime=True)
    assert len(event_log) == FRAMES
    gaps_s = [two.captured_at - one.captured_at for (one, _), (two, _) in itertools.pairwise(event_log)]
    assert [index for index, gap_s in enumerate(gaps_s) if gap_s > 1.0] == [FRAMES // 2 - 1]
    assert event_log[-1][0].captured_at - event_log[FRAMES // 2][0].captured_at == pytest.approx(
        (FRAMES // 2 - 1) / FPS, abs=0.01
    )
