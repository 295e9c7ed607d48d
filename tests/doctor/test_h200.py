"""A real machine with an H200, as the probes saw it (one virtual machine, driver 580.159.04, November 2026)."""

from pathlib import Path

import msgspec
import pytest

from server.doctor import graphics, image, limits, memory, mps, processor, shared_memory
from server.doctor.finding import Finding, Status
from server.doctor.graphics import GraphicsFacts
from server.doctor.limits import LimitFacts
from server.doctor.memory import MemoryFacts
from server.doctor.mps import MpsFacts
from server.doctor.processor import ProcessorFacts
from server.doctor.shared_memory import SharedMemoryFacts
from tests.doctor.machines import pick

FACTS = Path(__file__).parent.parent / "golden" / "doctor" / "h200.json"


class Machine(msgspec.Struct):
    """What the probes returned there."""

    graphics: GraphicsFacts
    mps: MpsFacts
    processor: ProcessorFacts
    memory: MemoryFacts
    limits: LimitFacts
    shared_memory: SharedMemoryFacts


@pytest.fixture
def findings() -> list[Finding]:
    """What the doctor makes of them."""
    machine = msgspec.json.decode(FACTS.read_bytes(), type=Machine)
    reading = machine.graphics.reading
    return [
        *graphics.findings_of(machine.graphics),
        *image.findings_of(reading),
        *mps.findings_of(machine.mps, reading),
        *processor.findings_of(machine.processor),
        *memory.findings_of(machine.memory),
        *limits.findings_of(machine.limits),
        *shared_memory.findings_of(machine.shared_memory),
    ]


def test_h200_is_described_as_nvidia_smi_does(findings: list[Finding]) -> None:
    """The card, its driver and the CUDA version are those that nvidia-smi showed there."""
    assert pick(findings, "gpu.driver").found == "driver 580.159.04, CUDA up to 13.0"
    card = pick(findings, "gpu.card0").found
    assert card == "NVIDIA H200, compute capability 9.0, 140.4 GiB (139.8 GiB free), mode DEFAULT, MIG off"


def test_h200_gets_a_maintained_image_and_one_note(findings: list[Finding]) -> None:
    """All is well there but for MPS, which does not run; the image is one that is still mended."""
    assert [one.id for one in findings if one.status is not Status.OK] == ["mps.service"]
    assert "26.07-py3 or later" in pick(findings, "image.tag").found
    assert "by CUDA's minor version compatibility" in pick(findings, "image.driver").found
    assert pick(findings, "mps.clients").found == "48 client contexts a card"
    assert pick(findings, "cpu.int8").found == "AMX, AVX512-VNNI, AVX-VNNI, AVX-512, AVX2: INT8 pays"
