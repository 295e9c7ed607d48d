"""GPUs: driver and cards, the matching Triton image and TensorRT, and the video engines (NVDEC, nvJPEG)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from penstock.doctor.finding import Finding, Severity, shown_bytes
from penstock.doctor.host import container_kind
from penstock.gpu.cards import ALL, GpusRefused, choose_cards
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading, read_cards
from penstock.gpu.telemetry.messages import CardLoad
from penstock.gpu.telemetry.sampler import TelemetryUnavailable, sample
from penstock.gpu.tensorrt import MIN_DRIVER, advise_tensorrt
from penstock.gpu.triton_images import DriverFit, ImageAdvice, advise_all
from penstock.gpu.video_engines import EngineOutcome, VideoEngines, read_engines

PCI = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/version")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_NEARLY_FULL = 0.9
_SAMPLE_S = 0.3
_NO_RUNTIME = "install nvidia-container-toolkit on the host and start it with docker run --gpus all"


@dataclass(frozen=True, slots=True)
class GraphicsFacts:
    """The driver and the cards."""

    reading: NvmlReading
    pci: tuple[str, ...] = ()  # addresses of NVIDIA display devices
    has_module: bool = False  # NVIDIA's kernel module is loaded
    in_container: str = ""
    hidden: str = ""  # `CUDA_VISIBLE_DEVICES=value` if set
    device_files: tuple[str, ...] = field(default=())
    loads: tuple[CardLoad, ...] = ()  # utilization


def probe_graphics() -> GraphicsFacts:
    """Reads NVML in child processes, /sys and /proc. Blocks for NVML's deadline, and one more second with cards."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reading = read_cards()
    return GraphicsFacts(
        reading=reading,
        pci=nvidia_devices(PCI),
        has_module=DRIVER.exists(),
        in_container=container_kind(),
        hidden="" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}",
        device_files=tuple(sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))),
        loads=_loads() if reading.cards else (),
    )


def _loads() -> tuple[CardLoad, ...]:
    try:
        return sample(_SAMPLE_S)
    except TelemetryUnavailable:  # the reading has the reason
        return ()


def nvidia_devices(folder: Path) -> tuple[str, ...]:
    """The PCI addresses of NVIDIA's display and 3D controllers."""
    return tuple(
        sorted(
            device.name
            for device in (folder.iterdir() if folder.is_dir() else ())
            if _read_text(device / "vendor") == _NVIDIA and _read_text(device / "class").startswith(_DISPLAY)
        )
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def graphics_findings(facts: GraphicsFacts) -> list[Finding]:
    """The driver and each card, or one finding on what is missing."""
    reading = facts.reading
    if reading.outcome is not NvmlOutcome.ANSWERED:
        return [_no_answer(facts)]
    if not reading.cards:
        return [_no_card(facts)]
    cuda = f", CUDA up to {reading.cuda[0]}.{reading.cuda[1]}" if reading.cuda else ""
    findings = [Finding("gpu.driver", Severity.OK, f"driver {reading.driver}{cuda}")]
    findings += [_card(card) for card in reading.cards]
    if reading.detail:
        advice = "see dmesg, then reset the GPU (nvidia-smi --gpu-reset) or restart the machine"
        findings.append(Finding("gpu.silent", Severity.WARNING, reading.detail, advice))
    visible = facts.hidden.partition("=")[2] if facts.hidden else None
    if len(cards := choose_cards(ALL, reading, visible)) > 1:
        labels = ", ".join(card.label for card in cards)
        findings.append(Finding("gpu.cards", Severity.OK, f"{labels}: penstock up starts an engine for each (--gpus)"))
    findings += [_activity(load) for load in facts.loads]
    if facts.hidden:
        advice = "unset it if every GPU is meant to serve"
        seen = "CUDA sees none of them" if facts.hidden.endswith(("=", "=-1")) else "CUDA sees those named only"
        findings.append(Finding("gpu.hidden", Severity.NOTE, f"{seen}: {facts.hidden}", advice))
    return findings


def wanted_findings(reading: NvmlReading, gpus: str, visible: str | None) -> list[Finding]:
    """A problem if `penstock up` refuses the setting `gpus`. visible: CUDA_VISIBLE_DEVICES, None if not set."""
    try:
        choose_cards(gpus, reading, visible)
    except GpusRefused as error:
        found, _, advice = str(error).partition("; ")
        return [
            Finding(
                "gpu.wanted",
                Severity.PROBLEM,
                found,
                f"{advice.removesuffix(', or see penstock doctor')} (--gpus, PENSTOCK_GPUS)",
            )
        ]
    return []


def _card(card: GpuDevice) -> Finding:
    name = f"gpu.card{card.index}"
    major, minor = card.capability
    found = f"{card.name}, compute capability {major}.{minor}, {shown_bytes(card.memory_bytes)}"
    found += f" ({shown_bytes(card.memory_bytes - card.used_bytes)} free), mode {card.compute_mode}"
    if card.mig is not None:
        found += f", MIG {'on' if card.mig else 'off'}"
    if card.processes:
        found += f", {len(card.processes)} processes"
    if card.compute_mode == "PROHIBITED":
        return Finding(
            name, Severity.WARNING, found, f"nothing may compute on it: nvidia-smi -i {card.index} -c DEFAULT"
        )
    if card.used_bytes > _NEARLY_FULL * card.memory_bytes:
        return Finding(name, Severity.WARNING, found, "its memory is nearly full: end what holds it (nvidia-smi)")
    if card.mig:
        advice = "name the instances that Triton may use: CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L)"
        return Finding(name, Severity.NOTE, found, advice)
    return Finding(name, Severity.OK, found)


def _activity(load: CardLoad) -> Finding:
    """SM activity beside nvidia-smi's utilization."""
    name = f"gpu.activity{load.index}"
    if load.lost:
        advice = "see dmesg, then reset the GPU (nvidia-smi --gpu-reset) or restart the machine"
        return Finding(name, Severity.WARNING, f"NVML can no longer read the GPU: {load.lost}", advice)
    util = "" if load.kernel_running is None else f"a kernel ran {load.kernel_running:.0%} of the time (util)"
    if load.activity.sm is None:
        found = f"{util}, SM activity unknown".removeprefix(", ")
        return Finding(name, Severity.NOTE, found, f"{load.why_no_activity}: gpu_metrics in penstock up's settings")
    return Finding(name, Severity.OK, f"SM activity {load.activity.sm:.1%} by {load.source}, {util}".removesuffix(", "))


def _no_card(facts: GraphicsFacts) -> Finding:
    found = f"driver {facts.reading.driver} is loaded and has no GPU"
    if facts.pci:
        found += f", though {len(facts.pci)} on the PCI bus"
        advice = (
            "see dmesg: the driver may be too new for it (R580 is the last for Pascal and Volta), or it is passed on"
        )
        return Finding("gpu.card", Severity.WARNING, found, advice)
    advice = f"{_NO_RUNTIME}" if facts.in_container else "see nvidia-smi and dmesg; models run on the CPU"
    return Finding("gpu.card", Severity.WARNING if facts.in_container else Severity.NOTE, found, advice)


def _no_answer(facts: GraphicsFacts) -> Finding:
    outcome, detail = facts.reading.outcome, facts.reading.detail
    has_card = bool(facts.pci or facts.device_files)
    if outcome is NvmlOutcome.TIMED_OUT:
        found = f"NVML did not answer within {detail}: the driver hangs"
        return Finding(
            "gpu.driver", Severity.WARNING, found, "look for Xid errors in dmesg, then reset the GPU or reboot"
        )
    if outcome is NvmlOutcome.MISMATCH:
        found = "the NVIDIA driver was updated and its old kernel module still runs"
        return Finding(
            "gpu.driver", Severity.WARNING, found, "reboot, or reload the module: modprobe -r nvidia && modprobe nvidia"
        )
    if outcome is NvmlOutcome.NO_PERMISSION:
        advice = "let this user into the group that owns /dev/nvidia*"
        return Finding("gpu.driver", Severity.WARNING, f"NVML: {detail}", advice)
    if outcome is NvmlOutcome.FAILED:
        return Finding(
            "gpu.driver", Severity.WARNING, f"NVML failed: {detail}", "see nvidia-smi; models run on the CPU"
        )
    if outcome is NvmlOutcome.NO_BINDING and (has_card or facts.has_module):
        return Finding(
            "gpu.driver",
            Severity.WARNING,
            "a GPU, but nvidia-ml-py is not installed",
            "pip install nvidia-ml-py (in a checkout: remove .venv and `make up`)",
        )
    return _no_driver(facts)


def _no_driver(facts: GraphicsFacts) -> Finding:
    """The container lacks the driver's files, the driver's libraries are missing, a card lacks a driver, or no card."""
    if facts.has_module and facts.in_container:
        found = f"the host has NVIDIA's driver, this {facts.in_container} container does not see it"
        return Finding("gpu.driver", Severity.WARNING, found, _NO_RUNTIME)
    if facts.has_module:
        found = "the kernel has NVIDIA's driver, its library libnvidia-ml.so.1 is missing"
        return Finding(
            "gpu.driver", Severity.WARNING, found, "install the driver's user-space part (apt-get install nvidia-smi)"
        )
    if facts.pci and facts.in_container:
        found = f"{len(facts.pci)} NVIDIA GPUs on the PCI bus, no driver in this {facts.in_container} container"
        return Finding("gpu.driver", Severity.WARNING, found, _NO_RUNTIME)
    if facts.pci:
        found = f"{len(facts.pci)} NVIDIA GPUs on the PCI bus ({', '.join(facts.pci)}), no driver"
        advice = "install NVIDIA's driver (branch 580, long-term support, fits every GPU since Pascal), then reboot"
        return Finding("gpu.driver", Severity.WARNING, found, advice)
    found = "no NVIDIA GPU: models run on the CPU; on a GPU machine run make gpu or make tensorrt first (docs/gpu.md)"
    return Finding("gpu.card", Severity.OK, found)


_FITS = (DriverFit.FULL, DriverFit.BY_MINOR_VERSION, DriverFit.UNKNOWN)


def image_findings(reading: NvmlReading) -> list[Finding]:
    """The image, whether the driver supports it, and a warning if it has known vulnerabilities."""
    if not reading.cards:
        return [Finding("image.tag", Severity.OK, "no NVIDIA GPU, so no requirement on Triton's image")]
    advice = advise_all([card.capability for card in reading.cards], reading.driver)
    if advice.image is None:
        return [Finding("image.tag", Severity.WARNING, f"no image fits {advice.cards}", advice.reason)]
    findings = [_tag(advice), _driver(advice, reading.driver)]
    findings += [Finding("image.security", Severity.WARNING, *_halves(warning)) for warning in advice.warnings]
    return findings


def _tag(advice: ImageAdvice) -> Finding:
    later = " or later" if advice.or_later else " at most"
    return Finding("image.tag", Severity.OK, f"{advice.image}{later} for {advice.cards}: {advice.reason}")


def _driver(advice: ImageAdvice, driver: str | None) -> Finding:
    found = f"driver {driver or 'unknown'} for CUDA {advice.cuda}: {advice.driver_fit}; it needs {advice.driver_needed}"
    if advice.driver_fit in _FITS:
        return Finding("image.driver", Severity.OK, found)
    if advice.driver_fit is DriverFit.BY_PACKAGE:
        return Finding("image.driver", Severity.NOTE, found, "a driver of branch 580 serves every GPU since Pascal")
    return Finding("image.driver", Severity.WARNING, found, "install a driver of branch 580 (long-term support)")


def _halves(sentence: str) -> tuple[str, str]:
    found, _, advice = sentence.partition(": ")
    return found, advice


def has_tensorrt_plugin(triton: Path) -> bool:
    """Whether ONNX Runtime's plug-in for TensorRT-RTX is installed here, and in a Triton environment that exists."""
    is_in_triton = any(triton.glob("lib/python3*/site-packages/onnxruntime_ep_nv_tensorrt_rtx"))
    return not missing_of(("onnxruntime-ep-nv-tensorrt-rtx-cu13",)) and (is_in_triton or not triton.is_dir())


_INSTALL_PLUGIN = (
    "install ONNX Runtime's plug-in beside the embedded engine and Triton: run make tensorrt in a checkout, else pip "
    "install 'penstock[tensorrt]' and penstock setup triton --tensorrt"
)


def has_tensorrt_builder() -> bool:
    """Whether TensorRT-RTX is installed here, which builds engines."""
    return find_spec("tensorrt_rtx_bindings") is not None


def _builder(is_here: bool) -> str:
    if is_here:
        return "engines for another machine's GPU can be built here (penstock models build)"
    return "make tensorrt, or pip install 'penstock[tensorrt]', installs what builds engines for another machine's GPU"


def tensorrt_findings(reading: NvmlReading, *, has_plugin: bool, has_builder: bool) -> list[Finding]:
    """Which TensorRT supports the cards: a finding for the first card of each compute capability."""
    if not reading.cards:
        return [Finding("tensorrt.card", Severity.OK, f"no NVIDIA GPU, so no TensorRT; {_builder(has_builder)}")]
    first = {card.capability: card for card in reversed(reading.cards)}
    return [
        _tensorrt(card, reading.driver, has_plugin=has_plugin)
        for card in sorted(first.values(), key=lambda card: card.index)
    ]


def _tensorrt(card: GpuDevice, driver: str | None, *, has_plugin: bool) -> Finding:
    name, advice = f"tensorrt.card{card.index}", advise_tensorrt(card.capability)
    found = f"{card.name}: use {advice.sentence}"
    branch = (driver or "").partition(".")[0]
    if advice.is_served and branch.isdecimal() and int(branch) < MIN_DRIVER:
        return Finding(name, Severity.NOTE, found, f"driver {driver} is too old for it: install {MIN_DRIVER} or newer")
    if advice.is_served and not has_plugin:
        return Finding(name, Severity.NOTE, found, _INSTALL_PLUGIN)
    return Finding(name, Severity.OK, found)


_NO_ENCODER = ((8, 0), (9, 0), (10, 0), (10, 3))  # A100 and A30, H100 and H200, B200, B300: NVIDIA's support matrix
PACKAGES = ("cuda-bindings",)
_INSTALL = (
    "run make gpu in a checkout, else pip install 'penstock[gpu]'; in a container, build the image with --build-arg "
    "VIDEO_GPU=1"
)
_ON_CPU = "the video program decodes on the CPU"


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """engines: of the first card. missing: packages for decoding on the GPU. in_container: the kind, or empty."""

    engines: VideoEngines
    missing: tuple[str, ...] = ()
    in_container: str = ""


def probe_video() -> VideoFacts:
    """Reads the driver in a child process, and the installed packages. Blocks for the child's deadline at most."""
    return VideoFacts(read_engines(), missing_of(PACKAGES), container_kind())


def missing_of(packages: Sequence[str]) -> tuple[str, ...]:
    """The packages that are not installed."""
    return tuple(name for name in packages if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def no_card_findings() -> list[Finding]:
    """Findings without a GPU."""
    return [Finding("video.nvdec", Severity.OK, f"no NVIDIA GPU: {_ON_CPU}")]


def video_findings(facts: VideoFacts, cards: Sequence[GpuDevice] = ()) -> list[Finding]:
    """Decoding with its obstacles, then JPEG, then encoding by the kind of the cards."""
    return [_decoder(facts), _jpeg(facts), *([_encoder(cards)] if cards else [])]


def _decoder(facts: VideoFacts) -> Finding:
    name, engines = "video.nvdec", facts.engines
    if engines.outcome is EngineOutcome.TIMED_OUT:
        found = f"the driver did not report within {engines.detail} what the GPU decodes: it hangs"
        return Finding(name, Severity.WARNING, found, "look for Xid errors in dmesg, then reset the GPU or reboot")
    if engines.outcome is EngineOutcome.FAILED:
        found = f"the driver does not report what the GPU decodes ({engines.detail}): {_ON_CPU}"
        return Finding(
            name, Severity.NOTE, found, "see nvidia-smi: the GPU has no free memory, or another process uses it alone"
        )
    if engines.outcome is not EngineOutcome.ANSWERED:
        advice = "install the driver's video part (apt-get install libnvidia-decode-580, libnvcuvid1 on Debian)"
        if facts.in_container:
            advice = "for video on the GPU start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        return Finding(name, Severity.NOTE, f"{engines.outcome}: {_ON_CPU}", advice)
    decoded = [codec for codec in engines.codecs if codec.engines]
    if not decoded:
        return Finding(name, Severity.OK, f"the GPU decodes neither H.264 nor HEVC: {_ON_CPU}")
    count = max(codec.engines for codec in decoded)
    sizes = ", ".join(f"{codec.name} to {codec.width}x{codec.height}" for codec in decoded)
    found = f"{count} engine{'s' * (count != 1)}: {sizes}, 8 bit 4:2:0"
    missing = (*facts.missing, *(() if engines.has_nvrtc else ("libnvrtc",)))
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        found = f"{found}; {' and '.join(missing)} {verb} not installed: {_ON_CPU}"
        return Finding(name, Severity.NOTE, found, _INSTALL)
    return Finding(name, Severity.OK, found)


def _encoder(cards: Sequence[GpuDevice]) -> Finding:
    """By compute capability; the video program tries the encoder when it starts."""
    having = next((card for card in cards if card.capability not in _NO_ENCODER), None)
    if having is None:
        found = f"{cards[0].name} has no video encoder: annotated video is encoded on the CPU"
        return Finding("video.nvenc", Severity.OK, found)
    return Finding(
        "video.nvenc", Severity.OK, f"{having.name}: this kind of GPU has a video encoder; the video program tries it"
    )


def _jpeg(facts: VideoFacts) -> Finding:
    if facts.engines.has_nvjpeg:
        return Finding("video.nvjpeg", Severity.OK, "libnvjpeg is here: previews are encoded on the GPU")
    return Finding("video.nvjpeg", Severity.NOTE, "libnvjpeg is not here: previews are encoded on the CPU", _INSTALL)
