"""A camera's thread where the card decodes: its driver is a stand-in, NVDEC is FFmpeg, and the kernels run as C++."""

import ctypes
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.vision.spec import PrepareSpec, ScalingFilter
from penstock_video.errors import NeedsCpu
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import CudaRing
from penstock_video.sources import shared_work
from penstock_video.sources.protocol import Beat, Ended, EndReason, FrameReady, Opened, Start
from penstock_video.sources.ring import Ring, image_offset, new_ring, ring_size
from penstock_video.sources.shared_work import DecoderTurns
from tests.deepstream_pipeline.clips import joined, number_of, write_clip
from tests.deepstream_pipeline.decode.fake_nvcodec import FakeOpener
from tests.deepstream_pipeline.gpu.fake_driver import CUresult, FakeDriver
from tests.deepstream_pipeline.gpu.kernels_on_cpu import card, compile_kernels
from tests.deepstream_pipeline.sources.child_parent import DEADLINE_S, SPEC, Parent, child, ended

SIZE, FRAMES, SLOTS = (320, 192), 12, 4


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def fake(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Device, FakeDriver]:
    monkeypatch.setattr(shared_work, "NvdecOpener", lambda device: FakeOpener())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the turns' files
    return card(library, monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_clip(tmp_path / "clip.mp4", frames=FRAMES, fps=10, size=SIZE, codec="libx264")


@contextmanager
def camera(
    uri: object, *, spec: PrepareSpec | None = SPEC, core: Any = None, **how: Any
) -> Iterator[tuple[Parent, threading.Thread]]:
    """One in a thread of this process, started by a message; at the end its socket is closed and its thread joined."""
    size = ring_size(SLOTS, spec.row_bytes if spec else 0, SIZE[0] * SIZE[1] * 3)
    descriptor = new_ring(size, "test")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    parent = Parent(ours, Mock(), Ring(os.dup(descriptor), size))
    started: dict[str, Any] = {
        "ring_frames": SLOTS, "slot_bytes": size.slot_bytes, "ring_bytes": size.size_bytes, "policy": "block",
        "decoder": "nvdec", "row_bytes": spec.row_bytes if spec else 0,
    }  # fmt: skip
    parent.say(Start(uri=str(uri), spec=spec.pack() if spec else b"", **(started | how)))
    shared = shared_work.SharedGpu(0, core)

    def run() -> None:
        with theirs:
            shared.run(theirs, descriptor)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield parent, thread
    finally:
        ours.close()
        thread.join(DEADLINE_S)
        parent.ring.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("wants_images", [False, True])
def test_rows_and_pictures_lie_in_the_ring_as_the_cpu_makes_them(
    path: Path, fake: tuple[Device, FakeDriver], wants_images: bool
) -> None:
    """Each frame once, in order, its row equal to the CPU's; the slots' pages are pinned once and given back."""
    driver, rows = fake[1], []
    with child(path, frames=SLOTS, wants_images=wants_images) as alone:
        while isinstance(record := alone.until(lambda one: isinstance(one, FrameReady | Ended)), FrameReady):
            rows.append(alone.ring.array(record.slot, 0, record.row_shape, np.float32).copy())
            alone.release(record)
    with camera(path, wants_images=wants_images) as (parent, _):
        opened = parent.until(lambda record: isinstance(record, Opened))
        assert isinstance(opened, Opened)
        assert (opened.decoder, opened.width, opened.height) == ("nvdec", *SIZE)
        for number in range(FRAMES):
            frame = parent.frame()
            assert (frame.frame_num, frame.is_on_device, parent.row_number(frame)) == (number, False, number)
            row = parent.ring.array(frame.slot, 0, frame.row_shape, np.float32)
            np.testing.assert_array_equal(row, rows[number])
            assert frame.has_image is wants_images
            if wants_images:
                assert number_of(parent.image(frame)) == number
            parent.release(frame)
        parent.rest()
        assert ended(parent).reason is EndReason.EOF
        assert driver.calls.count("cuMemHostRegister") <= SLOTS + 1  # and the thumbnail's
    assert driver.is_all_given_back


def test_rows_lie_on_the_card_where_its_ring_is_reported(path: Path, fake: tuple[Device, FakeDriver]) -> None:
    """In the slot of the same number, opened by its handle; the picture begins the ring's slot then."""
    device, driver = fake
    rows = CudaRing(device, SLOTS, SPEC.row_bytes)
    with camera(path, device_ring=rows.handle, wants_images=True) as (parent, _):
        for number in range(FRAMES):
            frame = parent.frame()
            assert frame.is_on_device
            row = rows.row(frame.slot, frame.row_shape, np.float32)
            values = np.frombuffer(ctypes.string_at(row.address, row.nbytes), np.float32).reshape(row.shape)
            image = parent.ring.array(frame.slot, image_offset(0), (frame.height, frame.width, 3), np.uint8)
            assert number_of(values.transpose(1, 2, 0)) == number == number_of(image)
            parent.release(frame)
        parent.rest()
    rows.close()
    assert driver.is_all_given_back


def test_frames_between_two_rows_and_without_a_network_are_looked_at_all_the_same(
    path: Path, fake: tuple[Device, FakeDriver]
) -> None:
    """Every frame has a digest of its own; a row only those that are inferred."""
    with camera(path, interval=2) as (parent, _):
        frames = parent.rest()
    assert [bool(frame.row_shape) for frame in frames] == [number % 3 == 0 for number in range(FRAMES)]
    with camera(path, spec=None) as (parent, _):
        bare = parent.rest()
    assert {frame.row_shape for frame in bare} == {()}
    assert len({frame.digest for frame in bare}) == FRAMES
    assert [frame.digest for frame in bare] == [frame.digest for frame in frames]
    assert fake[1].is_all_given_back


def test_what_the_card_does_not_take_needs_the_cpu(
    tmp_path: Path, path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec, a network's filter, or no card at all: said at once, with why."""
    other = write_clip(tmp_path / "clip.avi", frames=FRAMES, fps=10, size=SIZE, codec="mjpeg")
    for uri, spec, why in (
        (other, SPEC, "this is mjpeg"),
        (path, replace(SPEC, filter=ScalingFilter.CUBIC), "resized by cubic"),
    ):
        with camera(uri, spec=spec) as (parent, _):
            assert parent.rest() == []
            assert ended(parent).reason is EndReason.NEEDS_CPU
            assert why in ended(parent).text
    assert fake[1].is_all_given_back
    fake[1].devices = 0
    with camera(path) as (parent, _):
        assert parent.rest() == []
        assert (ended(parent).reason, parent.of(Opened)) == (EndReason.NO_CARD, [])
        assert "there is no GPU 0" in ended(parent).text


@pytest.mark.parametrize("is_broken", [False, True])
def test_card_that_fails_ends_the_process_only_where_nothing_goes_on(
    path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """A fault of one camera is that one's, with CUDA's word for it; a broken context is everybody's."""
    driver, ends = fake[1], Mock()
    monkeypatch.setattr(shared_work.os, "_exit", ends)
    state = CUresult.CUDA_ERROR_LAUNCH_FAILED if is_broken else CUresult.CUDA_SUCCESS
    driver.cuCtxSynchronize = lambda: (state,)  # type: ignore[attr-defined]
    with camera(path) as (parent, thread):
        parent.release(parent.frame())
        driver.fail("cuLaunchKernel", "CUDA_ERROR_LAUNCH_FAILED")
        parent.rest()
        assert "CUDA_ERROR_LAUNCH_FAILED" in ended(parent).text
        thread.join(DEADLINE_S)
    assert ends.called is is_broken
    assert driver.is_all_given_back


@pytest.mark.parametrize("is_broken", [False, True])
def test_card_that_fails_before_a_camera_begins_is_reported_as_one_that_fails_later(
    path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """With CUDA's word for it; a process whose context is broken does not live on for cameras that come again."""
    driver, ends = fake[1], Mock()
    monkeypatch.setattr(shared_work.os, "_exit", ends)
    state = CUresult.CUDA_ERROR_LAUNCH_FAILED if is_broken else CUresult.CUDA_SUCCESS
    driver.cuCtxSynchronize = lambda: (state,)  # type: ignore[attr-defined]
    driver.fail("cuStreamCreate", "CUDA_ERROR_LAUNCH_FAILED")
    with camera(path) as (parent, thread):
        assert parent.rest() == []
        assert ended(parent).reason is EndReason.INTERNAL
        assert "CUDA_ERROR_LAUNCH_FAILED" in ended(parent).text
        thread.join(DEADLINE_S)
    assert ends.called is is_broken


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuModuleLoadData", "cuMemAlloc", "cuMemHostRegister"])
def test_card_without_memory_for_one_more_camera_leaves_it_to_the_cpu(
    path: Path, fake: tuple[Device, FakeDriver], function: str
) -> None:
    """Whatever could not be had, and it is no fault of the stream; what was had is given back."""
    fake[1].fail(function, "CUDA_ERROR_OUT_OF_MEMORY")
    with camera(path) as (parent, _):
        assert parent.rest() == []
        assert ended(parent).reason is EndReason.NO_CARD
        assert "CUDA_ERROR_OUT_OF_MEMORY" in ended(parent).text
    assert fake[1].is_all_given_back


@pytest.mark.parametrize("is_broken", [False, True])
def test_decoder_that_cannot_be_made_by_a_broken_card_moves_no_camera_to_the_cpu(
    path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """What NVDEC refuses on a context that is lost says nothing of the stream: the process begins anew."""
    opener, ends = Mock(side_effect=NeedsCpu("NVDEC cannot decode this"), sharing=None), Mock()
    opener.for_camera.return_value = opener
    monkeypatch.setattr(shared_work, "NvdecOpener", lambda device: opener)
    monkeypatch.setattr(shared_work.os, "_exit", ends)
    state = CUresult.CUDA_ERROR_LAUNCH_FAILED if is_broken else CUresult.CUDA_SUCCESS
    fake[1].cuCtxSynchronize = lambda: (state,)  # type: ignore[attr-defined]
    with camera(path) as (parent, thread):
        assert parent.rest() == []
        assert ended(parent).reason is (EndReason.INTERNAL if is_broken else EndReason.NEEDS_CPU)
        assert "NVDEC cannot decode this" in ended(parent).text
        thread.join(DEADLINE_S)
    assert ends.called is is_broken
    assert fake[1].is_all_given_back


def test_full_card_is_no_fault_of_the_camera_and_does_not_end_the_process(
    path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is counted as damaged, its turn is the next one's, and that one decodes once there is room."""
    opener, ends = FakeOpener(room=0), Mock()
    monkeypatch.setattr(shared_work, "NvdecOpener", lambda device: opener)
    monkeypatch.setattr(shared_work.os, "_exit", ends)
    with camera(path) as (parent, _):
        assert parent.rest() == []
        assert ended(parent) == Ended(EndReason.NO_CARD, "the GPU makes no more decoders")
        assert [(beat.decoded, beat.bad_packets) for beat in parent.of(Beat)] == [(0, 0)]
    opener.room = 1
    with camera(path) as (parent, _):
        assert len(parent.rest()) == FRAMES
    assert not ends.called
    assert fake[1].is_all_given_back


@pytest.mark.parametrize("is_realtime", [False, True])
def test_file_at_full_speed_shares_no_decoder(
    path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch, is_realtime: bool
) -> None:
    """Two would take turns; what is played as a camera may share one."""
    opener = FakeOpener()
    monkeypatch.setattr(shared_work, "NvdecOpener", lambda device: opener)
    with camera(path, is_realtime=is_realtime) as (parent, _):
        assert len(parent.rest()) == FRAMES
    assert opener.is_alone is not is_realtime


def test_card_that_became_full_ends_a_stream_that_changes_its_size(
    tmp_path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before is there, and nothing is tried twice."""
    opener = FakeOpener(room=1)
    monkeypatch.setattr(shared_work, "NvdecOpener", lambda device: opener)
    parts = [
        write_clip(tmp_path / f"{width}.ts", frames=FRAMES, size=(width, 192), codec="libx264", b_frames=2)
        for width in (320, 352)
    ]
    with camera(joined(tmp_path / "both.ts", *parts)) as (parent, _):
        frames = parent.rest()
        assert ended(parent).reason is EndReason.NO_CARD
    assert {frame.width for frame in frames} == {320}
    assert len(opener.opened) == 2
    assert fake[1].is_all_given_back


@pytest.mark.parametrize(
    ("how", "is_left"),
    [
        ({}, True),
        ({"policy": "drop-oldest"}, True),
        ({"is_realtime": True}, False),
        ({"is_realtime": True, "policy": "drop-oldest"}, False),
    ],
)
def test_file_at_full_speed_has_every_core(
    path: Path, fake: tuple[Device, FakeDriver], how: dict[str, Any], is_left: bool
) -> None:
    """The process leaves its own one, whatever is done with frames for which there is no room; for what is played as a
    camera it keeps it."""
    core = Mock()
    with camera(path, core=core, **how) as (parent, _):
        parent.rest()
    assert core.leave.called is is_left
    assert fake[1].is_all_given_back


@pytest.mark.parametrize(
    ("address", "is_left"),
    [
        ("rtsp://127.0.0.1:{}/", False),
        ("http://127.0.0.1:{}/", False),
        ("http://127.0.0.1:{}/a.mp4", True),
        ("a:", False),
    ],
)
def test_camera_of_which_no_frame_may_be_dropped_is_no_file(
    fake: tuple[Device, FakeDriver], address: str, is_left: bool
) -> None:
    """It comes at its own speed, and its process keeps its core; a file over HTTP has every one."""
    core = Mock()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no one listens
        with camera(address.format(silent.getsockname()[1]), core=core, policy="block", open_timeout_s=2.0) as (
            parent,
            _,
        ):
            assert parent.rest() == []
            assert ended(parent).reason in (EndReason.UNAVAILABLE, EndReason.NOT_ALLOWED)
    assert core.leave.called is is_left


def test_cameras_of_a_process_have_one_order_of_turns_which_is_the_cards(
    path: Path, fake: tuple[Device, FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its place on the bus: its number is 0 in every program to which one card is left."""
    fake[1].first_bus = 0xAF
    turns, cards, new_card = Mock(side_effect=DecoderTurns), [], shared_work.SharedGpu
    monkeypatch.setattr(shared_work, "DecoderTurns", turns)

    def the_card(*given: Any) -> shared_work.SharedGpu:
        if not cards:
            cards.append(new_card(*given))
        return cards[0]

    monkeypatch.setattr(shared_work, "SharedGpu", the_card)
    with camera(path) as (first, _), camera(path) as (second, _):
        assert (len(first.rest()), len(second.rest())) == (FRAMES, FRAMES)
    turns.assert_called_once_with("0000-af-00.0")
    assert fake[1].is_all_given_back


def test_camera_waits_for_its_turn_and_says_so(path: Path, fake: tuple[Device, FakeDriver]) -> None:
    """Another program makes a decoder on the same card: it is open, lives, and shows nothing until that is done."""

    def nothing() -> None:
        """No one is before us."""

    with DecoderTurns(fake[0].bus_id).taken(nothing), camera(path) as (parent, _):
        waiting = parent.until(lambda record: isinstance(record, Beat))
        assert isinstance(waiting, Beat)
        assert (waiting.is_waiting, waiting.decoded) == (True, 0)
        assert len(parent.of(Opened)) == 1
    with camera(path) as (parent, _):
        assert len(parent.rest()) == FRAMES
    assert fake[1].is_all_given_back


def test_camera_that_is_left_gives_everything_back(path: Path, fake: tuple[Device, FakeDriver]) -> None:
    """Its parent closes its socket in the middle of its frames."""
    with camera(path, is_loop=True) as (parent, _):
        for _ in range(5):
            parent.release(parent.frame())
    assert fake[1].is_all_given_back
