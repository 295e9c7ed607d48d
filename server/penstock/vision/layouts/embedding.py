"""Networks that turn a picture into a vector, to compare pictures: re-identification, faces."""

import numpy as np

from penstock.protocol.vision_results import Embedding
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType


def parse_embedding(outputs: Outputs, options: LayoutOptions, _: Geometry) -> Embedding:
    """Parses the first output, (d,) or (d, 1, 1) per image. Raises EngineFailed."""
    name = options.output_names[0]
    vector = outputs.floats(name, rank=1)
    if not len(vector):
        raise outputs.refuse(name, vector, "[d]")
    if not options.is_unit_length:
        return Embedding(vector)
    wide = vector.astype(np.float64)  # squares overflow float32
    length = np.sqrt(np.square(wide).sum())
    if length == 0.0:
        raise outputs.broken(name, "is all zeros, which has no direction; leave out normalize-embedding")
    return Embedding((wide / length).astype(np.float32))


LAYOUTS = (
    Layout(
        "embedding",
        NetworkType.OTHER,
        parse_embedding,
        "the first output, float `[d]` or `[d, 1, 1]`: a vector; of length 1 with `normalize-embedding: 1`",
    ),
)
