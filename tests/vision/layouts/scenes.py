"""Pictures with known objects, the outputs of a network that sees them, and their decoding by a card."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import geometry_of
from penstock.vision.results import CARD_DEFAULTS, ResultOptions, card_for, parse
from tests.support.plain_detections import PlainBox, PlainFit, letterbox

Array = npt.NDArray[Any]
LETTERBOX = {"maintain-aspect-ratio": "1", "symmetric-padding": "1"}

# In a picture of 640 x 360: two of class 2 of which one is suppressed, one of class 0 over them that stays, one that
# reaches beyond the picture's edge, one that is small.
STREET = (
    PlainBox(100.0, 50.0, 220.0, 300.0, 2, 0.91),
    PlainBox(110.0, 55.0, 225.0, 310.0, 2, 0.74),
    PlainBox(98.0, 60.0, 210.0, 290.0, 0, 0.62),
    PlainBox(560.0, 200.0, 700.0, 390.0, 1, 0.83),
    PlainBox(400.0, 100.0, 424.0, 131.0, 4, 0.55),
    PlainBox(250.0, 20.0, 380.0, 120.0, 3, 0.31),
)
STREET_SIZE = (640, 360)
YARD = (PlainBox(20.5, 30.25, 190.0, 270.0, 4, 0.97), PlainBox(30.0, 380.0, 160.0, 470.0, 1, 0.44))
YARD_SIZE = (231, 493)
CLASSES = 5


def card_of(
    layout: str, size: tuple[int, int], outputs: Sequence[str], parameters: Mapping[str, str] | None = None
) -> VisionCard:
    """A detector's card. size: the network's width and height. Letterboxed unless the parameters say otherwise."""
    inputs = (TensorSpec("images", Datatype.FP32, (3, size[1], size[0])),)
    found = tuple(TensorSpec(name, Datatype.FP32, (-1, -1)) for name in outputs)
    words = {"network-type": "0", "layout": layout, **(LETTERBOX if parameters is None else parameters)}
    rows = 0 if LAYOUTS[layout].is_one_picture else 8
    made = card_from_config(ModelConfig("street", "onnxruntime", rows, inputs, found, words))
    assert made is not None
    return made


def decode(
    card: VisionCard,
    outputs: Mapping[str, Array],
    picture_size: tuple[int, int],
    *,
    row: int | None = 0,
    wanted: ResultOptions = CARD_DEFAULTS,
) -> Detections:
    """The card's result of one picture. row: in the batch; None without a batch axis."""
    response = InferResponse("street", "1", tuple(tensor_from_numpy(name, array) for name, array in outputs.items()))
    result = parse(card_for(card, wanted), response, row, geometry_of(*picture_size, card.prepare_spec))
    assert isinstance(result, Detections)
    return result


def fit_of(picture_size: tuple[int, int], size: tuple[int, int]) -> PlainFit:
    """Letterbox of a picture."""
    return letterbox(*picture_size, *size)


def cell_count(size: tuple[int, int], strides: Sequence[int] = (8, 16, 32)) -> int:
    """Cells of all grids of a network with an input of this width and height."""
    return sum((size[0] // stride) * (size[1] // stride) for stride in strides)


def anchor_rows(
    boxes: Sequence[PlainBox], fit: PlainFit, count: int, *, has_objectness: bool, classes: int = CLASSES, seed: int = 1
) -> Array:
    """(count, 4 + classes), or 5 with objectness: the boxes in random rows, low scores of noise in the others.

    The objectness of a box is 0.98, its class score as much as makes the product its score.
    """
    random = np.random.default_rng(seed)
    head = 5 if has_objectness else 4
    rows = np.empty((count, head + classes), np.float32)
    rows[:, :4] = random.uniform(1, 200, (count, 4))
    rows[:, 4:] = random.uniform(0, 0.2, (count, head - 4 + classes))
    places = random.permutation(count)[: len(boxes)]
    for place, box in zip(places, boxes, strict=True):
        x0, y0, x1, y1, class_id, score = fit.to_network(box)
        rows[place, :4] = (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0
        rows[place, head + class_id] = score
        if has_objectness:
            rows[place, 4], rows[place, head + class_id] = 0.98, score / 0.98
    return rows


def corner_rows(boxes: Sequence[PlainBox], fit: PlainFit) -> Array:
    """(n, 6): x0, y0, x1, y1 in the network's pixels, score, class."""
    placed = [fit.to_network(box) for box in boxes]
    return np.array([[*box[:4], box.score, box.class_id] for box in placed], np.float32).reshape(-1, 6)
