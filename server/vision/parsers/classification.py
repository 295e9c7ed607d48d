"""Classifiers: one score a class."""

import numpy as np

from server.core.result import Classes, FloatArray
from server.vision.outputs import Outputs
from server.vision.parsers.options import ParserOptions


def parse_classification(outputs: Outputs, options: ParserOptions) -> Classes:
    """The topk best classes of the model's first output, (classes,) an image; equal scores by class. BackendFailed."""
    score = outputs.floats(options.output_names[0], rank=1)
    if options.has_softmax:
        score = _softmax(score)
    class_id = np.argsort(-score, kind="stable")[: options.topk]
    class_id = class_id[score[class_id] >= options.classifier_threshold]
    return Classes(score[class_id], class_id.astype(np.int64))


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits - logits.max(initial=-np.inf))
    shares: FloatArray = powers / powers.sum()
    return shares
