"""Real cameras' threads in one process, with FFmpeg in NVDEC's place: files, as a process of their own plays them."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from penstock_video.sources import shared_child
from penstock_video.sources import shared_child as shared_cameras
from penstock_video.sources.options import GpuSources, SourceNeeds, SourcesOptions
from penstock_video.sources.protocol import Cut
from penstock_video.types import Frame, SourceConfig, SourceState
from tests.deepstream_pipeline.clips import number_of, write_clip
from tests.deepstream_pipeline.sources.parent import EventLog, one, running

STAND_IN = (sys.executable, "-m", "tests.deepstream_pipeline.sources.standin_shared_child")
OPTIONS = SourcesOptions(gpu=GpuSources(cameras_per_process=8, command=STAND_IN))
PICTURES = SourceNeeds(b"", 0, np.uint8, 0, True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A clip of 40 numbered pictures."""
    return write_clip(tmp_path / "clip.mp4", frames=40, fps=10, size=(320, 240), codec="libx264")


def numbers(event_log: EventLog, name: str) -> list[int]:
    """Of the frames that came."""
    return [frame.frame_num for frame in event_log.of("frame", name) if isinstance(frame, Frame)]


def test_clips_come_whole_with_their_pictures_beside_rubbish(path: Path, tmp_path: Path) -> None:
    """Four files in one process: each picture once, in order, at its time; what is no clip fails alone."""
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 64)
    event_log = EventLog()
    seen: dict[str, list[tuple[int, int, float]]] = {name: [] for name in "abcd"}
    event_log.on_frame_call = lambda prepared: seen[prepared.frame.source_id].append(
        (prepared.frame.frame_num, number_of(prepared.frame.image), prepared.frame.pts_s)
    )
    with running(event_log, OPTIONS) as sources:
        for name in "abcd":
            sources.add(SourceConfig(str(path), name), PICTURES)
        sources.add(SourceConfig(str(tmp_path / "noise.mp4"), "noise"), PICTURES)
        for name in "abcd":
            event_log.wait_for("ended", source_id=name)
        event_log.wait_for("ended", source_id="noise")
        assert [(process.decoder, process.cameras) for process in sources.processes()] == [("nvdec", 0)]
        assert [(one(sources, name).state, one(sources, name).restarts) for name in "abcd"] == [
            (SourceState.ENDED, 0)
        ] * 4
        assert (one(sources, "noise").state, one(sources, "a").decoder) == (SourceState.FAILED, "nvdec")
    for name in "abcd":
        assert [(number, picture) for number, picture, _ in seen[name]] == [(number, number) for number in range(40)]
        assert [pts_s for _, _, pts_s in seen[name]] == pytest.approx([number / 10 for number in range(40)])


def test_file_waits_for_its_slots_and_its_pause_while_its_neighbour_plays(path: Path) -> None:
    """What is held loses nothing, says its beats, and goes on where it was."""
    event_log = EventLog(is_keeping=True, keeps_only="held")
    with running(event_log, OPTIONS) as sources:
        sources.add(SourceConfig(str(path), "held", reconnect_interval_s=1.0), PICTURES)
        sources.add(SourceConfig(str(path), "other"), PICTURES)
        event_log.wait_for("ended", source_id="other")
        event_log.wait_for("frame", OPTIONS.ring_frames, "held")
        sources.pause("held")
        event_log.wait_for_state(SourceState.PAUSED, "held")
        event_log.is_keeping = False
        while event_log.frames:
            event_log.frames.pop().release()
        event_log.wait_for("beat", event_log.count("beat", "held") + 2, "held")
        paused_at = event_log.count("frame", "held")
        assert paused_at <= OPTIONS.ring_frames + 1
        sources.resume("held")
        event_log.wait_for("ended", source_id="held")
        assert one(sources, "held").restarts == 0
    assert numbers(event_log, "held") == list(range(40)) == numbers(event_log, "other")


def test_looped_clip_is_taken_out_and_its_neighbour_goes_on(path: Path) -> None:
    """It ends soon after it was asked to, in the middle of its pictures."""
    event_log = EventLog()
    with running(event_log, OPTIONS) as sources:
        for name in "ab":
            sources.add(SourceConfig(str(path), name, is_loop=True, is_realtime=True), PICTURES)
        event_log.wait_for("frame", 10, "a")
        began = time.monotonic()
        sources.remove("a")
        event_log.wait_for("ended", source_id="a")
        assert time.monotonic() - began < 10
        event_log.wait_for("frame", event_log.count("frame", "b") + 45, "b")
        assert (one(sources, "b").restarts, one(sources, "b").state) == (0, SourceState.RUNNING)
        beat = one(sources, "b")
        assert 0.0 < beat.decode_s < 5.0


def test_recording_is_cut_among_others(path: Path, tmp_path: Path) -> None:
    """Asked for while it plays, it is written by the camera's own thread."""
    event_log = EventLog()
    with running(event_log, OPTIONS) as sources:
        for name in "ab":
            sources.add(SourceConfig(str(path), name, is_loop=True, is_realtime=True, record_cache_s=3.0), PICTURES)
        event_log.wait_for("frame", 10, "a")
        sources.record("a", Cut(str(tmp_path / "cut.mp4"), 0.5, 0.5))
        assert event_log.wait_for("recorded", 1, "a") == [(str(tmp_path / "cut.mp4"), "")]
        assert (tmp_path / "cut.mp4").stat().st_size > 0


def test_pictures_travel_from_when_they_are_wanted(path: Path) -> None:
    """And no longer than they are."""
    event_log = EventLog()
    has_image: list[bool] = []
    event_log.on_frame_call = lambda prepared: has_image.append(prepared.frame.image is not None)
    with running(event_log, OPTIONS) as sources:
        sources.add(SourceConfig(str(path), "a", is_loop=True, is_realtime=True), SourceNeeds())
        event_log.wait_for("frame", 3)
        sources.want_images("a", True)
        event_log.wait(lambda: True in has_image)
        sources.want_images("a", False)
        event_log.wait(lambda: not has_image[-1])
    assert not has_image[0]


def test_real_process_without_a_card_hands_its_cameras_to_the_cpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is missing of card, driver or packages: each picture comes all the same, and nothing was restarted."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    event_log = EventLog()
    with running(event_log, SourcesOptions(gpu=GpuSources())) as sources:
        for name in "ab":
            sources.add(SourceConfig(str(path), name), PICTURES)
        for name in "ab":
            event_log.wait_for("ended", source_id=name)
            seen = one(sources, name)
            assert (seen.state, seen.decoder, seen.restarts, seen.frames) == (SourceState.ENDED, "cpu", 0, 40)
    assert numbers(event_log, "a") == list(range(40)) == numbers(event_log, "b")


@pytest.mark.parametrize(
    "arguments", [[], ["0"], ["0", "1", "3"], ["0", "1", "3", "x"], ["0", "2", "3", "4"], ["0", "1", "3", "4", "5"]]
)
def test_shared_process_started_by_hand_says_what_it_is(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and a sentence."""
    assert shared_child.main(arguments) == 2
    assert "a part of `penstock video`" in capsys.readouterr().err


def test_process_that_lives_on_keeps_no_memory_of_cameras_that_left(path: Path) -> None:
    """A ring each, and the packets of a recording that may be asked for, are free with their thread."""
    event_log = EventLog()
    with running(event_log, OPTIONS) as sources:
        sources.add(SourceConfig(str(path), "stays", is_loop=True, is_realtime=True), PICTURES)
        event_log.wait_for("frame", 1, "stays")
        pid = one(sources, "stays").pid
        for number in range(3):
            sources.add(SourceConfig(str(path), f"s{number}", record_cache_s=5.0), PICTURES)
            event_log.wait_for("ended", 1, f"s{number}")
        assert one(sources, "s2").decoder == "nvdec"
        assert Path(f"/proc/{pid}/maps").read_text().count("penstock-ring") == 1


def test_camera_that_gets_no_thread_is_over_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has none left, its end is reported as another's, and its neighbours keep their process."""
    tries: list[int] = []
    start = threading.Thread.start

    def start_the_second(thread: threading.Thread) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    def run(link: socket.socket, ring: int) -> int:
        os.close(ring)
        return 7

    monkeypatch.setattr(shared_cameras.Camera, "start", start_the_second)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        serving = threading.Thread(target=shared_cameras.serve, args=(theirs, run))
        serving.start()
        words = []
        for _ in range(2):
            link, ring, (end, write_end) = socket.socketpair(), os.memfd_create("ring"), os.pipe()
            socket.send_fds(ours, [b"camera"], [link[1].fileno(), ring, write_end])
            link[1].close()
            os.close(ring)
            os.close(write_end)
            words.append((link[0].recv(1), os.read(end, 2), os.read(end, 1)))
            link[0].close()
            os.close(end)
        ours.shutdown(socket.SHUT_RDWR)
        serving.join(5.0)
    assert words == [(b"", b"\x01", b""), (b"", b"\x07", b"")]
