"""Which Triton image fits a card: one row a generation, and what the driver has to say."""

import pytest

from penstock.gpu.triton_images import KNOWN_HOLES, DriverFit, advise, advise_all

P4, P100, V100, T4, A100, H100, B200, RTX50 = (
    (6, 1), (6, 0), (7, 0), (7, 5), (8, 0), (9, 0), (10, 0), (12, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "image", "or_later", "reason"),
    [
        (P100, "24.04-py3", False, "TensorRT 10"),
        (V100, "24.10-py3", False, "10.5 dropped Volta"),
        (T4, "26.07-py3", True, "vulnerabilities"),
        (H100, "26.07-py3", True, "vulnerabilities"),
        (B200, "26.07-py3", True, "from 25.01"),
        (RTX50, "26.07-py3", True, "from 25.01"),
    ],
)
def test_advise_a_card_names_its_image_and_why(
    capability: tuple[int, int], image: str, or_later: bool, reason: str
) -> None:
    """Every generation since Pascal has its image, and old ones say that it is the last."""
    advice = advise(capability, "580.95.05")
    assert advice.image == f"nvcr.io/nvidia/tritonserver:{image}"
    assert (advice.or_later, reason in advice.reason) == (or_later, True)
    assert advice.warnings == (() if or_later else (KNOWN_HOLES,))


@pytest.mark.parametrize("capability", [(3, 7), (5, 2)])
def test_advise_a_card_before_pascal_has_no_image(capability: tuple[int, int]) -> None:
    """A card that no image takes gets none, and the sentence says what is left."""
    advice = advise(capability, "470.57")
    assert advice.image is None
    assert "CPU" in advice.reason


@pytest.mark.parametrize(
    ("capability", "driver", "fit"),
    [
        (P4, "550.54.15", DriverFit.FULL),
        (P4, "535.161.08", DriverFit.BY_MINOR_VERSION),
        (P4, "470.57.02", DriverFit.BY_PACKAGE),
        (P4, "470.42.01", DriverFit.TOO_OLD),
        (P4, "590.44.01", DriverFit.TOO_NEW),
        (V100, "595.58.03", DriverFit.TOO_NEW),
        (T4, "610.43.02", DriverFit.FULL),
        (H100, "580.159.03", DriverFit.BY_MINOR_VERSION),
        (H100, "575.51.03", DriverFit.TOO_OLD),
        (H100, None, DriverFit.UNKNOWN),
        (H100, "engineering build", DriverFit.UNKNOWN),
        (B200, "620", DriverFit.FULL),
    ],
)
def test_advise_a_driver_says_whether_it_carries_the_image(
    capability: tuple[int, int], driver: str | None, fit: DriverFit
) -> None:
    """A driver is measured against the image's CUDA: full, with limits, by package, too old, too new, not known."""
    assert advise(capability, driver).driver_fit is fit


@pytest.mark.parametrize(
    ("capabilities", "image"),
    [
        ([H100, H100], "26.07"),
        ([A100, B200], "26.07"),
        ([T4, V100], "24.10"),
        ([P4, V100, A100, H100], "24.04"),
        ([V100, B200], None),
        ([(5, 2), H100], None),
    ],
)
def test_advise_all_mixed_cards_follows_the_oldest(capabilities: list[tuple[int, int]], image: str | None) -> None:
    """The oldest card decides, and where its last image is before Blackwell, no image takes both."""
    advice = advise_all(capabilities, "580.95.05")
    assert advice.image == (image and f"nvcr.io/nvidia/tritonserver:{image}-py3")
