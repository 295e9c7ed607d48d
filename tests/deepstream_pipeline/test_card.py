"""The card that a program decodes with: its absence is found before a camera is opened, with a readable reason."""

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.gateway.card_engines import CardEngine, CardEngines
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading
from penstock.gpu.video_engines import Codec, EngineOutcome, VideoEngines
from penstock.vision.spec import PrepareSpec, ScalingFilter
from penstock_video import gpu_setup as card
from penstock_video.errors import GpuUnavailable
from penstock_video.gpu.device import Device
from penstock_video.gpu_setup import GpuSetup, open_gpu
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.infer.options import RowMemory, RowMemoryChoice
from penstock_video.settings.models import GpuSettings
from penstock_video.types import DecoderKind
from tests.deepstream_pipeline.gpu.fake_driver import install

AUTO = (DecoderKind.AUTO,)
DEVICE = cast(Device, SimpleNamespace(name="a card"))

INSTALL = "run make gpu in a checkout, else pip install 'penstock[gpu]'"


class StandInEngine:
    """Answers the trial with a given result."""

    is_card_lost = False

    def __init__(self, kind: RowMemory) -> None:
        self.kind = kind

    def hand_over(self, network: Network, wish: RowMemory) -> RowMemoryChoice:
        return RowMemoryChoice(self.kind, "" if self.kind is RowMemory.DEVICE else "the engine has no card")


def a_network(scaling_filter: ScalingFilter = ScalingFilter.BILINEAR) -> Network:
    return cast(Network, SimpleNamespace(name="net", prepare_spec=PrepareSpec(8, 8, filter=scaling_filter)))


def asked(kind: RowMemory) -> Engine:
    return cast(Engine, StandInEngine(kind))


def test_no_card_is_looked_for_where_no_source_may_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context costs a card hundreds of megabytes: sources that are all the CPU's leave it alone."""
    monkeypatch.setattr(card, "find_spec", None)
    found = open_gpu(GpuSettings(), [DecoderKind.CPU, DecoderKind.CPU])
    assert found.device is None
    assert "have decoder cpu" in found.absence


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Those that are here."""
    here = {"libcuda.so.1", "libnvcuvid.so.1"}
    monkeypatch.setattr(card, "_is_there", here.__contains__)
    return here


def test_missing_driver_is_reported_first(libraries: set[str]) -> None:
    """No package would help it."""
    libraries.clear()
    assert open_gpu(GpuSettings(), AUTO).absence.startswith("no NVIDIA driver is here (libcuda.so.1)")


def test_gpus_that_are_named_and_absent_are_refused(libraries: set[str]) -> None:
    """As by `penstock up --gpus`: the CPU does not silently replace them. Sources with decoder cpu need no GPU."""
    libraries.clear()
    with pytest.raises(GpuUnavailable, match=r"--gpus 0: no NVIDIA driver is here \(libcuda.so.1\).*; leave it out"):
        open_gpu(GpuSettings(gpus="0"), AUTO)
    assert open_gpu(GpuSettings(gpus="0"), [DecoderKind.CPU]).device is None


def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    """Before the driver is asked; with what installs them."""
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    assert open_gpu(GpuSettings(), AUTO).absence == "the package cuda-bindings is not here: " + INSTALL


def test_driver_without_its_video_library_is_reported(monkeypatch: pytest.MonkeyPatch, libraries: set[str]) -> None:
    """In a container that was given compute and no video."""
    monkeypatch.setattr(card, "find_spec", lambda name: object())
    libraries.remove("libnvcuvid.so.1")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in open_gpu(GpuSettings(), AUTO).absence


def test_card_that_cannot_be_opened_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver's own reason; the program runs."""

    def refuse(index: int) -> Device:
        raise GpuUnavailable(f"there is no GPU {index}")

    monkeypatch.setattr(card, "_what_is_missing", lambda: "")
    monkeypatch.setattr(Device, "open", refuse)
    found = open_gpu(GpuSettings(device=3), AUTO)
    assert (found.device, found.absence) == (None, "there is no GPU 3")
    assert found.sources(GpuSettings(), asked(RowMemory.HOST), a_network()) == (None, "there is no GPU 3")


def test_memory_of_a_lost_card_is_let_go_of_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went with the context: the source that ends, or begins anew, does so all the same."""
    driver = install(monkeypatch)
    gpu, _ = GpuSetup(Device.open()).sources(GpuSettings(), asked(RowMemory.DEVICE), a_network())
    assert gpu is not None
    assert gpu.new_device_ring is not None
    ring = gpu.new_device_ring(4, 100)
    driver.fail("cuMemFree", "CUDA_ERROR_LAUNCH_FAILED")
    ring.close()
    driver.fail("cuMemFree", None)
    assert not gpu.is_card_lost()


def test_rows_that_the_card_cannot_make_are_made_by_the_cpu() -> None:
    """A network whose pictures are resized otherwise: its sources are decoded by the CPU, and it is said why."""
    gpu, absence = GpuSetup(DEVICE).sources(GpuSettings(), asked(RowMemory.DEVICE), a_network(ScalingFilter.AREA))
    assert gpu is None
    assert absence.startswith("model 'net': its pictures are resized by area")


def test_rows_stay_on_the_card_where_the_trial_says_so() -> None:
    """Else they go through the host's memory; decoded by the card they are either way."""
    for kind, has_rings in ((RowMemory.DEVICE, True), (RowMemory.HOST, False)):
        settings = GpuSettings(cameras_per_process=4, has_pinned_processes=False, device=1)
        gpu, absence = GpuSetup(DEVICE).sources(settings, asked(kind), a_network())
        assert gpu is not None
        assert absence == ""
        assert (gpu.cameras_per_process, gpu.device, gpu.new_device_ring is not None) == (4, 1, has_rings)
        assert not gpu.has_pinned_processes


@pytest.mark.parametrize(("cores", "is_pinned"), [(3, False), (4, True), (64, True)])
def test_decode_processes_have_a_core_each_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, is_pinned: bool
) -> None:
    """Of fewer than four, by number or as a container's share, the engine and the rest want each."""
    monkeypatch.setattr(card, "available_cores", lambda: cores)
    gpu, _ = GpuSetup(DEVICE).sources(GpuSettings(), asked(RowMemory.HOST), a_network())
    assert gpu is not None
    assert gpu.has_pinned_processes is is_pinned
    gpu, _ = GpuSetup(DEVICE).sources(GpuSettings(has_pinned_processes=False), asked(RowMemory.HOST), a_network())
    assert gpu is not None
    assert not gpu.has_pinned_processes


def test_several_cards_decode_each_by_processes_that_see_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the MPS daemon of the stack's engine on that card, and its own number of video engines."""
    reading = NvmlReading(
        NvmlOutcome.ANSWERED, cards=tuple(GpuDevice(at, "L4", (8, 9), 1 << 34, 0, uuid=f"GPU-{at}") for at in range(3))
    )
    asked: list[str] = []

    def engines_of(environ: Mapping[str, str]) -> VideoEngines:
        asked.append(environ["CUDA_VISIBLE_DEVICES"])
        return VideoEngines(EngineOutcome.ANSWERED, codecs=(Codec("H.264", 4), Codec("HEVC", 3)))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(card, "read_cards", lambda: reading)
    monkeypatch.setattr(card, "read_engines", engines_of)
    stack = CardEngines((CardEngine("GPU 2", "GPU-2", "/run/x", "/run/mps"),))
    first, second = card.decoder_cards(GpuSettings(gpus="2,0"), stack)
    assert (first.card.label, first.engines, second.card.label) == ("GPU 2", 4, "GPU 0")
    assert first.environ == {"CUDA_VISIBLE_DEVICES": "GPU-2", "CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}
    assert second.environ == {"CUDA_VISIBLE_DEVICES": "GPU-0"}
    assert asked == ["GPU-2", "GPU-0"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (only,) = card.decoder_cards(GpuSettings(gpus="1"), stack)
    assert (only.card.label, only.engines, dict(only.environ)) == ("GPU 1", 0, {})
    monkeypatch.setattr(card, "_what_is_missing", lambda: "")
    with pytest.raises(GpuUnavailable, match="has '0', which CUDA_VISIBLE_DEVICES=GPU-1 hides"):
        open_gpu(GpuSettings(gpus="0"), AUTO)
