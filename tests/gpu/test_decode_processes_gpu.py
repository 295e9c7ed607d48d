"""Decode processes on a card: several cameras in one, rows where they are wanted, and what a dead one costs."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.vision.spec import PrepareSpec
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import CudaRing
from penstock_video.sources.options import GpuSources, SourceNeeds, SourcesOptions
from penstock_video.types import DecoderKind, DeviceRow, PreparedFrame, SourceConfig, SourceState
from tests.deepstream_pipeline.clips import number_of, write_clip
from tests.deepstream_pipeline.sources.parent import EventLog, one, running

pytestmark = pytest.mark.gpu

SPEC = PrepareSpec(64, 48)
NEEDS = SourceNeeds(SPEC.pack(), SPEC.row_bytes, np.float32)
CAMERAS, FRAMES = "abcdef", 60
RESTART_S = 8.0  # of four cameras whose process died: its start, the card's context, four decoders


@pytest.fixture(scope="module")
def device() -> Device:
    """The card, in this process."""
    return Device.open()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip of H.264."""
    folder = tmp_path_factory.mktemp("clips")
    return write_clip(folder / "clip.mp4", frames=FRAMES, fps=30, size=(320, 192), codec="libx264", gop=15)


def options(**gpu: object) -> SourcesOptions:
    """Four cameras to a process."""
    return SourcesOptions(max_pixels=640 * 480, gpu=GpuSources(cameras_per_process=4, **gpu))  # type: ignore[arg-type]


def rows_of(
    device: Device, path: Path, needs: SourceNeeds, sources_options: SourcesOptions, decoder: DecoderKind
) -> dict[str, list["np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]]:
    """Each camera's, copied to the host as they came; each with its decoder setting."""
    rows: dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]] = {name: [] for name in CAMERAS}

    def keep(prepared: PreparedFrame) -> None:
        assert prepared.frame.image is None or number_of(prepared.frame.image) == prepared.frame.frame_num
        rows[prepared.frame.source_id].append(on_host(device, prepared))

    events = EventLog(on_frame_call=keep)
    with running(events, sources_options) as sources:
        for name in CAMERAS:
            sources.add(SourceConfig(str(path), name, decoder=decoder), needs)
        for name in CAMERAS:
            events.wait_for("ended", 1, name)
            seen = one(sources, name)
            assert (seen.state, seen.decoder, seen.restarts) == (SourceState.ENDED, decoder.value, 0), seen.reason
    return rows


def on_host(device: Device, prepared: PreparedFrame) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """The frame's row."""
    row = prepared.row
    if not isinstance(row, DeviceRow):
        assert row is not None
        return row.astype(np.float32)
    device.bind()
    host = np.empty(row.shape, np.float32)
    stream = device.new_stream()
    device.copy(host.ctypes.data, row.address, row.nbytes, stream.handle)
    stream.synchronize()
    stream.close()
    return host


@pytest.mark.parametrize("is_on_device", [True, False])
@pytest.mark.parametrize("wants_images", [False, True])
def test_rows_of_several_cameras_equal_the_cpus(
    device: Device, path: Path, is_on_device: bool, wants_images: bool
) -> None:
    """Each frame of each of six files, in the card's memory or in the host's, beside its picture or without it."""
    needs = SourceNeeds(NEEDS.spec, NEEDS.row_bytes, np.float32, 0, wants_images)
    new_ring = partial(CudaRing, device) if is_on_device else None
    made = rows_of(device, path, needs, options(new_device_ring=new_ring), DecoderKind.NVDEC)
    wanted = rows_of(device, path, needs, SourcesOptions(max_pixels=640 * 480), DecoderKind.CPU)
    for name in CAMERAS:
        assert len(made[name]) == len(wanted[name]) == FRAMES
        for number, (row, right) in enumerate(zip(made[name], wanted[name], strict=True)):
            np.testing.assert_array_equal(row, right, err_msg=f"frame {number} of {name}")


def test_killed_process_costs_its_own_cameras_a_restart_and_no_other(device: Device, path: Path) -> None:
    """Four begin anew within RESTART_S; the others' frames come on without a gap."""
    events = EventLog()
    with running(events, options()) as sources:
        for name in CAMERAS:
            sources.add(SourceConfig(str(path), name, is_loop=True, is_realtime=True), NEEDS)
            events.wait_for("frame", 2, name)
        pids = [one(sources, name).pid for name in CAMERAS]
        assert len(set(pids)) == 2
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGKILL)
        began = time.monotonic()
        for name in CAMERAS[:4]:
            events.wait_for("opened", 2, name)
        restart_s = time.monotonic() - began
        for name in CAMERAS[4:]:
            events.wait_for("frame", events.count("frame", name) + 10, name)
            seen = one(sources, name)
            assert (seen.restarts, dict(seen.drops), seen.state) == (0, {}, SourceState.RUNNING)
        assert restart_s < RESTART_S, restart_s


def test_rubbish_beside_cameras_ends_alone(device: Device, path: Path, tmp_path: Path) -> None:
    """What is no stream fails, and what is damaged is decoded as far as it goes, in the same process as the others."""
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 256)
    broken = bytearray(path.read_bytes())
    begin = len(broken) // 2
    broken[begin : begin + 2000] = os.urandom(2000)
    (tmp_path / "broken.mp4").write_bytes(broken)
    events = EventLog()
    with running(events, options()) as sources:
        sources.add(SourceConfig(str(path), "good"), NEEDS)
        sources.add(SourceConfig(str(tmp_path / "noise.mp4"), "noise"), NEEDS)
        sources.add(SourceConfig(str(tmp_path / "broken.mp4"), "broken"), NEEDS)
        for name in ("good", "noise", "broken"):
            events.wait_for("ended", 1, name)
        assert one(sources, "noise").state is SourceState.FAILED
        assert (one(sources, "good").frames, one(sources, "good").restarts) == (FRAMES, 0)
        assert one(sources, "broken").restarts == 0
        assert len([process for process in sources.processes() if process.decoder == "nvdec"]) == 1


def test_stream_that_nvdec_does_not_take_is_the_cpus_at_once(device: Device, tmp_path: Path) -> None:
    """auto goes on by the CPU, and nothing is lost or counted; nvdec fails and says why."""
    other = write_clip(tmp_path / "clip.avi", frames=20, fps=10, size=(320, 192), codec="mjpeg")
    events = EventLog()
    with running(events, options()) as sources:
        sources.add(SourceConfig(str(other), "auto"), NEEDS)
        sources.add(SourceConfig(str(other), "nvdec", decoder=DecoderKind.NVDEC), NEEDS)
        events.wait_for("ended", 1, "auto")
        events.wait_for("ended", 1, "nvdec")
        seen = one(sources, "auto")
        assert (seen.decoder, seen.frames, seen.restarts, seen.state) == ("cpu", 20, 0, SourceState.ENDED)
        assert one(sources, "nvdec").state is SourceState.FAILED
        assert "mjpeg" in one(sources, "nvdec").reason
