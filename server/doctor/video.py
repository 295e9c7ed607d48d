"""What the video program may do on a card here: decode (NVDEC), encode (NVENC), JPEG (nvJPEG)."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from server.doctor.finding import Finding, Status
from server.doctor.host import container_kind
from server.gpu.nvml import Card, Reading
from server.gpu.video_engines import EngineOutcome, VideoEngines, read_engines

PACKAGES = ("PyNvVideoCodec", "cuda-bindings")
# NVIDIA's table of video engines: A100 and A30, H100 and H200, B200 and B300 decode and do not encode.
_NO_ENCODER = ((8, 0), (9, 0), (10, 0), (10, 3))
_INSTALL = "run make gpu; in a container, build the image with --build-arg VIDEO_GPU=1"
_ON_CPU = "the video program decodes on the CPU"


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """engines: what the driver says of the first card. missing: packages that decoding on it needs. in_container: the
    kind, "" for none."""

    engines: VideoEngines
    missing: tuple[str, ...] = ()
    in_container: str = ""


def probe() -> VideoFacts:
    """Asks the driver in a child process, and this Python for its packages. Blocks for the child's deadline at most."""
    return VideoFacts(read_engines(), missing_of(PACKAGES), container_kind())


def missing_of(packages: Sequence[str]) -> tuple[str, ...]:
    """Those that are not installed."""
    return tuple(name for name in packages if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def no_card() -> list[Finding]:
    """Where there is none."""
    return [Finding("video.nvdec", Status.OK, f"no NVIDIA GPU: {_ON_CPU}")]


def findings_of(facts: VideoFacts, reading: Reading) -> list[Finding]:
    """Decoding, with what keeps it from the card; then encoding and JPEG. reading: of NVML, with a card."""
    return [_decoder(facts), _encoder(reading.cards), _jpeg(facts)]


def _decoder(facts: VideoFacts) -> Finding:
    name, engines = "video.nvdec", facts.engines
    if engines.outcome is EngineOutcome.TIMED_OUT:
        found = f"the driver did not tell within {engines.detail} what the card decodes: it hangs"
        return Finding(name, Status.WARNING, found, "look for Xid errors in dmesg, then reset the card or reboot")
    if engines.outcome is EngineOutcome.FAILED:
        found = f"the driver does not tell what the card decodes ({engines.detail}): {_ON_CPU}"
        return Finding(name, Status.NOTE, found, "see nvidia-smi: a card that is full, or held by another, says no")
    if engines.outcome is not EngineOutcome.ANSWERED:
        advice = "install the driver's video part (apt-get install libnvidia-decode-580, libnvcuvid1 on Debian)"
        if facts.in_container:
            advice = "for video on the card start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        return Finding(name, Status.NOTE, f"{engines.outcome}: {_ON_CPU}", advice)
    decoded = [codec for codec in engines.codecs if codec.engines]
    if not decoded:
        return Finding(name, Status.OK, f"the card decodes neither H.264 nor HEVC: {_ON_CPU}")
    count = max(codec.engines for codec in decoded)
    sizes = ", ".join(f"{codec.name} to {codec.width}x{codec.height}" for codec in decoded)
    found = f"{count} engine{'s' * (count != 1)}: {sizes}, 8 bit 4:2:0"
    missing = (*facts.missing, *(() if engines.has_nvrtc else ("libnvrtc",)))
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        found = f"{found}; {' and '.join(missing)} {verb} not installed: {_ON_CPU}"
        return Finding(name, Status.NOTE, found, _INSTALL)
    return Finding(name, Status.OK, found)


def _encoder(cards: Sequence[Card]) -> Finding:
    """By the card's kind: the video program tries it out when it starts."""
    if all(card.capability in _NO_ENCODER for card in cards):
        return Finding("video.nvenc", Status.OK, f"{cards[0].name} has none: annotated video is encoded on the CPU")
    having = next(card for card in cards if card.capability not in _NO_ENCODER)
    return Finding("video.nvenc", Status.OK, f"{having.name} is of a kind that has it; the video program tries it")


def _jpeg(facts: VideoFacts) -> Finding:
    if facts.engines.has_nvjpeg:
        return Finding("video.nvjpeg", Status.OK, "libnvjpeg is here: previews are encoded on the card")
    return Finding("video.nvjpeg", Status.NOTE, "libnvjpeg is not here: previews are encoded on the CPU", _INSTALL)
