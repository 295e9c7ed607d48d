"""A detector layout: the output `points` (n, 4) has centre x, centre y, side (network pixels) and score of each object.

config.pbtxt: `parameters { key: "parse-bbox-func-name" value { string_value: "centre_layout:parse_centres" } }`
"""

import numpy as np

from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import LayoutOptions, Outputs, finish_detections
from penstock.vision.preprocess import Geometry


def parse_centres(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """The detections of one image, in source pixels."""
    points = outputs.floats("points", rank=2)  # of one image
    if points.shape[1] != 4:
        raise outputs.refuse("points", points, "[n, 4]")
    centre, half, score = points[:, :2], points[:, 2:3] / 2, points[:, 3]
    xyxy = np.concatenate([centre - half, centre + half], axis=1)
    return finish_detections(xyxy, score, np.zeros(len(points), np.int64), options, geometry.to_source)
