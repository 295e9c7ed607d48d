"""The card that the program decodes with, where there is one: found before a camera is opened, and why not."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import structlog

from deepstream_pipeline.errors import GpuFailed, GpuUnavailable
from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.gpu.ring import DeviceRing
from deepstream_pipeline.infer.engine import Engine
from deepstream_pipeline.infer.machine import available_cores
from deepstream_pipeline.infer.network import Network
from deepstream_pipeline.preprocess import device_rows
from deepstream_pipeline.settings.records import GpuSettings
from deepstream_pipeline.sources.options import GpuSources
from deepstream_pipeline.types import DecoderKind

log = structlog.get_logger(component="video")
LEAST_CORES = 4  # on fewer, the engine and the rest of this program want each of them: no decode process has its own
_DRIVER, _VIDEO_LIBRARY = "libcuda.so.1", "libnvcuvid.so.1"
_PACKAGES = {"PyNvVideoCodec": "PyNvVideoCodec", "cuda": "cuda-bindings"}


@dataclass(frozen=True, slots=True)
class Card:
    """device: None where sources are decoded by the CPU alone; absence says why, empty where there is a card."""

    device: Device | None
    absence: str = ""

    def sources(self, settings: GpuSettings, engine: Engine, network: Network) -> tuple[GpuSources | None, str]:
        """(how sources are decoded by the card, None where they are not; why not).

        Tries how rows get to the engine. Raises InferFailed where the settings wish for a way that there is not.
        """
        if self.device is None:
            return None, self.absence
        why = device_rows.why_not(network.prepare_spec)
        if why:
            log.info("sources are decoded by the cpu", model=network.name, reason=why)
            return None, f"model {network.name!r}: {why}"
        choice = engine.hand_over(network, settings.hand_over)
        found = GpuSources(
            cameras_per_process=settings.cameras_per_process,
            device=settings.device,
            has_pinned_processes=settings.has_pinned_processes and available_cores() >= LEAST_CORES,
        )
        if not choice.is_on_card:
            return found, ""
        new_ring = partial(_Ring, self.device)
        return replace(found, new_device_ring=new_ring, is_card_lost=lambda: engine.is_card_lost), ""


def open_card(settings: GpuSettings, wishes: Iterable[DecoderKind]) -> Card:
    """wishes: of the sources that there may be. The card is looked for where one of them may have it."""
    if all(wish is DecoderKind.CPU for wish in wishes):
        return Card(None, "every source of this run was to be decoded by the cpu, and no card was opened")
    absence = _what_is_missing()
    if absence:
        return Card(None, absence)
    try:
        device = Device.open(settings.device)
    except (GpuUnavailable, GpuFailed) as error:
        return Card(None, error.message)
    log.info("the card decodes", gpu=settings.device, name=device.name)
    return Card(device)


def _what_is_missing() -> str:
    """What decoding on a card wants and this machine has not; the driver is not asked for anything yet."""
    if not _is_there(_DRIVER):
        return f"no NVIDIA driver is here ({_DRIVER}); penstock doctor says more"
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            return f"the package {package} is not here: make gpu installs it"
    if not _is_there(_VIDEO_LIBRARY):
        return (
            f"NVIDIA's {_VIDEO_LIBRARY} is not here: it comes with the driver, and into a container with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        )
    return ""


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class _Ring(DeviceRing):
    """A source's rows, let go of without a word when the card is lost: their memory went with the context."""

    def close(self) -> None:
        try:
            super().close()
        except GpuFailed as error:
            log.debug("memory of the card was not given back", reason=error.message)
