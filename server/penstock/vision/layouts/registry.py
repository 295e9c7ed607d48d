"""Output layouts by their name in a model's parameters. docs/extend.md explains how to add one."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from penstock.protocol.extensions import ExtensionError, load_extension
from penstock.protocol.inference import Classes, Detections
from penstock.vision.layouts.boxes import parse_boxes
from penstock.vision.layouts.center_heatmap import parse_center_heatmap
from penstock.vision.layouts.classification import parse_classification
from penstock.vision.layouts.fastestdet import parse_fastestdet
from penstock.vision.layouts.layout import Outputs, ParserOptions
from penstock.vision.preprocess import Geometry

DetectorParser = Callable[[Outputs, ParserOptions, Geometry], Detections]
ClassifierParser = Callable[[Outputs, ParserOptions], Classes]

DETECTOR_PARSERS: Mapping[str, DetectorParser] = {
    "boxes": parse_boxes,
    "center-heatmap": parse_center_heatmap,
    "fastestdet": parse_fastestdet,
}
CLASSIFIER_PARSERS: Mapping[str, ClassifierParser] = {"classification": parse_classification}
LAYOUTS_VARIABLE = "PENSTOCK_LAYOUTS"


def user_layouts() -> tuple[str, ...]:
    """The allowed `module:function` names. From the environment, as clients can override a model's parameters."""
    return tuple(filter(None, map(str.strip, os.environ.get(LAYOUTS_VARIABLE, "").split(","))))


def detector_parser(name: str) -> DetectorParser:
    """Raises ExtensionError if a user's layout cannot be loaded."""
    return DETECTOR_PARSERS.get(name) or _user_layout(name)


def classifier_parser(name: str) -> ClassifierParser:
    """Raises ExtensionError if a user's layout cannot be loaded."""
    return CLASSIFIER_PARSERS.get(name) or _user_layout(name)


@functools.cache
def _user_layout(name: str) -> Any:
    if name not in user_layouts():
        raise ExtensionError(
            f"is not allowed here: add it to {LAYOUTS_VARIABLE} (comma-separated), as in {LAYOUTS_VARIABLE}={name}"
        )
    return load_extension(name)
