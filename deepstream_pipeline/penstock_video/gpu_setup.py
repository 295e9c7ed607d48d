"""How the GPU decodes sources: what this machine has, which cards, and the memory that the engine shares."""

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import structlog

from penstock.engines.ort_serving.threads import available_cores
from penstock.gateway.card_engines import NO_CARDS, CardEngines
from penstock.gpu.cards import ALL, GpusRefused, choose_cards
from penstock.gpu.mps.control import PIPE_DIRECTORY, VISIBLE_CARDS
from penstock.gpu.nvml import read_cards
from penstock.gpu.video_engines import read_engines
from penstock_video.decode.cuvid import Cuvid
from penstock_video.errors import GpuFailed, GpuUnavailable, NeedsCpu
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import CudaRing
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.preprocess import device_rows
from penstock_video.settings.models import GpuSettings
from penstock_video.sources.decoder_cards import DecoderCard
from penstock_video.sources.decoder_meter import DecoderMeter
from penstock_video.sources.options import GpuSources
from penstock_video.types import DecoderKind

log = structlog.get_logger(component="video")
LEAST_CORES = 4  # on fewer, the engine and this program need all of them: decode processes are not pinned
_DRIVER, _VIDEO_LIBRARY = "libcuda.so.1", "libnvcuvid.so.1"


@dataclass(frozen=True, slots=True)
class GpuSetup:
    """device: None if the CPU decodes. absence: why there is no GPU; empty if there is one. cards: known to NVML.
    meter: of their decoders."""

    device: Device | None
    absence: str = ""
    cards: tuple[DecoderCard, ...] = ()
    meter: DecoderMeter | None = None

    def close(self) -> None:
        """Ends the measurement."""
        if self.meter is not None:
            self.meter.close()

    def sources(self, settings: GpuSettings, engine: Engine, network: Network) -> tuple[GpuSources | None, str]:
        """How the GPU decodes sources, or None and why not. Raises InferFailed for a required hand-over."""
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
            cards=self.cards,
            decoder_limit=settings.decoder_limit,
            has_pinned_processes=settings.has_pinned_processes and available_cores() >= LEAST_CORES,
        )
        if self.meter is not None:
            found = replace(found, read_decoders=self.meter.readings)
        if not choice.is_on_card:
            return found, ""
        new_ring = partial(_Ring, self.device)
        return replace(found, new_device_ring=new_ring, is_card_lost=lambda: engine.is_card_lost), ""


def open_gpu(settings: GpuSettings, wishes: Iterable[DecoderKind], engines: CardEngines = NO_CARDS) -> GpuSetup:
    """Opens the GPU if one of the wishes, of all possible sources, may use it. engines: of the stack, for their MPS.

    Raises GpuUnavailable if `gpus` names GPUs that cannot be used.
    """
    if all(wish is DecoderKind.CPU for wish in wishes):
        return GpuSetup(None, "all sources of this run have decoder cpu, so no GPU was opened")
    found = _opened(settings, engines)
    if found.device is None and settings.gpus != ALL:
        raise GpuUnavailable(
            f"--gpus {settings.gpus}: {found.absence}; leave it out (PENSTOCK_GPUS too), or use --decoder cpu"
        )
    return found


def _opened(settings: GpuSettings, engines: CardEngines) -> GpuSetup:
    absence = _what_is_missing()
    if absence:
        return GpuSetup(None, absence)
    try:
        cards = decoder_cards(settings, engines)
        device = Device.open(settings.device)
    except (GpuUnavailable, GpuFailed) as error:
        return GpuSetup(None, error.message)
    except GpusRefused as error:
        return GpuSetup(None, str(error))
    log.info("the GPU decodes sources", gpu=settings.device, name=device.name, cards=len(cards) or 1)
    if len(cards) == 1:
        cards = (replace(cards[0], engines=_engines_of(device)),)
    meter = DecoderMeter([one.card.uuid for one in cards]) if cards else None
    if meter is not None:
        meter.start()
    return GpuSetup(device, cards=cards, meter=meter)


def _engines_of(device: Device) -> int:
    """Video decoders of the opened GPU; 0 if unknown."""
    device.bind()
    try:
        return Cuvid().limits_of("h264")["num_decoder_engines"]
    except NeedsCpu:
        return 0


def decoder_cards(settings: GpuSettings, engines: CardEngines) -> tuple[DecoderCard, ...]:
    """The cards of `gpus`. Several are then all that CUDA sees here; of a single one `engines` is not known yet. Raises
    GpusRefused."""
    cards = choose_cards(settings.gpus, read_cards(), os.environ.get(VISIBLE_CARDS))
    if settings.gpus != ALL or len(cards) > 1:
        os.environ[VISIBLE_CARDS] = ",".join(card.uuid for card in cards)
    if len(cards) < 2:
        return tuple(DecoderCard(card, 0) for card in cards)
    mps = {each.uuid: each.mps_directory for each in engines.engines if each.mps_directory}
    found = []
    for card in cards:
        environ = {VISIBLE_CARDS: card.uuid} | ({PIPE_DIRECTORY: mps[card.uuid]} if card.uuid in mps else {})
        codecs = read_engines(environ).codecs
        found.append(DecoderCard(card, max((codec.engines for codec in codecs), default=0), environ))
    return tuple(found)


def _what_is_missing() -> str:
    """What GPU decoding needs and this machine lacks; checked without the driver."""
    if not _is_there(_DRIVER):
        return f"no NVIDIA driver is here ({_DRIVER}); penstock doctor says more"
    if find_spec("cuda") is None:
        return "the package cuda-bindings is not here: run make gpu in a checkout, else pip install 'penstock[gpu]'"
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


class _Ring(CudaRing):
    """A source's rows; closed silently if the GPU is lost, since its memory is gone then."""

    def close(self) -> None:
        try:
            super().close()
        except GpuFailed as error:
            log.debug("GPU memory was not freed", reason=error.message)
