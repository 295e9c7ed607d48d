"""A picture that is not square, networks of several sizes, and calls of a layout on outputs made in a test."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import EngineFailed
from penstock.protocol.vision_results import Detections
from penstock.vision.card import VisionCard
from penstock.vision.layouts.layout import LayoutOptions
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import geometry_of
from penstock.vision.results import parse
from penstock.vision.spec import NetworkType, PrepareSpec, ResizeMode
from tests.support.plain_detections import PlainBox, PlainFit, corner, squash
from tests.vision.test_parsers import answer

Array = npt.NDArray[Any]
WIDTH, HEIGHT = 317, 211
BOXES = (
    PlainBox(20, 30, 120, 90, 2, 0.9),
    PlainBox(150, 10, 300, 200, 0, 0.75),
    PlainBox(-10, 150, 60, 230, 1, 0.6),
    PlainBox(200, 100, 246, 151, 2, 0.55),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A layout at a network of `width` x `height`; is_padded: the picture keeps its aspect ratio, at the top left."""

    layout: str
    width: int = 96
    height: int = 64
    is_padded: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fit(self) -> PlainFit:
        return (corner if self.is_padded else squash)(WIDTH, HEIGHT, self.width, self.height)

    @property
    def threshold(self) -> float:
        return float(self.options.get("pre_cluster_threshold", LAYOUTS[self.layout].threshold))

    def detect(self, outputs: dict[str, Array], row: int | None = 0) -> Detections:
        """The layout's result of one picture."""
        layout = LAYOUTS[self.layout]
        own = {"pre_cluster_threshold": layout.threshold, "nms_iou_threshold": layout.iou, **self.options}
        names = own.pop("output_names", tuple(outputs))
        mode = ResizeMode.PAD_RIGHT_BOTTOM if self.is_padded else ResizeMode.STRETCH
        spec = PrepareSpec(self.width, self.height, fit=mode)
        card = VisionCard(NetworkType.DETECTOR, "x", spec, layout, LayoutOptions(names, **own), ())
        found = parse(card, answer(**outputs), row, geometry_of(WIDTH, HEIGHT, spec))
        assert isinstance(found, Detections)
        return found


def seen(boxes: tuple[PlainBox, ...] | list[PlainBox]) -> list[PlainBox]:
    """The boxes clipped to the picture."""
    return [
        box._replace(x0=max(box.x0, 0), y0=max(box.y0, 0), x1=min(box.x1, WIDTH), y1=min(box.y1, HEIGHT))
        for box in boxes
    ]


def scaled(box: PlainBox, x_scale: float, y_scale: float) -> PlainBox:
    return box._replace(x0=box.x0 * x_scale, y0=box.y0 * y_scale, x1=box.x1 * x_scale, y1=box.y1 * y_scale)


def batch_of(*images: dict[str, Array]) -> dict[str, Array]:
    """Outputs of several images as one batch."""
    return {name: np.stack([image[name] for image in images]) for name in images[0]}


def assert_harmless(case: Case, outputs: dict[str, Array]) -> None:
    """Damaged outputs give an EngineFailed with a sentence, or boxes inside the picture. No warning, no other error."""
    for name, array in outputs.items():
        for damaged in _damaged(array):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found, refusal = _detected(case, {**outputs, name: damaged})
            if found is None:
                assert refusal.startswith("model 'street' version 3: output ")
                continue
            assert np.isfinite(found.xyxy).all()
            assert (found.xyxy >= 0).all()
            assert (found.xyxy <= [WIDTH, HEIGHT] * 2).all()
            assert (found.class_id >= 0).all()
            assert ((found.score > 0) & (found.score <= 1)).all()
            if found.keypoints is not None:
                assert np.isfinite(found.keypoints).all()


def _detected(case: Case, outputs: dict[str, Array]) -> tuple[Detections | None, str]:
    try:
        return case.detect(outputs), ""
    except EngineFailed as error:
        return None, error.message


def _damaged(array: Array) -> list[Array]:
    """Copies of an output with hostile values, and with other shapes and types."""
    array = np.atleast_1d(array)
    found = [array[:0], array[..., :0], array[np.newaxis, np.newaxis], array.reshape(-1), array.astype(np.float64)]
    found += [np.concatenate([array, array], axis=-1), np.zeros((), array.dtype), np.ones(array.shape, np.int32)]
    for value in (-1.0, 0.0, 0.5, 1.0, -1e9, 3e9, 1e38, -1e38, 1e300, np.nan, np.inf, -np.inf):
        is_wide = value == 1e300 or (array.dtype.kind == "i" and value not in {-1.0, 0.0, 1.0, -1e9, 3e9})
        values = array.astype(np.float64 if is_wide else array.dtype)
        one, last = values.copy(), values.copy()
        one.reshape(-1)[:1], last[..., -1:] = value, value
        found += [np.full_like(values, value), one, last]
    return found
