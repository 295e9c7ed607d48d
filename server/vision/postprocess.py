"""A model's answer to labelled results."""

from server.core.infer import InferResponse
from server.core.result import VisionResult
from server.vision.card import NetworkType, VisionCard
from server.vision.outputs import Outputs
from server.vision.parsers import CLASSIFIER_PARSERS, DETECTOR_PARSERS
from server.vision.preprocess import Geometry


def parse(card: VisionCard, response: InferResponse, row: int | None, geometry: Geometry) -> VisionResult:
    """What the model sees in one image. row: the image's in the batch, None where the answer is this image's alone.

    Raises BackendFailed, naming model, version and output, where an output is missing, of another type or shape than
    its parser expects, or holds NaN or infinity.
    """
    outputs = Outputs(response, row)
    if card.network_type is NetworkType.DETECTOR:
        return DETECTOR_PARSERS[card.parser_name](outputs, card.parser_options, geometry)
    return CLASSIFIER_PARSERS[card.parser_name](outputs, card.parser_options)
