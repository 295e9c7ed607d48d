"""The parser center-heatmap: peaks of a heat map become boxes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.card import VisionCard
from penstock.vision.layouts.layout import LayoutOptions
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import Geometry
from penstock.vision.results import parse
from penstock.vision.spec import NetworkType, PrepareSpec

CLASSES, ROWS, COLUMNS = 3, 6, 10
GEOMETRY = Geometry(80, 40, 40, 24, 0.5, 0.5)  # a source of 80 x 40, at half its size over 4 rows of padding

Array = npt.NDArray[Any]


def maps(*peaks: tuple[int, int, int, float]) -> tuple[Array, Array]:
    """A cold heat map with logits at (class, row, column), and boxes that reach 1 cell to the left and up, 2 beyond."""
    heat = np.full((CLASSES, ROWS, COLUMNS), -9.0, np.float32)
    for class_id, row, column, logit in peaks:
        heat[class_id, row, column] = logit
    distances = np.zeros((4, ROWS, COLUMNS), np.float32)
    distances[2:] = np.log(2.0)
    return heat, distances


def found(
    heat: Array,
    distances: Array,
    row: int | None = None,
    *,
    iou: float = 0.5,
    class_thresholds: tuple[tuple[int, float], ...] = (),
) -> Detections:
    response = InferResponse(
        "street", "1", (tensor_from_numpy("distances", distances), tensor_from_numpy("heatmap", heat))
    )
    options = LayoutOptions(("heatmap", "distances"), 0.3, iou, class_thresholds=class_thresholds)
    card = VisionCard(NetworkType.DETECTOR, "x", PrepareSpec(40, 24), LAYOUTS["center-heatmap"], options, ())
    result = parse(card, response, row, GEOMETRY)
    assert isinstance(result, Detections)
    return result


def test_peak_becomes_a_box_in_source_pixels() -> None:
    """Cells are 4 network pixels, those are 2 of the source's: (2.5 ± …) x 8, clipped to the source."""
    result = found(*maps((1, 2, 5, 2.0), (2, 4, 9, 0.0)))
    assert result.class_id.tolist() == [1, 2]
    assert result.score.tolist() == pytest.approx([1 / (1 + np.exp(-2)), 0.5])
    assert result.xyxy.tolist() == pytest.approx(np.array([[36, 12, 60, 36], [68, 28, 80, 40]]))


def test_neighbours_of_a_peak_are_no_boxes_of_their_own() -> None:
    """Even where no suppression would take them; a lower peak two cells on stays, and so do other classes."""
    heat, distances = maps((0, 2, 2, 2.0), (0, 2, 3, 1.5), (0, 3, 3, 1.0), (0, 2, 4, 1.0), (1, 2, 3, 1.0))
    result = found(heat, distances, iou=1.0)
    assert sorted(zip(result.class_id.tolist(), (result.xyxy[:, 0] / 8).tolist(), strict=True)) == [(0, 1.5), (1, 2.5)]
    heat[0, 2, 3] = -9.0
    heat[0, 3, 3] = -9.0
    assert len(found(heat, distances, iou=1.0).score) == 3


def test_cold_map_is_no_box_and_a_wild_one_no_overflow() -> None:
    """Logits of any size, distances of any size: no warning, and boxes within the source."""
    heat, distances = maps()
    assert found(heat, distances).xyxy.shape == (0, 4)
    heat[0, 0, 0], heat[1] = 1e30, -1e30
    result = found(heat, distances + np.float32(1e6))
    assert (result.xyxy.tolist(), result.score.tolist()) == ([[0, 0, 80, 40]], [1.0])


@pytest.mark.parametrize("seed", range(4))
def test_peaks_equal_a_plain_loop_over_the_cells(seed: int) -> None:
    """Also at the edges, and where neighbours are equal."""
    heat = np.random.default_rng(seed).integers(-3, 4, (CLASSES, ROWS, COLUMNS)).astype(np.float32)
    _, distances = maps()
    wanted = []
    for class_id, row, column in np.ndindex(*heat.shape):
        near = heat[class_id, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
        if heat[class_id, row, column] >= near.max() and 1 / (1 + np.exp(-heat[class_id, row, column])) > 0.3:
            wanted.append((class_id, (column - 0.5) * 8, (row - 0.5) * 8))
    result = found(heat, distances, iou=1.0)
    corners = np.maximum([(x, y) for _, x, y in wanted], 0).tolist()
    places = sorted((class_id, *corner) for (class_id, _, _), corner in zip(wanted, corners, strict=True))
    made = zip(result.class_id.tolist(), result.xyxy[:, 0].tolist(), result.xyxy[:, 1].tolist(), strict=True)
    assert sorted(made) == places


def test_threshold_of_a_class_may_be_lower_than_the_cards() -> None:
    """Its peaks are not dropped before."""
    heat, distances = maps((1, 2, 5, -2.0), (2, 4, 8, -2.0))
    assert found(heat, distances, class_thresholds=((2, 0.1),)).class_id.tolist() == [2]


def test_image_of_a_batch_is_taken_by_its_row() -> None:
    """As the gateway's batcher hands it over."""
    cold, warm = maps(), maps((2, 1, 1, 3.0))
    heat, distances = np.stack([cold[0], warm[0]]), np.stack([cold[1], warm[1]])
    assert found(heat, distances, 0).class_id.tolist() == []
    assert found(heat, distances, 1).class_id.tolist() == [2]


@pytest.mark.parametrize(
    ("heat", "distances", "sentence"),
    [
        (np.zeros((3, 6, 10), np.float32), np.zeros((4, 6, 9), np.float32), r"'distances' .*\[4, 6, 10\]"),
        (np.zeros((3, 6, 10), np.float32), np.zeros((5, 6, 10), np.float32), r"'distances' .*\[4, 6, 10\]"),
        (np.zeros((3, 0, 10), np.float32), np.zeros((4, 0, 10), np.float32), r"'heatmap' .*\[classes, rows, columns\]"),
        (np.zeros((3, 6), np.float32), np.zeros((4, 6, 10), np.float32), r"'heatmap' .*no 3-D part"),
        (np.full((3, 6, 10), np.nan, np.float32), np.zeros((4, 6, 10), np.float32), "'heatmap' .*NaN"),
    ],
)
def test_maps_that_break_the_contract_are_the_models_fault(heat: Array, distances: Array, sentence: str) -> None:
    """The error names the output and what was expected."""
    with pytest.raises(EngineFailed, match=sentence):
        found(heat, distances)
