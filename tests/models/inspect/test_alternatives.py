"""Colour order and scale by the confidence of results: what blocks, what is open, what is only said."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from penstock.models.inspect.alternatives import Comparison, compare
from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.picture_views import Views
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype
from penstock.protocol.vision_results import Detections, VisionResult
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.spec import ColorFormat

RGB, BGR = ColorFormat.RGB, ColorFormat.BGR


def card() -> VisionCard:
    """Of YOLOv8: RGB, 0 to 1."""
    found = card_from_config(
        ModelConfig(
            "m",
            "onnxruntime",
            0,
            (TensorSpec("images", Datatype.FP32, (1, 3, 64, 64)),),
            (TensorSpec("out", Datatype.FP32, (1, 6, 84)),),
            {"network-type": "0", "layout": "yolov8", "net-scale-factor": "0.00392156862745098"},
        )
    )
    assert found is not None
    return found


def detections(*scores: float) -> VisionResult:
    count = len(scores)
    return Detections(np.zeros((count, 4), np.float32), np.array(scores, np.float32), np.zeros(count, np.int64))


def compared(
    best: Mapping[tuple[ColorFormat, bool], tuple[float, ...]],
    hints: Hints | None = None,
    *,
    has_metadata: bool = False,
    parts: Mapping[ColorFormat, tuple[float, ...]] | None = None,
) -> Comparison:
    """best: scores on the pictures by (colour order, whether pixels are 0 to 255). parts: the best score of each."""

    def results_of(changed: VisionCard, views: Views) -> list[VisionResult]:
        spec = changed.prepare_spec
        if views is Views.PARTS:
            return [detections(score) for score in (parts or {}).get(spec.color, ())]
        return [detections(*best.get((spec.color, spec.scale == 1.0), ()))]

    return compare(card(), results_of, hints or Hints(), has_metadata=has_metadata)


@pytest.mark.parametrize(
    ("rgb", "bgr", "has_metadata", "asked"),
    [
        (0.70, 0.76, False, [("--color", True)]),
        (0.70, 0.76, True, [("--color", False)]),
        (0.60, 0.76, True, [("--color", True)]),
        (0.74, 0.74, False, [("--color", False)]),
        (0.76, 0.70, False, []),
        (0.74, 0.74, True, []),
        (0.24, 0.52, False, [("--color", False)]),  # pictures of other objects than the network knows
        (0.10, 0.20, False, []),
    ],
)
def test_another_colour_order_blocks_only_where_it_is_clear(
    rgb: float, bgr: float, has_metadata: bool, asked: list[tuple[str, bool]]
) -> None:
    """A clear difference blocks; a small one is an open question that does not block."""
    found = compared({(RGB, False): (rgb,), (BGR, False): (bgr,)}, has_metadata=has_metadata)
    assert [(question.flag, question.is_blocking) for question in found.questions] == asked


EVEN = (0.5, 0.7, 0.6, 0.8)


@pytest.mark.parametrize(
    ("rgb", "bgr", "has_metadata", "asked"),
    [
        (EVEN, (0.55, 0.74, 0.66, 0.84), False, [("--color", True)]),
        (EVEN, (0.55, 0.74, 0.66, 0.84), True, [("--color", False)]),
        (EVEN, (0.65, 0.84, 0.76, 0.95), True, [("--color", True)]),
        ((0.55, 0.74, 0.66, 0.84), EVEN, False, []),
        (EVEN, (0.52, 0.72, 0.61, 0.83), False, [("--color", False)]),  # a small difference
        (EVEN, (0.20, 1.00, 0.60, 1.00), False, [("--color", False)]),  # a difference that is not of all parts
        (EVEN, (), False, [("--color", False)]),  # a slow network
    ],
)
def test_parts_of_the_pictures_decide_where_whole_ones_do_not(
    rgb: tuple[float, ...], bgr: tuple[float, ...], has_metadata: bool, asked: list[tuple[str, bool]]
) -> None:
    """Pictures with the same best score in both orders: many parts show which is the right one."""
    best = {(RGB, False): (0.75,), (BGR, False): (0.76,)}
    found = compared(best, has_metadata=has_metadata, parts={RGB: rgb, BGR: bgr})
    assert [(question.flag, question.is_blocking) for question in found.questions] == asked


@pytest.mark.parametrize(
    ("raw_scores", "reason"),
    [
        ((0.30,), ""),
        ((0.90,), "the difference is no clear sign of a wrong scale, so the proposed scale is used"),
        ((1.0,) * 30, "it finds 30 objects in place of 1, as with a wrong scale, so the proposed scale is used"),
    ],
)
def test_scale_that_is_kept_against_a_higher_confidence_says_why(raw_scores: tuple[float, ...], reason: str) -> None:
    """A network with the wrong scale is certain of objects everywhere."""
    found = compared({(RGB, False): (0.8,), (BGR, False): (0.6,), (RGB, True): raw_scores})
    assert not found.questions
    assert found.evidence[-1].endswith(reason or "with pixels of 0 to 255")


def test_parts_are_not_run_with_a_scale_that_is_asked() -> None:
    """Colour orders are compared on parts only after the scale is known."""
    best = {(RGB, False): (1.0,) * 40, (BGR, False): (1.0,) * 40, (RGB, True): (0.8, 0.6)}
    found = compared(best, parts={RGB: EVEN, BGR: (0.9,) * 4})
    assert [(question.flag, question.is_blocking) for question in found.questions] == [
        ("--color", False),
        ("--scale", True),
    ]


def test_a_scale_that_finds_nothing_is_asked() -> None:
    """The other scale finds objects."""
    found = compared({(RGB, True): (0.8, 0.6)})
    assert ("--scale", True) in [(question.flag, question.is_blocking) for question in found.questions]


@pytest.mark.parametrize(("best", "is_blocking"), [(0.01, True), (0.2, False)])
def test_a_scale_that_the_exporter_writes_blocks_only_if_it_finds_nothing(best: float, is_blocking: bool) -> None:
    """A network of other objects than the pictures show finds little with the right scale, too."""
    found = compared({(RGB, False): (best,), (RGB, True): (0.8,)}, has_metadata=True)
    assert [(question.flag, question.is_blocking) for question in found.questions] == [("--scale", is_blocking)]


def test_a_scale_that_finds_everything_is_asked() -> None:
    """Scores of 1 all over the picture come from pixels that are too large."""
    found = compared({(RGB, False): (1.0,) * 40, (BGR, False): (1.0,) * 40, (RGB, True): (0.8, 0.6)})
    assert ("--scale", True) in [(question.flag, question.is_blocking) for question in found.questions]


def test_pictures_without_known_objects_are_said() -> None:
    """Pictures that show nothing raise no question, and the page has a warning."""
    found = compared({})
    assert not found.questions
    assert "--picture" in found.warnings[0]


def test_what_a_flag_says_is_not_compared() -> None:
    """--color and --scale settle their questions."""
    best = {(RGB, False): (0.5,), (BGR, False): (0.9,), (RGB, True): (0.97,)}
    assert compared(best, Hints(color="rgb", scale=1 / 255)).questions == ()


def test_the_networks_other_settings_stay() -> None:
    """Only the colour order and the scale change; offsets follow the order of colours."""
    seen = []
    mine = card()
    mine = replace(mine, prepare_spec=replace(mine.prepare_spec, offsets=(1.0, 2.0, 3.0)))

    def results_of(changed: VisionCard, _: Views) -> list[VisionResult]:
        seen.append((changed.prepare_spec.color, changed.prepare_spec.offsets))
        return [detections(0.5)]

    compare(mine, results_of, Hints(), has_metadata=False)
    assert (BGR, (3.0, 2.0, 1.0)) in seen
