"""GPUs: each state, with and without one, has its own finding and advice."""

from pathlib import Path

import msgspec
import pytest

from penstock.doctor import gpu as graphics
from penstock.doctor import gpu as image
from penstock.doctor.finding import Severity
from penstock.doctor.gpu import GraphicsFacts
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading
from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad
from tests.doctor.machines import A100, B200, H100, L4, P4, T4, V100, pick, reading

NO_LIBRARY = NvmlReading(NvmlOutcome.NO_LIBRARY)
ONE = ("0000:01:00.0",)


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        (GraphicsFacts(NO_LIBRARY), "gpu.card", Severity.OK, ""),
        (GraphicsFacts(NvmlReading(NvmlOutcome.NO_BINDING)), "gpu.card", Severity.OK, ""),
        (GraphicsFacts(NO_LIBRARY, ONE), "gpu.driver", Severity.WARNING, "install NVIDIA's driver"),
        (GraphicsFacts(NO_LIBRARY, ONE, False, "docker"), "gpu.driver", Severity.WARNING, "--gpus all"),
        (GraphicsFacts(NO_LIBRARY, ONE, True, "docker"), "gpu.driver", Severity.WARNING, "--gpus all"),
        (GraphicsFacts(NO_LIBRARY, ONE, True), "gpu.driver", Severity.WARNING, "user-space"),
        (
            GraphicsFacts(NvmlReading(NvmlOutcome.NO_DRIVER), ONE),
            "gpu.driver",
            Severity.WARNING,
            "install NVIDIA's driver",
        ),
        (GraphicsFacts(NvmlReading(NvmlOutcome.MISMATCH), ONE, True), "gpu.driver", Severity.WARNING, "reboot"),
        (GraphicsFacts(NvmlReading(NvmlOutcome.TIMED_OUT, "10 s"), ONE, True), "gpu.driver", Severity.WARNING, "Xid"),
        (
            GraphicsFacts(NvmlReading(NvmlOutcome.NO_PERMISSION), ONE, True),
            "gpu.driver",
            Severity.WARNING,
            "/dev/nvidia*",
        ),
        (GraphicsFacts(NvmlReading(NvmlOutcome.FAILED, "?"), ONE, True), "gpu.driver", Severity.WARNING, "nvidia-smi"),
        (GraphicsFacts(NvmlReading(NvmlOutcome.NO_BINDING), ONE, True), "gpu.driver", Severity.WARNING, "make up"),
        (GraphicsFacts(reading()), "gpu.card", Severity.NOTE, "nvidia-smi"),
        (GraphicsFacts(reading(), (), False, "docker"), "gpu.card", Severity.WARNING, "--gpus all"),
        (GraphicsFacts(reading(driver="595.58.03"), ONE), "gpu.card", Severity.WARNING, "R580 is the last"),
        (GraphicsFacts(reading(H100)), "gpu.card0", Severity.OK, ""),
        (GraphicsFacts(reading(H100)), "gpu.driver", Severity.OK, ""),
        (GraphicsFacts(reading(H100), hidden="CUDA_VISIBLE_DEVICES="), "gpu.hidden", Severity.NOTE, "unset"),
    ],
)
def test_graphics_each_machine_has_its_own_finding(
    facts: GraphicsFacts, name: str, status: Severity, advice: str
) -> None:
    """What is missing on the way to a GPU is named with its remedy; where nothing is missing there is no advice."""
    finding = pick(graphics.graphics_findings(facts), name)
    assert (finding.status, advice in finding.advice, bool(finding.advice)) == (status, True, bool(advice))


@pytest.mark.parametrize(
    ("changed", "status", "advice"),
    [
        ({}, Severity.OK, ""),
        ({"mig": True}, Severity.NOTE, "CUDA_VISIBLE_DEVICES=MIG-"),
        ({"compute_mode": "PROHIBITED"}, Severity.WARNING, "-c DEFAULT"),
        ({"used_bytes": 39 << 30}, Severity.WARNING, "nearly full"),
        ({"processes": (4, 5)}, Severity.OK, ""),
    ],
)
def test_graphics_a_card_in_a_bad_state_says_so(changed: dict[str, object], status: Severity, advice: str) -> None:
    """A card that nothing may compute on, that is full, or that is split says what to do about it."""
    card = msgspec.structs.replace(A100, **changed)
    finding = pick(graphics.graphics_findings(GraphicsFacts(reading(card))), "gpu.card0")
    assert (finding.status, advice in finding.advice) == (status, True)
    assert finding.found.startswith("NVIDIA A100-SXM4-40GB, compute capability 8.0, 40.0 GiB")


@pytest.mark.parametrize(
    ("cards", "driver", "tag", "driver_status", "is_unsafe"),
    [
        ((P4,), "550.54.15", "24.04-py3 at most", Severity.OK, True),
        ((P4,), "470.57.02", "24.04-py3 at most", Severity.NOTE, True),
        ((V100,), "580.95.05", "24.10-py3 at most", Severity.OK, True),
        ((T4,), "580.95.05", "26.07-py3 or later", Severity.OK, False),
        ((A100,), "535.161.08", "26.07-py3 or later", Severity.WARNING, False),
        ((H100, H100), "610.43.02", "26.07-py3 or later", Severity.OK, False),
        ((B200,), "610.43.02", "26.07-py3 or later", Severity.OK, False),
        ((P4, T4), "580.95.05", "24.04-py3 at most", Severity.OK, True),
    ],
)
def test_image_of_a_machine_names_tag_driver_and_danger(
    cards: tuple[GpuDevice, ...], driver: str, tag: str, driver_status: Severity, is_unsafe: bool
) -> None:
    """The tag that fits, whether the driver carries it, and a warning where it has known vulnerabilities."""
    findings = image.image_findings(reading(*cards, driver=driver))
    assert tag in pick(findings, "image.tag").found
    assert pick(findings, "image.driver").status is driver_status
    assert [one.advice for one in findings if one.id == "image.security"] == (
        ["let nothing but the gateway reach Triton's ports"] if is_unsafe else []
    )


@pytest.mark.parametrize(
    ("card", "driver", "has_plugin", "words", "advice"),
    [
        (A100, "580.95.05", False, "NVIDIA A100-SXM4-40GB: use CUDA (run make gpu", ""),
        (L4, "580.95.05", True, "NVIDIA L4: use TensorRT-RTX (penstock models build NAME --for 8.9", ""),
        (L4, "580.95.05", False, "NVIDIA L4: use TensorRT-RTX", "install ONNX Runtime's plug-in beside"),
        (L4, "570.86.10", True, "NVIDIA L4: use TensorRT-RTX", "driver 570.86.10 is too old for it: install 580"),
    ],
)
def test_tensorrt_of_a_card_names_what_it_takes(
    card: GpuDevice, driver: str, words: str, advice: str, *, has_plugin: bool
) -> None:
    """What runs models on the card, and what TensorRT-RTX still needs: a newer driver, or the plug-in."""
    (finding,) = graphics.tensorrt_findings(reading(card, driver=driver), has_plugin=has_plugin, has_builder=True)
    assert (finding.id, finding.status) == ("tensorrt.card0", Severity.NOTE if advice else Severity.OK)
    assert finding.found.startswith(words)
    assert finding.advice.startswith(advice)


def test_tensorrt_has_one_finding_for_cards_of_one_kind() -> None:
    """Eight equal cards are not eight lines; a machine without cards has a line, too."""
    cards = [msgspec.structs.replace(card, index=index) for index, card in enumerate((T4, L4, T4, L4))]
    found = graphics.tensorrt_findings(reading(*cards), has_plugin=True, has_builder=True)
    assert [one.id for one in found] == ["tensorrt.card0", "tensorrt.card1"]
    for has_builder, words in ((True, "can be built here (penstock models build)"), (False, "make tensorrt, or pip")):
        (finding,) = graphics.tensorrt_findings(NO_LIBRARY, has_plugin=False, has_builder=has_builder)
        assert finding.id == "tensorrt.card"
        assert words in finding.found


@pytest.mark.parametrize(
    ("found", "gpus", "visible", "words"),
    [
        (NO_LIBRARY, "all", None, ""),
        (NO_LIBRARY, "0", None, "gpus is '0' and no NVIDIA GPU is here"),
        (reading(L4), "0", None, ""),
        (reading(L4), "0", "", "gpus has '0', which CUDA_VISIBLE_DEVICES= hides"),
    ],
)
def test_gpus_that_up_would_refuse_are_a_problem(
    found: NvmlReading, gpus: str, visible: str | None, words: str
) -> None:
    """The setting is checked as `penstock up` checks it."""
    findings = graphics.wanted_findings(found, gpus, visible)
    assert [one.status for one in findings] == ([Severity.PROBLEM] if words else [])
    assert all(one.found.startswith(words) and "penstock doctor" not in one.advice for one in findings)


def test_image_without_a_gpu_has_nothing_to_fit() -> None:
    """Without a card there is no image to choose."""
    found = [one.found for one in image.image_findings(NO_LIBRARY)]
    assert found == ["no NVIDIA GPU, so no requirement on Triton's image"]


def test_image_for_cards_that_no_image_takes_together_is_a_warning() -> None:
    """Pascal beside Blackwell: no image, and the way out."""
    (finding,) = image.image_findings(reading(P4, B200))
    assert (finding.status, "--gpus device=N" in finding.advice) == (Severity.WARNING, True)


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
            CardLoad(0, kernel_running=1.0, source=ActivitySource.GPM, activity=Activity(sm=0.0076)),
            *(Severity.OK, "SM activity 0.8% by gpm, a kernel ran 100% of the time (util)", ""),
        ),
        (
            CardLoad(0, kernel_running=0.5, why_no_activity="this GPU has no GPM"),
            *(Severity.NOTE, "a kernel ran 50% of the time (util), SM activity unknown", "this GPU has no GPM"),
        ),
        (CardLoad(0, why_no_activity="no"), Severity.NOTE, "SM activity unknown", "gpu_metrics"),
        (CardLoad(0, lost="GPU is lost"), Severity.WARNING, "can no longer read the GPU: GPU is lost", "--gpu-reset"),
    ],
)
def test_graphics_tells_how_busy_a_card_is_and_what_keeps_it_from_knowing(
    load: CardLoad, status: Severity, found: str, advice: str
) -> None:
    """SM activity beside util, by whom; without it, where else it can be had."""
    finding = pick(graphics.graphics_findings(GraphicsFacts(reading(H100), loads=(load,))), "gpu.activity0")
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True), finding
    assert bool(finding.advice) == bool(advice)


def test_graphics_of_several_cards_says_that_each_gets_an_engine() -> None:
    """Of those that CUDA is shown; a card that does not answer is named."""
    cards = [msgspec.structs.replace(H100, index=index, uuid=f"GPU-{index}") for index in range(3)]
    several = msgspec.structs.replace(reading(*cards), detail="GPU 3 does not answer: GPU is lost")
    findings = graphics.graphics_findings(GraphicsFacts(several, hidden="CUDA_VISIBLE_DEVICES=0,2"))
    assert pick(findings, "gpu.cards").found.startswith("GPU 0, GPU 2: penstock up starts an engine for each")
    assert pick(findings, "gpu.silent").status is Severity.WARNING
    one = graphics.graphics_findings(GraphicsFacts(several, hidden="CUDA_VISIBLE_DEVICES=1"))
    assert "gpu.cards" not in [finding.id for finding in one]


@pytest.mark.parametrize(
    ("missing", "in_triton", "has_plugin"),
    [((), None, True), ((), False, False), ((), True, True), (("onnxruntime-ep-nv-tensorrt-rtx-cu13",), True, False)],
)
def test_plugin_is_looked_for_beside_both_engines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    *,
    in_triton: bool | None,
    has_plugin: bool,
) -> None:
    """Triton's backend runs in an environment of its own; one that does not exist lacks nothing."""
    packages = tmp_path / "triton/lib/python3.11/site-packages"
    if in_triton is not None:
        (packages / "onnxruntime_ep_nv_tensorrt_rtx" if in_triton else packages).mkdir(parents=True)
    monkeypatch.setattr(graphics, "missing_of", lambda names: missing)
    assert graphics.has_tensorrt_plugin(tmp_path / "triton") is has_plugin
