"""Output layouts by their name in a model's parameters. docs/extend.md explains how to add one."""

import functools
import os
from collections.abc import Mapping

from penstock.protocol.errors import EngineFailed, InferenceError
from penstock.protocol.extensions import ExtensionError, load_extension
from penstock.protocol.vision_results import VisionResult
from penstock.vision.layouts import (
    boxes,
    center_heatmap,
    classification,
    detection_rows,
    detr,
    embedding,
    faces,
    fastestdet,
    final_boxes,
    instance_masks,
    maps,
    nanodet,
    oriented_boxes,
    pose,
    text,
    yolo,
)
from penstock.vision.layouts.layout import Decode, Layout, LayoutOptions, Outputs
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_MODULES = (
    boxes,
    center_heatmap,
    fastestdet,
    yolo,
    detection_rows,
    detr,
    final_boxes,
    nanodet,
    faces,
    classification,
    embedding,
    instance_masks,
    pose,
    oriented_boxes,
    text,
    maps,
)
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for module in _MODULES for layout in module.LAYOUTS}
DEFAULT_LAYOUTS = {NetworkType.DETECTOR: "boxes", NetworkType.CLASSIFIER: "classification"}
LAYOUTS_VARIABLE = "PENSTOCK_LAYOUTS"


def user_layouts() -> tuple[str, ...]:
    """The allowed `module:function` names. From the environment, as clients can override a model's parameters."""
    return tuple(filter(None, map(str.strip, os.environ.get(LAYOUTS_VARIABLE, "").split(","))))


def find_layout(name: str, network_type: NetworkType) -> Layout:
    """The layout of that name. network_type: of a user's function. Raises ExtensionError if it cannot be loaded."""
    return LAYOUTS.get(name) or Layout(name, network_type, _user_function(name), "")


@functools.cache
def _user_function(name: str) -> Decode:
    if name not in user_layouts():
        raise ExtensionError(
            f"is not allowed here: add it to {LAYOUTS_VARIABLE} (comma-separated), as in {LAYOUTS_VARIABLE}={name}"
        )
    decode: Decode = load_extension(name)

    def checked(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> VisionResult:
        try:
            result = decode(outputs, options, geometry)
        except InferenceError:
            raise
        except Exception as error:
            raise EngineFailed(f"the layout {name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, VisionResult):
            raise EngineFailed(f"the layout {name!r} returned {type(result).__name__}, which is not a VisionResult")
        return result

    return checked
