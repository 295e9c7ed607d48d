"""A real machine with an H200, as the probes saw it (one virtual machine, driver 580.159.04, November 2026)."""

from pathlib import Path

import msgspec
import pytest

from penstock.doctor import gpu as graphics
from penstock.doctor import gpu as image
from penstock.doctor import host as limits
from penstock.doctor import host as memory
from penstock.doctor import host as processor
from penstock.doctor import mps
from penstock.doctor import storage as shared_memory
from penstock.doctor.finding import Finding, Severity
from penstock.doctor.gpu import GraphicsFacts
from penstock.doctor.host import LimitFacts, MemoryFacts, ProcessorFacts
from penstock.doctor.mps import MpsFacts
from penstock.doctor.storage import SharedMemoryFacts
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
        *graphics.graphics_findings(machine.graphics),
        *image.image_findings(reading),
        *mps.mps_findings(machine.mps, reading),
        *processor.processor_findings(machine.processor),
        *memory.memory_findings(machine.memory),
        *limits.limit_findings(machine.limits),
        *shared_memory.shared_memory_findings(machine.shared_memory),
    ]


def test_h200_is_described_as_nvidia_smi_does(findings: list[Finding]) -> None:
    """The card, its driver and the CUDA version are those that nvidia-smi showed there."""
    assert pick(findings, "gpu.driver").found == "driver 580.159.04, CUDA up to 13.0"
    card = pick(findings, "gpu.card0").found
    assert card == "NVIDIA H200, compute capability 9.0, 140.4 GiB (139.8 GiB free), mode DEFAULT, MIG off"


def test_h200_gets_a_maintained_image_and_one_note(findings: list[Finding]) -> None:
    """All is well there but for MPS, which does not run; the image is one that is still mended."""
    assert [one.id for one in findings if one.status is not Severity.OK] == ["mps.service"]
    assert "26.07-py3 or later" in pick(findings, "image.tag").found
    assert "by CUDA's minor version compatibility" in pick(findings, "image.driver").found
    assert pick(findings, "mps.clients").found == "48 client contexts a GPU"
    assert pick(findings, "cpu.int8").found == "AMX, AVX512-VNNI, AVX-VNNI, AVX-512, AVX2: INT8 pays"
