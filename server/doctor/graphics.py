"""The GPUs: every card that NVML shows, or how far the way to one is built."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from server.doctor.finding import Finding, Status, shown_bytes
from server.doctor.host import container_kind
from server.gpu.nvml import Card, NvmlOutcome, Reading, read_cards
from server.gpu.telemetry import CardLoad, NoTelemetry, sample

PCI = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/version")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_NEARLY_FULL = 0.9
_LOOK_S = 0.3
_NO_RUNTIME = "install nvidia-container-toolkit on the host and start it with docker run --gpus all"


@dataclass(frozen=True, slots=True)
class GraphicsFacts:
    """pci: addresses of NVIDIA display devices. has_module: the kernel has NVIDIA's driver. hidden: the variable that
    hides cards from CUDA, with its value. in_container: the kind, "" for none. loads: how busy the cards are."""

    reading: Reading
    pci: tuple[str, ...] = ()
    has_module: bool = False
    in_container: str = ""
    hidden: str = ""
    device_files: tuple[str, ...] = field(default=())
    loads: tuple[CardLoad, ...] = ()


def probe() -> GraphicsFacts:
    """NVML in child processes, /sys and /proc. Blocks for NVML's deadline, and a second where there are cards."""
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
        return sample(_LOOK_S)
    except NoTelemetry:  # why, the reading says
        return ()


def nvidia_devices(folder: Path) -> tuple[str, ...]:
    """The PCI addresses of NVIDIA's display and 3D controllers."""
    return tuple(
        sorted(
            device.name
            for device in (folder.iterdir() if folder.is_dir() else ())
            if _word(device / "vendor") == _NVIDIA and _word(device / "class").startswith(_DISPLAY)
        )
    )


def _word(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def findings_of(facts: GraphicsFacts) -> list[Finding]:
    """The driver and each card; one finding on what is missing where there is none."""
    reading = facts.reading
    if reading.outcome is not NvmlOutcome.ANSWERED:
        return [_no_answer(facts)]
    if not reading.cards:
        return [_no_card(facts)]
    cuda = f", CUDA up to {reading.cuda[0]}.{reading.cuda[1]}" if reading.cuda else ""
    findings = [Finding("gpu.driver", Status.OK, f"driver {reading.driver}{cuda}")]
    findings += [_card(card) for card in reading.cards]
    findings += [_activity(load) for load in facts.loads]
    if facts.hidden:
        advice = "unset it if every card is meant to serve"
        seen = "CUDA sees none of them" if facts.hidden.endswith(("=", "=-1")) else "CUDA sees those named only"
        findings.append(Finding("gpu.hidden", Status.NOTE, f"{seen}: {facts.hidden}", advice))
    return findings


def _card(card: Card) -> Finding:
    name = f"gpu.card{card.index}"
    major, minor = card.capability
    found = f"{card.name}, compute capability {major}.{minor}, {shown_bytes(card.memory_bytes)}"
    found += f" ({shown_bytes(card.memory_bytes - card.used_bytes)} free), mode {card.compute_mode}"
    if card.mig is not None:
        found += f", MIG {'on' if card.mig else 'off'}"
    if card.processes:
        found += f", {len(card.processes)} processes"
    if card.compute_mode == "PROHIBITED":
        return Finding(name, Status.WARNING, found, f"nothing may compute on it: nvidia-smi -i {card.index} -c DEFAULT")
    if card.used_bytes > _NEARLY_FULL * card.memory_bytes:
        return Finding(name, Status.WARNING, found, "its memory is nearly full: end what holds it (nvidia-smi)")
    if card.mig:
        advice = "name the instances that Triton may use: CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L)"
        return Finding(name, Status.NOTE, found, advice)
    return Finding(name, Status.OK, found)


def _activity(load: CardLoad) -> Finding:
    """How busy, beside what nvidia-smi calls so."""
    name = f"gpu.activity{load.index}"
    if load.lost:
        advice = "see dmesg, then reset the card (nvidia-smi --gpu-reset) or restart the machine"
        return Finding(name, Status.WARNING, f"NVML cannot ask the card any more: {load.lost}", advice)
    util = "" if load.kernel_running is None else f"a kernel ran {load.kernel_running:.0%} of the time (util)"
    if load.activity.sm is None:
        found = f"{util}, SM activity unknown".removeprefix(", ")
        return Finding(name, Status.NOTE, found, f"{load.why_no_activity}: gpu_metrics in penstock up's settings")
    return Finding(name, Status.OK, f"SM activity {load.activity.sm:.1%} by {load.source}, {util}".removesuffix(", "))


def _no_card(facts: GraphicsFacts) -> Finding:
    found = f"driver {facts.reading.driver} is loaded and has no card"
    if facts.pci:
        found += f", though {len(facts.pci)} on the PCI bus"
        advice = (
            "see dmesg: the driver may be too new for it (R580 is the last for Pascal and Volta), or it is passed on"
        )
        return Finding("gpu.card", Status.WARNING, found, advice)
    advice = f"{_NO_RUNTIME}" if facts.in_container else "see nvidia-smi and dmesg; models run on the CPU"
    return Finding("gpu.card", Status.WARNING if facts.in_container else Status.NOTE, found, advice)


def _no_answer(facts: GraphicsFacts) -> Finding:
    outcome, detail = facts.reading.outcome, facts.reading.detail
    has_card = bool(facts.pci or facts.device_files)
    if outcome is NvmlOutcome.TIMED_OUT:
        found = f"NVML did not answer within {detail}: the driver hangs"
        return Finding(
            "gpu.driver", Status.WARNING, found, "look for Xid errors in dmesg, then reset the card or reboot"
        )
    if outcome is NvmlOutcome.MISMATCH:
        found = "the NVIDIA driver was updated and its old kernel module still runs"
        return Finding(
            "gpu.driver", Status.WARNING, found, "reboot, or reload the module: modprobe -r nvidia && modprobe nvidia"
        )
    if outcome is NvmlOutcome.NO_PERMISSION:
        advice = "let this user into the group that owns /dev/nvidia*"
        return Finding("gpu.driver", Status.WARNING, f"NVML: {detail}", advice)
    if outcome is NvmlOutcome.FAILED:
        return Finding("gpu.driver", Status.WARNING, f"NVML failed: {detail}", "see nvidia-smi; models run on the CPU")
    if outcome is NvmlOutcome.NO_BINDING and (has_card or facts.has_module):
        return Finding(
            "gpu.driver", Status.WARNING, "a card, but nvidia-ml-py is not installed", "remove .venv and `make up`"
        )
    return _no_driver(facts)


def _no_driver(facts: GraphicsFacts) -> Finding:
    """Four cases: the host has the driver and this container not its files; only the files of the driver are missing;
    a card without driver; nothing at all."""
    if facts.has_module and facts.in_container:
        found = f"the host has NVIDIA's driver, this {facts.in_container} container does not see it"
        return Finding("gpu.driver", Status.WARNING, found, _NO_RUNTIME)
    if facts.has_module:
        found = "the kernel has NVIDIA's driver, its library libnvidia-ml.so.1 is missing"
        return Finding(
            "gpu.driver", Status.WARNING, found, "install the driver's user-space part (apt-get install nvidia-smi)"
        )
    if facts.pci and facts.in_container:
        found = f"{len(facts.pci)} NVIDIA cards on the PCI bus, no driver in this {facts.in_container} container"
        return Finding("gpu.driver", Status.WARNING, found, _NO_RUNTIME)
    if facts.pci:
        found = f"{len(facts.pci)} NVIDIA cards on the PCI bus ({', '.join(facts.pci)}), no driver"
        advice = "install NVIDIA's driver (branch 580, long-term support, fits every card since Pascal), then reboot"
        return Finding("gpu.driver", Status.WARNING, found, advice)
    return Finding("gpu.card", Status.OK, "no NVIDIA GPU: models run on the CPU")
