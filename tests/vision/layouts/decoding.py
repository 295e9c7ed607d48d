"""Decodes outputs that a test made, and the geometry of the ways in which a picture is fitted to a network."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Mask
from penstock.vision.layouts.layout import LayoutOptions, Outputs
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import Geometry, geometry_of
from penstock.vision.spec import PrepareSpec, ResizeMode

Array = npt.NDArray[Any]
_Result = TypeVar("_Result")

FITS = (ResizeMode.STRETCH, ResizeMode.PAD_SYMMETRIC, ResizeMode.PAD_RIGHT_BOTTOM)
LETTERBOXES = FITS[1:]


def fitted(source: tuple[int, int], network: tuple[int, int], fit: ResizeMode = ResizeMode.PAD_SYMMETRIC) -> Geometry:
    """source, network: (width, height)."""
    return geometry_of(*source, PrepareSpec(*network, fit=fit))


def decoded(
    kind: type[_Result],
    layout: str,
    arrays: tuple[Array, ...] | Mapping[str, Array],
    geometry: Geometry,
    row: int | None = None,
    **options: Any,
) -> _Result:
    """The result of outputs with their names, or named a, b, c. options: of LayoutOptions, beside the layout's own."""
    named = arrays if isinstance(arrays, Mapping) else dict(zip("abc", arrays, strict=False))
    tensors = tuple(tensor_from_numpy(name, array) for name, array in named.items())
    chosen = LAYOUTS[layout]
    defaults = {
        "pre_cluster_threshold": chosen.threshold,
        "nms_iou_threshold": chosen.iou,
        "segmentation_threshold": chosen.segmentation_threshold,
    }
    wanted = LayoutOptions(tuple(tensor.name for tensor in tensors), **(defaults | options))
    result = chosen.decode(Outputs(InferResponse("model", "1", tensors), row), wanted, geometry)
    assert isinstance(result, kind)
    return result


def whole(mask: Mask) -> Array:
    """(height, width) bool: the mask in its whole picture."""
    picture = np.zeros((mask.height, mask.width), np.bool_)
    rows, columns = mask.bits.shape
    assert 0 <= mask.top <= mask.height - rows
    assert 0 <= mask.left <= mask.width - columns
    picture[mask.top : mask.top + rows, mask.left : mask.left + columns] = mask.bits
    return picture


def mask_iou(one: Array, other: Array) -> float:
    """Intersection over union of two (height, width) bool; 1 if both are empty."""
    union = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / union if union else 1.0
