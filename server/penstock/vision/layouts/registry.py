"""Registry of output layouts, by the names that `parse-bbox-func-name` and `parse-classifier-func-name` give.

A detector layout is a function (Outputs, ParserOptions, Geometry) → Detections, a classifier layout a function
(Outputs, ParserOptions) → Classes. To add one, write its module and add it here.
"""

from collections.abc import Callable, Mapping

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
