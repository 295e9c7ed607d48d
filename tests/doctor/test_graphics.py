"""GPUs: every way to have one, or none, is told apart, and says what to do."""

from pathlib import Path

import msgspec
import pytest

from server.doctor import graphics, image
from server.doctor.finding import Status
from server.doctor.graphics import GraphicsFacts
from server.gpu.nvml import Card, NvmlOutcome, Reading
from server.gpu.telemetry import Activity, CardLoad, Source
from tests.doctor.machines import A100, B200, H100, P4, T4, V100, pick, reading

NO_LIBRARY = Reading(NvmlOutcome.NO_LIBRARY)
ONE = ("0000:01:00.0",)


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        (GraphicsFacts(NO_LIBRARY), "gpu.card", Status.OK, ""),
        (GraphicsFacts(Reading(NvmlOutcome.NO_BINDING)), "gpu.card", Status.OK, ""),
        (GraphicsFacts(NO_LIBRARY, ONE), "gpu.driver", Status.WARNING, "install NVIDIA's driver"),
        (GraphicsFacts(NO_LIBRARY, ONE, False, "docker"), "gpu.driver", Status.WARNING, "--gpus all"),
        (GraphicsFacts(NO_LIBRARY, ONE, True, "docker"), "gpu.driver", Status.WARNING, "--gpus all"),
        (GraphicsFacts(NO_LIBRARY, ONE, True), "gpu.driver", Status.WARNING, "user-space"),
        (GraphicsFacts(Reading(NvmlOutcome.NO_DRIVER), ONE), "gpu.driver", Status.WARNING, "install NVIDIA's driver"),
        (GraphicsFacts(Reading(NvmlOutcome.MISMATCH), ONE, True), "gpu.driver", Status.WARNING, "reboot"),
        (GraphicsFacts(Reading(NvmlOutcome.TIMED_OUT, "10 s"), ONE, True), "gpu.driver", Status.WARNING, "Xid"),
        (GraphicsFacts(Reading(NvmlOutcome.NO_PERMISSION), ONE, True), "gpu.driver", Status.WARNING, "/dev/nvidia*"),
        (GraphicsFacts(Reading(NvmlOutcome.FAILED, "?"), ONE, True), "gpu.driver", Status.WARNING, "nvidia-smi"),
        (GraphicsFacts(Reading(NvmlOutcome.NO_BINDING), ONE, True), "gpu.driver", Status.WARNING, "make up"),
        (GraphicsFacts(reading()), "gpu.card", Status.NOTE, "nvidia-smi"),
        (GraphicsFacts(reading(), (), False, "docker"), "gpu.card", Status.WARNING, "--gpus all"),
        (GraphicsFacts(reading(driver="595.58.03"), ONE), "gpu.card", Status.WARNING, "R580 is the last"),
        (GraphicsFacts(reading(H100)), "gpu.card0", Status.OK, ""),
        (GraphicsFacts(reading(H100)), "gpu.driver", Status.OK, ""),
        (GraphicsFacts(reading(H100), hidden="CUDA_VISIBLE_DEVICES="), "gpu.hidden", Status.NOTE, "unset"),
    ],
)
def test_graphics_each_machine_is_told_apart(facts: GraphicsFacts, name: str, status: Status, advice: str) -> None:
    """What is missing on the way to a GPU is named with its remedy; where nothing is missing there is no advice."""
    finding = pick(graphics.findings_of(facts), name)
    assert (finding.status, advice in finding.advice, bool(finding.advice)) == (status, True, bool(advice))


@pytest.mark.parametrize(
    ("changed", "status", "advice"),
    [
        ({}, Status.OK, ""),
        ({"mig": True}, Status.NOTE, "CUDA_VISIBLE_DEVICES=MIG-"),
        ({"compute_mode": "PROHIBITED"}, Status.WARNING, "-c DEFAULT"),
        ({"used_bytes": 39 << 30}, Status.WARNING, "nearly full"),
        ({"processes": (4, 5)}, Status.OK, ""),
    ],
)
def test_graphics_a_card_in_a_bad_state_says_so(changed: dict[str, object], status: Status, advice: str) -> None:
    """A card that nothing may compute on, that is full, or that is split says what to do about it."""
    card = msgspec.structs.replace(A100, **changed)
    finding = pick(graphics.findings_of(GraphicsFacts(reading(card))), "gpu.card0")
    assert (finding.status, advice in finding.advice) == (status, True)
    assert finding.found.startswith("NVIDIA A100-SXM4-40GB, compute capability 8.0, 40.0 GiB")


@pytest.mark.parametrize(
    ("cards", "driver", "tag", "driver_status", "is_unsafe"),
    [
        ((P4,), "550.54.15", "24.04-py3 at most", Status.OK, True),
        ((P4,), "470.57.02", "24.04-py3 at most", Status.NOTE, True),
        ((V100,), "580.95.05", "24.10-py3 at most", Status.OK, True),
        ((T4,), "580.95.05", "26.07-py3 or later", Status.OK, False),
        ((A100,), "535.161.08", "26.07-py3 or later", Status.WARNING, False),
        ((H100, H100), "610.43.02", "26.07-py3 or later", Status.OK, False),
        ((B200,), "610.43.02", "26.07-py3 or later", Status.OK, False),
        ((P4, T4), "580.95.05", "24.04-py3 at most", Status.OK, True),
    ],
)
def test_image_of_a_machine_names_tag_driver_and_danger(
    cards: tuple[Card, ...], driver: str, tag: str, driver_status: Status, is_unsafe: bool
) -> None:
    """The tag that fits, whether the driver carries it, and a warning where it has known vulnerabilities."""
    findings = image.findings_of(reading(*cards, driver=driver))
    assert tag in pick(findings, "image.tag").found
    assert pick(findings, "image.driver").status is driver_status
    assert [one.advice for one in findings if one.id == "image.security"] == (
        ["let nothing but the gateway reach Triton's ports"] if is_unsafe else []
    )


def test_image_without_a_gpu_is_not_applicable() -> None:
    """Without a card there is no image to choose."""
    assert [one.found for one in image.findings_of(NO_LIBRARY)] == ["not applicable: no GPU"]


def test_image_for_cards_that_no_image_takes_together_is_a_warning() -> None:
    """Pascal beside Blackwell: no image, and the way out."""
    (finding,) = image.findings_of(reading(P4, B200))
    assert (finding.status, "--gpus device=N" in finding.advice) == (Status.WARNING, True)


def test_nvidia_devices_finds_display_controllers_only(tmp_path: Path) -> None:
    """Of what is on the bus, only NVIDIA's display and 3D controllers count: not its audio, not others' cards."""
    for address, vendor, kind in [
        ("0000:01:00.0", "0x10de", "0x030000"),
        ("0000:02:00.0", "0x10de", "0x030200"),
        ("0000:01:00.1", "0x10de", "0x040300"),
        ("0000:03:00.0", "0x1002", "0x030000"),
    ]:
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / address / "class").write_text(f"{kind}\n")
    assert graphics.nvidia_devices(tmp_path) == ("0000:01:00.0", "0000:02:00.0")
    assert graphics.nvidia_devices(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("load", "status", "found", "advice"),
    [
        (
            CardLoad(0, kernel_running=1.0, source=Source.GPM, activity=Activity(sm=0.0076)),
            *(Status.OK, "SM activity 0.8% by gpm, a kernel ran 100% of the time (util)", ""),
        ),
        (
            CardLoad(0, kernel_running=0.5, why_no_activity="this card has no GPM"),
            *(Status.NOTE, "a kernel ran 50% of the time (util), SM activity unknown", "this card has no GPM"),
        ),
        (CardLoad(0, why_no_activity="no"), Status.NOTE, "SM activity unknown", "gpu_metrics"),
        (CardLoad(0, lost="GPU is lost"), Status.WARNING, "cannot ask the card any more: GPU is lost", "--gpu-reset"),
    ],
)
def test_graphics_tells_how_busy_a_card_is_and_what_keeps_it_from_knowing(
    load: CardLoad, status: Status, found: str, advice: str
) -> None:
    """SM activity beside util, by whom; without it, where else it can be had."""
    finding = pick(graphics.findings_of(GraphicsFacts(reading(H100), loads=(load,))), "gpu.activity0")
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True), finding
    assert bool(finding.advice) == bool(advice)
