"""From output tensors to results: one file a parser, found by the name that `parse-…-func-name` gives.

A parser is a function (Outputs, ParserOptions, Geometry) → VisionResult. To add one, write its file and its row here.
"""

from collections.abc import Callable, Mapping

from server.core.result import Classes, Detections
from server.vision.outputs import Outputs
from server.vision.parsers.boxes import parse_boxes
from server.vision.parsers.center_heatmap import parse_center_heatmap
from server.vision.parsers.classification import parse_classification
from server.vision.parsers.fastestdet import parse_fastestdet
from server.vision.parsers.options import ParserOptions
from server.vision.preprocess import Geometry

DetectorParser = Callable[[Outputs, ParserOptions, Geometry], Detections]
ClassifierParser = Callable[[Outputs, ParserOptions], Classes]

DETECTOR_PARSERS: Mapping[str, DetectorParser] = {
    "boxes": parse_boxes,
    "center-heatmap": parse_center_heatmap,
    "fastestdet": parse_fastestdet,
}
CLASSIFIER_PARSERS: Mapping[str, ClassifierParser] = {"classification": parse_classification}
